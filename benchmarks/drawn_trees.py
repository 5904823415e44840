"""A block drafter's trees in the engine on a CPU, without seeds: drawn (law 2) against the likeliest nodes (law 1).

A drawn tree has the shape of the likeliest nodes, which follows from committed tokens alone: how many children a node
has is fixed before any token is drawn. Children are the first draws of a row of q without replacement: the highest of
log q plus Gumbel noise. q is over the candidates of a position, under the request's temperature and filters. The engine
verifies such trees by traversal as they are.

Both ways answer each prompt in turn, in an order that alternates. Seconds are the processor's, of all threads, so that
other programs on the machine disturb less. The answers differ, being drawn; compare expected values, which have no
noise of coins.

    python benchmarks/drawn_trees.py --prompts mt_bench.jsonl --nodes 7 15
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import finish
from torch import Tensor

from paceline import SamplingParams, build
from paceline.config import AUTO, EngineConfig, SpeculationConfig
from paceline.core.draft import Draft, Proposal
from paceline.core.rng import Lane, uniform
from paceline.drafters.block.drafter import DSparkDrafter
from paceline.drafters.block.tree import BEAM, CANDIDATES, Lattice, grow, lattice
from paceline.drafters.method_names import drafter_specs
from paceline.engine.engine import Engine
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.models.kv_cache import LayerCache
from paceline.verify.processors import threshold

Floats = np.ndarray[Any, np.dtype[np.float32]]


class Drawing(NamedTuple):
    """A row that draws its tree."""

    row: int
    params: SamplingParams
    key: int  # of its coins
    committed: int  # tokens, when the draft begins


class Drawn(NamedTuple):
    tokens: list[int]  # of the draft vocabulary
    parents: list[int]
    depth: list[int]
    q: dict[int, tuple[Any, Floats]]  # by slot of a parent: tokens (C,) of the draft vocabulary, and q (C,)


class Shares(NamedTuple):
    """A lattice whose transitions are all there, to be changed before a tree is grown."""

    tokens: Tensor  # (B, D, C)
    first: Tensor  # (B, C)
    later: Tensor  # (B, D - 1, C, C) by the candidate before

    @staticmethod
    def of(lattice: Lattice) -> Shares:
        batch, depth, count = lattice.tokens.shape
        every = torch.arange(count).expand(batch, count)
        later = torch.stack([lattice.after(position, every) for position in range(1, depth)], 1)
        return Shares(lattice.tokens, lattice.first, later)

    def after(self, position: int, before: Tensor) -> Tensor:
        rows = self.later[:, position - 1]
        return rows.gather(1, before[..., None].expand(-1, -1, rows.shape[-1]))


def draw(of: Lattice, wanted: Drawing, count: int, beam: int) -> Drawn:
    """A tree of up to `count` nodes for one row of the lattice."""
    only, warmth = slice(wanted.row, wanted.row + 1), wanted.params.temperature
    shares = Shares(*(part[only] for part in Shares.of(of)))
    first, later = ((part / warmth).log_softmax(-1) for part in shares[1:])
    shares = shares._replace(first=first, later=later)
    shape = grow(shares, count, beam)
    parents, depth = shape.parents[0].tolist(), shape.depth[0].tolist()
    candidates, first, later = of.tokens[wanted.row].numpy(), shares.first[0].numpy(), shares.later[0].numpy()
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    noise = _noise(wanted, list(children), candidates.shape[1])
    tokens, place, q = [0] * len(parents), [0] * len(parents), {}
    for at, (parent, below) in enumerate(children.items()):
        position = 0 if parent < 0 else depth[parent]
        row = first if parent < 0 else later[position - 1, min(place[parent], later.shape[1] - 1)]
        q[parent + 1] = candidates[position], _filtered(row, wanted.params)
        with np.errstate(divide="ignore"):
            order = np.argsort(-(np.log(q[parent + 1][1]) + noise[at]), kind="stable")
        for node, chosen in zip(below, order.tolist(), strict=False):
            tokens[node], place[node] = int(candidates[position, chosen]), chosen
    return Drawn(tokens, parents, depth, q)


def _noise(wanted: Drawing, parents: list[int], candidates: int) -> Any:
    """(parents, C) Gumbel noise that no other step uses."""
    slots, columns = np.repeat(np.array(parents) + 1, candidates), np.tile(np.arange(candidates), len(parents))
    words = (np.full_like(slots, wanted.key), np.full_like(slots, wanted.committed), slots, columns)
    units = uniform(Lane.DRAFT, *(torch.from_numpy(word) for word in words))
    return -np.log(-np.log(units.numpy())).reshape(len(parents), candidates)


def _filtered(log_q: Floats, params: SamplingParams) -> Floats:
    """(C,) probabilities under the request's filters."""
    top_k, top_p, min_p = params.top_k or 0, params.top_p, params.min_p
    shifted = log_q - log_q.max()
    if top_k > 0 or top_p < 1 or min_p > 0:
        shifted[shifted < threshold(shifted, top_k, top_p, min_p)] = -np.inf
    weights = np.exp(shifted)
    shares: Floats = weights / weights.sum()
    return shares


def joined(drawn: dict[int, Drawn], others: Draft, ids: Tensor) -> Draft:
    """The draft with some rows drawn; `ids` are the target's ids of draft tokens."""
    columns = np.unique(np.concatenate([tokens for tree in drawn.values() for tokens, _ in tree.q.values()]))
    rows, row_of = [], np.full((others.batch, others.width + 1), -1)
    tokens, parents, depth = (part.clone() for part in (others.tokens, others.parents, others.depth))
    for at, tree in drawn.items():
        for into, part in ((tokens, ids[tree.tokens]), (parents, tree.parents), (depth, tree.depth)):
            into[at, : len(tree.tokens)] = torch.as_tensor(part)
        for slot, (where, shares) in tree.q.items():
            row_of[at, slot] = len(rows)
            rows.append(np.zeros(len(columns), np.float32))
            rows[-1][np.searchsorted(columns, where)] = shares
    q = Proposal(probs=torch.from_numpy(np.stack(rows)), row_of=torch.from_numpy(row_of), ids=ids[columns])
    return Draft(tokens=tokens, parents=parents, depth=depth, num_nodes=others.num_nodes, q=q)


class DrawnTrees(DSparkDrafter):
    """Of one row at a time, which samples without a seed."""

    def bind(self, caches: Sequence[LayerCache], block_size: int) -> None:
        super().bind(caches, block_size)
        self._native = None  # it grows trees of its own, and `_trees` is not asked

    def _trees(self, logits: Tensor, anchors: Tensor, nodes: int) -> tuple[Tensor, Tensor | None]:
        positions = logits.view(len(anchors), self.config.block_size, -1)
        depth = min(self.config.depth, nodes)
        positions = positions[:, self.config.block_size - self.config.depth :][:, :depth]
        anchor_rows, w1, w2 = self._markov or (None, None, None)
        self.lattice = lattice(positions, None if anchor_rows is None else anchor_rows[anchors], w1, w2, CANDIDATES)
        return torch.zeros(3, len(anchors), nodes, dtype=torch.int64), None

    def draft(self, rows: Any, req_indices: Tensor, lengths: Tensor) -> Draft:
        nothing = super().draft(rows, req_indices, lengths)
        ((sequence, *_),) = rows
        wanted = Drawing(0, sequence.params, sequence.noise_key, int(lengths[0]))
        return joined({0: draw(self.lattice, wanted, int(nothing.num_nodes[0]), BEAM)}, nothing, self._ids)


class Way:
    """An engine with one drafter."""

    def __init__(self, target: build.Target, draws: bool, nodes: int | None) -> None:
        speculation = SpeculationConfig(method=AUTO)
        context = build.drafter_context(target.loaded, speculation)
        assert context.checkpoint is not None
        (method,) = (each for each in drafter_specs(speculation, [context.checkpoint]) if each.method.recognise)
        drafter = (DrawnTrees if draws else DSparkDrafter).from_context(context, method.name)
        policy = AdaptivePolicy(method.name, nodes)
        loaded = target.loaded
        config = EngineConfig(max_num_seqs=1)
        self.engine = Engine(loaded.decoder, config, tokenizer=loaded.tokenizer, drafters=[drafter], policy=policy)
        self.tokens = self.passes = 0
        self.cpu_s = 0.0

    def answer(self, prompt: list[int], params: SamplingParams) -> None:
        sequences = self.engine.add_request(str(self.tokens), prompt, params.resolve({}))
        started = time.process_time()
        while self.engine.has_work:
            self.engine.step()
        self.cpu_s += time.process_time() - started
        self.tokens += sequences[0].stats.num_committed_tokens
        self.passes += sequences[0].stats.num_target_passes

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "tau": self.tokens / self.passes,
            "cpu_ms_a_token": 1e3 * self.cpu_s / self.tokens,
            "cpu_ms_a_pass": 1e3 * self.cpu_s / self.passes,
            "tokens": self.tokens,
            "passes": self.passes,
            "failures": self.engine.drafters.failures,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--nodes", type=int, nargs="*", default=[7, 15], help="none: the policy decides")
    parser.add_argument("--part", type=int, nargs=2, default=[0, 1], help="of the prompts: the third of ten is 2 10")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    target = build.load(args.model, device="cpu", threads=args.threads)
    lines = [json.loads(line) for line in Path(args.prompts).read_text().splitlines() if line.strip()]
    texts = [line["turns"][0] if "turns" in line else line["prompt"] for line in lines]
    texts = texts[:: max(1, len(texts) // args.count)][: args.count][args.part[0] :: args.part[1]]
    params = SamplingParams(temperature=args.temperature, top_p=args.top_p, top_k=0, max_tokens=args.max_tokens)
    results: dict[str, dict[str, Any]] = {}
    for nodes in args.nodes or [None]:
        ways = {"drawn": Way(target, True, nodes), "likeliest": Way(target, False, nodes)}
        for at, text in enumerate(texts):
            prompt = target.loaded.tokenizer.apply_chat_template([{"role": "user", "content": text}])
            for name in ways if at % 2 else reversed(ways):
                ways[name].answer(prompt, params)
        for name, way in ways.items():
            results[f"{name}, {nodes or AUTO} nodes"] = way.figures
            print(f"{name}, {nodes or AUTO} nodes: {way.figures}", flush=True)
    finish("drawn_trees", {"temperature": args.temperature, "top_p": args.top_p, "ways": results})


if __name__ == "__main__":
    main()
