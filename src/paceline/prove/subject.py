"""The model under proof: prompts, methods, effort, and its answers with and without speculation.

The engine inside an LLM is read by `llm.call`, between two steps, and changed by `patched` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from paceline.config import AUTO
from paceline.core.sequence import Sequence
from paceline.drafters import METHODS, NONE
from paceline.drafters.method_names import matches_method, unknown_method
from paceline.engine.engine import Engine
from paceline.errors import InvalidParameter
from paceline.llm import LLM
from paceline.models.kv_cache import slots_of
from paceline.outputs import CompletionOutput
from paceline.prove.replay import Verify
from paceline.prove.report import Check
from paceline.prove.tap import Tap
from paceline.sampling_params import SamplingParams
from paceline.text.grammar import can_compile

LENGTHS = (4, 8, 2, 1, 3)  # k of prompts, in turn
# Asked of requests whose method drafts for structured outputs alone: no answer ends before its max_tokens.
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "kind": {"enum": ["animal", "vegetable", "mineral"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
STRUCTURED = {"json": {"type": "array", "minItems": 1000, "items": ITEM}}
NEAR_TIE = 1e-3  # nats between the two likeliest tokens below which kernels that are not exact may disagree
# Tasks that copy, so that drafts are accepted, and open ones, so that some are rejected.
PROMPTS: tuple[str, ...] = (
    "Repeat this text word for word, twice:\nThe grey heron stood in the shallow water of the mill pond and waited. "
    "The grey heron stood in the shallow water until a small fish came by.",
    "Continue the list in the same form.\nitem 1: apple, price 3\nitem 2: apple, price 4\nitem 3: apple, price 5\n"
    "item 4: apple, price 6\nitem 5:",
    "Write this function again with the name `total` instead of `sum_all`:\n\ndef sum_all(values):\n    result = 0\n"
    "    for value in values:\n        result = result + value\n    return result\n",
    "Why is the sky blue? Answer in three sentences.",
    "Turn this into JSON with one object per line:\nname: Ada, city: London\nname: Emmy, city: Erlangen\n"
    '{"name": "Ada", "city": "London"}\n',
    "Quote the first sentence of this note exactly, then quote it again.\nThe ferry leaves at nine from the old pier. "
    "Bring a coat, since the wind is cold on the water.",
    "Tell a very short story about a lighthouse keeper who collects clocks.",
    "Count from 1 to 30, separated by commas: 1, 2, 3, 4, 5, 6, 7, 8,",
    "Name the planets in order of their distance from the sun, then name them again in the opposite order.",
    "Say the alphabet with one letter per line, then say it again.",
    "Explain to a child what a bicycle gear does.",
    "Copy this table and add a check for March.\n| month | rain | sun |\n|---|---|---|\n| January | 80 mm | 40 h |\n"
    "| February | 70 mm | 60 h |\n",
)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The amount of work of a proof."""

    prompts: int
    few: int  # prompts of the checks that gain little from more
    max_tokens: int
    replays: int
    steps: int  # recorded steps replayed for each method
    generations: int

    @staticmethod
    def of(quick: bool, prompts: int | None) -> Effort:
        if quick:
            return Effort(prompts=prompts or 4, few=2, max_tokens=24, replays=20_000, steps=1, generations=64)
        return Effort(prompts=prompts or 12, few=8, max_tokens=96, replays=100_000, steps=6, generations=1_000)


@dataclass
class ProofSubject:
    llm: LLM
    verify: Verify  # also used by the engine: the real one unless a fault was injected
    methods: tuple[str, ...]
    effort: Effort
    prompts: list[list[int]]
    spare: list[list[int]]  # for checks that have not seen an accept, a reject and a bonus yet
    generator: torch.Generator
    seed: int
    _plain: dict[tuple[tuple[int, ...], str], CompletionOutput] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Return whether a row's arithmetic has the same bits in every pass."""
        return self.llm.loaded.decoder.kernels.exact

    def params(self, method: str, k: int, **more: object) -> SamplingParams:
        options: dict[str, object] = {"temperature": 0.0, "max_tokens": self.effort.max_tokens} | more
        if is_structured(method) or (method == AUTO and all(map(is_structured, self.methods))):
            options |= {"structured_outputs": STRUCTURED, "ignore_eos": False}
        speculation = NONE if method == NONE else {"method": method, "k": k}
        return SamplingParams(speculation=speculation, **options)  # type: ignore[arg-type]

    def plain(self, prompt: SequenceOf[int], params: SamplingParams) -> CompletionOutput:
        """Return the engine's answer alone and without drafts; computed once."""
        plain_params = replace(params, speculation=NONE)
        key = (tuple(prompt), repr(plain_params))
        if key not in self._plain:
            self._plain[key] = self.llm.generate(list(prompt), plain_params)[0].outputs[0]
        return self._plain[key]

    def ask(
        self, prompts: SequenceOf[SequenceOf[int]], params: SequenceOf[SamplingParams], check: Check
    ) -> list[CompletionOutput]:
        """Return the answers of requests sent all at once; accepts, rejects and bonuses are counted in the check."""
        with self.tapped() as tap:
            outputs = self.llm.generate([list(prompt) for prompt in prompts], list(params))
        check.seen.merge(tap.seen)
        return [output.outputs[0] for output in outputs]

    def compare(
        self,
        check: Check,
        prompt: SequenceOf[int],
        params: SamplingParams,
        plain: CompletionOutput,
        other: CompletionOutput,
    ) -> None:
        """Record in the check whether two answers are equal in everything a user sees."""
        facts = ("token_ids", "text", "finish_reason", "stop_reason")
        differs = next((name for name in facts if getattr(plain, name) != getattr(other, name)), None)
        if differs == "token_ids" and not self.exact and self._is_near_tie(prompt, params, plain, other):
            check.notes.append("a near-tie fell differently (kernels are not exact)")
            differs = None
        own = params.speculation
        asked = f"{own['method']}, k {own['k']}" if isinstance(own, dict) else str(own)
        check.expect(differs is None, f"{differs} differs: {_where(plain, other)} ({asked})")

    def _is_near_tie(
        self, prompt: SequenceOf[int], params: SamplingParams, plain: CompletionOutput, other: CompletionOutput
    ) -> bool:
        at = _common(plain.token_ids, other.token_ids)
        if not params.greedy or at >= min(len(plain.token_ids), len(other.token_ids)):
            return False
        context = [*prompt, *plain.token_ids[:at]]
        wanted = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, speculation=NONE)
        entry = (self.llm.generate(context, wanted)[0].outputs[0].logprobs or [{}])[0]
        scale = 1.0 if self.llm.loaded.decoder.dtypes.compute == torch.float32 else 50.0
        logprobs = sorted((logprob.logprob for logprob in entry.values()), reverse=True)
        tied = {plain.token_ids[at], other.token_ids[at]} <= set(entry)
        return tied and logprobs[0] - logprobs[1] < NEAR_TIE * scale

    def each(self, check: Check, count: int | None = None) -> Iterator[tuple[int, list[int]]]:
        """Yield the prompts, the first `count` of them, and spare ones while the check has not seen all it must."""
        least = len(self.prompts) if count is None else min(count, len(self.prompts))
        for i, prompt in enumerate((*self.prompts, *self.spare)):
            if i >= least and check.seen.complete and check.missing is None:
                return
            yield i, prompt

    # -- the engine, watched and patched

    @contextmanager
    def tapped(self, *, keep: bool = False) -> Iterator[Tap]:
        """Watch the engine verify."""
        tap = Tap(keep=keep)
        watched = tap.watching(self.llm.call(lambda engine: engine.runner.sampler.verify))
        with patched(self.llm, lambda engine: engine.runner.sampler, verify=watched):
            yield tap

    def prefix_caching(self, wanted: bool) -> AbstractContextManager[None]:
        return patched(self.llm, lambda engine: engine.blocks, prefix_caching=wanted)


@contextmanager
def patched(llm: LLM, part: Callable[[Engine], object], **values: object) -> Iterator[None]:
    """Replace attributes of a part of the engine for the time of a `with`."""
    missing = object()

    def exchange(engine: Engine, new: dict[str, object]) -> dict[str, object]:
        owner = part(engine)
        before = {name: vars(owner).get(name, missing) for name in new}  # missing: only the class has it
        for name, value in new.items():
            delattr(owner, name) if value is missing else setattr(owner, name, value)
        return before

    before = llm.call(lambda engine: exchange(engine, values))
    try:
        yield
    finally:
        llm.call(lambda engine: exchange(engine, before))


def encoded_prompts(llm: LLM, count: int = len(PROMPTS)) -> list[list[int]]:
    """Return the prompts as chat messages, or as plain text where the model has no chat template."""
    tokenizer = llm.tokenizer
    chosen = [PROMPTS[i % len(PROMPTS)] + (f"\n({i})" if i >= len(PROMPTS) else "") for i in range(count)]
    if not tokenizer.has_chat_template:
        return [tokenizer.encode(text) for text in chosen]
    chats = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in chosen]
    return [tokenizer.encode(text, add_special_tokens=False) for text in chats]


def is_structured(method: str) -> bool:
    """Return whether a method, or a drafter by its name, drafts for structured outputs alone."""
    return any(matches_method(method, name) for name, each in METHODS.items() if each.structured)


def chosen_methods(llm: LLM, wanted: SequenceOf[str]) -> tuple[str, ...]:
    available = llm.call(lambda engine: tuple(drafter.name for drafter in engine.drafters.drafters))
    meant: list[str] = []
    for asked in wanted:
        matching = [name for name in available if matches_method(name, asked)]
        if not matching:
            if asked not in METHODS:
                raise InvalidParameter("methods", unknown_method(asked, available))
            flags = " and ".join(f"--{need.replace('_', '-')}" for need in METHODS[asked].needs)
            raise InvalidParameter("methods", f"{asked} is not loaded; give {flags or f'method {AUTO}'}")
        meant += matching
    possible = tuple(name for name in available if can_compile() or not is_structured(name))
    return tuple(dict.fromkeys(meant)) or possible


def _common(one: SequenceOf[int], other: SequenceOf[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _where(plain: CompletionOutput, other: CompletionOutput) -> str:
    at = _common(plain.token_ids, other.token_ids)
    if at < max(len(plain.token_ids), len(other.token_ids)):
        return f"token {at} is {other.token_ids[at : at + 1]}, plainly {plain.token_ids[at : at + 1]}"
    return f"{(other.text, other.finish_reason, other.stop_reason)!r}"


def slots_held(sequence: Sequence, positions: Iterable[int], block_size: int) -> Tensor:
    """Return the cache slots of some positions of a sequence."""
    at = np.array(list(positions), np.int64)
    tables = np.array([sequence.blocks], np.int64)
    return torch.from_numpy(slots_of(tables, np.zeros_like(at), at, block_size))
