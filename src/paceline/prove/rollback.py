"""The cache after rejected drafts: K and V of every committed token against those of a fresh prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.engine.layout import slot
from paceline.prove.report import Row
from paceline.prove.subject import LENGTHS, Subject
from paceline.prove.tap import Tap
from paceline.sequence import Sequence

TOLERANCE = 1e-3  # of the largest value, where kernels are not exact in fp32
COARSE = 5e-2  # the same in 16 bits


def cache_after_rollback(subject: Subject, method: str) -> Row:
    how = "bit for bit" if subject.exact else "within rounding"
    row = Row(f"cache · {method}", f"K/V after rollbacks with a fresh prefill's, {how}")
    for i, prompt in subject.each(row, subject.effort.few):
        with Tap().on(subject.llm.engine) as tap:
            tokens, kept = _speculate(subject, prompt, method, LENGTHS[i % len(LENGTHS)])
        row.seen.merge(tap.seen)
        fresh = _prefill(subject, tokens)
        for layer, (one, other) in enumerate(zip(kept, fresh, strict=True)):
            row.expect(_same(subject, one, other), _difference(layer, one, other))
    return row


def _speculate(subject: Subject, prompt: list[int], method: str, k: int) -> tuple[list[int], list[Tensor]]:
    """The tokens computed by the time the answer is nearly done, and their K and V, layer by layer."""
    engine = subject.llm.engine
    params = subject.params(method, k, ignore_eos=True, max_tokens=subject.effort.max_tokens + k + 2)
    resolved = params.resolve(subject.llm.loaded.generation_defaults)
    (sequence,) = engine.add_request("prove/speculative", prompt, resolved)
    try:
        while sequence.num_output < subject.effort.max_tokens:
            engine.step()
        return sequence.tokens[: sequence.num_computed], _read(subject, sequence)
    finally:
        engine.cancel(sequence.request_id)


def _prefill(subject: Subject, tokens: list[int]) -> list[Tensor]:
    engine = subject.llm.engine
    params = subject.params("none", 1, ignore_eos=True, max_tokens=2).resolve(subject.llm.loaded.generation_defaults)
    with subject.prefix_caching(False):
        (sequence,) = engine.add_request("prove/prefill", tokens, params)
        try:
            while sequence.num_computed < len(tokens):
                engine.step()
            return _read(subject, sequence)
        finally:
            engine.cancel(sequence.request_id)


def _read(subject: Subject, sequence: Sequence) -> list[Tensor]:
    """(2, n, heads, head_dim) of each of the target's layers."""
    cache = subject.llm.engine.runner.cache
    layers = cache.layers[: len(subject.llm.engine.model.kv_specs)]
    slots = [slot(sequence, at, cache.block_size) for at in range(sequence.num_computed)]
    at = torch.tensor(slots, device=subject.llm.loaded.decoder.device)
    return [torch.stack((layer.k[at], layer.v[at])) for layer in layers]


def _same(subject: Subject, one: Tensor, other: Tensor) -> bool:
    if subject.exact:
        return torch.equal(one, other)
    tolerance = TOLERANCE if one.dtype == torch.float32 else COARSE
    return float((one - other).abs().max()) <= tolerance * float(other.abs().max())


def _difference(layer: int, one: Tensor, other: Tensor) -> str:
    wrong = (one != other).flatten(2).any(2).any(0).nonzero()[:, 0].tolist()
    apart = float((one - other).abs().max())
    return f"layer {layer}: {len(wrong)} of {one.shape[1]} tokens differ, by up to {apart:.2g}, first {wrong[:3]}"
