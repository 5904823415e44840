"""The folder that a training writes: what may be there before, what is continued, and publishing the drafter.

OUT/config.json, *.safetensors      the drafter, as the engine reads it
OUT/README.md, curve.png, .json     the card
OUT/training/tokens, training.pt    what a later run continues from
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import InvalidParameter, PacelineError
from paceline.files.folders import disk_errors, replace_file
from paceline.training.data.sources import sources_of
from paceline.training.data.store import Source, unwritable

if TYPE_CHECKING:
    from paceline.training.run import TrainOptions

TRAINING, TOKENS, STATE = "training", "tokens", "training.pt"
CONFIG = "config.json"
PARTS = ("weights", "ema", "optimizers", "sampler", "progress")  # keys of training.pt
ANEW = "begin anew with another --out"
UNREADABLE = {  # settings whose values say nothing to a reader: the parameter, and what is wrong with it
    "target": ("target", "the training was begun for another target; give that"),
    "sources": ("data", "the training began with other data; leave --data and --synthesise out to continue with it"),
    "tokens": ("data", "the training's tokens are not those it began with; put them back"),
}


def occupied(folder: Path) -> bool:
    """Return whether something is there that is not an empty folder."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def check_out(out: Path, method: str, *, resume: bool, target: Path, init_from: Path | None) -> None:
    """Refuse a folder whose files the training would destroy."""
    unreadable = disk_errors(
        lambda error: InvalidParameter("out", f"cannot read {out}: {error.strerror}; name another folder")
    )
    with unreadable:
        _check_out(out, method, resume=resume, target=target, init_from=init_from)


def _check_out(out: Path, method: str, *, resume: bool, target: Path, init_from: Path | None) -> None:
    for source, what in ((target, "the target's folder"), (init_from, "the folder of --init-from")):
        if source is not None and out.resolve() in _places(source):
            raise InvalidParameter("out", f"{out} is {what}, which would be overwritten; choose another folder")
    work = out / TRAINING
    if (work / STATE).exists():
        if not resume:
            raise InvalidParameter(
                "out", f"{work} holds a training; continue it with --resume, or choose another folder"
            )
    elif resume:
        raise InvalidParameter("resume", f"{work} holds no {STATE}; leave --resume out to begin")
    elif occupied(out) and not ((work / TOKENS).exists() and _may_replace(out, method)):
        raise InvalidParameter("out", f"{out} holds something else than a training; choose a new or empty folder")
    if (work / TOKENS).exists() and not (work / TOKENS).is_dir():
        raise InvalidParameter("out", f"{work / TOKENS} is not a folder; delete it, or choose another --out")
    if (out / CONFIG).is_dir():
        raise InvalidParameter("out", f"{out / CONFIG} is a folder; delete it, or choose another --out")


def _may_replace(out: Path, method: str) -> bool:
    """Return whether no drafter is there yet, or one of the method, whose training.pt is gone."""
    from paceline.training.export import method_of

    try:
        return not (out / CONFIG).exists() or method_of(out) == method
    except PacelineError:
        return False


def _places(source: Path) -> tuple[Path, ...]:
    """Return the folders of a model, which may be one file of a folder."""
    whole = source.resolve()
    return (whole, whole.parent) if whole.is_file() else (whole,)


@dataclass(frozen=True)
class ResumePlan:
    """Data and settings of a run; of the training before if it is continued."""

    sources: tuple[Source, ...]
    asked: bool  # True: the user named the sources; False: they are those of the training before
    settings: Mapping[str, Any]  # values that stay when it is continued
    state: Mapping[str, Any] | None  # training.pt of the training before

    @staticmethod
    def of(options: TrainOptions, target: str) -> ResumePlan:
        """Read the state of the training before, and write nothing: a refused run leaves a training as it was."""
        asked = sources_of(
            options.data,
            regenerate=options.regenerate,
            synthesise=options.synthesise,
            length=options.length,
            target=target,
        )
        loop = options.loop
        settings = {"method": options.method, "target": target, "seed": loop.seed, "rows": loop.rows}
        settings |= {"length": options.length, "optimizer": loop.optimizer}
        path = options.out / TRAINING / STATE
        state = read_state(path) if options.resume else None
        if asked:
            settings["sources"] = [asdict(source) for source in asked]
        elif state is None:
            raise InvalidParameter("data", "there is nothing to train on; give --data FILE or --synthesise N")
        if state is None:
            return ResumePlan(asked, True, settings, None)
        check_settings(path, state, settings)
        try:
            sources = tuple(Source(**source) for source in state["settings"]["sources"])
        except (KeyError, TypeError) as error:
            raise damaged(path, error) from error
        return ResumePlan(sources, bool(asked), {**settings, "sources": state["settings"]["sources"]}, state)


def read_state(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        missing = [part for part in PARTS if part not in state]
        if missing:
            raise KeyError(missing[0])
    except FileNotFoundError:
        raise InvalidParameter("resume", f"{path.parent} holds no {path.name}; leave --resume out to begin") from None
    except Exception as error:  # a damaged archive fails in many ways, EOFError among them
        raise damaged(path, error) from error
    return {"settings": {}, **state}


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


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace the state: an interruption leaves the old one or the new one."""
    with unwritable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as staging:
            try:
                with staging.open("wb") as file:
                    torch.save(dict(state), file)
            except RuntimeError as error:  # torch's own writer names a full disk so
                raise OSError(str(error).partition("\n")[0]) from error


def publish(out: Path, save: Callable[[Path], None]) -> None:
    """Move the files that `save` writes into `out` once all of them are whole."""
    part = out / ".part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        with unwritable(out):
            save(part)
            for old in (*out.glob("*.safetensors"), *out.glob("*.safetensors.index.json")):
                old.unlink()
            for file in sorted(part.iterdir()):
                file.replace(out / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
