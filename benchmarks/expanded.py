"""A model folder that other software can read: blocks expanded to float32, everything else copied."""

from __future__ import annotations

import shutil
from pathlib import Path

from paceline.models.load.loader import load_config, load_weights
from paceline.models.quant.block_file import BLOCK_WEIGHTS, write_blocks
from paceline.models.weights import WeightKind


def expanded_folder(folder: Path, work: Path) -> Path:
    """`folder` itself unless it holds blocks; else a folder under `work`, written once."""
    if not (folder / BLOCK_WEIGHTS).exists():
        return folder
    out = work / f"{folder.name}-fp32"
    if out.exists():
        return out
    partial = out.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix == ".json":
            shutil.copyfile(file, partial / file.name)
    weights = load_weights(folder, load_config(folder))
    entries = [(name, WeightKind.FLOAT32, weights[name].shape) for name in weights]
    write_blocks(partial / "model.safetensors", entries, weights.__getitem__, lambda done, total: None)
    partial.rename(out)
    return out
