"""τ of a drafter on known answers, and as the engine counts it.

The walk is the engine's: every step starts where the last one ended, chains or trees, all rows at once. A deterministic
draft is accepted as long as it holds the target's own next tokens, greedy or sampled (law 1 draws y from p and accepts
a child that equals y), so a stored answer decides what would have been accepted: no target pass is needed beyond the
one that gives the taps. The pass over the prompt counts, as in the engine's τ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.block.config import W2
from paceline.drafters.block.tree import BEAM, CANDIDATES, BlockTrees, grow, lattice
from paceline.drafters.methods import METHODS
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.outputs import SpeculationStats
from paceline.sampling_params import SamplingParams
from paceline.training.data.filters import repeats
from paceline.training.trainees.dspark import DSparkTrainee, context_kv, markov_features
from paceline.training.trainees.target import additive, decoder_layer, layer_weights, rms_norm


@dataclass(frozen=True)
class Walk:
    """Counts of one answer."""

    committed: int
    passes: int
    accepted: tuple[int, ...]  # drafts accepted to depth 1, 2, ...
    loops: bool

    @property
    def drafts(self) -> int:
        return self.passes - 1


def tau(walks: SequenceOf[Walk], *, without_loops: bool = False) -> float:
    counted = [walk for walk in walks if not (without_loops and walk.loops)]
    passes = sum(walk.passes for walk in counted)
    return sum(walk.committed for walk in counted) / passes if passes else float("nan")


def by_depth(walks: SequenceOf[Walk]) -> list[float]:
    """Return the share of drafts accepted to depth 1, 2, ... among those accepted to the depth before."""
    reached = [
        sum(walk.drafts for walk in walks),
        *(sum(each) for each in zip(*(w.accepted for w in walks), strict=True)),
    ]
    return [after / before if before else 0.0 for before, after in pairwise(reached)]


@torch.no_grad()
def walk(
    trainee: DSparkTrainee,
    answers: SequenceOf[tuple[SequenceOf[int], SequenceOf[int]]],
    nodes: int,
    *,
    chain: bool = False,
    parameters: Mapping[str, Tensor] | None = None,
    rows: int = 80,
) -> list[Walk]:
    """Walk (prompt, answer) token ids with drafts of `nodes` tokens, `rows` answers at once."""
    walks: list[Walk] = []
    for start in range(0, len(answers), rows):
        walks += _walk(trainee, answers[start : start + rows], nodes, chain, parameters or trainee.parameters)
    return walks


def _walk(
    trainee: DSparkTrainee,
    answers: SequenceOf[tuple[SequenceOf[int], SequenceOf[int]]],
    nodes: int,
    chain: bool,
    parameters: Mapping[str, Tensor],
) -> list[Walk]:
    model, target, config = trainee.model, trainee.target, trainee.config
    device, size = target.device, config.block_size
    depth = min(config.depth, nodes) if chain else config.depth
    lengths = [len(prompt) + len(answer) for prompt, answer in answers]
    longest = -(-max(lengths) // 8) * 8
    tokens = torch.zeros(len(answers), longest + size + 1, dtype=torch.long)
    for row, (prompt, answer) in enumerate(answers):
        tokens[row, : lengths[row]] = torch.tensor([*prompt, *answer])
    tokens = tokens.to(device)
    at = torch.arange(longest, device=device)
    last = torch.tensor(lengths, device=device) - 1
    segments = (at <= last[:, None]).long()
    positions = at.expand(len(answers), -1)
    hidden = target(tokens[:, :longest], segments, positions, config.taps, compiled=False)
    context = model.context(parameters, hidden.taps, compiled=False)
    weights = [layer_weights(parameters.get, f"layers.{index}") for index in range(config.body.num_layers)]
    rotary = target.rotary(positions)
    cached = [context_kv(context, rotary, one, model.eps) for one in weights]

    place = torch.tensor([len(prompt) for prompt, _ in answers], device=device)  # the anchor: first answer token
    passes = torch.ones(len(answers), dtype=torch.long, device=device)
    accepted = torch.zeros(len(answers), depth, dtype=torch.long, device=device)
    ahead = torch.arange(1, size + 1, device=device)
    steps = torch.arange(size, device=device)
    while bool((place < last).any()):
        x = model.blocks(parameters, tokens.gather(1, place[:, None]))
        at_block = target.rotary((place[:, None] + steps).clamp(max=target.config.max_positions - 1))
        seen = torch.cat((at < place[:, None], torch.ones(len(x), size, dtype=torch.bool, device=device)), 1)
        mask = additive(seen[:, None, None].expand(-1, 1, size, -1), model.dtype)
        for (k, v), one in zip(cached, weights, strict=True):
            x = decoder_layer(x, at_block, mask, one, model.eps, model.dtype, keys=(k,), values=(v,))[0]
        states = rms_norm(x, parameters["norm.weight"], model.eps).to(model.dtype)
        tree = _tree(trainee, parameters, states, tokens.gather(1, place[:, None])[:, 0], nodes, chain)
        actual = tokens.gather(1, place[:, None] + ahead)
        actual = torch.where(place[:, None] + ahead <= last[:, None], actual, -1)
        reached = accepted_path(tree, actual, depth)  # (S, depth) bool
        running = place < last
        accepted += reached & running[:, None]
        passes += running
        place = torch.where(running, torch.minimum(place + reached.sum(1) + 1, last), place)
    counts = zip(passes.tolist(), accepted.tolist(), answers, strict=True)
    return [Walk(len(answer), n, tuple(each), repeats(np.array(answer))) for n, each, (_, answer) in counts]


def _tree(
    trainee: DSparkTrainee, parameters: Mapping[str, Tensor], states: Tensor, anchor: Tensor, nodes: int, chain: bool
) -> BlockTrees:
    """Grow the drafter's own tree from the head's input (S, g, H), with the target's ids."""
    depth = min(trainee.config.depth, nodes) if chain else trainee.config.depth
    logits = (states @ trainee.head.T).float()[:, -trainee.config.depth :][:, :depth]
    before = markov_features(parameters, trainee.draft_id, anchor, trainee.model.dtype)
    of_draft = markov_features(parameters, trainee.draft_id, trainee.vocab, trainee.model.dtype)
    w2 = None if before is None else parameters[W2].to(before.dtype)
    tree = grow(lattice(logits, before, of_draft, w2, CANDIDATES), nodes, 1 if chain else BEAM)
    return tree._replace(tokens=trainee.vocab[tree.tokens])


def accepted_path(tree: BlockTrees, actual: Tensor, depth: int) -> Tensor:
    """Return (S, depth) bool: whether the first d actual tokens are a path of the tree."""
    alive = torch.ones(len(actual), dtype=torch.bool, device=actual.device)
    node = torch.full((len(actual),), -1, device=actual.device)
    reached = []
    for level in range(depth):
        match = (tree.parents == node[:, None]) & (tree.tokens == actual[:, level, None]) & (tree.depth == level + 1)
        alive = alive & match.any(1)
        node = match.long().argmax(1)
        reached.append(alive)
    return torch.stack(reached, 1)


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
    """Return τ and acceptance by depth of a few answers, which an engine drafts with `nodes` tokens a step."""
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


def by_engine(
    target: str,
    out: Path,
    method: str,
    prompts: SequenceOf[SequenceOf[int]],
    *,
    nodes: int,
    device: str,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Return τ as the engine counts it, greedy and sampled. A drafter that the engine cannot run is reported."""
    figures: dict[str, Any] = {}
    try:
        for temperature in (0.0, 0.7) if prompts else ():
            measured = engine_tau(target, out, method, prompts, nodes=nodes, temperature=temperature, device=device)
            figures[f"τ of the engine, {nodes} nodes, T {temperature:g}"] = measured["tau"]
            figures[f"accepted by depth, T {temperature:g}"] = measured["by depth"]
            report(f"{out}: τ {measured['tau']:.2f} at T {temperature:g}, by depth {measured['by depth']}")
    except PacelineError as error:
        report(f"the engine could not measure {out}: {error}")
    return figures
