"""A checkpoint's weights rounded to blocks of codes in GGUF's formats, or to codes beside their scales (`compress`), in
a folder of its own.

Scales follow from the largest and the least weight of a block. Codes are rounded against the scales as they are stored,
so that a weight is at most half a step away from its code. Embedding and head are q8_0 whatever the layers are: they
are read for every token and lose most. Biases and norms stay as they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import BrokenModel, InvalidParameter
from paceline.files.folders import new_folder, refuse_existing
from paceline.files.safetensors_writer import write_tensors
from paceline.models.load.fetch import TEMPLATES
from paceline.models.load.hf_folder import WEIGHTS, read_model_json
from paceline.models.load.loader import Weights, load_config, load_quantization, load_stored_weights
from paceline.models.load.placement import expected_shapes
from paceline.models.load.store import MANIFEST
from paceline.models.quant.block_file import BLOCK_WEIGHTS, write_blocks
from paceline.models.quant.compress import COMPRESSED, group_of, headers, is_rounded, quantization_config, tensors
from paceline.models.spec import ModelConfig
from paceline.models.weights import BLOCKS, StoredWeight, WeightKind

TARGETS = {"q8_0": WeightKind.Q8_0, "q4_1": WeightKind.Q4_1, "q4_k": WeightKind.Q4_K}
NAMES = (*TARGETS, *COMPRESSED)
CONFIG = "config.json"
FALLBACK = WeightKind.Q4_1  # in place of q4_k where rows are not whole blocks of 256
COPIED = (".json", ".jinja", ".model", ".txt")
OUTER = ("model.embed_tokens.weight", "lm_head.weight")


def quantize(values: Tensor, kind: WeightKind) -> StoredWeight:
    """Round (N, K) numbers to blocks; K is a multiple of the blocks' weights."""
    blocks = values.float().reshape(-1, BLOCKS[kind].weights)
    data = _ENCODE[kind](blocks)
    return StoredWeight.of_blocks(kind, data.view(len(values), -1))


Kinds = dict[str, WeightKind]
Counts = dict[str, int]  # weights of each kind
Progress = Callable[[int, int], None]
Write = Callable[[Path], None]  # into a folder


def quantize_folder(
    source: Path, to: str, out: Path, progress: Progress, complete: Callable[[Path, Counts], None] | None = None
) -> Counts:
    """Write the folder `out`, which must not exist. `complete` adds files before it is in place; if it raises, there is
    no folder."""
    if to not in NAMES:
        raise InvalidParameter("to", f"{to!r} is not one of {', '.join(NAMES)}")
    refuse_existing(out)
    if not source.is_dir():
        raise InvalidParameter("model", f"{source} is stored as blocks already; name a folder of safetensors")
    if (settings := load_quantization(source)) is not None:
        raise InvalidParameter("model", f"{source} is quantised already ({settings.method}); name the original model")
    config = load_config(source)
    weights = load_stored_weights(source, config)
    if stored := next((kind for kind in weights.kinds.values() if kind.is_blocks or kind.has_scales), None):
        raise InvalidParameter("model", f"{source} is stored as {stored.label} already; name the original model")
    checked = Weights(weights.kinds, lambda name: _finite(weights[name], f"{source}: tensor {name}"))
    write = _compressed if to in COMPRESSED else _blocks
    kinds, finish = write(source, to, config, checked, progress)
    shapes = expected_shapes(config)
    counts = dict(Counter(kind.label for name, kind in kinds.items() if len(shapes[name]) == 2))
    with new_folder(out) as folder:
        _copy_settings(source, folder)
        finish(folder)
        if complete is not None:
            complete(folder, counts)
    return counts


def _copy_settings(source: Path, folder: Path) -> None:
    """Copy config and tokenizer: all files that are read beside the weights."""
    files = [file for file in sorted(source.iterdir()) if file.suffix in COPIED and file.name != MANIFEST]
    for file in (*files, *source.glob(f"{TEMPLATES}*.jinja")):
        if file.is_file() and "safetensors" not in file.name:
            try:
                data = file.read_bytes()
            except OSError as error:
                raise BrokenModel(f"{file} cannot be read ({error.strerror}); check its permissions") from error
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(data)


def _finite(weight: StoredWeight, source: str) -> StoredWeight:
    values = weight.numbers()
    if not bool(values.isfinite().all()):
        raise BrokenModel(f"{source} holds a weight that is not a number; the file is damaged, download it again")
    if values.dtype is torch.float64 and not bool(values.float().isfinite().all()):
        raise BrokenModel(f"{source} holds a weight beyond float32; this model cannot be quantised")
    return weight


def _blocks(source: Path, to: str, config: ModelConfig, weights: Weights, progress: Progress) -> tuple[Kinds, Write]:
    kinds = choose_kinds(config, TARGETS[to], str(source))
    entries = [(name, kinds[name], shape) for name, shape in expected_shapes(config).items()]

    def write(folder: Path) -> None:
        write_blocks(
            folder / BLOCK_WEIGHTS,
            entries,
            lambda name: _stored(weights[name], kinds[name], f"{source}: tensor {name}"),
            progress,
        )

    return kinds, write


def _compressed(
    source: Path, to: str, config: ModelConfig, weights: Weights, progress: Progress
) -> tuple[Kinds, Write]:
    kind = COMPRESSED[to]
    group = group_of(config, str(source)) if kind is WeightKind.INT4 else 0  # columns that share a scale
    rounded = {name for name, shape in expected_shapes(config).items() if is_rounded(name, shape)}

    def write(folder: Path) -> None:
        tensor_headers = headers(weights, config, kind, group)
        write_tensors(folder / WEIGHTS, tensor_headers, tensors(weights, config, kind, group), progress)
        settings = read_model_json(folder / CONFIG) | {"quantization_config": quantization_config(kind, group)}
        (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    return {name: kind if name in rounded else weights.kinds[name] for name in weights}, write


def choose_kinds(config: ModelConfig, wanted: WeightKind, source: str) -> dict[str, WeightKind]:
    kinds: dict[str, WeightKind] = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            kinds[name] = WeightKind.FLOAT32
            continue
        kind = WeightKind.Q8_0 if name in OUTER else wanted
        if shape[1] % BLOCKS[kind].weights:
            kind = FALLBACK
        if shape[1] % BLOCKS[kind].weights:
            raise BrokenModel(
                f"{source}: {name} has rows of {shape[1]}, which are not whole blocks of {BLOCKS[kind].weights}; "
                "this model cannot be quantised"
            )
        kinds[name] = kind
    return kinds


def write_card(folder: Path, *, name: str, model: str, to: str, kinds: Counts, distance: dict[str, float]) -> None:
    """Write README.md for people and paceline.json for programs."""
    counts = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
    lines = [
        f"# {model}, weights rounded to {to}",
        "",
        f"Written by `paceline quantize`. {counts}; norms and biases as in the original.",
        "It is another model than the original. Its measured distance, next-token distributions on prompts:",
        "",
        "| tokens compared | mean KL (nats) | largest KL | same likeliest token |",
        "|---|---|---|---|",
        f"| {distance['tokens']:.0f} | {distance['mean_kl']:.5f} | {distance['max_kl']:.4f} "
        f"| {100 * distance['top1_agreement']:.2f} % |",
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
    form = "compressed-tensors" if to in COMPRESSED else "blocks"
    facts = {"name": name, "source": f"{model}, quantised to {to}", "format": form, "distance": distance}
    (folder / MANIFEST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _stored(weight: StoredWeight, kind: WeightKind, source: str) -> StoredWeight:
    if not kind.is_blocks:
        return weight
    stored = quantize(weight.numbers(), kind)
    if not BLOCKS[kind].scales_are_finite(stored.data):
        raise BrokenModel(
            f"{source} holds weights too large for {kind.label}, whose scales are float16; quantise to int4 or fp8"
        )
    return stored


def _half_bytes(values: Tensor) -> Tensor:
    """Convert (B, n) to float16, (B, 2 n) bytes."""
    return values.half().view(torch.uint8)


def _divided(values: Tensor, step: Tensor, largest: int, least: int = 0) -> Tensor:
    """Count the steps of (B, n) values; 0 where the step is 0."""
    steps = torch.where(step == 0, torch.zeros_like(values), values / step)
    return steps.round().clamp(least, largest)


def _nibbles(codes: Tensor) -> Tensor:
    """Pack (..., 2 n) codes of 4 bits -> (..., n) bytes, the first half low."""
    low, high = codes.to(torch.uint8).chunk(2, -1)
    return low | high << 4


def _q8_0(blocks: Tensor) -> Tensor:
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half().float()
    codes = _divided(blocks, scale, 127, -127).to(torch.int8)
    return torch.cat([_half_bytes(scale), codes.view(torch.uint8)], 1)


def _q4_1(blocks: Tensor) -> Tensor:
    least = blocks.amin(1, keepdim=True).half().float()
    scale = ((blocks.amax(1, keepdim=True) - least) / 15).clamp(min=0).half().float()
    codes = _divided(blocks - least, scale, 15)
    return torch.cat([_half_bytes(scale), _half_bytes(least), _nibbles(codes)], 1)


def _q4_k(blocks: Tensor) -> Tensor:
    """Round blocks of 256: groups of 32, whose scales and minima are 6-bit multiples of two halves."""
    groups = blocks.view(-1, 8, 32)
    minima = -groups.amin(2).clamp(max=0)  # (B, 8), subtracted
    scales = (groups.amax(2) + minima).clamp(min=0) / 15
    d, least = ((part.amax(1, keepdim=True) / 63).half().float() for part in (scales, minima))
    small_scales, small_minima = _divided(scales, d, 63), _divided(minima, least, 63)
    codes = _divided(groups + (least * small_minima)[:, :, None], (d * small_scales)[:, :, None], 15)
    return torch.cat([_half_bytes(d), _half_bytes(least), _packed_scales(small_scales, small_minima), _pairs(codes)], 1)


def _packed_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """Pack eight 6-bit scales and minima in twelve bytes: the high bits of the last four above the first four."""
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    first, last = s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6
    return torch.cat([first, last, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], 1)


def _pairs(codes: Tensor) -> Tensor:
    """Pack (B, 8, 32) -> (B, 128): groups 2 i and 2 i + 1 share 32 bytes."""
    return _nibbles(codes.reshape(-1, 4, 64)).flatten(1)


_ENCODE: dict[WeightKind, Callable[[Tensor], Tensor]] = {
    WeightKind.Q8_0: _q8_0,
    WeightKind.Q4_1: _q4_1,
    WeightKind.Q4_K: _q4_k,
}
