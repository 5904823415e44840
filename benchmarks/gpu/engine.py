"""Parts of benchmarks.gpu.run through the engine: identity, time of the host, drafting, batches, the small model."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.subject import Subject
from benchmarks.harness import TOPICS, Answers
from benchmarks.harness import prompts_of as copying
from paceline import SamplingParams
from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters import METHODS, Drafter, DrafterContext
from paceline.drafters.lookup.suffix import SuffixDrafter
from paceline.drafters.model.draft_model import DraftModelDrafter
from paceline.engine.engine import Engine
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.engine.policy.priors import prior_of
from paceline.models.decoder import Decoder
from paceline.models.graphs import PassGraphs
from paceline.models.weights import WeightKind

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
QUESTIONS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "What are the main causes of inflation?",
    "Describe how bread is made, step by step.",
    "Give me advice for learning to play the piano.",
    "Why is the sky blue, and why are sunsets red?",
)


FIXED_K, ROUNDS = (4, 8, 16), 4
PARTS = ("the basics", "the history", "what is often misunderstood", "with an example", "and say why it matters")
STYLES = ("to a child", "in one page", "as a letter", "as a dialogue", "as a poem", "as a list", "briefly")


class Runs:
    """An engine, and answers with the time they took."""

    def __init__(
        self,
        subject: Subject,
        decoder: Decoder,
        method: str = "none",
        k: int | None = None,
        batch: int = 8,
        on: Runs | None = None,
    ) -> None:
        """`on`: another's cache and graphs. One engine runs at a time, so several may use the same."""
        gc.collect()  # an engine before this one may still hold its cache
        drafters = self._drafters(subject, decoder, method)
        self.prior = prior_of(decoder, WeightKind.of(decoder.dtypes.numbers))
        self.policy = AdaptivePolicy(method, k, self.prior)
        config = EngineConfig(
            prefix_caching=False,
            kv_cache_bytes=(64 << 20) if subject.tiny else 8 << 30,
            max_num_seqs=max(batch, 1),
            max_num_batched_tokens=2048,
            max_model_len=min(decoder.config.max_positions, 2048),
        )
        with _unprepared() if on else nullcontext():
            self.engine = Engine(decoder, config, drafters=drafters, policy=self.policy)
        # Layers of the draft model, which follow the target's: one list for all that share a cache, since graphs belong
        # to the list that they were captured with.
        self.draft_layers = on.draft_layers if on else self.engine.runner.cache.layers[len(decoder.kv_specs) :]
        self._share_cache(on or self)

    @staticmethod
    def _drafters(subject: Subject, decoder: Decoder, method: str) -> list[Drafter]:
        if method == "none":
            return []
        context = DrafterContext(decoder.config, decoder.device, SpeculationConfig(method=method))
        made: list[Drafter] = []
        if method in ("auto", "draft-model"):
            made.append(DraftModelDrafter(subject.small, eos_token_ids=decoder.config.eos_token_ids))
        return made + [METHODS[name].make(context) for name in ("ngram", "suffix") if method in ("auto", name)]

    def _share_cache(self, other: Runs) -> None:
        mine, theirs = self.engine.runner, other.engine.runner
        mine.cache, mine._caches = theirs.cache, theirs._caches
        for drafter in self.engine.drafters.drafters:
            if isinstance(drafter, DraftModelDrafter):
                drafter.bind(self.draft_layers, theirs.cache.block_size)

    def forget(self) -> None:
        """A policy that knows nothing, on graphs that are captured."""
        self.policy.load(AdaptivePolicy(prior=self.prior).state())

    def answer(self, prompts: Sequence[list[int]], params: SamplingParams) -> dict[str, Any]:
        """Decoding time starts when every prompt has its first token."""
        answers = Answers(self.engine, prompts, params).finished()
        steps = answers.steps_s
        return {
            "answers": answers.tokens,
            "tokens_per_second": answers.decoded / sum(steps) if steps else 0.0,
            "step_ms": 1e3 * statistics.median(steps) if steps else 0.0,
            "steps": steps,
            "tau": answers.stats().mean_acceptance_length,
        }


@contextmanager
def _unprepared() -> Iterator[None]:
    """An engine made meanwhile touches no graphs: it will get another's cache."""
    nothing = patch.object(PassGraphs, "prepare", lambda *_, **__: None)
    with nothing, patch.object(Decoder, "pass_chain", lambda *_: None):
        yield


def prompts_of(subject: Subject, count: int) -> list[list[int]]:
    if subject.random:
        generator = torch.Generator().manual_seed(0)
        vocab = subject.small_config.vocab_size
        return torch.randint(3, vocab, (count, 40), generator=generator).tolist()
    return chats(subject, [QUESTIONS[index % len(QUESTIONS)] for index in range(count)])


def chats(subject: Subject, texts: Sequence[str]) -> list[list[int]]:
    return [subject.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]


def copies(subject: Subject, every: int) -> list[list[int]]:
    """Return prompts that ask for copies; none of random weights."""
    return [] if subject.random else chats(subject, [prompt["turns"][0] for prompt in copying()[::every]])


def many_prompts(subject: Subject, first: int, count: int) -> list[list[int]]:
    """All different, up to some hundreds."""
    if subject.random:
        return prompts_of(subject, first + count)[first:]
    every = [f"Explain {topic} {style}, {part}." for part in PARTS for style in STYLES for topic in TOPICS]
    return chats(subject, [every[7 * index % len(every)] for index in range(first, first + count)])


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True).resolve({})


def identity(subject: Subject) -> dict[str, Any]:
    """Greedy and seeded answers, plain and under every drafter, alone and together: the same tokens."""
    decoder, found = subject.yardstick, {}
    length = 24 if subject.tiny else 128
    prompts = prompts_of(subject, 6) + copies(subject, 6)
    for name, params in (
        ("greedy", greedy(length)),
        ("seeded", SamplingParams(temperature=0.7, seed=7, max_tokens=length, ignore_eos=True).resolve({})),
    ):
        plain = Runs(subject, decoder)
        alone = [plain.answer([prompt], params)["answers"][0] for prompt in prompts]
        for method, k in (("none", None), ("ngram", 4), ("suffix", 8), ("draft-model", 4), ("auto", None)):
            runs = Runs(subject, decoder, method, k, batch=16)
            together = runs.answer(prompts, params)
            same = sum(a == b for a, b in zip(alone, together["answers"], strict=True))
            found[f"{name} {method}"] = [same, len(prompts), together["tau"]]
            what = f"{same} of {len(prompts)} as plain and alone, τ {together['tau']:.2f}"
            print(f"   {name}, {method}, together: {what}", flush=True)
            del runs
    return found | crowds(subject, prompts)


def crowds(subject: Subject, prompts: list[list[int]]) -> dict[str, Any]:
    """The small model itself in batches of many, where prompts and steps of all lengths share passes."""
    found, params = {}, greedy(12)
    plain = Runs(subject, subject.small)
    alone = [plain.answer([prompt], params)["answers"][0] for prompt in prompts]
    for count in (8,) if subject.tiny else (8, 33, 64, 128, 200):
        runs = Runs(subject, subject.small, batch=count)
        together = runs.answer([prompts[at % len(prompts)] for at in range(count)], params)["answers"]
        same = sum(answer == alone[at % len(prompts)] for at, answer in enumerate(together))
        found[f"crowd of {count}"] = [same, count]
        print(f"   smollm2, {count} together: {same} as alone", flush=True)
    return found


def host(subject: Subject) -> dict[str, Any]:
    """Time what a step takes beyond its pass: the same pass is timed on the device alone."""
    decoder, found = subject.yardstick, {}
    length = 16 if subject.tiny else 100
    cells = (("none", None, 1), ("ngram", 4, 1), ("suffix", 4, 1), ("draft-model", 4, 1))
    cells += (("none", None, 64), ("ngram", 2, 64), ("suffix", 2, 64))
    for method, k, batch in cells:
        runs = Runs(subject, decoder, method, k, batch=batch)
        for drafter in runs.engine.drafters.drafters:
            if isinstance(drafter, SuffixDrafter):  # the same prompts are answered again and again
                drafter.store.learn = lambda tokens: None  # type: ignore[method-assign]
        prompts = prompts_of(subject, batch)
        runs.answer(prompts, greedy(12))
        got = busy(runs, prompts, greedy(length))
        found[f"{method} x{batch}"] = got
        times = f"step {got['step_ms']:.2f} ms, device busy {got['device_ms']:.2f} ms, host {got['host_ms']:.2f} ms"
        print(f"   {method:<12} {batch:>3} rows: {times} ({got['host_mean_ms']:.2f} on average)", flush=True)
        del runs
    return found


def busy(runs: Runs, prompts: list[list[int]], params: SamplingParams) -> dict[str, float]:
    """Wall time of some steps, and how long the device was busy in the same steps of the same answers, profiled:
    medians, and what the host takes on average."""
    steps = runs.answer(prompts, params)["steps"]
    first, count = len(steps) // 4, len(steps) // 2
    walls = [1e3 * seconds for seconds in steps[first : first + count]]
    wall, mean = statistics.median(walls), statistics.mean(walls)
    if not torch.cuda.is_available():
        return {"step_ms": wall, "device_ms": 0.0, "host_ms": wall, "host_mean_ms": mean}
    from torch.profiler import ProfilerActivity, profile

    profiled = Answers(runs.engine, prompts, params)
    for _ in range(first):
        profiled.step()
    torch.cuda.synchronize()  # a step may be under way already, as one will be at the end
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(count):
            profiled.step()
        torch.cuda.synchronize()
    profiled.finished()
    spans = sorted(
        (event.time_range.start, event.time_range.end, "DtoH" in event.name)
        for event in prof.events()
        if event.device_type.name == "CUDA"
    )
    shares, last = [0.0], 0.0
    for begin, end, is_verdict in spans:  # kernels overlap: their union
        shares[-1] += max(end - max(begin, last), 0.0) / 1e3
        last = max(last, end)
        if is_verdict:  # the one copy to the host that ends a step
            shares.append(0.0)
    average = sum(shares) / count
    alone = abs(len(shares) - 1 - count) <= 1  # else copies of drafters' divide steps
    device = statistics.median(shares[1:-1]) if alone else average
    return {"step_ms": wall, "device_ms": device, "host_ms": wall - device, "host_mean_ms": mean - average}


def draft(subject: Subject) -> dict[str, Any]:
    """Lookups on prompts that ask for copies, stopping at EOS."""
    asked = copies(subject, 4) or prompts_of(subject, 3)
    params = SamplingParams(temperature=0, max_tokens=192).resolve({})
    found: dict[str, Any] = {}
    for method, k in (("none", None), ("ngram", 8), ("ngram", 16), ("suffix", 8)):
        runs = Runs(subject, subject.yardstick, method, k)
        runs.answer(asked[:1], params)  # captures its graphs
        each = [runs.answer([prompt], params) for prompt in asked]
        rate = statistics.harmonic_mean([one["tokens_per_second"] or 1.0 for one in each])
        name = method if k is None else f"{method} k={k}"
        found[name] = {"tokens_per_second": rate, "tau": statistics.mean(one["tau"] for one in each)}
        found[name]["over_plain"] = rate / found["none"]["tokens_per_second"]
        print(f"   copy, {name}: {found[name]}", flush=True)
    return found


def batches(subject: Subject) -> dict[str, Any]:
    """Plain, fixed k and auto in turn, every round with prompts of its own: the suffix store must not know the answers.

    All run on one cache, so that they share its graphs. `cold` is the first answer under a policy that knows nothing,
    everything else the rounds after it, so that the same prompts are compared.
    """
    decoder, found = subject.yardstick, {}
    sizes = (1, 4) if subject.tiny else BATCHES
    length, rounds = (16, 2) if subject.tiny else (128, ROUNDS)
    graphs = Runs(subject, decoder, "auto", batch=max(sizes))
    cells = {"plain": ("none", None)} | {f"k={k}": ("draft-model", k) for k in FIXED_K} | {"auto": ("auto", None)}
    for batch in sizes:
        runs = {name: Runs(subject, decoder, method, k, batch, graphs) for name, (method, k) in cells.items()}
        rates: dict[str, list[float]] = {name: [] for name in cells}
        for turn in range(rounds + 1):
            prompts = many_prompts(subject, turn * batch, batch)
            for name, one in runs.items():
                if turn == 1 and name == "auto":
                    one.forget()
                rate = one.answer(prompts, greedy(length))["tokens_per_second"]
                if turn:  # in the first, prompts of new sizes are met
                    rates[name].append(rate)
        found[str(batch)] = {name: statistics.median(each[1:]) for name, each in rates.items()} | {
            "cold": rates["auto"][0]
        }
        row = found[str(batch)]
        gains = ", ".join(f"{name} {rate / row['plain']:.2f}x" for name, rate in row.items() if name != "plain")
        print(f"   batch {batch:>3}: plain {row['plain']:.0f} tok/s, {gains}", flush=True)
        del runs, one
    return found


def startup(subject: Subject) -> dict[str, Any]:
    """Time from weights in memory to the first answer; run it in a process of its own, twice for a warm cache."""
    started, found = time.perf_counter(), {}

    def note(name: str) -> None:
        found[name] = time.perf_counter() - started
        print(f"   {name} after {found[name]:.1f} s", flush=True)

    decoder = subject.yardstick
    note("weights in place")
    runs = Runs(subject, decoder, "ngram", batch=64)
    note("engine ready")
    runs.answer(prompts_of(subject, 1), greedy(1))
    note("first token")
    got = runs.answer(prompts_of(subject, 1), greedy(24))
    print(f"   then {got['tokens_per_second']:.0f} tok/s", flush=True)
    return found


def small(subject: Subject) -> dict[str, Any]:
    batch, length = (8, 12) if subject.tiny else (512, 64)
    runs = Runs(subject, subject.small, batch=batch)
    params = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True).resolve({})
    prompts = prompts_of(subject, batch)
    runs.answer(prompts, params)
    got = runs.answer(prompts, params)
    print(f"   {batch} rows sampled: {got['tokens_per_second']:.0f} tok/s, step {got['step_ms']:.2f} ms", flush=True)
    device = busy(runs, prompts, params)
    print(f"   in the middle: step {device['step_ms']:.2f} ms, device busy {device['device_ms']:.2f} ms", flush=True)
    return {"tokens_per_second": got["tokens_per_second"], **device, "step_ms": got["step_ms"]}


ENGINE_PARTS: dict[str, Callable[[Subject], dict[str, Any]]] = {
    "startup": startup,
    "identity": identity,
    "host": host,
    "draft": draft,
    "batches": batches,
    "small": small,
}
