"""Model families against transformers' own classes: greedy tokens, trees, GGUF files and the other kernels.

`test_decoder.py` holds the logits, taps and chunks of the same models.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from torch import Tensor

from paceline.errors import UnsupportedModel
from paceline.models.backends.torch import TorchKernels
from paceline.models.decoder import Decoder
from paceline.models.families import FAMILIES, nearest
from paceline.models.kernels import kernels_for
from paceline.models.kv_cache import KVCache
from paceline.models.load.hf_config import parse_config
from paceline.models.load.loader import load_config, load_weights
from paceline.models.load.open_model import load_model
from paceline.models.plan import PassPlan
from paceline.models.quant.quantize import quantize_folder
from paceline.models.weights import Dtypes, WeightKind
from paceline.testing import logits_of
from tests.helpers.tiny import COMMON, IDS, SLIDING, TINY, save_tiny, write_tokenizer

CPU = torch.device("cpu")
LENGTH = 60  # tokens, beyond the windows and original contexts of the tiny models
KNOWN = [name for name in TINY if not name.startswith(("llama", "mistral", "qwen"))]


def decoder_of(path: Path, kernels: Any = None) -> Decoder:
    config, dtypes = load_config(path), Dtypes.of(torch.float32, CPU)
    return Decoder(config, load_weights(path, config), kernels or kernels_for(CPU), device=CPU, dtypes=dtypes)


@pytest.fixture(scope="module", params=KNOWN)
def tiny(request, tmp_path_factory):
    """(name, folder, transformers' model, tokens, its logits)."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = save_tiny(request.param, folder)
    tokens = random.Random(3).choices(range(3, oracle.config.vocab_size), k=LENGTH)
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    return request.param, folder, oracle, tokens, expected


def test_every_family_has_a_tiny_model() -> None:
    classes = {f"{kind}ForCausalLM" for kind, _ in TINY.values()}
    assert all(classes & {*family.classes} for family in FAMILIES)


def test_64_greedy_tokens_are_those_of_transformers(tiny) -> None:
    _, folder, oracle, tokens, _ = tiny
    prompt, decoder = tokens[:40], decoder_of(folder)  # beyond the original context of phi4-mini: see families/phi3.py
    made = oracle.generate(
        torch.tensor([prompt]), max_new_tokens=64, min_new_tokens=64, do_sample=False, use_cache=False
    )[0].tolist()
    logits = logits_of(decoder, made[:-1], [40] + [1] * 63)[39:]
    logits[:, oracle.config.eos_token_id] = -torch.inf  # as transformers does until the last token
    assert logits.argmax(-1).tolist() == made[40:]


def test_a_tree_gives_the_bits_of_its_paths_decoded_plainly(tiny) -> None:
    _, folder, _, tokens, _ = tiny
    decoder, at = decoder_of(folder), 40
    cache = KVCache(decoder.kv_specs, num_blocks=1, block_size=64, dtype=torch.float32, device=CPU)
    tables = torch.zeros(1, 1, dtype=torch.int32)
    first = torch.arange(at, dtype=torch.int32)
    context = PassPlan.in_order(first, first, torch.zeros_like(first), tables, 64, at)
    decoder.forward(torch.tensor(tokens[:at]), context, cache.layers, torch.arange(0))
    nodes = ints([tokens[50], tokens[40], tokens[41]])  # the last is a child of the second
    tree = PassPlan(
        positions=ints([at, at, at + 1]),
        slots=ints([at, at + 1, at + 2]),
        sequence=ints([0, 0, 0]),
        prefix=ints([at, at, at]),
        reach=ints([at + 1, at + 1, at + 2]),
        path=ints([[at, 0], [at + 1, 0], [at + 1, at + 2]]),
        block_tables=tables,
        block_size=64,
        max_len=at + 2,
    )
    logits = decoder.forward(nodes, tree, cache.layers, torch.arange(3)).logits
    plain = logits_of(decoder, tokens[: at + 2], [at, 1, 1])
    assert torch.equal(logits[1:], plain[at:])
    other = logits_of(decoder, [*tokens[:at], tokens[50]], [at, 1])
    assert torch.equal(logits[0], other[at])


def test_torchs_kernels_agree(tiny) -> None:
    _, folder, _, tokens, expected = tiny
    torch.testing.assert_close(logits_of(decoder_of(folder, TorchKernels()), tokens, [LENGTH]), expected, **NEAR)


def test_a_gguf_file_of_llama_cpps_layout_is_the_same_model(tiny, tmp_path) -> None:
    name, _, oracle, tokens, expected = tiny
    write_gguf(tmp_path / "m.gguf", name, oracle)
    torch.testing.assert_close(logits_of(decoder_of(tmp_path / "m.gguf"), tokens, [LENGTH]), expected, **NEAR)


@pytest.mark.parametrize("name", ["gemma3", "phi3", "glm4"])  # norms less 1; fused; fused, neighbours
def test_blocks_of_a_family_are_the_model_of_their_numbers(name, tmp_path) -> None:
    """In a folder that `quantize` wrote, under the names of the original; also with activations in int8."""
    save_tiny(name, tmp_path / "float", hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
    quantize_folder(tmp_path / "float", "q8_0", tmp_path / "blocks", lambda done, total: None)
    tokens, config = random.Random(4).choices(range(97), k=24), load_config(tmp_path / "blocks")
    numbers = {key: weight.numbers().float() for key, weight in load_weights(tmp_path / "blocks", config).items()}
    plain = Decoder(config, numbers, kernels_for(CPU), device=CPU, dtypes=Dtypes.of(torch.float32, CPU))
    blocks = load_model(tmp_path / "blocks", device="cpu")
    assert blocks.kind is WeightKind.Q8_0
    torch.testing.assert_close(
        logits_of(blocks.decoder, tokens, [24]), logits_of(plain, tokens, [24]), atol=1e-3, rtol=1e-3
    )
    rounded = load_model(tmp_path / "blocks", device="cpu", activations="int8").decoder
    assert torch.equal(logits_of(rounded, tokens, [24]), logits_of(rounded, tokens, [1] * 24))


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
WRAPPERS = {
    "Mistral3": ({"model_type": "mistral", "sliding_window": None}, {"model_type": "pixtral", "head_dim": 16}, {}),
    "Gemma3": (
        {"sliding_window": 16, "layer_types": SLIDING},
        {"model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4, "boi_token_index": 6, "eoi_token_index": 7},
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_of_a_multimodal_model_the_text_is_served_and_a_note_says_so(name, tmp_path) -> None:
    text, vision, own = WRAPPERS[name]
    text = {**COMMON, **IDS, "head_dim": 16, **text}
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config={**VISION, **vision}, image_token_index=5, **own
    )
    oracle = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    oracle.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 97)
    loaded, tokens = load_model(tmp_path, device="cpu"), list(range(10, 50))
    with torch.no_grad():
        expected = oracle(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_of(loaded.decoder, tokens, [40]), expected, **NEAR)
    assert any("text only" in note for note in loaded.notes)


def test_an_unknown_architecture_is_named_beside_the_nearest_that_is_known() -> None:
    assert nearest("Gemma3nForCausalLM", ["LlamaForCausalLM", "Gemma3ForCausalLM"]).endswith("Gemma3ForCausalLM")
    assert nearest("Mamba", ["LlamaForCausalLM"]) == ""
    with pytest.raises(UnsupportedModel, match="nearest is Gemma3ForCausalLM"):
        parse_config({"architectures": ["Gemma3nForCausalLM"]}, "config.json")


NEAR = {"atol": 1e-4, "rtol": 1e-4}


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# -- files as llama.cpp's converter writes them

ARCHITECTURES = {"ernie": "ernie4_5", "seed-oss": "seed_oss", "phi4-mini": "phi3", "olmo3": "olmo2"}
ARCHITECTURES |= {"exaone4-full": "exaone4", "ministral3": "mistral3"}
PERMUTED = ("granite", "smollm3", "mistral3")  # families whose q and k the converter reorders, as Llama's
LESS_ONE = ("gemma2", "gemma3")


def write_gguf(path: Path, name: str, model: Any) -> None:
    config, arch = model.config, ARCHITECTURES.get(name, name)
    writer = gguf.GGUFWriter(path, arch)
    heads, head_dim = config.num_attention_heads, getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if arch == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(2)
    _add_own(writer, arch, config)
    _add_rope(writer, arch, config, head_dim)
    tensor_names = gguf.get_tensor_name_map(_arch_of(arch), config.num_hidden_layers)
    for full, tensor in model.state_dict().items():
        if full == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch in PERMUTED and (".q_proj." in full or ".k_proj." in full):
            tensor = permuted(tensor, heads if ".q_proj." in full else config.num_key_value_heads)
        if arch in LESS_ONE and full.endswith("norm.weight"):
            tensor = tensor + 1
        if arch in LESS_ONE and scaled_by(arch) in full:  # a file has no key for the scale: see families/gemma2.py
            tensor = tensor * (head_dim / config.query_pre_attn_scalar) ** 0.5
        stored = tensor_names.get_name(full, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def scaled_by(arch: str) -> str:
    return ".q_norm." if arch == "gemma3" else ".q_proj."


def _add_own(writer: Any, arch: str, config: Any) -> None:
    """Write the keys of a family, as its class in llama.cpp's conversion/ does."""
    if getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)
    if arch in ("olmo2", "exaone4", "gemma3") and getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if arch in ("gemma2", "cohere2"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "cohere2":
        writer.add_logit_scale(config.logit_scale)
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _add_rope(writer: Any, arch: str, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(full["mscale_all_dim"])
        writer.add_float32(f"{arch}.attention.temperature_scale", full["llama_4_scaling_beta"])
    if full["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors((1 + torch.log(torch.tensor(8.0)) / torch.log(torch.tensor(32.0))) ** 0.5)
        writer.add_tensor("rope_factors_long.weight", torch.tensor(full["long_factor"]).numpy())
        writer.add_tensor("rope_factors_short.weight", torch.tensor(full["short_factor"]).numpy())


def _arch_of(name: str) -> Any:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows as llama.cpp does for Llama: rotary pairs become neighbours."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
