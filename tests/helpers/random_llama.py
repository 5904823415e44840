"""Small Llamas with random weights: their sizes and their numbers."""

from __future__ import annotations

import torch

from paceline.models.decoder import Decoder
from paceline.models.kernels import kernels_for
from paceline.models.load.placement import expected_shapes
from paceline.models.spec import ModelConfig, uniform
from paceline.models.weights import Dtypes


def llama(**sizes: int) -> ModelConfig:
    usual = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "max_positions": 512}
    usual |= {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return uniform(architecture="llama", tie_embeddings=True, **{**usual, **sizes})


def random_weights(config: ModelConfig, spread: float) -> dict[str, torch.Tensor]:
    """Norms between 0.5 and 1.5, rows of matrices of the given length."""
    return {
        name: torch.rand(shape) + 0.5 if len(shape) == 1 else spread * torch.randn(shape) / shape[1] ** 0.5
        for name, shape in expected_shapes(config).items()
    }


def decoder_and_drafter(config: ModelConfig, device: torch.device, *, other: float = 0.12) -> tuple[Decoder, Decoder]:
    """Return a decoder of random weights, and one whose weights are the same with so much of others."""
    torch.manual_seed(5)
    own, others = random_weights(config, 1.5), random_weights(config, 1.5)
    blend = {name: torch.lerp(own[name], others[name], other) for name in own}
    dtypes = Dtypes.of(torch.float32 if device.type == "cpu" else torch.bfloat16, device)
    target, drafter = (
        Decoder(config, made, kernels_for(device), device=device, dtypes=dtypes) for made in (own, blend)
    )
    return target, drafter
