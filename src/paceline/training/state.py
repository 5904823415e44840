"""training.pt: what a training continues from, and the settings that have to stay as they were."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.errors import InvalidParameter

KEYS = ("weights", "ema", "optimizers", "sampler", "progress")
ANEW = "begin anew with another --out"
UNREADABLE = {  # settings whose values say nothing to a reader: the parameter, and what is wrong with it
    "target": ("target", "the training was begun for another target; give that"),
    "sources": ("data", "the training began with other data; leave --data and --synthesise out to continue with it"),
    "tokens": ("data", "the training's tokens are not those it began with; put them back"),
}


def read_state(path: Path) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        missing = [key for key in KEYS if key not in found]
        if missing:
            raise KeyError(missing[0])
    except FileNotFoundError:
        raise InvalidParameter("resume", f"{path.parent} holds no {path.name}; leave --resume out to begin") from None
    except Exception as error:  # a damaged archive fails in many ways, EOFError among them
        raise damaged(path, error) from error
    return {"settings": {}, **found}


def damaged(path: Path, error: Exception) -> InvalidParameter:
    why = str(error).partition("\n")[0][:80] or type(error).__name__
    return InvalidParameter("resume", f"{path} is damaged ({why}); delete it and run again without --resume")


def check_settings(path: Path, state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    began = state["settings"]
    for name, value in settings.items():
        if name not in began:
            raise InvalidParameter("resume", f"{path} is of an older version, which did not keep {name}; {ANEW}")
        if began[name] != value:
            plain = name, f"the training began with {began[name]}, not {value}; give that"
            field, problem = UNREADABLE.get(name, plain)
            raise InvalidParameter(field, f"{problem}, or {ANEW}")
