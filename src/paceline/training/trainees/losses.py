"""The loss of drafted distributions against the target's, over a draft vocabulary, in one pass over chunks of rows.

For a row with drafted logits z and target logits y, q = softmax(z), p = softmax(y / T):

    CE = -sum p log q        TV = 1 - sum min(p, q) = half of sum |p - q|, which is the chance of a rejection

Logits and gradients of a chunk exist only while the chunk is computed: the forward pass leaves the gradients of its
inputs behind, so that nothing of size rows x vocabulary is kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.training.registry import MOST_WEIGHT, between

Chunk = Callable[[Tensor, Tensor, Tensor, float, float, float], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options that every trainee has."""

    anchors: int = between(1, 1 << 16, 64)  # places of a row that drafts start from and that count
    ce: float = between(0.0, MOST_WEIGHT, 0.3)
    tv: float = between(0.0, MOST_WEIGHT, 0.7)
    temperature: float = between(0.01, 100.0, 1.0)  # temperature of the target's distribution that is learnt


class Losses(NamedTuple):
    loss: Tensor  # () weighted sum over rows; the only one with a gradient
    hit: Tensor  # (N,) bool: both have the same likeliest token


def chunk_loss(
    z: Tensor, y: Tensor, weight: Tensor, ce: float, tv: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss (), its gradient by z and the hits of a chunk; `weight` (C,) is each row's share of the loss."""
    logq = F.log_softmax(z.float(), -1)
    p, q = F.softmax(y.float() / temperature, -1), logq.exp()
    entropy = -(p * logq).sum(-1)
    away = (q - p).abs().sum(-1) / 2
    side = (q - p).sign() / 2  # dTV/dq
    gradient = ce * (q - p) + tv * q * (side - (q * side).sum(-1, keepdim=True))
    hit = z.argmax(-1) == y.argmax(-1)
    return (weight * (ce * entropy + tv * away)).sum(), (weight[:, None] * gradient).to(z.dtype), hit


class _Markov(NamedTuple):
    previous: Tensor  # (N, r)
    w2: Tensor  # (Vd, r) in the dtype of the logits
    grad_previous: Tensor
    grad_w2: Tensor  # summed in fp32 over chunks

    @staticmethod
    def of(previous: Tensor, w2: Tensor) -> _Markov:
        wide = torch.promote_types(w2.dtype, torch.float32)
        return _Markov(previous, w2.to(previous.dtype), torch.empty_like(previous), torch.zeros_like(w2, dtype=wide))


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        previous: Tensor | None,
        w2: Tensor | None,
        head: Tensor,
        target: Tensor,
        weight: Tensor,
        ce: float,
        tv: float,
        temperature: float,
        rows: int,
        chunk: Chunk,
    ) -> tuple[Tensor, Tensor]:
        grad_hidden = torch.empty_like(hidden)
        markov = None if previous is None or w2 is None else _Markov.of(previous, w2)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hits = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            z = hidden[at] @ head.T
            if markov is not None:
                z.addmm_(markov.previous[at], markov.w2.T)
            loss, gradient, hits[at] = chunk(z, target[at] @ head.T, weight[at], ce, tv, temperature)
            total += loss
            torch.mm(gradient, head, out=grad_hidden[at])
            if markov is not None:
                torch.mm(gradient, markov.w2, out=markov.grad_previous[at])
                markov.grad_w2.add_(gradient.T @ markov.previous[at])
        ctx.grads = (grad_hidden, *((None, None) if markov is None else (markov.grad_previous, markov.grad_w2)))
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if grad is None else grad * outputs[0].to(grad.dtype) for grad in ctx.grads]
        return (*scaled, *(None for _ in range(8)))


def draft_loss(
    hidden: Tensor,
    head: Tensor,
    target: Tensor,
    weight: Tensor,
    options: LossOptions,
    *,
    previous: Tensor | None = None,
    w2: Tensor | None = None,
    rows: int = 4096,
    chunk: Chunk = chunk_loss,
) -> Losses:
    """Return the loss of z = hidden head^T + previous w2^T against y = target head^T.

    head is (Vd, H), all others have N rows. `weight` is the share of each row in the sum; `rows` the size of a chunk;
    `chunk` may be a compiled `chunk_loss`.
    """
    shares = options.ce, options.tv, options.temperature
    apply: Any = _DraftLoss.apply
    return Losses(*apply(hidden, previous, w2, head, target, weight, *shares, rows, chunk))
