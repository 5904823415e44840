"""The files of a Hugging Face folder: its JSON, and the tensors of its safetensors files, read one by one.

The error for a file that is missing, cut short or of another kind names the file and the remedy.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from torch import Tensor

from paceline.errors import BrokenModel, ModelNotFound
from paceline.files.json_fields import Json, read_json
from paceline.files.regular import read_text
from paceline.files.safetensors_reader import SafetensorsFile
from paceline.models.quant.block_file import BLOCK_WEIGHTS

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}  # of a multimodal model
TOWERS = re.compile(r"(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector)\.")


class TensorFiles:
    """All tensors of a folder: their headers, and their data from the files on request."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, SafetensorsFile] = {}
        self._stored: dict[str, str] = {}  # names in the files of a multimodal model's text
        for file in [SafetensorsFile(folder / shard) for shard in _shards(folder)]:
            if twice := next((name for name in file.headers if name in self._file_of), None):
                others = self._file_of[twice].path.name, file.path.name
                raise BrokenModel(f"{folder}: tensor {twice} is in {others[0]} and in {others[1]}; download it again")
            self._file_of |= dict.fromkeys(file.headers, file)
        self.headers = {name: file.headers[name] for name, file in self._file_of.items()}

    def keep_text(self) -> None:
        """Drop the towers of a multimodal model, and name its text as that of a text model."""
        named = {_text_name(name): name for name in self._file_of}
        self._stored = {text: name for text, name in named.items() if text is not None}
        self.headers = {text: self._file_of[name].headers[name] for text, name in self._stored.items()}

    def block_kind(self, name: str) -> str | None:
        """Return the kind of blocks that a tensor of bytes holds (`block_file`)."""
        stored = self._stored.get(name, name)
        return self._file_of[stored].metadata.get(stored)

    def read(self, name: str) -> Tensor:
        stored = self._stored.get(name, name)
        return self._file_of[stored].read(stored)


def _text_name(name: str) -> str | None:
    """Return the name of a tensor in a text model; None for a tensor of a tower."""
    if TOWERS.match(name):
        return None
    for prefix, text in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return text + name.removeprefix(prefix)
    return name


def read_model_json(path: Path) -> Json:
    """Return the object in a file of a model's folder."""
    return read_json(path, hint=_instead)


def _shards(folder: Path) -> list[str]:
    for name in (WEIGHTS, BLOCK_WEIGHTS):
        if (folder / name).exists():
            return [name]
    if (folder / INDEX).exists():
        index = read_model_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise BrokenModel(f"{folder / INDEX}: the key weight_map is missing")
        shards = sorted(set(map(str, index.values())))
        for shard in shards:
            if Path(shard).name != shard or not (folder / shard).is_file():
                raise BrokenModel(f"{folder}: {INDEX} names {shard}, which is missing; download it again")
        return shards
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is not a model folder")
    raise BrokenModel(f"{folder} holds no weights: {WEIGHTS} is missing{_instead(folder)}")


def _instead(folder: Path) -> str:
    """Suggest a remedy, from the files in the folder."""
    if (folder / ADAPTER).is_file():
        return (
            f": it is a LoRA adapter{_base_of(folder / ADAPTER)}, not a model. Merge the two with peft "
            "(merge_and_unload, then save_pretrained) and name the merged folder"
        )
    if any(folder.glob("*.gguf")):
        return f"; name the file itself: {sorted(folder.glob('*.gguf'))[0]}"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return (
            "; there are pickled weights (.bin), which are not supported: convert them with "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder) from transformers"
        )
    within = sorted(each for depth in ("*", "*/*") for each in folder.glob(f"{depth}/config.json"))
    if within and not (folder / "config.json").exists():  # a checkpoint of a run, a snapshot in the hub's cache
        return f"; name the folder that does, such as {within[0].parent}"
    return "; a model's folder has config.json, tokenizer.json and *.safetensors"


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads(read_text(adapter)).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError, BrokenModel):
        base = None
    return f" of {base}" if isinstance(base, str) and base else ""
