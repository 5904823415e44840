"""config.json of a drafter's folder, as far as methods write it alike: speculators' layout, and the target.

Under `paceline` a folder says which model it was trained for, by its shape and a sample of its embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.config import ModelConfig, RopeConfig
from paceline.drafters.folder import Json, section
from paceline.errors import BrokenModel, InvalidParameter
from paceline.models.load.hf_config import rope_scaling

LEAST_LIKENESS = 0.9  # cosine of two samples of one embedding, however each is quantised; others are near 0


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """The model a drafter was trained for, as far as a folder says; 0 and () are unknown."""

    name: str = ""
    hidden_size: int = 0
    num_layers: int = 0
    vocab_size: int = 0
    embedding_sample: tuple[float, ...] = ()

    @staticmethod
    def of(config: ModelConfig, embedding: Tensor, name: str = "") -> TargetShape:
        return TargetShape(
            name=name,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            embedding_sample=embedding_sample(embedding, config.vocab_size),
        )

    def is_like(self, embedding: Tensor) -> bool:
        """The embedding (V, H) is the one sampled; a folder without a sample says nothing against it."""
        if not self.embedding_sample:
            return True
        mine = embedding_sample(embedding, self.vocab_size)
        ours, theirs = torch.tensor(mine), torch.tensor(self.embedding_sample)
        return len(ours) == len(theirs) and float(F.cosine_similarity(ours, theirs, dim=0)) >= LEAST_LIKENESS


UNKNOWN_TARGET = TargetShape()


def embedding_sample(embedding: Tensor, vocab_size: int) -> tuple[float, ...]:
    """A few values of a few rows: they tell one model from another of its shape, in any precision."""
    rows = torch.tensor([vocab_size * eighth // 8 for eighth in (1, 3, 5, 7)])
    values = embedding[rows][:, :16].detach().float().flatten().tolist()
    return tuple(round(value, 6) for value in values)


def target_of(raw: Mapping[str, Any], source: str) -> TargetShape:
    """What config.json says of the model its drafter was trained for."""
    verifier = section(section(raw, "speculators_config", source), "verifier", source)
    found: Json = {"name": verifier.get("name_or_path") or ""}
    if type(raw.get("num_target_layers")) is int:
        found["num_layers"] = raw["num_target_layers"]
    ours = section(section(raw, "paceline", source), "target", source)
    found |= {key: value for key, value in ours.items() if key in TargetShape.__dataclass_fields__}
    sample = found.pop("embedding_sample", [])
    wrong = [key for key, value in found.items() if type(value) is not (str if key == "name" else int)]
    if not isinstance(sample, list) or not all(type(one) in (int, float) for one in sample):
        wrong.append("embedding_sample")
    if wrong:
        raise BrokenModel(f"{source}: what it says of its target's {wrong[0]} is of another type than it must be")
    return TargetShape(**found, embedding_sample=tuple(sample))


def refuse_another(trained: TargetShape, source: str | Path, *facts: tuple[str, int, int]) -> None:
    """Raise where something about the drafter (0: not known) is not as this model has it."""
    for what, theirs, ours in facts:
        if theirs and theirs != ours:
            made_for = trained.name or "another model"
            raise InvalidParameter(
                "drafter", f"{source} was trained for {made_for}: its {what} is {theirs}, and this model's is {ours}"
            )


def layer_keys(body: ModelConfig, *, attention_bias: bool = False, mlp_bias: bool = False) -> Json:
    """The drafter's layers in the keys of a Hugging Face config, but for the scaling of RoPE."""
    return {
        "model_type": "qwen3" if body.qk_norm else "llama",
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        "num_hidden_layers": body.num_layers,
        "num_attention_heads": body.num_heads,
        "num_key_value_heads": body.num_kv_heads,
        "head_dim": body.head_dim,
        "rms_norm_eps": body.rms_norm_eps,
        "rope_theta": body.rope.theta,
        "max_position_embeddings": body.max_positions,
        "vocab_size": body.vocab_size,
        "hidden_act": "silu",
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "tie_word_embeddings": False,
    }


def rope_keys(rope: RopeConfig) -> Json:
    return {**rope_scaling(rope), "rope_theta": rope.theta}


def target_keys(target: TargetShape) -> Json:
    return {
        "hidden_size": target.hidden_size,
        "num_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "embedding_sample": list(target.embedding_sample),
    }


def description(
    method: str,
    version: str,
    architecture: str,
    layer: Json,
    tokens: int,
    target: TargetShape,
    ours: Json | None = None,
) -> Json:
    """In speculators' layout; `tokens`: of a chain, unless its reader chooses; `ours`: keys of paceline alone."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "speculators_model_type": method,
        "speculators_version": version,
        "architectures": [architecture],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": method,
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": []},
        },
        "paceline": {"target": target_keys(target), **(ours or {})},
    }
