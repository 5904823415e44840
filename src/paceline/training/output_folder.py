"""The folder that a training writes: what may be there before."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import InvalidParameter, PacelineError

TRAINING, TOKENS, STATE = "training", "tokens", "training.pt"
CONFIG = "config.json"  # of the finished drafter


def occupied(folder: Path) -> bool:
    """Whether something is there that is not an empty folder."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def check_out(out: Path, method: str, *, resume: bool, target: Path, init_from: Path | None) -> None:
    """Refuses a folder whose files the training would destroy."""
    try:
        _check(out, method, resume=resume, target=target, init_from=init_from)
    except OSError as error:
        raise InvalidParameter("out", f"cannot read {out}: {error.strerror}; name another folder") from error


def _check(out: Path, method: str, *, resume: bool, target: Path, init_from: Path | None) -> None:
    for given, what in ((target, "the target's folder"), (init_from, "the folder of --init-from")):
        if given is not None and out.resolve() in _places(given):
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
    """No drafter is there yet, or one of the method: its training.pt is gone, or it would have been found before."""
    from paceline.training.export import method_of

    try:
        return not (out / CONFIG).exists() or method_of(out) == method
    except PacelineError:
        return False


def _places(given: Path) -> tuple[Path, ...]:
    """A model may be one file of a folder."""
    whole = given.resolve()
    return (whole, whole.parent) if whole.is_file() else (whole,)
