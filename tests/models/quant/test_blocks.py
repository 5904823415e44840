"""Weights kept as blocks: the same bits as their expansion to fp32, for any rows, threads and variant."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import paceline.models
from paceline.errors import BrokenModel, UnsupportedModel
from paceline.files.gguf import GGUFFile
from paceline.models.backends.cpu.kernels import NativeKernels
from paceline.models.backends.torch import TorchKernels
from paceline.models.kernels import FLOAT32, INT8, kernels_for
from paceline.models.load.convert import convert_gguf
from paceline.models.load.loader import load_config, load_weights
from paceline.models.load.open_model import load_model
from paceline.models.quant.block_file import BLOCK_WEIGHTS
from paceline.models.weights import BLOCKS, StoredWeight, WeightKind
from paceline.native.library import open_library, runnable_variants
from paceline.testing import logits_of
from tests.helpers.errors import refused
from tests.helpers.tiny import write_tokenizer
from tests.models.load.test_gguf import Type, write_gguf

CPU = torch.device("cpu")
N = 70  # not a whole number of panels
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 17, 24, 25, 130, 512)
HALVES = (WeightKind.FLOAT16, WeightKind.BFLOAT16)


def random_weight(kind: WeightKind, outputs: int = N, inputs: int | None = None, seed: int = 0) -> StoredWeight:
    """Any codes, any small scales, either sign. By default two blocks and a half for those of 32 weights."""
    draw = torch.Generator().manual_seed(seed)
    if not kind.is_blocks:
        return StoredWeight.of(torch.randn(outputs, inputs or 80, generator=draw).to(kind.dtype))
    layout = BLOCKS[kind]
    inputs = inputs or (512 if layout.weights == 256 else 160)
    raw = torch.randint(0, 256, (outputs, layout.row_bytes(inputs)), dtype=torch.uint8, generator=draw)
    blocks = raw.view(-1, layout.bytes)
    for at in layout.halves:
        blocks[:, at : at + 2] = (torch.randn(len(blocks), 1, generator=draw) / 20).half().view(torch.uint8)
    return StoredWeight.of_blocks(kind, raw)


def native(variant: str, threads: int = 1, activations: str = FLOAT32) -> NativeKernels:
    return NativeKernels(open_library(variant), threads, activations)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_an_expansion_has_the_bits_of_the_gguf_package(kind: WeightKind) -> None:
    weight = random_weight(kind)
    expected = gguf.quants.dequantize(weight.data.numpy(), Type[kind.name])
    assert np.array_equal(weight.numbers().numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("variant", runnable_variants())
@pytest.mark.parametrize("kind", [*BLOCKS, *HALVES], ids=lambda kind: kind.name)
def test_products_of_stored_weights_have_the_bits_of_their_expansion(kind: WeightKind, variant: str) -> None:
    weight, bias = random_weight(kind), torch.randn(N)
    for threads in (1, 3):
        kernels = native(variant, threads)
        stored, expanded = kernels.pack(weight, bias), kernels.pack(weight.to(WeightKind.FLOAT32, CPU), bias)
        assert stored.parts[0].kind is kind
        x = torch.randn(max(ROWS), weight.shape[1])
        whole = kernels.linear(x, expanded)
        for rows in ROWS:
            assert torch.equal(bits(kernels.linear(x[-rows:], stored)), bits(whole[-rows:])), rows


@pytest.mark.parametrize("variant", runnable_variants())
def test_rows_of_an_embedding_are_read_from_its_panels(variant: str) -> None:
    for kind in BLOCKS:
        weight, kernels = random_weight(kind), native(variant)
        ids = torch.tensor([0, 69, 7, 31, 32, 33, 7])
        embedding = kernels.embedding(weight, None)
        assert torch.equal(embedding[ids], weight.numbers()[ids]), kind
        assert torch.equal(embedding[ids[None]], weight.numbers()[ids[None]]), kind
        assert torch.equal(embedding[33], weight.numbers()[33]), kind
        with pytest.raises(IndexError, match="vocabulary"):
            kernels.embedding(weight, None)[torch.tensor([70])]


@pytest.mark.parametrize("rows", [33, 64])  # within a panel of columns, and at the end of one
def test_weights_of_several_kinds_are_one_product(rows: int) -> None:
    kinds = (WeightKind.Q4_K, WeightKind.Q4_K, WeightKind.Q6_K, WeightKind.FLOAT32)
    parts = [random_weight(kind, rows, 512, seed) for seed, kind in enumerate(kinds)]
    bias, x = torch.randn(4 * rows), torch.randn(9, 512)
    for activations in (FLOAT32, INT8):
        kernels = native(runnable_variants()[0], 2, activations)
        packed = kernels.pack(parts, bias)
        assert [part.kind for part in packed.parts] == [WeightKind.Q4_K, WeightKind.Q6_K, WeightKind.FLOAT32]
        each = [kernels.linear(x, kernels.pack(part, bias[rows * i : rows * (i + 1)])) for i, part in enumerate(parts)]
        assert torch.equal(kernels.linear(x, packed), torch.cat(each, 1))
    reference = TorchKernels()
    expected = reference.linear(x, reference.pack(parts, bias))
    found = native("baseline").linear(x, native("baseline").pack(parts, bias))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def rounded_product(x: Tensor, weight: StoredWeight) -> Tensor:
    """The definition: activations in blocks of 32 with a scale, integer sums, floats combined block after block."""
    numbers, group = weight.numbers(), 16 if weight.kind is WeightKind.Q6_K else 32
    rows, inputs = x.shape
    blocks = x.view(rows, -1, 32)
    scale = blocks.abs().amax(-1) / 127
    codes = (blocks * (1 / scale).nan_to_num(posinf=0.0)[..., None]).round().view(rows, inputs).double()
    result = torch.zeros(rows, len(numbers), dtype=torch.float64)
    for k in range(0, inputs, group):
        part = codes[:, k : k + group] @ numbers[:, k : k + group].double().T
        result += part * scale[:, k // 32, None].double()
    return result.float()


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_rounded_activations_give_the_same_bits_from_every_variant_and_for_any_rows(kind: WeightKind) -> None:
    weight, bias = random_weight(kind), torch.randn(N)
    x = torch.randn(130, weight.shape[1]) * torch.logspace(-3, 3, 130)[:, None]
    x[3, :32] = 0.0
    results = []
    for variant in runnable_variants():
        for threads in (1, 3):
            kernels = native(variant, threads, INT8)
            packed = kernels.pack(weight, bias)
            results.append(kernels.linear(x, packed))
            for rows in (1, 2, 3, 5, 8, 9, 16, 17):
                assert torch.equal(bits(kernels.linear(x[:rows], packed)), bits(results[-1][:rows])), (variant, rows)
    assert all(torch.equal(bits(result), bits(results[0])) for result in results)
    expected = rounded_product(x, weight) + bias
    torch.testing.assert_close(results[0], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("code", [0x00, 0xFF, 0x80, 0x7F])
def test_rounded_activations_of_the_largest_codes_overflow_nowhere(kind: WeightKind, code: int) -> None:
    """Codes all alike and activations all 127 or all -127: the largest sums, which some variants keep in 16 bits."""
    layout = BLOCKS[kind]
    raw = torch.full((N, layout.row_bytes(256)), code, dtype=torch.uint8)
    for at in layout.halves:
        raw.view(-1, layout.bytes)[:, at : at + 2] = torch.tensor([0.25]).half().view(torch.uint8)
    weight, x = StoredWeight.of_blocks(kind, raw), torch.ones(6, 256)
    x[1], x[2, ::2], x[3, 1::2], x[4, :128] = -1.0, -1.0, -1.0, -1.0
    expected = rounded_product(x, weight)
    for variant in runnable_variants():
        kernels = native(variant, activations=INT8)
        for rows in (1, 3, 6):
            found = kernels.linear(x[:rows], kernels.pack(weight))
            torch.testing.assert_close(found, expected[:rows], rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_rounded_activations_keep_what_is_not_a_number_in_its_row() -> None:
    weight = random_weight(WeightKind.Q4_1)
    for variant in runnable_variants():
        kernels = native(variant, activations=INT8)
        x = torch.randn(3, weight.shape[1])
        x[1, 40] = float("nan")
        x[2, 0] = float("inf")
        out = kernels.linear(x, kernels.pack(weight))
        assert out[0].isfinite().all()
        assert out[1:].isnan().all()


def checksums(compiler: str, *emulator: str, folder: Path, flags: tuple[str, ...] = ()) -> str:
    """Run native_blocks.cpp, which fails where blocks and their expansion differ. Unoptimised: quick to build."""
    native_sources = Path(paceline.models.__file__).parents[1] / "native"
    program = folder / compiler
    source = Path(__file__).with_name("native_blocks.cpp")
    options = ["-O0", "-std=c++17", "-ffp-contract=off", "-pthread", f"-I{native_sources}", *flags]
    subprocess.run([compiler, *options, str(source), "-o", str(program)], check=True)
    return subprocess.run([*emulator, str(program)], check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64") and shutil.which("g++")),
    reason="NEON needs qemu-user and g++-aarch64-linux-gnu",
)
def test_neon_gives_the_bits_of_the_other_variants(tmp_path: Path) -> None:
    here = checksums("g++", folder=tmp_path)
    assert len(here.splitlines()) == len(BLOCKS)
    assert checksums("aarch64-linux-gnu-g++", "qemu-aarch64", folder=tmp_path, flags=("-static",)) == here


def small_gguf(folder: Path, write_model: Any, kind: Type, **options: Any) -> Path:
    model = write_model(folder / "hf", "Llama", **options)
    write_gguf(folder / "m.gguf", model, kind)
    return folder / "m.gguf"


@pytest.fixture
def without_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """These files have none."""
    monkeypatch.setattr("paceline.models.load.open_model.Tokenizer.from_path", lambda path: None)
    monkeypatch.setattr("paceline.models.load.convert.tokenizer_files", lambda metadata, source: ({}, {}))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_1, Type.F16])
@pytest.mark.usefixtures("without_vocabulary")
def test_logits_from_blocks_are_those_of_the_model_expanded(kind, tied, tmp_path, write_model) -> None:
    path = small_gguf(tmp_path, write_model, kind, tie_word_embeddings=tied)
    stored, expanded = load_model(path, device="cpu"), load_model(path, dtype="float32", device="cpu")
    assert stored.kind.name.removeprefix("FLOAT") in (kind.name, "16")
    tokens = torch.randint(0, 96, (100,)).tolist()
    expected = logits_of(expanded.decoder, tokens, [100])
    for passes in ([100], [1] * 100, [7, 13, 80], [99, 1]):
        assert torch.equal(logits_of(stored.decoder, tokens, passes), expected)


@pytest.mark.usefixtures("without_vocabulary")
def test_a_converted_folder_keeps_the_blocks_of_its_file(tmp_path: Path, write_model: Any) -> None:
    path, folder = small_gguf(tmp_path, write_model, Type.Q4_1), tmp_path / "out"
    folder.mkdir()
    convert_gguf(GGUFFile(path), folder, lambda *step: None)
    assert not (folder / "model.safetensors").exists()
    assert (folder / BLOCK_WEIGHTS).stat().st_size < path.stat().st_size + 4096
    ours, theirs = (load_weights(at, load_config(at)) for at in (folder, path))
    assert ours.kinds == theirs.kinds
    assert all(torch.equal(ours[name].data, theirs[name].data) for name in theirs)
    assert load_model(folder, device="cpu").kind is WeightKind.Q4_1


@pytest.mark.usefixtures("without_vocabulary")
def test_int8_activations_are_another_model_and_refused_where_nothing_is_stored_as_blocks(
    tmp_path: Path, write_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_gguf(tmp_path, write_model, Type.Q8_0)
    tokens = torch.randint(0, 96, (60,)).tolist()
    rounded = load_model(path, device="cpu", activations=INT8).decoder
    expected = logits_of(rounded, tokens, [60])
    assert torch.equal(logits_of(rounded, tokens, [1] * 60), expected)
    plain = logits_of(load_model(path, device="cpu").decoder, tokens, [60])
    assert not torch.equal(plain, expected)
    torch.testing.assert_close(plain, expected, atol=0.05 * float(plain.abs().max()), rtol=0.1)
    with refused("activations"):
        load_model(tmp_path / "hf", device="cpu", activations=INT8)
    with refused("activations"):
        load_model(path, device="cpu", activations="int4")
    monkeypatch.setenv("PACELINE_KERNELS", "torch")
    with refused("activations"):
        kernels_for(CPU, activations=INT8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_checkpoints_of_16_bits_stay_16_bits_in_memory(dtype: torch.dtype, tmp_path: Path, write_model: Any) -> None:
    model = write_model(tmp_path, "Llama").to(dtype)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 96)
    loaded = load_model(tmp_path, device="cpu")
    assert loaded.decoder.layers[0].down.parts[0].data.nbytes == 2 * 64 * 96
    tokens = torch.randint(0, 96, (30,)).tolist()
    wide = load_model(tmp_path, dtype="float32", device="cpu").decoder
    assert torch.equal(logits_of(loaded.decoder, tokens, [30]), logits_of(wide, tokens, [30]))


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.usefixtures("without_vocabulary")
def test_blocks_that_cannot_be_right_are_refused_in_one_line(tmp_path: Path, write_model: Any) -> None:
    path, folder = small_gguf(tmp_path, write_model, Type.Q4_1), tmp_path / "out"
    folder.mkdir()
    convert_gguf(GGUFFile(path), folder, lambda *step: None)
    kept, nan = (folder / BLOCK_WEIGHTS).read_bytes(), torch.tensor([math.nan]).half().view(torch.uint8)
    for change, error, message in (
        (lambda t, kinds: t[DOWN][3, 20:22].copy_(nan), BrokenModel, f"{DOWN} has a scale that is not a number"),
        (lambda t, kinds: kinds.update({DOWN: "IQ9"}), UnsupportedModel, "IQ9, an unknown kind of blocks; known: Q4_0"),
        (lambda t, kinds: t.update({DOWN: t[DOWN][:, :-3].contiguous()}), BrokenModel, "not blocks of 20"),
        (lambda t, kinds: kinds.pop(DOWN), BrokenModel, f"{DOWN} has dtype U8"),
    ):
        tensors = load_file(folder / BLOCK_WEIGHTS)
        with safe_open(folder / BLOCK_WEIGHTS, "pt") as file:
            kinds = dict(file.metadata())
        change(tensors, kinds)
        save_file(tensors, folder / BLOCK_WEIGHTS, kinds)
        with pytest.raises(error, match=message):
            load_model(folder, device="cpu")
        (folder / BLOCK_WEIGHTS).write_bytes(kept)
    (folder / BLOCK_WEIGHTS).write_bytes(kept[: len(kept) // 2])
    with pytest.raises(BrokenModel, match="truncated or damaged"):
        load_weights(folder, load_config(folder))
