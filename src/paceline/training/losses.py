"""The loss of drafted distributions against the target's, over a draft vocabulary, in one pass over chunks of rows.

For a row with drafted logits z and target logits y, q = softmax(z), p = softmax(y / T):

    CE = -sum p log q        TV = 1 - sum min(p, q) = half of sum |p - q|, which is the chance of a rejection

Logits and gradients of a chunk exist only while the chunk is computed: the forward pass leaves the gradients of its
inputs behind, so that nothing of size rows x vocabulary is kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Chunk = Callable[[Tensor, Tensor, Tensor, float, float, float], tuple[Tensor, Tensor, Tensor, Tensor]]


class Losses(NamedTuple):
    loss: Tensor  # () weighted sum over rows; the only one with a gradient
    tv: Tensor  # (N,) chance that the target rejects a token drawn from q
    hit: Tensor  # (N,) bool: both have the same likeliest token


def chunk_loss(
    z: Tensor, y: Tensor, weight: Tensor, ce: float, tv: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss (), its gradient by z, TV and hits of a chunk; `weight` (C,) has the row's share of the loss."""
    logq = F.log_softmax(z.float(), -1)
    p, q = F.softmax(y.float() / temperature, -1), logq.exp()
    entropy = -(p * logq).sum(-1)
    away = (q - p).abs().sum(-1) / 2
    side = (q - p).sign() / 2  # dTV/dq
    gradient = ce * (q - p) + tv * q * (side - (q * side).sum(-1, keepdim=True))
    hit = z.argmax(-1) == y.argmax(-1)
    return (weight * (ce * entropy + tv * away)).sum(), (weight[:, None] * gradient).to(z.dtype), away, hit


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
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = [None if one is None else torch.empty_like(one) for one in (hidden, previous)]
        grad_w2 = None if w2 is None else torch.zeros(w2.shape, dtype=torch.float32, device=w2.device)
        narrow = None if w2 is None else w2.to(hidden.dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        away = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        hits = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            z = hidden[at] @ head.T
            if previous is not None and narrow is not None:
                z.addmm_(previous[at], narrow.T)
            loss, gradient, away[at], hits[at] = chunk(z, target[at] @ head.T, weight[at], ce, tv, temperature)
            total += loss
            assert grads[0] is not None
            torch.mm(gradient, head, out=grads[0][at])
            if previous is not None and narrow is not None:
                assert grads[1] is not None and grad_w2 is not None
                torch.mm(gradient, narrow, out=grads[1][at])
                grad_w2 += gradient.T @ previous[at]
        ctx.grads = (*grads, None if w2 is None or grad_w2 is None else grad_w2.to(w2.dtype))
        ctx.mark_non_differentiable(away, hits)
        return total, away, hits

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if grad is None else grad * outputs[0].to(grad.dtype) for grad in ctx.grads]
        return (*scaled, *(None for _ in range(8)))


def draft_loss(
    hidden: Tensor,
    head: Tensor,
    target: Tensor,
    weight: Tensor,
    *,
    previous: Tensor | None = None,
    w2: Tensor | None = None,
    ce: float,
    tv: float,
    temperature: float = 1.0,
    rows: int = 4096,
    chunk: Chunk = chunk_loss,
) -> Losses:
    """z = hidden head^T + previous w2^T, y = target head^T; head (Vd, H), all others have N rows.

    `weight` is the share of each row in the sum; `rows` the size of a chunk; `chunk` may be a compiled `chunk_loss`.
    """
    found: Any = _DraftLoss.apply(hidden, previous, w2, head, target, weight, ce, tv, temperature, rows, chunk)  # type: ignore[no-untyped-call]
    return Losses(*found)
