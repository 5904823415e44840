"""Rollback: after rejected drafts, K and V of every committed token against those of a fresh prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.drafters import NONE
from paceline.engine.engine import Engine
from paceline.prove.report import Check
from paceline.prove.subject import LENGTHS, ProofSubject, slots_held
from paceline.sampling_params import SamplingParams

# share of the largest value, by bytes of a number; allowed where kernels are not exact; a step of e4m3 is an eighth
TOLERANCE = {4: 1e-3, 2: 5e-2, 1: 0.2}


def cache_after_rollback(subject: ProofSubject, method: str) -> Check:
    """Check the cache of answers that are nearly done."""
    how = "bit for bit" if subject.exact else "within rounding"
    check = Check(f"cache · {method}", f"K/V after rollbacks with a fresh prefill's, {how}")
    most = subject.effort.max_tokens
    for i, prompt in subject.each(check, subject.effort.few):
        k = LENGTHS[i % len(LENGTHS)]
        with subject.tapped() as tap:  # until the answer is nearly done
            drafting = subject.params(method, k, ignore_eos=True, max_tokens=most + k + 2)
            tokens, drafted = _computed(subject, prompt, drafting, output=most)
        check.seen.merge(tap.seen)
        with subject.prefix_caching(False):
            plain = subject.params(NONE, 1, ignore_eos=True, max_tokens=2)
            _, fresh = _computed(subject, tokens, plain, output=1)
        for layer, (one, other) in enumerate(zip(drafted, fresh, strict=True)):
            check.expect(_same(subject, one, other), _difference(layer, one, other))
    return check


def _computed(
    subject: ProofSubject, prompt: list[int], params: SamplingParams, *, output: int
) -> tuple[list[int], list[Tensor]]:
    """Return the tokens computed when `output` tokens are output, and their K and V, layer by layer."""
    resolved = params.resolve(subject.llm.loaded.generation_defaults)

    def run(engine: Engine) -> tuple[list[int], list[Tensor]]:
        (sequence,) = engine.add_request("prove/cache", prompt, resolved)
        try:
            while sequence.num_output < output:
                engine.step()
            return sequence.tokens[: sequence.num_computed], _read(engine, sequence)
        finally:
            engine.cancel(sequence.request_id)

    return subject.llm.call(run)


def _read(engine: Engine, sequence: Sequence) -> list[Tensor]:
    """Return (2, n, heads, head_dim) K and V of each of the target's layers."""
    cache = engine.runner.cache
    at = slots_held(sequence, range(sequence.num_computed), cache.block_size).to(engine.model.device)
    return [torch.stack(layer.read(at)) for layer in cache.layers[: len(engine.model.kv_specs)]]


def _same(subject: ProofSubject, one: Tensor, other: Tensor) -> bool:
    if subject.exact:
        return torch.equal(_numbers(one), _numbers(other))
    return _apart(one, other) <= TOLERANCE[one.itemsize] * float(_numbers(other).abs().max())


def _difference(layer: int, one: Tensor, other: Tensor) -> str:
    wrong = (_numbers(one) != _numbers(other)).flatten(2).any(2).any(0).nonzero()[:, 0].tolist()
    apart = _apart(one, other)
    return f"layer {layer}: {len(wrong)} of {one.shape[1]} tokens differ, by up to {apart:.2g}, first {wrong[:3]}"


def _apart(one: Tensor, other: Tensor) -> float:
    return float((_numbers(one) - _numbers(other)).abs().max())


def _numbers(values: Tensor) -> Tensor:
    """Return values in a dtype that torch computes in: not fp8."""
    return values.float() if values.itemsize == 1 else values
