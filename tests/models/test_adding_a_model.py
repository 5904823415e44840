"""docs/guides/adding-a-model.md, followed literally: a made-up family in one file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.models import families
from paceline.models.decoder import Decoder
from paceline.models.kernels import kernels_for
from paceline.models.load.loader import load_config, load_weights
from paceline.models.spec import SANDWICH
from paceline.models.weights import Dtypes
from paceline.testing import logits_of

PAGE = Path(__file__).parents[2] / "docs/guides/adding-a-model.md"
CONFIG = {
    "architectures": ["LarkForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "embedding_factor": 4.0,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}


@pytest.fixture
def lark(tmp_path: Path) -> Iterator[Path]:
    """A folder of the page's family, whose file was run and registered as the page says."""
    [source] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    module: dict[str, families.Family] = {}
    exec(compile(source, "lark.py", "exec"), module)
    families.FAMILIES.append(module["FAMILY"])
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    noise = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (50, 32), "model.norm": (32,)}
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    for layer in range(3):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{part}_proj": (32, 32) for part in "qkvo"}
        shapes |= {f"{at}mlp.gate_proj": (48, 32), f"{at}mlp.up_proj": (48, 32), f"{at}mlp.down_proj": (32, 48)}
        shapes |= {f"{at}{norm}": (32,) for norm in norms}
    tensors = {f"{name}.weight": torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    yield tmp_path
    families.FAMILIES.remove(module["FAMILY"])


def test_the_pages_family_loads_and_runs(lark: Path) -> None:
    config, cpu = load_config(lark), torch.device("cpu")
    assert [layer.window for layer in config.layers] == [8, 8, None]
    assert config.layer.norms == SANDWICH
    assert config.embed_scale == 4.0
    weights, dtypes = load_weights(lark, config), Dtypes.of(torch.float32, cpu)
    decoder = Decoder(config, weights, kernels_for(cpu), device=cpu, dtypes=dtypes)
    tokens = list(range(40))
    whole = logits_of(decoder, tokens, [40])
    assert torch.equal(whole, logits_of(decoder, tokens, [1] * 40))
    assert decoder.layers[0].attention_norm is not None
