"""How far one model's output is from another's: next-token distributions at every position of some prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.models.decoder import Decoder
from paceline.models.kv_cache import KVCache
from paceline.models.plan import PassPlan

BLOCK = 16


class Alone:
    """One sequence of up to `length` tokens on a decoder, with a cache of its own and no engine."""

    def __init__(self, decoder: Decoder, length: int) -> None:
        self._decoder, self._num_blocks = decoder, -(-length // BLOCK)
        self._cache = KVCache(
            decoder.kv_specs,
            num_blocks=self._num_blocks,
            block_size=BLOCK,
            dtype=decoder.cache_dtype,
            device=decoder.device,
        )

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], first: int = 0) -> Tensor:
        """(M, V) of one pass over these tokens, the first of which is at position `first`."""
        at = torch.arange(first, first + len(tokens), dtype=torch.int32)
        tables = torch.arange(self._num_blocks, dtype=torch.int32)[None]
        plan = PassPlan.in_order(at, at, torch.zeros_like(at), tables, BLOCK, first + len(tokens))
        return self._decoder.forward(torch.tensor(tokens), plan, self._cache.layers, torch.arange(len(tokens))).logits


def distance(original: Decoder, rounded: Decoder, prompts: Iterable[Sequence[int]]) -> dict[str, float]:
    """KL(original || rounded) in nats, and how often the likeliest token is the same."""
    divergences, agreements = [], []
    for tokens in prompts:
        p, q = (Alone(one, len(tokens)).logits(tokens).clone().log_softmax(-1) for one in (original, rounded))
        divergences.append((p.exp() * (p - q)).sum(-1).clamp(min=0))
        agreements.append(p.argmax(-1) == q.argmax(-1))
    kl, same = torch.cat(divergences), torch.cat(agreements)
    return {
        "tokens": float(len(kl)),
        "mean_kl": float(kl.mean()),
        "max_kl": float(kl.max()),
        "top1_agreement": float(same.double().mean()),
    }
