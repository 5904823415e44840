"""`quantization_config` of a Hugging Face config.json: how each linear layer's weight is stored. No torch.

Methods: compressed-tensors (integers in groups or per channel, FP8), AWQ, GPTQ, FP8. Others are refused by name before
any weight is read. Only weights are quantised: where a checkpoint asks for rounded activations or a rounded cache, a
note says that they are not rounded.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from paceline.errors import BrokenModel, UnsupportedModel, short_repr
from paceline.files.json_fields import Json, JsonFields
from paceline.files.patterns import WrongPattern, compiled

KEYS = ("quantization_config", "compression_config")  # the second is the older spelling of compressed-tensors
INSTEAD = "take the unquantised model, a GGUF file, or a checkpoint of another method (W4A16, FP8, AWQ, GPTQ)"
NOT_ROUNDED = "activations are not rounded to {}, as the checkpoint's config asks: only its weights are"
EXPANDED = "weights with a scale for each block of rows and columns ({} x {}) are expanded at load"
MOST_NAMES, MOST_PATTERNS = 20_000, 64  # names of layers in a list, and patterns, each of which is tried on each layer
CACHE_NOTE = "the checkpoint's scales for an fp8 cache are not used"


class CodeLayout(enum.Enum):
    """Names, shapes and order of the tensors that hold a weight."""

    PACKED = "packed"  # compressed-tensors: codes of one row in int32 words
    PLAIN = "plain"  # codes (N, K) of 8 bits, integers or e4m3
    AWQ = "awq"
    GPTQ = "gptq"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The storage of a (N, K) weight."""

    layout: CodeLayout
    bits: int
    is_float: bool = False  # e4m3
    group: int | None = None  # columns that share a scale; None: a row
    block: tuple[int, int] | None = None  # rows and columns that share a scale; in place of `group`
    zeros: bool = False  # a zero point for each scale; else the middle code stands for 0
    scale: str = "weight_scale"  # name of the scales' tensor, in layout PLAIN
    zeros_less_one: bool = False  # GPTQ's first format: 1 was subtracted from every zero point of a packed word


@dataclass(frozen=True)
class Quantization:
    """The method of a checkpoint, and the storage of its linear layers."""

    method: str
    targets: tuple[tuple[str, Scheme], ...]  # names, `re:` patterns or classes of layers
    ignore: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def scheme_of(self, layer: str) -> Scheme | None:
        """Return the storage of a linear layer. An exact name outranks a pattern, a pattern the class Linear."""
        if any(_matches(pattern, layer) for pattern in self.ignore):
            return None
        matches = [(target, scheme) for target, scheme in self.targets if _matches(target, layer)]
        matches.sort(key=lambda match: (match[0] == LINEAR, match[0].startswith(PATTERN)))
        return matches[0][1] if matches else None


LINEAR, PATTERN = "Linear", "re:"


def _matches(target: str, layer: str) -> bool:
    if target.startswith(PATTERN):
        return compiled(target.removeprefix(PATTERN))(layer)
    return target in (layer, LINEAR)


def parse_quantization(raw: Json, source: str) -> Quantization | None:
    """Read the quantisation of a whole config.json; None where weights are plain numbers."""
    values = next((raw[key] for key in KEYS if raw.get(key) is not None), None)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise BrokenModel(f"{source}: quantization_config must be an object, found {short_repr(values)}")
    fields = QuantizationFields(values, source, "{} of quantization_config")
    method = values.get("quant_method", "compressed-tensors" if "config_groups" in values else None)
    if not isinstance(method, str) or method not in METHODS:
        raise fields.refused("quant_method", f"known are {', '.join(METHODS)}")
    fields.names("modules_to_not_convert")  # what is converted is told by the tensors; here its type is checked
    return METHODS[method](fields)


class QuantizationFields(JsonFields):
    """Fields of quantization_config or of an object in it; an unknown choice is unsupported, not broken."""

    def refused(self, key: str, why: str) -> UnsupportedModel:
        value = short_repr(self.values.get(key))
        return UnsupportedModel(f"{self.source}: quantization_config with {key} {value} is not read: {why}; {INSTEAD}")

    def one_of(self, key: str, *allowed: Any, default: Any = None) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if not any(type(value) is type(known) and value == known for known in allowed):
            raise self.refused(key, f"it must be {' or '.join(map(str, allowed))}")
        return value

    def group(self, key: str = "group_size") -> int | None:
        """Return the columns that share a scale; None: a row."""
        value = self.values.get(key)
        if value is None or (type(value) is int and value == -1):
            return None
        if type(value) is not int or value < 1:
            raise self.wrong(key, "a positive integer, or -1 for a scale per row")
        return value

    def patterns(self, key: str) -> tuple[str, ...]:
        """Return the names of layers; those that begin with `re:` are regular expressions."""
        names = self.names(key)
        patterns = [name for name in names if name.startswith(PATTERN)]
        if len(names) > MOST_NAMES or len(patterns) > MOST_PATTERNS:
            raise self.wrong(key, f"a list of at most {MOST_NAMES} names, {MOST_PATTERNS} of them patterns")
        for name in patterns:
            try:
                compiled(name.removeprefix(PATTERN))
            except WrongPattern as error:
                raise BrokenModel(
                    f"{self.source}: {key}: {short_repr(name)} is not a regular expression that is read: {error}"
                ) from error
        return names

    def section(self, key: str) -> QuantizationFields:
        return QuantizationFields(super().section(key).values, self.source, self.label)


# -- compressed-tensors

PACKED = "pack-quantized"
FORMATS = {  # formats, and the types of their codes
    PACKED: ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}


def _compressed_tensors(fields: QuantizationFields) -> Quantization:
    sparsity, transform = fields.section("sparsity_config"), fields.section("transform_config")
    if sparsity.values.get("format", "dense") != "dense":
        raise fields.refused("sparsity_config", "sparse weights are not supported")
    if any(transform.values.values()):
        raise fields.refused("transform_config", "rotated weights are not supported")
    if fields.values.get("moe_sparsity_config"):
        raise fields.refused("moe_sparsity_config", "models with experts are not supported")
    groups = fields.section("config_groups")
    if not groups.values:
        raise fields.wrong("config_groups", "an object with at least one group")
    targets: list[tuple[str, Scheme]] = []
    notes: list[str] = []
    for name in groups.values:
        group = groups.section(name)
        scheme = _group_scheme(group, fields)
        targets += [(target, scheme) for target in group.patterns("targets")]
        if group.values.get("output_activations"):
            raise group.refused("output_activations", "rounded outputs are not supported")
        if group.values.get("input_activations"):
            notes.append(NOT_ROUNDED.format("fp8" if scheme.is_float else "integers"))
        if scheme.block is not None:
            notes.append(EXPANDED.format(*scheme.block))
    if fields.values.get("kv_cache_scheme"):
        notes.append(CACHE_NOTE)
    return Quantization("compressed-tensors", tuple(targets), fields.patterns("ignore"), tuple(dict.fromkeys(notes)))


def _group_scheme(group: QuantizationFields, fields: QuantizationFields) -> Scheme:
    weights = group.section("weights")
    if not weights.values:
        raise group.refused("weights", "its weights are not quantised")
    if group.values.get("format") is None:
        group = fields
    format_ = group.one_of("format", *FORMATS)
    is_float = weights.one_of("type", *FORMATS[format_], default="int") == "float"
    layout = CodeLayout.PACKED if format_ == PACKED else CodeLayout.PLAIN
    bits = weights.one_of("num_bits", *((4, 8) if layout is CodeLayout.PACKED else (8,)))
    if weights.values.get("actorder") not in (None, False, "weight", "static"):
        raise weights.refused("actorder", "columns in the order of activations (act-order) are not supported")
    if weights.flag("dynamic", False):
        raise weights.refused("dynamic", "scales of weights are part of the checkpoint")
    symmetric = weights.flag("symmetric", True)
    if is_float and not symmetric:
        raise weights.refused("symmetric", "FP8 has no zero points")
    strategies = ("tensor", "channel", "block") if is_float else ("group", "channel")
    strategy = weights.one_of("strategy", *strategies, default="group" if weights.group() else "channel")
    group_size = weights.group() if strategy == "group" else None
    if strategy == "group" and group_size is None:
        raise weights.wrong("group_size", "a positive integer")
    return Scheme(
        layout=layout,
        bits=bits,
        is_float=is_float,
        group=group_size,
        block=_block(weights, "block_structure") if strategy == "block" else None,
        zeros=not symmetric,
    )


def _block(fields: QuantizationFields, key: str) -> tuple[int, int]:
    value = fields.values.get(key)
    if isinstance(value, str):  # 128x128
        value = [int(part) if part.isdecimal() else part for part in value.split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise fields.wrong(key, "two positive integers")
    return value[0], value[1]


# -- AWQ, GPTQ, FP8

GPTQ_FORMAT = ("checkpoint_format", "format")  # two spellings of one key


def _awq(fields: QuantizationFields) -> Quantization:
    key = next((key for key in ("version", *GPTQ_FORMAT) if fields.values.get(key) is not None), "version")
    if str(fields.values.get(key) or "gemm").lower() != "gemm":
        raise fields.refused(key, "it must be gemm")
    bits = fields.one_of("bits", 4) if "bits" in fields.values else fields.one_of("w_bit", 4)
    fields.one_of("zero_point", True, default=True)
    group = fields.group("group_size" if "group_size" in fields.values else "q_group_size")
    return Quantization("awq", ((LINEAR, Scheme(layout=CodeLayout.AWQ, bits=bits, group=group, zeros=True)),))


def _gptq(fields: QuantizationFields) -> Quantization:
    bits, group = fields.one_of("bits", 4, 8), fields.group()
    if fields.flag("desc_act", False) and group is not None:
        raise fields.refused("desc_act", "columns in the order of activations (act-order) are not supported")
    if fields.values.get("rotation") is not None:
        raise fields.refused("rotation", "rotated weights are not supported")
    fields.one_of("pack_dtype", "int32", default="int32")
    key = next((key for key in GPTQ_FORMAT if fields.values.get(key) is not None), GPTQ_FORMAT[0])
    version = fields.one_of(key, "gptq", "gptq_v2", default="gptq")
    dynamic = fields.section("dynamic")
    if any(not rule.startswith("-:") for rule in dynamic.values):
        raise fields.refused("dynamic", "layers with other bits or groups than the rest are not supported")
    scheme = Scheme(
        layout=CodeLayout.GPTQ,
        bits=bits,
        group=group,
        zeros=not fields.flag("sym", True),
        zeros_less_one=version == "gptq",
    )
    return Quantization("gptq", ((LINEAR, scheme),))


def _fp8(fields: QuantizationFields) -> Quantization:
    """Read the FP8 of two writers: with a `weight_block_size` the scales are called weight_scale_inv."""
    if fields.values.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise fields.refused("fmt", "it must be e4m3")
    fields.one_of("activation_scheme", "dynamic", "static", default="dynamic")
    block = None if fields.values.get("weight_block_size") is None else _block(fields, "weight_block_size")
    scale = "weight_scale" if block is None else "weight_scale_inv"
    scheme = Scheme(layout=CodeLayout.PLAIN, bits=8, is_float=True, block=block, scale=scale)
    notes = (NOT_ROUNDED.format("fp8"), *(() if block is None else (EXPANDED.format(*block),)))
    return Quantization("fp8", ((LINEAR, scheme),), notes=notes)


METHODS = {"compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq, "fp8": _fp8}
