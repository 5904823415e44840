"""Replays: the real verifier on the recorded inputs of a real step, again and again with fresh coins.

Only columns of the vocabulary that top_k passes, or that have positive q, somewhere in the step are used: p and q are
the numbers over the whole vocabulary, and a replay costs microseconds. Most replays start from processed logits; some
(`processed` false) from the raw logits, through the engine's processors, a row at a time on a CPU.

- `FixedReplay`: a deterministic draft as recorded, with exact p at each of its nodes. The law of the committed tokens
  is known exactly.
- `ReplayStream`: chains are drawn anew from q each time, so p and q are needed wherever a draft may lead. The p and q
  recorded at successive positions are used whatever the tokens before; steps go on until enough tokens are committed,
  with real keys, so coins used twice show in the joint distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.draft import Draft, Proposal
from paceline.core.verdict import Verdict
from paceline.prove.g_test import GTest, g_test
from paceline.prove.tap import Seen, Step
from paceline.sampling_params import SamplingParams
from paceline.verify import DrawKeys, Nodes, SamplingMetadata, probabilities, process

Verify = Callable[..., Verdict]
CHUNK = 10_000  # rows of one call of the verifier
COMMITTED = 100  # tokens at which replays of a stream start


@dataclass(frozen=True)
class FixedReplay:
    """A recorded deterministic draft over the columns that matter."""

    tokens: list[int]  # columns of the nodes' tokens
    parents: list[int]
    logits: Tensor  # (n + 1, C)
    p: Tensor  # (n + 1, C) float64
    params: SamplingParams
    committed: int

    @staticmethod
    def of(step: Step) -> FixedReplay:
        p = exact_p(step.logits, step.params)
        matters = _left_by_top_k(step.logits, step.params)
        drafted = torch.tensor(step.tokens, device=step.logits.device)
        matters[drafted] = True
        columns = matters.nonzero()[:, 0]
        tokens = torch.searchsorted(columns, drafted).tolist()
        return FixedReplay(tokens, step.parents, step.logits[:, columns], p[:, columns], step.params, step.committed)

    def outcomes(self) -> Tensor:
        """Return (n + 1, C) the probability that the step stops at each slot with each token."""
        left = self.p.cpu().clone()
        reach = torch.zeros(len(self.tokens) + 1, dtype=torch.float64)
        reach[0] = 1
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            # Only the first of equal siblings can be reached.
            reach[node + 1] = reach[parent + 1] * left[parent + 1, token]
            left[parent + 1, token] = 0
        return reach[:, None] * left

    def replay(
        self, verify: Verify, times: int, generator: torch.Generator, seen: Seen, *, processed: bool = True
    ) -> list[GTest]:
        """Test the first committed token against p at the root, and all committed tokens against their law."""
        device, columns = self.logits.device, self.p.shape[1]
        first, whole = np.zeros(columns), np.zeros(self.p.numel())
        for start in range(0, times, CHUNK):
            batch = min(CHUNK, times - start)
            drafts = _drafts(torch.tensor([self.tokens], device=device).expand(batch, -1).contiguous(), self.parents)
            logits, metadata = _inputs(self.logits, self.p, self.params, batch, processed)
            committed = torch.full((batch,), self.committed, device=device)
            keys = random_keys(batch, generator, device)
            verdict = _call(verify, drafts, logits.repeat(batch, 1), metadata, keys, committed)
            seen.add(verdict, torch.ones_like(verdict.num_accepted, dtype=torch.bool))
            stop = torch.cat((torch.full_like(verdict.path[:, :1], -1), verdict.path), 1)
            stop = stop.gather(1, verdict.num_accepted[:, None])[:, 0] + 1
            last = verdict.tokens.gather(1, verdict.num_accepted[:, None])[:, 0]
            first += _count(verdict.tokens[:, 0], columns)
            whole += _count(stop * columns + last, self.p.numel())
        return [
            g_test(first.tolist(), self.p[0].tolist()),
            g_test(whole.tolist(), self.outcomes().flatten().tolist()),
        ]


@dataclass(frozen=True)
class ReplayStream:
    """p and q by state; the state is the position (recorded steps) or the last token (`markov`, the toy)."""

    logits: Tensor  # (T, C) raw
    p: Tensor  # (T, C) float64
    q: Tensor  # (T, C) float32, positive where drawn
    params: SamplingParams
    markov: bool = False

    @staticmethod
    def of(logits: Tensor, q: Tensor, params: SamplingParams) -> ReplayStream:
        """Return the stream of recorded raw logits (T, V) and q (T, V) at successive positions."""
        p = exact_p(logits, params)
        columns = (_left_by_top_k(logits, params) | (q > 0).any(0)).nonzero()[:, 0]
        return ReplayStream(logits[:, columns], p[:, columns], q[:, columns].contiguous(), params)

    def joint(self, tokens: int) -> Tensor:
        """Return (C ** tokens,) the exact probability of the first tokens."""
        p, columns = self.p.cpu(), self.p.shape[1]
        law = p[0]
        for at in range(1, tokens):
            row = p[torch.arange(law.shape[0]) % columns] if self.markov else p[at % p.shape[0]]
            law = (law[:, None] * row).flatten()
        return law

    def replay(
        self,
        verify: Verify,
        times: int,
        generator: torch.Generator,
        seen: Seen,
        *,
        k: int,
        tokens: int = 2,
        processed: bool = True,
    ) -> list[GTest]:
        """Test the first token, and the first `tokens` jointly. `k` is the length of every draft."""
        columns = self.p.shape[1]
        first, whole = np.zeros(columns), np.zeros(columns**tokens)
        for start in range(0, times, CHUNK):
            batch = min(CHUNK, times - start)
            drawn = self._generate(verify, batch, generator, seen, k, tokens, processed)
            first += _count(drawn[:, 0], columns)
            whole += _count(sum(drawn[:, at] * columns ** (tokens - 1 - at) for at in range(tokens)), columns**tokens)
        return [g_test(first.tolist(), self.p[0].tolist()), g_test(whole.tolist(), self.joint(tokens).tolist())]

    def _generate(
        self,
        verify: Verify,
        batch: int,
        generator: torch.Generator,
        seen: Seen,
        k: int,
        tokens: int,
        processed: bool,
    ) -> Tensor:
        """Return (batch, tokens) the first tokens of `batch` generations, step by step."""
        device = self.logits.device
        keys = random_keys(batch, generator, device)
        drawn = torch.zeros(batch, tokens + k + 1, dtype=torch.int64, device=device)
        length = torch.zeros(batch, dtype=torch.int64, device=device)
        live = torch.arange(batch, device=device)
        while live.shape[0]:
            now = length[live]
            draft, states = self._draft(now, drawn[live, (now - 1).clamp_min(0)], generator, k)
            logits, metadata = _inputs(self.logits, self.p, self.params, live.shape[0], processed)
            verdict = _call(verify, draft, logits[states.flatten()], metadata, keys[live], now + COMMITTED)
            seen.add(verdict, draft.num_nodes > 0)
            for at in range(k + 1):
                committed = at <= verdict.num_accepted
                drawn[live[committed], now[committed] + at] = verdict.tokens[committed, at]
            length[live] = now + verdict.num_accepted + 1
            live = live[length[live] < tokens]
        return drawn[:, :tokens]

    def _draft(self, length: Tensor, last: Tensor, generator: torch.Generator, k: int) -> tuple[Draft, Tensor]:
        """Return chains of k tokens drawn from q, and the states (B, k + 1) by slot."""
        rows = self.p.shape[0]
        # A generation starts in state 0 whatever its last token.
        states, tokens = [torch.where(length > 0, last, 0) if self.markov else length % rows], []
        for depth in range(1, k + 1):
            drawn = torch.multinomial(self.q[states[-1]].double().cpu(), 1, generator=generator)
            tokens.append(drawn[:, 0].to(length.device))
            states.append(tokens[-1] if self.markov else (length + depth) % rows)
        by_slot = torch.stack(states, 1)
        row_of = torch.where(torch.arange(k + 1, device=length.device) < k, by_slot, -1)
        draft = _drafts(torch.stack(tokens, 1), range(-1, k - 1), Proposal(probs=self.q, row_of=row_of))
        return draft, by_slot


TOY_P = [[0.13, 0.60, 0.27], [0.10, 0.15, 0.75], [0.68, 0.11, 0.21]]
TOY_Q = [[0.26, 0.30, 0.44], [0.22, 0.73, 0.05], [0.95, 0.04, 0.01]]


def toy(device: torch.device) -> ReplayStream:
    """Return a stream of three tokens, p and q far apart: coins used in two steps change the joint law by percents."""
    p = torch.tensor(TOY_P, dtype=torch.float64, device=device)
    q = torch.tensor(TOY_Q, device=device)
    return ReplayStream(p.log().float(), p, q, SamplingParams(temperature=1.0), markov=True)


def exact_p(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return (R, V) float64 p of raw logits (R, V), by the real processors."""
    rows = Nodes.roots(logits.shape[0], logits.device)
    return probabilities(process(logits, _metadata(params, logits.shape[0], logits.device), rows).double())


def _left_by_top_k(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return (V,) bool: the columns that matter. top_p sums over all tokens that top_k passes, so all of those stay."""
    return (exact_p(logits, replace(params, top_p=1.0)) > 0).any(0)


def _metadata(params: SamplingParams, batch: int, device: torch.device) -> SamplingMetadata:
    """Return the metadata that the engine would build for `batch` requests with these parameters."""
    top_p = params.top_p if params.top_p is not None and params.top_p < 1 else None
    return SamplingMetadata(
        temperature=torch.full((batch,), params.temperature or 0.0, device=device),
        top_k=torch.full((batch,), params.top_k, device=device) if params.top_k else None,
        top_p=torch.full((batch,), top_p, dtype=torch.float64, device=device) if top_p is not None else None,
    )


def _inputs(
    logits: Tensor, p: Tensor, params: SamplingParams, batch: int, processed: bool
) -> tuple[Tensor, SamplingMetadata]:
    """Return logits by slot or state, and the metadata that goes with them."""
    if processed:
        return p.log().float(), SamplingMetadata()
    return logits, _metadata(params, batch, logits.device)


def _drafts(tokens: Tensor, parents: Sequence[int], q: Proposal | None = None) -> Draft:
    """Return trees of one shape, one for each row of tokens (B, N)."""
    depth: list[int] = []
    for parent in parents:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    batch, device = tokens.shape[0], tokens.device
    shape = torch.tensor([list(parents), depth], device=device)[:, None].expand(2, batch, len(depth)).contiguous()
    counts = torch.full((batch,), len(depth), device=device)
    return Draft(tokens=tokens, parents=shape[0], depth=shape[1], num_nodes=counts, q=q)


def _call(
    verify: Verify, draft: Draft, logits: Tensor, metadata: SamplingMetadata, key: Tensor, committed: Tensor
) -> Verdict:
    """Call the verifier as the engine's sampler does, every row full."""
    rows, slots = torch.arange(logits.shape[0], device=logits.device), draft.width + 1
    depth = int(draft.depth[0].max())
    nodes = Nodes.of(draft, rows // slots, rows % slots - 1, depth)
    draws = DrawKeys.by_coins(key, committed)
    return verify(draft, logits, rows.view(-1, slots), nodes, metadata, draws, max_depth=depth)


def random_keys(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return (count,) int64 private keys, as requests without a seed get them."""
    return torch.randint(0, 2**63 - 1, (count,), generator=generator, dtype=torch.int64).to(device)


def _count(values: Any, cells: int) -> Any:
    return np.bincount(values.cpu().numpy(), minlength=cells).astype(float)
