"""The distance between two models: their next-token distributions at every position of some prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import BrokenModel, InvalidParameter
from paceline.models.decoder import Decoder
from paceline.models.kv_cache import KVCache
from paceline.models.load.loader import load_config
from paceline.models.plan import PassPlan
from paceline.text.tokenizer import Tokenizer

BLOCK = 16
LONGEST = 256  # tokens of a prompt; later ones are not compared


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
        """Return the logits (M, V) of a pass over tokens from position `first` on."""
        at = torch.arange(first, first + len(tokens), dtype=torch.int32)
        tables = torch.arange(self._num_blocks, dtype=torch.int32)[None]
        plan = PassPlan.in_order(at, at, torch.zeros_like(at), tables, BLOCK, first + len(tokens))
        return self._decoder.forward(torch.tensor(tokens), plan, self._cache.layers, torch.arange(len(tokens))).logits


def compared_tokens(model: Path, texts: Iterable[str]) -> list[list[int]]:
    """Encode prompts, before the model's weights are read."""
    config, tokenizer = load_config(model), Tokenizer.from_path(model)
    prompts = [tokenizer.encode(text)[: min(LONGEST, config.max_positions)] for text in texts]
    if not any(prompts):
        raise InvalidParameter("prompts", "there is no token in them to compare; give other prompts")
    if (largest := max(max(tokens, default=0) for tokens in prompts)) >= config.vocab_size:
        raise BrokenModel(
            f"{model}: its tokenizer makes token {largest} of a prompt, which the vocabulary of {config.vocab_size} "
            "lacks; take the tokenizer that belongs to it, or give other prompts (--prompts)"
        )
    return [tokens for tokens in prompts if tokens]


def distance(original: Decoder, rounded: Decoder, prompts: Iterable[Sequence[int]]) -> dict[str, float]:
    """Return KL(original || rounded) in nats, and the share of positions with an equal likeliest token."""
    divergences, agreements = [], []
    for tokens in prompts:
        p = _log_probabilities(original, tokens, "original", "its weights are damaged, or too large to compute with")
        q = _log_probabilities(rounded, tokens, "rounded", "name another kind (--to)")
        divergences.append((p.exp() * (p - q)).sum(-1).clamp(min=0))
        agreements.append(p.argmax(-1) == q.argmax(-1))
    kl, same = torch.cat(divergences), torch.cat(agreements)
    return {
        "tokens": float(len(kl)),
        "mean_kl": float(kl.mean()),
        "max_kl": float(kl.max()),
        "top1_agreement": float(same.double().mean()),
    }


def _log_probabilities(decoder: Decoder, tokens: Sequence[int], which: str, advice: str) -> Tensor:
    logits = Alone(decoder, len(tokens)).logits(tokens).clone()
    if not bool(logits.isfinite().all()):
        raise BrokenModel(f"the {which} model's output on a prompt is not a number; {advice}")
    return logits.log_softmax(-1)
