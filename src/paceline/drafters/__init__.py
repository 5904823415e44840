"""The API of drafter authors. The table of methods is read without torch; other names are looked up on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.config import AUTO, NONE
from paceline.drafters.methods import METHODS

if TYPE_CHECKING:
    from paceline.core.device_draft import DeviceDraft
    from paceline.core.draft import Draft, HostDraft, Proposal
    from paceline.core.feedback import Feedback
    from paceline.core.verdict import UnreadVerdict
    from paceline.drafters.base import Drafter, DrafterContext, DraftRequest, HostDrafter, VerifiedDraft
    from paceline.drafters.hidden_states import TapBatch
    from paceline.drafters.tapped import TappedDrafter
    from paceline.models.kv_cache import KVSpec

_HOMES = {
    "DeviceDraft": "core.device_draft",
    **dict.fromkeys(("Draft", "HostDraft", "Proposal"), "core.draft"),
    "Feedback": "core.feedback",
    "UnreadVerdict": "core.verdict",
    **dict.fromkeys(("Drafter", "DrafterContext", "DraftRequest", "HostDrafter", "VerifiedDraft"), "drafters.base"),
    "TapBatch": "drafters.hidden_states",
    "TappedDrafter": "drafters.tapped",
    "KVSpec": "models.kv_cache",
}
__all__ = ["AUTO", "METHODS", "NONE", "DeviceDraft", "Draft", "DraftRequest", "Drafter", "DrafterContext", "HostDraft"]
__all__ += [
    "Feedback",
    "HostDrafter",
    "KVSpec",
    "Proposal",
    "TapBatch",
    "TappedDrafter",
    "UnreadVerdict",
    "VerifiedDraft",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"paceline.{_HOMES[name]}"), name)
