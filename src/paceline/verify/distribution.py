"""From processed logits to p and the tokens it allows: temperature, min_p, top_k, top_p; and log-probabilities.

Each filter works over the tokens that the one before kept, in this order. It keeps every token at or above a threshold,
so tokens tied with the last one kept are kept too, and the result does not depend on any order of equal logits. A row's
result has the same bits in any batch: no sum runs across rows, or along a row in an order that depends on their number.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.verdict import INVALID, Logprobs
from paceline.verify.dispatch import on_device
from paceline.verify.processors import Nodes, SamplingMetadata, edit

CANDIDATES = 1024  # highest logits that are sorted before a row is sorted whole
ROWS_AT_A_TIME = 64  # rows whose logprobs are computed together: each takes several rows of the vocabulary


@on_device
def process(logits: Tensor, metadata: SamplingMetadata, nodes: Nodes) -> Tensor:
    """Return (R, V) logits whose softmax is p; of a greedy row only the argmax matters. The input is not changed."""
    edited = edit(logits, metadata, nodes)
    if metadata.temperature is None:
        return edited
    # The first step that writes makes a copy; later ones write into it.
    return _sharpen(edited, metadata, nodes, torch.empty_like(edited) if edited is logits else edited)


@on_device
def probabilities(logits: Tensor) -> Tensor:
    """Return p of processed logits, in their dtype."""
    return torch.softmax(logits, -1)


def logprobs(raw: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """Return log softmax of raw logits (..., V) at the tokens (...), and the `top` most likely tokens of each row."""
    scores = torch.log_softmax(raw, -1)
    chosen = scores.gather(-1, tokens[..., None])
    best = scores.topk(min(top, scores.shape[-1]), -1)
    rank = (scores > chosen).sum(-1) + 1
    return Logprobs(chosen=chosen[..., 0], rank=rank, top_tokens=best.indices, top=best.values)


def logprobs_at(logits: Tensor, rows: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """Return `logprobs` of rows (...) of the logits (R, V), a few at a time: together they may take gigabytes."""
    parts = zip(*(torch.split(part.flatten(), ROWS_AT_A_TIME) for part in (rows, tokens)), strict=True)
    blocks = [vars(logprobs(logits[some], chosen, top)) for some, chosen in parts]
    joined = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
    return Logprobs(**{name: part.view(*rows.shape, *part.shape[1:]) for name, part in joined.items()})


def argmax(logits: Tensor) -> Tensor:
    """Return (R,) the first of the highest; INVALID where that is NaN or infinite."""
    values = logits.numpy()  # whose argmax is thirty times faster than torch's; a NaN counts as the highest
    best = values.argmax(-1)
    best[~np.isfinite(values[np.arange(len(best)), best])] = INVALID
    return torch.from_numpy(best)


def _sharpen(logits: Tensor, metadata: SamplingMetadata, nodes: Nodes, out: Tensor) -> Tensor:
    """Write the distance to the row's highest logit, over the temperature, and filter; row by row, since a row stays in
    the cache. No temperature overflows, and no filter can drop the highest; greedy rows are only shifted."""
    info = torch.finfo(logits.dtype)
    for source, target, seq in zip(logits, out, nodes.seq.tolist(), strict=True):
        temperature, top_k, top_p, min_p = metadata.on_host[seq]
        peak = float(source.amax())
        torch.sub(source, peak, out=target)
        if temperature == 0 or not math.isfinite(peak):  # greedy, or a row that is not finite
            continue
        if temperature != 1:
            target.div_(min(max(temperature, info.tiny), info.max))
        if metadata.filters:
            _keep_(target, threshold(target.numpy(), top_k, top_p, min_p))
    return out


def _keep_(logits: Tensor, threshold: float) -> None:
    """Write -inf below the threshold of one row, several times faster than with a mask."""
    if threshold > -math.inf:
        under = np.nextafter(logits.numpy().dtype.type(threshold), -math.inf)
        torch.threshold_(logits, float(under), -math.inf)


def threshold(logits: np.ndarray[Any, Any], top_k: int, top_p: float, min_p: float) -> float:
    """Return the lowest logit of one row (V,) that is kept. numpy selects and sorts faster than torch on the host."""
    vocab = logits.shape[0]
    lowest = float(logits.dtype.type(math.log(min_p))) if min_p > 0 else -math.inf
    if 0 < top_k < vocab:
        lowest = max(lowest, float(np.partition(logits, vocab - top_k)[vocab - top_k]))
    if top_p >= 1:
        return lowest
    allowed = logits if lowest == -math.inf else logits[np.flatnonzero(logits >= lowest)]
    weights = np.exp(allowed)
    total = float(weights.sum())
    goal = top_p * total
    # Tokens below this sum to less than 1 - top_p: the others reach top_p without them.
    candidates = allowed[np.flatnonzero(weights >= (1 - top_p) * total / vocab)]
    for values, count in ((candidates, CANDIDATES), (candidates, vocab), (allowed, vocab)):  # last: rounding
        highest = _falling(values, count)
        held = np.exp(highest).cumsum(dtype=np.float64)
        if held[-1] >= goal:
            break
    return float(highest[min(int(held.searchsorted(goal)), highest.shape[0] - 1)])


def _falling(values: np.ndarray[Any, Any], count: int) -> Any:
    """Return the `count` highest, highest first."""
    start = values.shape[0] - count
    return np.sort(np.partition(values, start)[start:] if start > 0 else values)[::-1]
