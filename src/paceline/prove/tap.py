"""Observation of an engine's verification: counts of accepts, rejects and bonuses; p and q of steps for replay."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.core.draft import Draft
from paceline.core.sequence import Sequence
from paceline.core.verdict import TokenKind, Verdict
from paceline.sampling_params import SamplingParams

MOST_STEPS = 48  # recorded steps of one generation: a step's logits take megabytes


@dataclass
class Seen:
    """Outcomes of drafts. A check that lacks one of the first three has not tested its subject."""

    accepts: int = 0  # drafted tokens
    rejects: int = 0  # steps that ended in a recovered token
    bonus: int = 0  # steps that ended in one more token after a draft
    committed: int = 0  # tokens of all verdicts, those a stop cut off included

    @property
    def complete(self) -> bool:
        return self.accepts > 0 and self.rejects > 0 and self.bonus > 0

    def add(self, verdict: Verdict, drafted: Tensor) -> None:
        """Count a verdict. `drafted` (B,) bool: the rows that carried a draft."""
        final = verdict.kinds.gather(1, verdict.num_accepted[:, None])[:, 0]
        self.accepts += int(verdict.num_accepted.sum())
        self.rejects += int(((final == TokenKind.RECOVERED) & drafted).sum())
        self.bonus += int(((final == TokenKind.BONUS) & drafted).sum())
        self.committed += int(verdict.num_accepted.sum()) + verdict.num_accepted.shape[0]

    def merge(self, other: Seen) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True)
class Step:
    """One row of one verification, as it was: a draft, the raw logits of its nodes, q where it was sampled."""

    params: SamplingParams
    committed: int
    tokens: list[int]
    parents: list[int]
    logits: Tensor  # (n + 1, V) by slot
    q: Tensor | None  # (n + 1, V) by slot of the parent; rows without children are zero


@dataclass
class Tap:
    keep: bool = False  # steps of sampling requests without a seed
    seen: Seen = field(default_factory=Seen)
    steps: list[Step] = field(default_factory=list)
    runs: dict[str, list[int]] = field(default_factory=dict)  # sequence key -> accepted tokens of each step

    def watching(self, inner: Callable[..., Verdict]) -> Callable[..., Verdict]:
        """Return the sampler's `verify`, observed."""

        def verify(
            sequences: SequenceOf[Sequence], draft: Draft, logits: Tensor, row_of: Tensor, **options: Any
        ) -> Verdict:
            verdict = inner(sequences, draft, logits, row_of, **options)
            draft, row_of = draft.to(logits.device), row_of.to(logits.device)
            self.seen.add(verdict, draft.num_nodes > 0)
            for sequence, accepted in zip(sequences, verdict.num_accepted.tolist(), strict=True):
                self.runs.setdefault(sequence.key, []).append(accepted)
            if self.keep and draft.width:
                self._keep(sequences, draft, logits, row_of)
            return verdict

        return verify

    def _keep(self, sequences: SequenceOf[Sequence], draft: Draft, logits: Tensor, row_of: Tensor) -> None:
        for row, sequence in enumerate(sequences):
            count = int(draft.num_nodes[row])
            if not count or sequence.params.greedy or sequence.seed is not None or len(self.steps) >= MOST_STEPS:
                continue
            q = None
            if draft.q is not None and bool((draft.q.row_of[row] >= 0).any()):
                at = draft.q.row_of[row, : count + 1]
                q = draft.q.over(logits.shape[1])[at.clamp_min(0)] * (at >= 0)[:, None]
            step = Step(
                params=sequence.params,
                committed=len(sequence.tokens),
                tokens=draft.tokens[row, :count].tolist(),
                parents=draft.parents[row, :count].tolist(),
                logits=logits[row_of[row, : count + 1]].clone(),
                q=None if q is None else q.clone(),
            )
            self.steps.append(step)
