"""GGUF files: values checked against dequantisation written out by hand, models against those they came from."""

from __future__ import annotations

import builtins
import json
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from paceline.errors import BrokenModel, ModelError, ModelNotFound, PacelineError, UnsupportedModel
from paceline.files.gguf import GGUFFile, open_gguf
from paceline.models.load.convert import convert_gguf, hf_config
from paceline.models.load.gguf_model import gguf_names
from paceline.models.load.hf_config import parse_config
from paceline.models.load.loader import load_config, load_weights
from paceline.models.rope import half_order
from paceline.text.gguf_vocab import tokenizer_files

LLAMA_CPP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def half(raw: bytes) -> float:
    return float(struct.unpack("<e", raw)[0])


def by_hand_q8_0(block: bytes) -> list[float]:
    return [half(block[:2]) * q for q in struct.unpack("32b", block[2:])]


def by_hand_q4_0(block: bytes) -> list[float]:
    nibbles = [b & 15 for b in block[2:]] + [b >> 4 for b in block[2:]]
    return [half(block[:2]) * (q - 8) for q in nibbles]


def by_hand_q4_1(block: bytes) -> list[float]:
    nibbles = [b & 15 for b in block[4:]] + [b >> 4 for b in block[4:]]
    return [half(block[:2]) * q + half(block[2:4]) for q in nibbles]


def by_hand_q4_k(block: bytes) -> list[float]:
    """256 values in eight groups of 32; the 6-bit scale and minimum of each group are packed in twelve bytes."""
    d, dmin, packed, quants = half(block[:2]), half(block[2:4]), block[4:16], block[16:]
    values: list[float] = []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            minimum = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        part = quants[32 * (group // 2) : 32 * (group // 2) + 32]
        values += [d * scale * ((b >> 4) if group % 2 else (b & 15)) - dmin * minimum for b in part]
    return values


def by_hand_q6_k(block: bytes) -> list[float]:
    """256 values: four low bits, two high bits, a signed scale for each 16 of them."""
    low, high, scales, d = block[:128], block[128:192], struct.unpack("16b", block[192:208]), half(block[208:])
    values = []
    for i in range(256):
        part, quarter, lane = i // 128, i % 128 // 32, i % 32
        nibble = low[64 * part + 32 * (quarter % 2) + lane]
        nibble = nibble >> 4 if quarter >= 2 else nibble & 15
        top = high[32 * part + lane] >> (2 * quarter) & 3
        values.append(d * scales[i // 16] * ((nibble | top << 4) - 32))
    return values


BY_HAND = {
    Type.Q8_0: by_hand_q8_0,
    Type.Q4_0: by_hand_q4_0,
    Type.Q4_1: by_hand_q4_1,
    Type.Q4_K: by_hand_q4_k,
    Type.Q6_K: by_hand_q6_k,
}
SCALES = {Type.Q8_0: [0], Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q4_K: [0, 2], Type.Q6_K: [208]}  # offsets of halves


def random_blocks(kind: Type, rows: int, blocks: int) -> np.ndarray:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for offset in SCALES[kind]:
        scale = rng.uniform(0.01, 0.1, (rows, blocks, 1)).astype("<f2")
        raw[:, :, offset : offset + 2] = scale.view(np.uint8)
    return raw.reshape(rows, blocks * size)


def write_tensor(path: Path, kind: Type, data: np.ndarray) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    close(writer)


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", BY_HAND, ids=lambda kind: kind.name)
def test_dequantisation_equals_the_format_written_out_by_hand(kind: Type, tmp_path: Path) -> None:
    raw = random_blocks(kind, rows=3, blocks=2)
    write_tensor(tmp_path / "t.gguf", kind, raw)
    values = GGUFFile(tmp_path / "t.gguf").read("t")
    block, size = gguf.GGML_QUANT_SIZES[kind]
    expected = [v for row in raw for i in range(2) for v in BY_HAND[kind](row[i * size : (i + 1) * size].tobytes())]
    assert values.shape == (3, 2 * block)
    np.testing.assert_allclose(values.ravel(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16])
def test_plain_floats_come_back_unchanged(kind: Type, tmp_path: Path) -> None:
    exact = np.arange(-32, 32, dtype=np.float32).reshape(2, 32) / 8  # representable in all three
    write_tensor(tmp_path / "t.gguf", kind, gguf.quants.quantize(exact, kind))
    assert np.array_equal(GGUFFile(tmp_path / "t.gguf").read("t"), exact)


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder q and k as llama.cpp's converter does: rotary pairs (i, i + half) become neighbours."""
    rows = []
    size = weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            rows += [weight[head * size + i], weight[head * size + size // 2 + i]]
    return torch.stack(rows)


def llama_cpp_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    parts = stem.split(".", 3)
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{LLAMA_CPP_NAMES[parts[3]]}.{kind}"
    return f"{LLAMA_CPP_NAMES[stem]}.{kind}"


def write_gguf(path: Path, model: Any, kind: Type = Type.F32, extra: Any = None, skip: str = "") -> None:
    """A transformers model as llama.cpp's converter would write it."""
    config, arch = model.config, model.config.model_type.replace("mistral", "llama")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    if extra:
        extra(writer)
    for name, tensor in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or name == skip:
            continue
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = interleave(tensor, heads)
        used = kind if tensor.ndim == 2 else Type.F32
        writer.add_tensor(llama_cpp_name(name), gguf.quants.quantize(tensor.float().numpy(), used), raw_dtype=used)
    close(writer)


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biased": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_gguf_holds_the_model_it_was_made_from(case: str, tmp_path: Path, write_model: Any) -> None:
    kind, options = MODELS[case]
    model = write_model(tmp_path / "hf", kind, rms_norm_eps=1e-5, **options)
    write_gguf(tmp_path / "m.gguf", model)
    config, original = load_config(tmp_path / "m.gguf"), load_config(tmp_path / "hf")
    assert config.eos_token_ids == (2, 3)
    for field in ("vocab_size", "layers", "tie_embeddings", "rms_norm_eps"):
        assert getattr(config, field) == getattr(original, field), field
    weights = load_weights(tmp_path / "m.gguf", config)
    expected = load_weights(tmp_path / "hf", original)
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name].data, expected[name].data) for name in expected)


@pytest.mark.parametrize(
    ("kind", "tolerance"), [(Type.F16, 1e-4), (Type.Q8_0, 1e-3), (Type.Q4_0, 0.02), (Type.Q4_1, 0.01)]
)
def test_a_quantised_model_is_close_to_its_original(kind, tolerance, tmp_path, write_model) -> None:
    model = write_model(tmp_path / "hf", "Llama")
    write_gguf(tmp_path / "m.gguf", model, kind)
    weights = load_weights(tmp_path / "m.gguf", load_config(tmp_path / "m.gguf"))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[name].numbers().float(), tensor, rtol=0, atol=tolerance)


def test_the_order_of_a_head_undoes_the_converter_for_any_number_of_heads() -> None:
    order = half_order(8, None, neighbours=True)
    for heads in (1, 2, 3, 8):
        weight = torch.randn(heads * 8, 5)
        assert torch.equal(interleave(weight, heads).view(heads, 8, 5)[:, order].flatten(0, 1), weight)


def test_a_part_of_a_head_is_rotated_as_its_halves_or_its_neighbours() -> None:
    assert half_order(8, None, neighbours=False) is None
    assert half_order(8, 4, neighbours=False) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert half_order(8, 4, neighbours=True) == [0, 2, 4, 5, 1, 3, 6, 7]
    assert half_order(8, 0, neighbours=True) is None


def divisors(theta: float, factor: float, head_dim: int) -> np.ndarray:
    """rope_freqs.weight as llama.cpp's converter writes it for Llama 3."""
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path, write_model: Any) -> None:
    model = write_model(tmp_path, "Llama", head_dim=64, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    table = divisors(5e5, 32.0, 64)
    assert table.min() == 1.0
    assert ((table > 1.0) & (table < 32.0)).any()  # all three branches are in use
    write_gguf(tmp_path / "m.gguf", model, extra=lambda writer: writer.add_tensor("rope_freqs.weight", table))
    rope = load_config(tmp_path / "m.gguf").layer.rope
    assert (rope.kind, rope.theta, rope.factor) == ("llama3", 5e5, 32.0)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions) == (1.0, 4.0, 8192)
    assert "rope_freqs.weight" not in load_weights(tmp_path / "m.gguf", load_config(tmp_path / "m.gguf"))
    write_gguf(
        tmp_path / "odd.gguf", model, extra=lambda writer: writer.add_tensor("rope_freqs.weight", table**0.5 * 2)
    )
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        load_config(tmp_path / "odd.gguf")


def test_linear_scaling_is_read(tmp_path: Path, write_model: Any) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    write_gguf(tmp_path / "m.gguf", write_model(tmp_path, "Llama"), extra=linear)
    rope = load_config(tmp_path / "m.gguf").layer.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_yarn_scaling_is_that_of_the_model_it_came_from(tmp_path: Path, write_model: Any) -> None:
    """The same fields as from config.json, so the same tables."""
    given = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    model = write_model(tmp_path, "Llama", rope_parameters=given, max_position_embeddings=64)
    write_gguf(tmp_path / "m.gguf", model, extra=_yarn())
    read = load_config(tmp_path / "m.gguf")
    assert read.layer.rope == load_config(tmp_path).layer.rope
    assert read.max_positions == load_config(tmp_path).max_positions == 128
    louder = _yarn(attn_factor=2.0, yarn_beta_fast=16.0, yarn_beta_slow=2.0)
    write_gguf(tmp_path / "louder.gguf", model, extra=louder)
    rope = load_config(tmp_path / "louder.gguf").layer.rope
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 2.0)
    assert rope.attention_factor == 2 * read.layer.rope.attention_factor
    assert parse_config(hf_config(load_config(tmp_path / "louder.gguf")), "converted").layer.rope == rope


def _yarn(**more: float) -> Any:
    def apply(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
        for key, value in more.items():
            writer.add_float32(f"llama.rope.scaling.{key}", value)

    return apply


UNSUPPORTED = {
    "longrope": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
    "yarn_log_multiplier": _yarn(yarn_log_multiplier=0.1),
    "expert_count": lambda writer: writer.add_expert_count(8),
    "rope.dimension_count": lambda writer: writer.add_rope_dimension_count(8),
    "head_count_kv": lambda writer: writer.add_array("llama.attention.head_count_kv", [2, 1]),
}


@pytest.mark.parametrize("named", UNSUPPORTED)
def test_options_the_decoder_would_ignore_are_refused(named: str, tmp_path: Path, write_model: Any) -> None:
    write_gguf(tmp_path / "m.gguf", write_model(tmp_path, "Llama"), extra=_overriding(UNSUPPORTED[named]))
    with pytest.raises(UnsupportedModel, match=named):
        load_config(tmp_path / "m.gguf")


def _overriding(extra: Any) -> Any:
    """The writer refuses a key twice; drop the first."""

    def apply(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.attention.head_count_kv")
        extra(writer)
        writer.kv_data[0].setdefault("llama.attention.head_count_kv", gguf.GGUFValue(2, gguf.GGUFValueType.UINT32))

    return apply


def test_an_unknown_architecture_is_refused_with_those_supported(tmp_path: Path) -> None:
    close(gguf.GGUFWriter(tmp_path / "m.gguf", "mamba"))
    with pytest.raises(UnsupportedModel, match=r"'mamba' is not supported; supported in GGUF: llama, qwen2, qwen3"):
        load_config(tmp_path / "m.gguf")


def test_a_missing_tensor_is_named(tmp_path: Path, write_model: Any) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    write_gguf(tmp_path / "m.gguf", write_model(tmp_path, "Llama"), skip=name)
    with pytest.raises(BrokenModel, match=name):
        load_weights(tmp_path / "m.gguf", load_config(tmp_path / "m.gguf"))


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(BrokenModel, match=r"m\.gguf is empty: the download did not finish"):
        GGUFFile(tmp_path / "m.gguf")


def test_a_file_cut_anywhere_is_refused_in_one_line(tmp_path: Path, write_model: Any) -> None:
    write_gguf(tmp_path / "m.gguf", write_model(tmp_path, "Llama"))
    data = (tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 8, 30, *range(50, 3000, 97), len(data) // 2, len(data) - 33]:
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError) as caught:
            load_config(cut)
        assert "\n" not in str(caught.value)


def header(*tensors: tuple[bytes, int], fields: bytes = b"", count: int = 0) -> bytes:
    """A file of vectors of eight numbers at these offsets."""
    table = b"".join(struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 8, 0, at) for name, at in tensors)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), count) + fields + table
    return start + bytes(-len(start) % 32) + bytes(256)


def test_tensors_that_contradict_each_other_are_refused(tmp_path: Path, write_model: Any) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header((b"a", 0), (b"b", 32)))
    assert list(GGUFFile(path).tensors) == ["a", "b"]
    for tensors, words in ((((b"a", 0), (b"a", 32)), "there twice"), (((b"a", 3),), "at 3, no multiple of 32")):
        path.write_bytes(header(*tensors))
        with pytest.raises(BrokenModel, match=f"tensor a is {words}"):
            GGUFFile(path)
    path.write_bytes(header((b"output_norm.weight", 0), (b"model.norm.weight", 32)))
    with pytest.raises(BrokenModel, match=r"output_norm\.weight and model\.norm\.weight are one and the same"):
        gguf_names(GGUFFile(path))


def test_an_array_of_arrays_without_end_is_refused(tmp_path: Path) -> None:
    nested = struct.pack("<Q", 1) + b"x" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
    (tmp_path / "m.gguf").write_bytes(header(fields=nested, count=1))
    with pytest.raises(BrokenModel, match="truncated or damaged"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("change", ["cut", "rewritten"])
def test_a_file_that_changes_while_it_is_open_is_refused(change: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header((b"a", 0), (b"b", 32)))
    file = GGUFFile(path)
    assert file.raw("b").nbytes == 32
    if change == "cut":
        with path.open("r+b") as same:
            same.truncate(path.stat().st_size - 250)
    else:
        path.write_bytes(path.read_bytes()[:-32] + bytes(range(32)))
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # whatever the file system's clock resolves
    with pytest.raises(BrokenModel, match="changed while it was read"):
        file.raw("b")


def test_a_header_longer_than_the_first_bytes_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(header((b"a", 0), (b"b" * 300, 32)))
    whole = GGUFFile(tmp_path / "m.gguf").tensors
    for first in (5, 30, 200):
        monkeypatch.setattr("paceline.files.gguf.FIRST_BYTES", first)
        assert GGUFFile(tmp_path / "m.gguf").tensors == whole


def test_memory_of_a_tensor_is_used_again_only_when_nothing_refers_to_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.files.reader.SPARE_BYTES", (1, 1 << 20))
    (tmp_path / "m.gguf").write_bytes(header((b"a", 0), (b"b", 32)))
    file = GGUFFile(tmp_path / "m.gguf")
    first = torch.from_numpy(file.raw("a").reshape(4, 8))
    second = file.raw("b")
    assert first.data_ptr() != second.ctypes.data
    at = second.ctypes.data
    del second
    assert file.raw("a").ctypes.data == at


def test_a_file_is_parsed_once_while_a_reader_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header((b"a", 0)))
    file = open_gguf(path)
    assert open_gguf(path) is file
    path.write_bytes(header((b"a", 0), (b"b", 32)))
    assert set(open_gguf(path).tensors) == {"a", "b"}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokens", [1, 2, 3, 4], "a list of texts"),
        ("tokens", "abcd", "a list of texts"),
        ("scores", 5, "a list of numbers"),
        ("merges", ["ab"], "a list of pairs"),
        ("merges", [1], "a list of texts"),
        ("pre", ["llama-bpe"], "a text"),
        ("token_type", [3] * 9, "as long as the list of tokens"),
        ("bos_token_id", "x", "a token's number"),
        ("eos_token_id", [2], "a token's number"),
        ("padding_token_id", 1.5, "a token's number"),
        ("add_bos_token", "false", "true or false"),
        ("unknown_token_id", 4, "is 4, and there are 4 tokens"),
    ],
)
def test_a_field_of_the_tokenizer_of_another_type_is_named(key: str, value: object, words: str) -> None:
    metadata = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", "a"], "scores": [0.0] * 4, key: value}
    with pytest.raises(BrokenModel, match=rf"{key} (must be )?{words}"):
        tokenizer_files({f"tokenizer.ggml.{name}": one for name, one in metadata.items()}, "m.gguf")


def test_a_header_that_lies_about_sizes_is_refused(tmp_path: Path) -> None:
    huge = b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60)
    (tmp_path / "m.gguf").write_bytes(huge + struct.pack("<Q", 2**63) + b"x" * 64)
    with pytest.raises(BrokenModel):
        load_config(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + b"x" * 64)
    with pytest.raises(BrokenModel, match="not a GGUF file"):
        load_config(tmp_path / "m.gguf")
    with pytest.raises(ModelNotFound):
        load_config(tmp_path / "none.gguf")


def test_without_the_gguf_package_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close(gguf.GGUFWriter(tmp_path / "m.gguf", "llama"))
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "gguf":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PacelineError, match="pip install gguf"):
        load_config(tmp_path / "m.gguf")


@pytest.mark.parametrize("case", ["llama", "llama tied", "qwen2", "qwen3"])
def test_conversion_gives_a_folder_transformers_reads(case: str, tmp_path: Path, write_model: Any) -> None:
    from transformers import AutoModelForCausalLM

    kind, options = MODELS[case]
    model = write_model(tmp_path / "hf", kind, rms_norm_eps=1e-5, **options)
    tokens = ["<unk>", "<s>", "</s>", "<eot>", *(f"▁w{i}" for i in range(92))]

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * 96)
        writer.add_token_types([2, 3, 3, 3] + [1] * 92)

    write_gguf(tmp_path / "m.gguf", model, extra=vocabulary)
    (tmp_path / "out").mkdir()
    steps: list[tuple[str, int, int | None]] = []
    convert_gguf(GGUFFile(tmp_path / "m.gguf"), tmp_path / "out", lambda *step: steps.append(step))
    assert steps[-1][1] == steps[-1][2]
    assert load_config(tmp_path / "out") == load_config(tmp_path / "m.gguf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2, 3]
    ids = torch.tensor([[5, 9, 40, 7]])
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
