"""A tiny random decoder, and Medusa heads for it: of random weights, or such as know some texts by heart (no training,
one least-squares fit for each head)."""

from __future__ import annotations

import torch

from paceline.drafters.heads.checkpoint import MedusaHead
from paceline.models.decoder import FINAL, Decoder
from paceline.models.kernels import kernels_for
from paceline.models.kv_cache import KVCache
from paceline.models.plan import PassPlan
from paceline.models.weights import Dtypes
from tests.cuda.test_cuda import CONFIG
from tests.helpers.random_llama import random_weights

BLOCK = 16
CPU = torch.device("cpu")


def tiny_decoder(device=CPU):
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(2)
    weights = random_weights(CONFIG, 1.5)
    return Decoder(CONFIG, weights, kernels_for(device), device=device, dtypes=Dtypes.of(dtype, device))


@torch.inference_mode()
def taps_of(decoder, tokens, taps=(FINAL,)):
    """(n, T, H) of one pass over tokens that are all known."""
    blocks = -(-len(tokens) // BLOCK)
    cache = KVCache(
        decoder.kv_specs, num_blocks=blocks, block_size=BLOCK, dtype=decoder.cache_dtype, device=decoder.device
    )
    at, table = torch.arange(len(tokens)), torch.arange(blocks, dtype=torch.int32)[None]
    plan = PassPlan.in_order(at, at, torch.zeros_like(at), table, BLOCK, len(tokens))
    return decoder.forward(torch.tensor(tokens), plan, cache.layers, at[-1:], taps).taps.clone()


def overfit_heads(decoder, texts, count=3, begins=None):
    """Head i maps the hidden state of t to token t + 2 + i of these token sequences, for t from where each begins."""
    config, begins = decoder.config, begins or [0] * len(texts)
    states = [taps_of(decoder, text)[:, 0].double() for text in texts]
    heads = []
    for ahead in range(2, 2 + count):
        pairs = list(zip(states, texts, begins, strict=True))
        x = torch.cat([state[begin : len(text) - ahead] for state, text, begin in pairs])
        behind = torch.tensor([token for _, text, begin in pairs for token in text[begin + ahead :]])
        known, which = behind.unique(return_inverse=True)
        wanted = torch.nn.functional.one_hot(which, len(known)).double()
        output = torch.zeros(config.vocab_size, config.hidden_size)
        output[known] = torch.linalg.lstsq(x, wanted, driver="gelsd").solution.T.float()
        nothing = torch.zeros(config.hidden_size, config.hidden_size), torch.zeros(config.hidden_size)
        heads.append(MedusaHead((nothing,), output))
    return heads


def random_heads(hidden_size, vocab_size, *, seed=0, count=3, layers=1):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator) / hidden_size**0.5

    return [
        MedusaHead(
            tuple((draw(hidden_size, hidden_size), draw(hidden_size)) for _ in range(layers)),
            draw(vocab_size, hidden_size),
        )
        for _ in range(count)
    ]
