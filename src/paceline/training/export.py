"""Export of a drafter's folder in the layout of another engine.

The classes are vLLM's (0.32): an exported folder holds nothing that they would ignore, and a feature that a class lacks
is refused by name. Formats: `eagle3` is the layout its authors publish, `speculators` the library's (EAGLE-3 and block
drafters), `medusa` and `dspark` those of one method.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from paceline.drafters.folder import ExportTarget, read_config
from paceline.drafters.methods import METHODS, methods_of
from paceline.errors import BrokenModel, InvalidParameter
from paceline.files.folders import build_folder
from paceline.models.load.hub import resolve
from paceline.models.load.loader import load_config, load_weights
from paceline.training.output_folder import occupied
from paceline.training.registry import FORMATS


def target_of(name: str) -> ExportTarget:
    """Return the model of this name, whose head is read when it is needed."""
    path = resolve(name)
    config = load_config(path)
    weights = load_weights(path, config)
    rows = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return ExportTarget(name, config, lambda: weights[rows].numbers())


def export(folder: Path, form: str, out: Path, target: ExportTarget | None = None) -> str:
    """Write the drafter of a folder; return its method. `target` is needed for what the folder leaves to its model."""
    if form not in FORMATS:
        raise InvalidParameter("format", f"{form!r} is not one of {', '.join(FORMATS)}")
    if occupied(out):
        raise InvalidParameter("out", f"{out} is there already; choose a folder that does not exist or is empty")
    method = method_of(folder)
    if method not in FORMATS[form]:
        possible = [name for name, methods in FORMATS.items() if method in methods]
        advice = f"export it as {' or '.join(possible)}" if possible else "other engines read its folder as it is"
        raise InvalidParameter("format", f"{folder} holds a drafter of method {method}, which {form} lacks; {advice}")
    write = METHODS[method].export
    assert write is not None, "a format names methods that are exported"
    try:
        with build_folder(out) as staging:
            write(folder, form, staging, target)
            if out.is_dir():
                out.rmdir()  # an empty one: not every system renames over it
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidParameter("out", f"cannot write to {out}: {reason}; free some space or choose another") from error
    return method


def method_of(folder: Path) -> str:
    """Return the method of the drafter in a folder."""
    for method in methods_of(read_config(folder)):
        return method.name
    raise BrokenModel(f"{folder} holds no drafter that is known here")
