"""A model in a Hugging Face folder or a .gguf file: its config, its weights, its generation defaults.

Weights have the names of the decoder (`placement`), whatever their names in the file. Presence and shape of every
tensor are checked against the config from the files' headers, before the first value is read.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.errors import BrokenModel, InvalidParameter, ModelNotFound, short_repr
from paceline.files.gguf import GGUFFile, open_gguf
from paceline.models.families.hf import token_ids
from paceline.models.load.gguf_model import gguf_config, gguf_kind, gguf_names, gguf_weight
from paceline.models.load.hf_config import is_wrapper, parse_checkpoint
from paceline.models.load.hf_folder import TensorFiles, read_model_json
from paceline.models.load.placement import decoder_shapes, expected_shapes, places
from paceline.models.load.quantized_config import Quantization, parse_quantization
from paceline.models.load.quantized_tensors import UNUSED, CodedWeight, find_coded, names_of
from paceline.models.quant.block_file import block_shape, checked_blocks
from paceline.models.spec import ModelConfig
from paceline.models.weights import StoredWeight, WeightKind
from paceline.sampling_params import SamplingParams

FLOATS = {
    "F32": WeightKind.FLOAT32,
    "F16": WeightKind.FLOAT16,
    "BF16": WeightKind.BFLOAT16,
    "F64": WeightKind.FLOAT64,
}
REDUNDANT = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "attn.masked_bias", "attn.bias")
MOST_NUMBER = 1e9  # beyond it a sampling parameter is a mistake of the file
NUMERIC_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

Shape = tuple[int, ...]
Declared = Callable[[str], bool]  # whether a drafter declares the tensor of a name that the decoder has not


@dataclass(frozen=True)
class Weights(Mapping[str, StoredWeight]):
    """Weights by name, read from the file on access. `kinds` come from its header."""

    kinds: dict[str, WeightKind]
    read: Callable[[str], StoredWeight]

    def __getitem__(self, name: str) -> StoredWeight:
        if name not in self.kinds:
            raise KeyError(name)
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    def only(self, names: Iterable[str]) -> Weights:
        kinds = {name: self.kinds[name] for name in names}
        return Weights(kinds, self.read if kinds else _read_nothing)  # the file is closed once no weight is left in it


def _read_nothing(name: str) -> StoredWeight:
    raise KeyError(name)


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf"


@contextmanager
def parsed_once(path: Path) -> Iterator[None]:
    """Parse a GGUF file once for all that is read from it inside."""
    file = open_gguf(path) if is_gguf(path) and path.is_file() else None
    yield
    del file


def load_config(path: Path) -> ModelConfig:
    """Read the config. End-of-text ids are those of generation_config.json, if it has any, as in transformers."""
    source = path
    if is_gguf(path):
        config = gguf_config(_open_gguf(path))
    elif not path.is_dir():
        raise ModelNotFound(f"{path} is not a model folder")
    else:
        source = path / "config.json"
        config, _ = parse_checkpoint(read_model_json(source), str(source))
        if eos := load_generation_defaults(path).get("eos_token_id"):
            source, config = path / "generation_config.json", replace(config, eos_token_ids=tuple(eos))
    for token in config.eos_token_ids:
        if not isinstance(token, int) or not 0 <= token < config.vocab_size:
            raise BrokenModel(
                f"{source}: the end-of-text id {short_repr(token)} is not one of the vocabulary's "
                f"{config.vocab_size} tokens; correct eos_token_id"
            )
    return config


def load_notes(path: Path) -> list[str]:
    """Return what a user is told of a model that is served in part."""
    if is_gguf(path) or not is_wrapper(read_model_json(path / "config.json")):
        return []
    return ["text only: the towers for images and sound are not loaded"]


def load_quantization(path: Path) -> Quantization | None:
    """Read how the weights of a folder are quantised; None for numbers, and for blocks, whose kind is in their file."""
    if is_gguf(path) or not (path / "config.json").exists():
        return None
    return parse_quantization(read_model_json(path / "config.json"), str(path / "config.json"))


def load_generation_defaults(path: Path) -> dict[str, Any]:
    """Read generation_config.json: eos_token_id as a list, do_sample and sampling numbers, where it sets them."""
    file = path / "generation_config.json"
    if is_gguf(path) or not file.exists():
        return {}
    raw = read_model_json(file)
    defaults: dict[str, Any] = {}
    for key in NUMERIC_DEFAULTS:
        if raw.get(key) is not None:
            if isinstance(raw[key], bool) or not isinstance(raw[key], (int, float)) or not abs(raw[key]) < MOST_NUMBER:
                raise BrokenModel(f"{file}: {key} must be a number, found {short_repr(raw[key])}; correct the file")
            defaults[key] = raw[key]
    if raw.get("do_sample") is not None:
        if not isinstance(raw["do_sample"], bool):
            raise BrokenModel(f"{file}: do_sample must be true or false, found {short_repr(raw['do_sample'])}")
        defaults["do_sample"] = raw["do_sample"]
    try:
        for params in (SamplingParams(), SamplingParams(temperature=1.0)):  # a greedy one leaves filters out
            params.resolve(defaults)
    except InvalidParameter as error:
        raise BrokenModel(f"{file}: {error}; correct the file") from error
    if eos := token_ids(raw, "eos_token_id", str(file)):
        defaults["eos_token_id"] = list(eos)
    return defaults


def load_weights(path: Path, config: ModelConfig) -> Weights:
    """Return the decoder's weights; a checkpoint with other tensors is refused."""
    return load_all_weights(path, config, lambda name: False)[0]


def load_all_weights(path: Path, config: ModelConfig, declared: Declared) -> tuple[Weights, Weights]:
    """Return the decoder's weights and those that a drafter declares; a checkpoint with other tensors is refused."""
    stored, extra = _stored_weights(path, config, declared)
    return _placed(stored, config, in_gguf=is_gguf(path)), extra


def load_stored_weights(path: Path, config: ModelConfig) -> Weights:
    """Return the weights of a folder as they are stored, by the names of `expected_shapes`."""
    return _stored_weights(path, config, lambda name: False)[0]


def _stored_weights(path: Path, config: ModelConfig, declared: Declared) -> tuple[Weights, Weights]:
    if is_gguf(path):
        return _gguf_weights(_open_gguf(path), config, declared)
    return _folder_weights(path, config, declared)


def _placed(stored: Weights, config: ModelConfig, *, in_gguf: bool) -> Weights:
    """Return the decoder's weights, from those of a file."""
    at, shapes = places(config, in_gguf=in_gguf), decoder_shapes(config)
    kinds = {ours: WeightKind.FLOAT32 if place.less_one else stored.kinds[place.name] for ours, place in at.items()}
    return Weights(kinds, lambda ours: at[ours].of(stored[at[ours].name], shapes[ours][0]))


def check_shapes(
    stored: Mapping[str, Shape], config: ModelConfig, source: str, declared: Declared
) -> tuple[list[str], list[str]]:
    """Return the names of the decoder's tensors and of declared ones; raise for the first that is missing, of another
    shape or unexpected."""
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in stored:
            raise BrokenModel(f"{source}: tensor {name} is missing")
        if tuple(stored[name]) != shape:
            raise BrokenModel(f"{source}: tensor {name} has shape {list(stored[name])}, the config says {list(shape)}")
    others = [
        name for name in stored if name not in expected and not name.endswith(REDUNDANT) and name != "lm_head.weight"
    ]
    for name in others:
        if not declared(name):
            raise BrokenModel(f"{source}: tensor {name} is not part of a {config.architecture} model of this config")
    return list(expected), others


def _gguf_weights(file: GGUFFile, config: ModelConfig, declared: Declared) -> tuple[Weights, Weights]:
    names = gguf_names(file)
    shapes = {name: file.tensors[stored].shape for name, stored in names.items()}
    own, extra = check_shapes(shapes, config, str(file.path), declared)
    kinds = {name: gguf_kind(file, stored) for name, stored in names.items()}
    every = Weights(kinds, lambda name: gguf_weight(file, names[name]))
    return every.only(own), every.only(extra)


def _folder_weights(folder: Path, config: ModelConfig, declared: Declared) -> tuple[Weights, Weights]:
    files = TensorFiles(folder)
    if is_wrapper(read_model_json(folder / "config.json")):
        files.keep_text()
    coded = _coded_weights(folder, config, files)
    kinds = {name: weight.kind for name, weight in coded.items()}
    shapes: dict[str, Shape] = {name: weight.shape for name, weight in coded.items()}
    parts, expected = names_of(coded.values()), expected_shapes(config)
    for name, header in files.headers.items():
        if name in parts or (coded and _is_idle(name, files, coded, expected)):
            continue
        block_kind = files.block_kind(name)
        shapes[name] = header.shape
        if header.dtype == "U8" and block_kind is not None:
            kinds[name], shapes[name] = block_shape(header.shape, block_kind, f"{folder}: tensor {name}")
        elif header.dtype in FLOATS:
            kinds[name] = FLOATS[header.dtype]
        elif not name.endswith(REDUNDANT):
            raise BrokenModel(
                f"{folder}: tensor {name} has dtype {header.dtype}; expected one of {', '.join(FLOATS)}, unless "
                "quantization_config in config.json says how to read it"
            )

    def read(name: str) -> StoredWeight:
        if name in coded:
            return coded[name].read(files.read)
        data = files.read(name)
        if kinds[name].is_blocks:
            return checked_blocks(kinds[name], data, f"{folder}: tensor {name}")
        return StoredWeight.of(data)

    own, extra = check_shapes(shapes, config, str(folder), declared)
    every = Weights(kinds, read)
    tied_twice = config.tie_embeddings and "lm_head.weight" in kinds
    if tied_twice and not torch.equal(every["lm_head.weight"].data, every["model.embed_tokens.weight"].data):
        raise BrokenModel(
            f"{folder}: config.json ties lm_head.weight to the embeddings, but the file stores a different one; "
            "set tie_word_embeddings to false"
        )
    return every.only(own), every.only(extra)


def _coded_weights(folder: Path, config: ModelConfig, files: TensorFiles) -> dict[str, CodedWeight]:
    quantization = load_quantization(folder)
    if quantization is None:
        return {}
    return find_coded(files.headers, expected_shapes(config), quantization, str(folder))


def _is_idle(name: str, files: TensorFiles, coded: Container[str], expected: Container[str]) -> bool:
    """Return whether a tensor beside codes has no effect: scales of activations, and biases of 0 that some writers
    add to layers without a bias."""
    layer, _, what = name.rpartition(".")
    if what in UNUSED:
        return True
    added = what == "bias" and name not in expected
    return added and f"{layer}.weight" in coded and not files.read(name).any()


def _open_gguf(path: Path) -> GGUFFile:
    if not path.is_file():
        what = "is no file but a folder, a pipe or a device" if path.exists() else "does not exist"
        raise ModelNotFound(f"{path} {what}")
    return open_gguf(path)
