"""The models benchmarks.gpu.run measures: the yardstick, and smollm2 itself, built on the device when asked for."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.yardstick import Size, Yardstick
from paceline.models.decoder import Decoder
from paceline.models.kernels import kernels_for
from paceline.models.load.hub import resolve
from paceline.models.load.loader import load_config, load_weights
from paceline.models.load.open_model import LoadedModel
from paceline.models.spec import ModelConfig, RopeConfig, uniform
from paceline.models.weights import Dtypes
from paceline.text.tokenizer import Tokenizer

TINY = Size(hidden=256, layers=3, heads=16, kv_heads=4, head_dim=32, intermediate=512)
SMALL = {
    "architecture": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "max_positions": 8192,
    "rms_norm_eps": 1e-5,
    "rope": RopeConfig(theta=100_000.0),
    "tie_embeddings": True,
    "eos_token_ids": (2,),
}
TINY_SMALL = {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 128, "num_layers": 2, "num_heads": 6}
TINY_SMALL |= {"num_kv_heads": 2, "head_dim": 16}


class Subject:
    def __init__(self, weights: str, device: torch.device, *, tiny: bool = False) -> None:
        self.weights, self.device, self.tiny = weights, device, tiny
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        self.random = weights == "random"
        self.sizes: Size | None = None  # sizes of the yardstick, where it is not the usual one
        if not self.random:
            self.path = Path(weights) if Path(weights).is_dir() else resolve(weights)

    @functools.cached_property
    def small_config(self) -> ModelConfig:
        if not self.random:
            return load_config(self.path)
        return uniform(**{**SMALL, **TINY_SMALL} if self.tiny else SMALL)

    @functools.cached_property
    def small_weights(self) -> dict[str, torch.Tensor]:
        if not self.random:
            return {name: weight.numbers() for name, weight in load_weights(self.path, self.small_config).items()}
        return random_weights(self.small_config)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_path(self.path)

    @functools.cached_property
    def yardstick(self) -> Decoder:
        size = self.sizes or (TINY if self.tiny else Size())
        source = Yardstick(self.small_config, self.small_weights, size, device=self.device, dtype=self.dtype)
        kernels = kernels_for(self.device)
        # A longer context than smollm2's own, to measure 16k: the rotary tables are the only thing it changes.
        config = replace(source.config, max_positions=max(source.config.max_positions, 1 << 15))
        return Decoder(config, source, kernels, device=self.device, dtypes=Dtypes.of(self.dtype, self.device))

    @functools.cached_property
    def small(self) -> Decoder:
        kernels = kernels_for(self.device)
        return Decoder(
            self.small_config,
            self.small_weights,
            kernels,
            device=self.device,
            dtypes=Dtypes.of(self.dtype, self.device),
        )

    def loaded(self, decoder: Decoder) -> LoadedModel:
        return LoadedModel(decoder.config, decoder, self.tokenizer, {})


def random_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    hidden, inter = config.hidden_size, config.layer.inner
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}.self_attn.{n}_proj.weight": (config.layer.kv_size, hidden) for n in "kv"}
        shapes[f"{at}.self_attn.q_proj.weight"] = (config.layer.q_size, hidden)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, config.layer.q_size)
        shapes |= {f"{at}.mlp.{n}_proj.weight": (inter, hidden) for n in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inter)
    return {
        name: torch.rand(shape) + 0.5 if len(shape) == 1 else torch.randn(shape) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
