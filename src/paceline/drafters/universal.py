"""The universal drafter: a small model that drafts for any target by itself, where it is in the cache and its price is
low. Nothing is fetched, and a pair that does not fit is left out without a word to the user.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path

from paceline.drafters.base import Drafter, DrafterContext, HostDrafter
from paceline.drafters.methods import DRAFT_MODEL, METHODS
from paceline.errors import PacelineError
from paceline.models.load.hub import UNIVERSAL, resolve_here

HIGHEST_PRICE = 0.2  # bytes of its pass over the target's; above it a chain costs most of what it brings
log = logging.getLogger("paceline")


def is_lookup(drafter: Drafter) -> bool:
    """Return whether a drafter searches text: then a model may still bring more."""
    return isinstance(drafter, HostDrafter) and not drafter.pass_bytes


def universal_drafters(context: DrafterContext, target_bytes: int) -> SequenceOf[Drafter]:
    """Return the universal drafter in a list; an empty one where it is not at hand, or would cost too much.

    `target_bytes`: weights that a pass of the target reads; 0: unknown. On a GPU it drafts by name alone: between its
    tokens the host waits.
    """
    if context.device.type != "cpu" or not target_bytes:
        return []
    try:
        path = resolve_here(UNIVERSAL)
        if _bytes_of(path) > HIGHEST_PRICE * target_bytes:
            return []
        named = replace(context, speculation=replace(context.speculation, draft_model=(UNIVERSAL,)))
        drafter: Drafter = METHODS[DRAFT_MODEL].make(named)
    except (PacelineError, OSError) as problem:
        log.debug("the universal drafter is left out: %s", problem)
        return []
    drafter.name = f"{DRAFT_MODEL}:{UNIVERSAL}"
    return [drafter]


def _bytes_of(path: Path) -> int:
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)
