"""The real verifier, called repeatedly on the recorded inputs of a real step, each time with fresh coins.

Only columns of the vocabulary that top_k keeps, or that have positive q, somewhere in the step are kept: p and q are
the same numbers as over the whole vocabulary, and a replay costs microseconds. Most replays start from processed
logits; some (`processed` false) from the raw logits, through the same processors as in the engine, a row at a time on a
CPU. Two shapes:

- `Fixed`: a deterministic draft as recorded, with exact p at each of its nodes. The law of the committed tokens is
  known exactly.
- `Stream`: drafts are drawn anew from q each time, so p and q are needed wherever a draft may lead. The p and q
  recorded at successive positions are used whatever the tokens before; steps go on until enough tokens are committed,
  with the real keys, so coins used twice show in the joint distribution.
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
CHUNK = 10_000  # rows of one call
COMMITTED = 100  # length at which replays of no particular sequence start


@dataclass(frozen=True)
class Fixed:
    """A recorded deterministic draft over the columns that matter."""

    tokens: list[int]  # by node, as columns
    parents: list[int]
    logits: Tensor  # (n + 1, C)
    p: Tensor  # (n + 1, C) float64
    params: SamplingParams
    committed: int

    @staticmethod
    def of(step: Step) -> Fixed:
        p = exact_p(step.logits, step.params)
        wanted = _left_by_top_k(step.logits, step.params)
        drafted = torch.tensor(step.tokens, device=step.logits.device)
        wanted[drafted] = True
        columns = wanted.nonzero()[:, 0]
        tokens = torch.searchsorted(columns, drafted).tolist()
        return Fixed(tokens, step.parents, step.logits[:, columns], p[:, columns], step.params, step.committed)

    def outcomes(self) -> Tensor:
        """(n + 1, C) the probability that the step stops at each slot with each token."""
        left = self.p.cpu().clone()
        reach = torch.zeros(len(self.tokens) + 1, dtype=torch.float64)
        reach[0] = 1
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            # Of equal siblings only the first can be reached.
            reach[node + 1] = reach[parent + 1] * left[parent + 1, token]
            left[parent + 1, token] = 0
        return reach[:, None] * left

    def replay(
        self, verify: Verify, times: int, generator: torch.Generator, seen: Seen, *, processed: bool = True
    ) -> list[GTest]:
        """Tests of the first committed token against p at the root, and of all committed tokens against their law."""
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
class Stream:
    """p and q by state; the state is the position (recorded steps) or the last token (`markov`, the toy)."""

    logits: Tensor  # (T, C) raw
    p: Tensor  # (T, C) float64
    q: Tensor  # (T, C) float32, positive where drawn
    params: SamplingParams
    markov: bool = False

    @staticmethod
    def of(logits: Tensor, q: Tensor, params: SamplingParams) -> Stream:
        """Recorded raw logits (T, V) and q (T, V) at successive positions."""
        p = exact_p(logits, params)
        columns = (_left_by_top_k(logits, params) | (q > 0).any(0)).nonzero()[:, 0]
        return Stream(logits[:, columns], p[:, columns], q[:, columns].contiguous(), params)

    def joint(self, tokens: int) -> Tensor:
        """(C ** tokens,) the exact probability of the first tokens."""
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
        tree: bool = False,
        tokens: int = 2,
        processed: bool = True,
    ) -> list[GTest]:
        """Tests of the first token, and of the first `tokens` jointly. `k` is the depth of every draft."""
        columns = self.p.shape[1]
        first, whole = np.zeros(columns), np.zeros(columns**tokens)
        for start in range(0, times, CHUNK):
            batch = min(CHUNK, times - start)
            drawn = self._generate(verify, batch, generator, seen, k, tree, tokens, processed)
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
        tree: bool,
        tokens: int,
        processed: bool,
    ) -> Tensor:
        """(batch, tokens) the first tokens of as many generations, by as many steps as it takes."""
        device = self.logits.device
        keys = random_keys(batch, generator, device)
        drawn = torch.zeros(batch, tokens + k + 1, dtype=torch.int64, device=device)
        length = torch.zeros(batch, dtype=torch.int64, device=device)
        live = torch.arange(batch, device=device)
        while live.shape[0]:
            now = length[live]
            draft, states = self._draft(now, drawn[live, (now - 1).clamp_min(0)], generator, k, tree)
            logits, metadata = _inputs(self.logits, self.p, self.params, live.shape[0], processed)
            verdict = _call(verify, draft, logits[states.flatten()], metadata, keys[live], now + COMMITTED)
            seen.add(verdict, draft.num_nodes > 0)
            for at in range(k + 1):
                kept = at <= verdict.num_accepted
                drawn[live[kept], now[kept] + at] = verdict.tokens[kept, at]
            length[live] = now + verdict.num_accepted + 1
            live = live[length[live] < tokens]
        return drawn[:, :tokens]

    def _draft(
        self, length: Tensor, last: Tensor, generator: torch.Generator, k: int, tree: bool
    ) -> tuple[Draft, Tensor]:
        """A chain of k, or a tree with two children at every node, siblings without replacement; states by slot."""
        rows = self.p.shape[0]
        # A generation starts in state 0 whatever its last token.
        states = [torch.where(length > 0, last, 0) if self.markov else length % rows]
        tokens: list[Tensor] = []
        parents: list[int] = []
        depths = [0]
        for slot in range(2**k - 1 if tree else k):  # parents, level by level
            left = self.q[states[slot]].double().cpu()
            for _ in range(2 if tree else 1):
                drawn = torch.multinomial(left, 1, generator=generator)
                left = left.scatter(1, drawn, 0)
                tokens.append(drawn[:, 0].to(length.device))
                parents.append(slot - 1)
                depths.append(depths[slot] + 1)
                states.append(tokens[-1] if self.markov else (length + depths[-1]) % rows)
        by_slot = torch.stack(states, 1)
        has_child = torch.zeros(len(depths), dtype=torch.bool, device=length.device)
        has_child[torch.tensor(parents) + 1] = True
        q = Proposal(probs=self.q, row_of=torch.where(has_child, by_slot, -1))
        return _drafts(torch.stack(tokens, 1), parents, q), by_slot


TOY_P = [[0.13, 0.60, 0.27], [0.10, 0.15, 0.75], [0.68, 0.11, 0.21]]
TOY_Q = [[0.26, 0.30, 0.44], [0.22, 0.73, 0.05], [0.95, 0.04, 0.01]]


def toy(device: torch.device) -> Stream:
    """Three tokens, p and q far apart: coins used in two steps change the joint distribution by several percent."""
    p = torch.tensor(TOY_P, dtype=torch.float64, device=device)
    q = torch.tensor(TOY_Q, device=device)
    return Stream(p.log().float(), p, q, SamplingParams(temperature=1.0), markov=True)


def perturbed(p: Tensor, generator: torch.Generator) -> Tensor:
    """(T, V) float32: a made-up q near p (T, V), of the same support and then some of its neighbour rows'."""
    support = (p > 0).any(0)
    scores = 0.7 * p.clamp_min(1e-3).log() + 0.8 * torch.randn(p.shape, generator=generator).to(p)
    return torch.softmax(scores.masked_fill(~support, -torch.inf), -1).float()


def exact_p(logits: Tensor, params: SamplingParams) -> Tensor:
    """(R, V) float64 of raw logits (R, V), by the real processors."""
    rows = Nodes.roots(logits.shape[0], logits.device)
    return probabilities(process(logits, _metadata(params, logits.shape[0], logits.device), rows).double())


def _left_by_top_k(logits: Tensor, params: SamplingParams) -> Tensor:
    """(V,) bool: the columns that matter. top_p sums over all tokens that top_k keeps, so all of those stay."""
    return (exact_p(logits, replace(params, top_p=1.0)) > 0).any(0)


def _metadata(params: SamplingParams, batch: int, device: torch.device) -> SamplingMetadata:
    """As the engine would build them for `batch` requests with these parameters."""
    top_p = params.top_p if params.top_p is not None and params.top_p < 1 else None
    return SamplingMetadata(
        temperature=torch.full((batch,), params.temperature or 0.0, device=device),
        top_k=torch.full((batch,), params.top_k, device=device) if params.top_k else None,
        top_p=torch.full((batch,), top_p, dtype=torch.float64, device=device) if top_p is not None else None,
    )


def _inputs(
    logits: Tensor, p: Tensor, params: SamplingParams, batch: int, processed: bool
) -> tuple[Tensor, SamplingMetadata]:
    """Logits by slot or state, and the controls that go with them."""
    if processed:
        return p.log().float(), SamplingMetadata()
    return logits, _metadata(params, batch, logits.device)


def _drafts(tokens: Tensor, parents: Sequence[int], q: Proposal | None = None) -> Draft:
    """Trees of one shape, one for each row of tokens (B, N)."""
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
    """The verifier as the engine's sampler calls it, every row full."""
    rows, slots = torch.arange(logits.shape[0], device=logits.device), draft.width + 1
    depth = int(draft.depth[0].max())
    nodes = Nodes.of(draft, rows // slots, rows % slots - 1, depth)
    draws = DrawKeys.by_coins(key, committed)
    return verify(draft, logits, rows.view(-1, slots), nodes, metadata, draws, max_depth=depth)


def random_keys(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """(count,) int64: private keys as requests without a seed get them."""
    return torch.randint(0, 2**63 - 1, (count,), generator=generator, dtype=torch.int64).to(device)


def _count(values: Any, cells: int) -> Any:
    return np.bincount(values.cpu().numpy(), minlength=cells).astype(float)
