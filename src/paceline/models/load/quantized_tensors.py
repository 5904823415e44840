"""The tensors of a quantised checkpoint that together hold one weight, and the weight that they stand for.

Names, dtypes and shapes are checked from the files' headers (`find_coded`). A weight is then read as a `StoredWeight`
of codes beside their scales (`CodedWeight.read`), one weight at a time. The layouts of a (N, K) weight with G scales in
a row, of codes of b bits, w = 32 / b of them in a word, the first lowest:

    PACKED  weight_packed (N, K / w), weight_scale (N, G), weight_zero_point (N / w, G); codes and zeros + 2^(b - 1)
    PLAIN   weight (N, K), weight_scale (N, G), weight_zero_point (N, G); or one scale, or one for each block
    AWQ     qweight (K, N / 8), qzeros (G, N / 8), scales (G, N); columns of a word in the order 0 2 4 6 1 3 5 7
    GPTQ    qweight (K / w, N), qzeros (G, N / w), scales (G, N), g_idx (K,)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import BrokenModel, UnsupportedModel
from paceline.files.safetensors_writer import Header
from paceline.models.load.quantized_config import INSTEAD, CodeLayout, Quantization, Scheme
from paceline.models.weights import StoredWeight, WeightKind

Shape = tuple[int, ...]
Read = Callable[[str], Tensor]  # a tensor of the file by its name

FLOATS, WORDS = ("F32", "F16", "BF16"), ("I32",)
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # places in a word of its columns 0 to 7
ONE_EACH = {4: 0x11111111, 8: 0x01010101}  # 1 for each code of a word
NOT_A_NUMBER = 0x7F  # the e4m3 code, without its sign
UNUSED = (  # scales of activations and of the cache, by the last part of their names
    "input_scale",
    "output_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "input_zero_point",
    "kv_cache_scale",
)
EMBEDDING = "model.embed_tokens"


class Part(NamedTuple):
    """The shapes and dtypes that a tensor of a layout may have."""

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]  # any of these
    optional: bool = False


@dataclass(frozen=True)
class CodedWeight:
    layer: str
    shape: tuple[int, int]
    scheme: Scheme
    parts: frozenset[str]  # tensors of the layout that the file has
    source: str

    @property
    def kind(self) -> WeightKind:
        """Return the kind of the weight in memory. FP8 with a scale for each block of rows and columns is expanded."""
        if self.scheme.is_float:
            return WeightKind.FP8 if self.scheme.block is None else WeightKind.FLOAT32
        return WeightKind.INT4 if self.scheme.bits == 4 else WeightKind.INT8

    def read(self, tensor: Read) -> StoredWeight:
        weight = _READ[self.scheme.layout](self, lambda part: tensor(f"{self.layer}.{part}"))
        if weight.scales is not None and not bool(weight.scales.isfinite().all()):
            raise BrokenModel(f"{self.where} has a scale that is not a number; the file is damaged, download it again")
        return weight

    @property
    def where(self) -> str:
        return f"{self.source}: {self.layer}"


def find_coded(
    headers: Mapping[str, Header], expected: Mapping[str, Shape], quantization: Quantization, source: str
) -> dict[str, CodedWeight]:
    """Return the weights that are stored as codes, by the names of unquantised weights. A weight that the file has
    as numbers is not among them, whatever the config says."""
    coded: dict[str, CodedWeight] = {}
    for name, shape in expected.items():
        layer, _, what = name.rpartition(".")
        scheme = quantization.scheme_of(layer) if what == "weight" and len(shape) == 2 and layer != EMBEDDING else None
        if scheme is None or _is_plain(headers.get(name)):
            continue
        rows, columns = shape
        parts = _parts(scheme, (rows, columns), f"{source}: {layer}")
        for part, wanted in parts.items():
            _check(headers.get(f"{layer}.{part}"), wanted, f"{source}: tensor {layer}.{part}")
        present = frozenset(part for part in parts if f"{layer}.{part}" in headers)
        coded[name] = CodedWeight(layer, (rows, columns), scheme, present, source)
    return coded


def names_of(coded: Iterable[CodedWeight]) -> set[str]:
    """Return the names of the tensors that hold these weights."""
    return {f"{weight.layer}.{part}" for weight in coded for part in weight.parts}


def _is_plain(header: Header | None) -> bool:
    return header is not None and header.dtype in FLOATS


def _check(header: Header | None, wanted: Part, where: str) -> None:
    if header is None:
        if not wanted.optional:
            raise BrokenModel(f"{where} is missing; the file does not fit quantization_config, download it again")
        return
    if header.dtype not in wanted.dtypes:
        raise BrokenModel(
            f"{where} has dtype {header.dtype}, and quantization_config asks for {' or '.join(wanted.dtypes)}; "
            "correct the config, or download the model again"
        )
    if header.shape not in wanted.shapes:
        raise BrokenModel(
            f"{where} has shape {list(header.shape)}, and quantization_config asks for {list(wanted.shapes[0])}: "
            "bits or group_size are wrong, or the file is"
        )


# -- the tensors of each layout


def _parts(scheme: Scheme, shape: tuple[int, int], where: str) -> dict[str, Part]:
    n, k = shape
    if scheme.group is not None and k % scheme.group:
        raise UnsupportedModel(
            f"{where}: groups of {scheme.group} do not divide its {k} columns; take a checkpoint of another group_size"
        )
    words = 32 // scheme.bits  # codes in a word
    groups = k // (scheme.group or k)
    if scheme.layout is CodeLayout.PLAIN:
        return _plain_parts(scheme, n, k, groups)
    if k % words or (scheme.layout is not CodeLayout.PACKED and n % words):
        raise UnsupportedModel(f"{where}: its {n} rows and {k} columns are no whole words of {words}; {INSTEAD}")
    if scheme.layout is CodeLayout.PACKED:
        parts = {
            "weight_packed": Part(WORDS, ((n, k // words),)),
            "weight_scale": Part(FLOATS, ((n, groups),)),
            "weight_shape": Part(("I64", "I32"), ((2,),), optional=True),
            "weight_g_idx": Part(WORDS, ((k,),), optional=True),
        }
        zeros = {"weight_zero_point": Part(WORDS, ((-(-n // words), groups),))}
        return parts | zeros if scheme.zeros else parts
    parts = {"qzeros": Part(WORDS, ((groups, n // words),)), "scales": Part(FLOATS, ((groups, n),))}
    if scheme.layout is CodeLayout.AWQ:
        return {"qweight": Part(WORDS, ((k, n // words),))} | parts
    return {
        "qweight": Part(WORDS, ((k // words, n),)),
        "g_idx": Part(WORDS, ((k,),), optional=True),
    } | parts


def _plain_parts(scheme: Scheme, n: int, k: int, groups: int) -> dict[str, Part]:
    scales: tuple[Shape, ...] = ((n, groups),)
    if scheme.block is not None:
        scales = ((-(-n // scheme.block[0]), -(-k // scheme.block[1])),)
    elif scheme.is_float:
        scales = ((n, 1), (n,), (1, 1), (1,), ())  # one scale for each row, or for the tensor
    parts = {
        "weight": Part(("F8_E4M3",) if scheme.is_float else ("I8",), ((n, k),)),
        scheme.scale: Part(FLOATS, scales),
    }
    zeros = {"weight_zero_point": Part(("I8",), ((n, groups),))}
    return parts | zeros if scheme.zeros else parts


# -- from words to codes


def _codes(words: Tensor, bits: int) -> Tensor:
    """Unpack (M, W) int32 -> (M, W * 32 / bits) uint8."""
    data = words.contiguous().view(torch.uint8)
    return data if bits == 8 else torch.stack([data & 15, data >> 4], -1).flatten(1)


def _stored(weight: CodedWeight, data: Tensor, scales: Tensor, zeros: Tensor | None) -> StoredWeight:
    """Wrap codes from 0 on. `data`: (N, bytes of a row); `zeros` are codes too."""
    if weight.kind is WeightKind.INT8:
        data = (data ^ 128).view(torch.int8)
        zeros = None if zeros is None else zeros.to(torch.int16) - 128
    return StoredWeight.of_codes(weight.kind, data.contiguous(), scales, zeros=zeros)


def _read_packed(weight: CodedWeight, part: Read) -> StoredWeight:
    n, k = weight.shape
    scheme, bits = weight.scheme, weight.scheme.bits
    if "weight_g_idx" in weight.parts:
        _check_order(part("weight_g_idx"), weight)
    if "weight_shape" in weight.parts and (stated := part("weight_shape").tolist()) != [n, k]:
        raise BrokenModel(f"{weight.where}: weight_shape says {stated}, config.json {[n, k]}; download the model again")
    data = part("weight_packed").contiguous().view(torch.uint8)[:, : k * bits // 8]
    zeros = _codes(part("weight_zero_point").t(), bits)[:, :n].t() if scheme.zeros else None
    return _stored(weight, data, part("weight_scale"), zeros)


def _read_plain(weight: CodedWeight, part: Read) -> StoredWeight:
    scheme = weight.scheme
    data, scales = part("weight"), part(scheme.scale)
    if not scheme.is_float:
        zeros = part("weight_zero_point") if scheme.zeros else None
        return StoredWeight.of_codes(weight.kind, data, scales, zeros=zeros)
    if bool((data.view(torch.uint8) & NOT_A_NUMBER == NOT_A_NUMBER).any()):
        raise BrokenModel(f"{weight.where} has a weight that is not a number; the file is damaged, download it again")
    if scheme.block is None:
        return StoredWeight.of_codes(weight.kind, data, scales)
    if not bool(scales.isfinite().all()):
        raise BrokenModel(f"{weight.where} has a scale that is not a number; the file is damaged, download it again")
    rows, columns = scheme.block
    across = scales.float().repeat_interleave(columns, 1)[:, : data.shape[1]]  # (blocks of rows, K)
    numbers = data.float()
    for at, scale in enumerate(across):
        numbers[at * rows : (at + 1) * rows] *= scale
    return StoredWeight.of(numbers)


def _read_awq(weight: CodedWeight, part: Read) -> StoredWeight:
    def columns(words: Tensor) -> Tensor:  # (M, N / 8) -> (N, M)
        return _codes(words, 4).view(len(words), -1, 8)[:, :, AWQ_PLACES].flatten(1).t()

    codes = columns(part("qweight")).contiguous()
    return _stored(weight, codes[:, ::2] | codes[:, 1::2] << 4, part("scales").t(), columns(part("qzeros")))


def _read_gptq(weight: CodedWeight, part: Read) -> StoredWeight:
    scheme = weight.scheme
    if "g_idx" in weight.parts:
        _check_order(part("g_idx"), weight)
    data = part("qweight").t().contiguous().view(torch.uint8)
    packed = part("qzeros")
    if scheme.zeros_less_one:
        packed = packed + ONE_EACH[scheme.bits]  # one addition for all: a zero point of 0 has borrowed from the next
    zeros = _codes(packed, scheme.bits).t()
    if not scheme.zeros and bool((zeros != 2 ** (scheme.bits - 1)).any()):
        raise BrokenModel(
            f"{weight.where} has zero points that are not the middle code, and quantization_config says sym: true; "
            "set sym to false, or correct checkpoint_format (gptq or gptq_v2)"
        )
    return _stored(weight, data, part("scales").t(), zeros if scheme.zeros else None)


def _check_order(groups: Tensor, weight: CodedWeight) -> None:
    """Refuse columns in another order than that of their groups."""
    k = weight.shape[1]
    if not torch.equal(groups.long(), torch.arange(k) // (weight.scheme.group or k)):
        raise UnsupportedModel(
            f"{weight.where} has its columns in the order of activations (act-order), which is not supported; "
            "take a checkpoint with desc_act false"
        )


_READ: dict[CodeLayout, Callable[[CodedWeight, Read], StoredWeight]] = {
    CodeLayout.PACKED: _read_packed,
    CodeLayout.PLAIN: _read_plain,
    CodeLayout.AWQ: _read_awq,
    CodeLayout.GPTQ: _read_gptq,
}
