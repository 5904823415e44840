"""τ as the engine itself counts it, with a drafter's folder: the last word after a training."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.drafters.methods import METHODS
from paceline.llm import LLM
from paceline.outputs import SpeculationStats
from paceline.sampling_params import SamplingParams


def engine_tau(
    target: str,
    drafter: Path,
    method: str,
    prompts: SequenceOf[SequenceOf[int]],
    *,
    nodes: int,
    max_tokens: int = 128,
    temperature: float = 0.0,
    device: str = "auto",
) -> dict[str, Any]:
    """Over a few answers with drafts of `nodes` tokens each."""
    stats = SpeculationStats()
    params = SamplingParams(temperature=temperature, top_p=1.0, top_k=0, max_tokens=max_tokens)
    settings: dict[str, Any] = {"device": device, "method": method, "k": nodes}
    (need,) = METHODS[method].needs  # a drafter's folder or a model's
    settings[need] = str(drafter)
    with LLM(target, max_num_seqs=8, gpu_memory_fraction=0.3, **settings) as llm:
        for output in llm.generate([list(prompt) for prompt in prompts], params):
            stats.merge(output.outputs[0].speculation)
    reached = [stats.num_drafts, *stats.accepted_per_position]
    depths = [round(after / before, 3) if before else 0.0 for before, after in pairwise(reached)]
    return {"tau": stats.mean_acceptance_length, "by depth": depths}
