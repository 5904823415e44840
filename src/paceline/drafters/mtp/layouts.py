"""Heads for multi-token prediction as checkpoints lay them out, by family: names, order of the halves, hidden states.

A head of module 0 is one decoder layer behind a projection of (embedding of token t + 1, hidden state of t). Drafts of
several tokens call it again with its own output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.drafters.eagle.config import EMBEDDING_NORM, FEATURE_NORM, LAYER

COUNT = "num_nextn_predict_layers"  # config key: modules in the checkpoint


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """The layout of a family's heads; `names` lead from its parts, behind `prefix`, to those of EagleConfig."""

    architecture: str  # of the model in config.json
    prefix: str  # of module 0; a module's number stands in it
    names: Mapping[str, str]
    feature_first: bool  # order of the halves that the projection joins
    normed_feature: bool  # the hidden state fed is taken after the target's final norm

    def plain_name(self, stored: str) -> str | None:
        """Return the name in EagleConfig's spelling; None: no tensor of module 0."""
        if not stored.startswith(self.prefix):
            return None
        part = stored.removeprefix(self.prefix)
        module, _, kind = part.rpartition(".")
        return f"{self.names.get(module, f'{LAYER}.{module}')}.{kind}"

    def stored_name(self, plain: str) -> str:
        module, _, kind = plain.rpartition(".")
        part = next((part for part, name in self.names.items() if name == module), module.removeprefix(f"{LAYER}."))
        return f"{self.prefix}{part}.{kind}"


# MiMo-7B. vLLM feeds the hidden state before the final norm, SGLang the one after it; no checkpoint was at hand to
# compare their acceptance.
MIMO_FEEDS_NORMED = False
MIMO = HeadLayout(
    architecture="MiMoForCausalLM",
    prefix="model.mtp_layers.0.",
    names={
        "input_proj": "fc",
        "token_layernorm": EMBEDDING_NORM,
        "hidden_layernorm": FEATURE_NORM,
        "final_layernorm": "norm",
    },
    feature_first=True,
    normed_feature=MIMO_FEEDS_NORMED,
)
LAYOUTS = {layout.architecture: layout for layout in (MIMO,)}


def layout_of(raw: Mapping[str, Any]) -> HeadLayout | None:
    """Return the layout of the heads that a config.json promises; None: no heads, or of an unknown family."""
    names, count = raw.get("architectures"), raw.get(COUNT)
    if not isinstance(names, list) or not names or type(count) is not int or count < 1:
        return None
    return LAYOUTS.get(str(names[0]))


def is_head_tensor(name: str) -> bool:
    """Return whether a tensor of a model's checkpoint belongs to a head."""
    return any(name.startswith(layout.prefix.partition("0.")[0]) for layout in LAYOUTS.values())
