"""The model under proof: prompts, methods, how much to do, and ways to ask it plainly and speculatively."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from paceline.errors import InvalidParameter
from paceline.llm import LLM
from paceline.outputs import CompletionOutput
from paceline.prove.prompts import PROMPTS
from paceline.prove.replay import Verify
from paceline.prove.report import Row
from paceline.prove.tap import Tap
from paceline.sampling_params import SamplingParams

LENGTHS = (4, 8, 2, 1, 3)  # k, in turn
NEAR_TIE = 1e-3  # nats between the two likeliest tokens, under which kernels that are not exact may disagree


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is done."""

    prompts: int
    few: int  # prompts of the checks that say little more with more of them
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
class Subject:
    llm: LLM
    verify: Verify  # what the engine uses too: the real one unless a fault was injected
    methods: tuple[str, ...]
    effort: Effort
    prompts: list[list[int]]
    spare: list[list[int]]  # for checks that have not seen an accept, a reject and a bonus yet
    generator: torch.Generator
    seed: int
    _plain: dict[tuple[tuple[int, ...], SamplingParams], CompletionOutput] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether a row's arithmetic is the same bits in every pass."""
        return self.llm.loaded.decoder.kernels.exact

    def params(self, method: str, k: int, **more: object) -> SamplingParams:
        given: dict[str, object] = {"temperature": 0.0, "max_tokens": self.effort.max_tokens} | more
        own = "none" if method == "none" else {"method": method, "k": k}
        return SamplingParams(speculation=own, **given)  # type: ignore[arg-type]

    def plain(self, prompt: SequenceOf[int], params: SamplingParams) -> CompletionOutput:
        """What the same engine says alone and without drafts; asked once."""
        wanted = replace(params, speculation="none")
        key = (tuple(prompt), wanted)
        if key not in self._plain:
            self._plain[key] = self.llm.generate(list(prompt), wanted)[0].outputs[0]
        return self._plain[key]

    def ask(
        self, prompts: SequenceOf[SequenceOf[int]], params: SequenceOf[SamplingParams], row: Row, *, together: bool
    ) -> list[CompletionOutput]:
        """The answers of requests sent one after another, or all at once; what became of drafts goes into the row."""
        with Tap().on(self.llm.engine) as tap:
            if together:
                outputs = self.llm.generate([list(prompt) for prompt in prompts], list(params))
            else:
                outputs = [self.llm.generate(list(p), q)[0] for p, q in zip(prompts, params, strict=True)]
        row.seen.merge(tap.seen)
        return [output.outputs[0] for output in outputs]

    def compare(
        self,
        row: Row,
        prompt: SequenceOf[int],
        params: SamplingParams,
        plain: CompletionOutput,
        other: CompletionOutput,
    ) -> None:
        """Note in the row whether two answers are the same in everything a user sees."""
        facts = ("token_ids", "text", "finish_reason", "stop_reason")
        differs = next((name for name in facts if getattr(plain, name) != getattr(other, name)), None)
        if differs == "token_ids" and not self.exact and self._is_near_tie(prompt, params, plain, other):
            row.notes.append("a near-tie fell differently (kernels are not exact)")
            differs = None
        row.expect(differs is None, f"{differs} differs: {_where(plain, other)} ({_asked(params)})")

    def _is_near_tie(
        self, prompt: SequenceOf[int], params: SamplingParams, plain: CompletionOutput, other: CompletionOutput
    ) -> bool:
        at = _common(plain.token_ids, other.token_ids)
        if not params.greedy or at >= min(len(plain.token_ids), len(other.token_ids)):
            return False
        context = [*prompt, *plain.token_ids[:at]]
        wanted = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, speculation="none")
        entry = (self.llm.generate(context, wanted)[0].outputs[0].logprobs or [{}])[0]
        scale = 1.0 if self.llm.loaded.decoder.dtypes.compute == torch.float32 else 50.0
        found = sorted((logprob.logprob for logprob in entry.values()), reverse=True)
        tied = {plain.token_ids[at], other.token_ids[at]} <= set(entry)
        return tied and found[0] - found[1] < NEAR_TIE * scale

    def each(self, row: Row, count: int | None = None) -> Iterator[tuple[int, list[int]]]:
        """The prompts, the first `count` of them, and spare ones while the row has not seen all it must."""
        least = len(self.prompts) if count is None else min(count, len(self.prompts))
        for i, prompt in enumerate((*self.prompts, *self.spare)):
            if i >= least and row.seen.complete and row.missing is None:
                return
            yield i, prompt

    @contextmanager
    def context_of(self, length: int) -> Iterator[None]:
        """Make the engine believe that its context holds `length` tokens."""
        engine = self.llm.engine
        before, engine.max_model_len = engine.max_model_len, min(length, engine.max_model_len)
        try:
            yield
        finally:
            engine.max_model_len = before

    @contextmanager
    def prefix_caching(self, wanted: bool) -> Iterator[None]:
        blocks = self.llm.engine.blocks
        before, blocks.prefix_caching = blocks.prefix_caching, wanted
        try:
            yield
        finally:
            blocks.prefix_caching = before


def encoded_prompts(llm: LLM, count: int = len(PROMPTS)) -> list[list[int]]:
    """As a user's chat would send them, or as text to go on with where the model has no chat template."""
    tokenizer = llm.tokenizer
    chosen = [PROMPTS[i % len(PROMPTS)] + (f"\n({i})" if i >= len(PROMPTS) else "") for i in range(count)]
    if not tokenizer.has_chat_template:
        return [tokenizer.encode(text) for text in chosen]
    chats = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in chosen]
    return [tokenizer.encode(text, add_special_tokens=False) for text in chats]


def chosen_methods(llm: LLM, wanted: SequenceOf[str]) -> tuple[str, ...]:
    available = tuple(drafter.name for drafter in llm.engine.drafters.drafters)
    for name in wanted:
        if name not in available:
            hint = " (it needs --draft-model)" if name == "draft-model" else ""
            raise InvalidParameter("methods", f"{name!r} is not one of {', '.join(available)}{hint}")
    return tuple(dict.fromkeys(wanted)) or available


def _common(one: SequenceOf[int], other: SequenceOf[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _where(plain: CompletionOutput, other: CompletionOutput) -> str:
    at = _common(plain.token_ids, other.token_ids)
    if at < max(len(plain.token_ids), len(other.token_ids)):
        return f"token {at} is {other.token_ids[at : at + 1]}, plainly {plain.token_ids[at : at + 1]}"
    return f"{(other.text, other.finish_reason, other.stop_reason)!r}"


def _asked(params: SamplingParams) -> str:
    own = params.speculation
    return f"{own['method']}, k {own['k']}" if isinstance(own, dict) else str(own)
