"""Ways to make a tree from one pass of a block drafter, compared at the same states of the same answers.

The engine answers prompts with a draft that is the union of all trees under trial, which the walk (law 1) verifies
without loss. The target's distribution at every node gives each tree's *expected* number of accepted tokens: for
deterministic trees the sum of p over the paths of their nodes, for trees drawn without replacement (law 2) the
expectation of traversal verification over its coins. So trials are paired, and no coin adds noise.

- `top`: the likeliest nodes by the drafter's own distribution; `top/T`: with its logits divided by T.
- `drawn as top`: drawn without replacement from q at the request's temperature, in the shape of `top/T`.
- `drawn, fixed`: the same in the best shape for `RANKS`, the same at every step.
- `merged n`: with the tree of a lookup, and `suffix`: that alone.
- `coupled/c`: the target draws its tokens by noise that the drafter knows (law 3), which is added to log q.

    python benchmarks/tree_trials.py --prompts mt_bench.jsonl --temperature 0.7 --out steps.json
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import finish
from drawn_trees import Drawing, Shares, draw
from speculation import index_prompts
from torch import Tensor

from paceline import SamplingParams, build
from paceline.config import AUTO, EngineConfig, SpeculationConfig
from paceline.core.draft import Draft
from paceline.drafters.base import DraftRequest
from paceline.drafters.block.checkpoint import read
from paceline.drafters.block.config import CONFIDENCE
from paceline.drafters.block.drafter import DSparkDrafter
from paceline.drafters.block.tree import BEAM, CANDIDATES, grow, lattice
from paceline.drafters.method_names import drafter_specs
from paceline.drafters.methods import METHODS, SUFFIX
from paceline.engine.engine import Engine
from paceline.engine.policy import level
from paceline.engine.policy import survival as acceptance
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.models.decoder import FINAL
from paceline.models.kv_cache import LayerCache

KINDS = ("top", "coupled", "suffix", "merged")  # deterministic trials, whose first n nodes are a trial of n
MOST = 400  # nodes of a union
RANKS = (0.66, 0.14, 0.06, 0.03, 0.02, 0.015, 0.01)  # how often the first, second, ... child drawn is accepted


class Tree(NamedTuple):
    tokens: list[int]  # the target's ids
    parents: list[int]  # -1: the root
    score: list[float]  # log probability of the path by the drafter; empty for drawn trees
    q: dict[int, Tensor]  # by parent: what its children were drawn from, over the draft vocabulary; empty: not drawn


def fixed_shape(count: int, depth: int) -> list[int]:
    """Parents of the likeliest nodes where children are accepted by `RANKS`."""
    found: list[int] = []
    heap = [(-RANKS[0], -1, 0, 1)]  # less the probability of the path, parent, rank, depth
    while len(found) < count:
        less, parent, rank, level = heapq.heappop(heap)
        found.append(parent)
        if rank + 1 < len(RANKS):
            heapq.heappush(heap, (less / RANKS[rank] * RANKS[rank + 1], parent, rank + 1, level))
        if level < depth:
            heapq.heappush(heap, (less * RANKS[0], len(found) - 1, 0, level + 1))
    return found


def merged(one: Tree, other: Tree, count: int) -> Tree:
    """Nodes of both in turn, each path once."""
    paths: dict[tuple[int, ...], int] = {}
    queues = []
    for tree in (one, other):
        own: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            own.append((*(own[parent] if parent >= 0 else ()), token))
        queues.append(iter(own))
    while len(paths) < count and queues:
        for queue in list(queues):
            path = next((each for each in queue if each not in paths), None)
            if path is None:
                queues.remove(queue)
            elif len(paths) < count:
                paths[path] = len(paths)
    return Tree([path[-1] for path in paths], [paths.get(path[:-1], -1) for path in paths], [], {})


class Trials(DSparkDrafter):
    """Proposes the union of all trials, and keeps them for `expected`."""

    def bind(self, caches: Sequence[LayerCache], block_size: int) -> None:
        super().bind(caches, block_size)
        self._native = None  # it grows trees of its own, and `_trees` is not asked

    def prepare(self, folder: Path, vocab_size: int, args: argparse.Namespace) -> None:
        self.vocab_size, self.temperature, self.sizes = vocab_size, args.temperature, args.sizes
        self.scales, self.sharpness, self.fixed, self.draws = args.scales, args.sharpness, args.fixed, not args.lookup
        self.lookup: Any = None
        self.support = 0
        _, tensors = read(folder)
        self.confidence = tensors[f"{CONFIDENCE}.weight"].float()[0], tensors[f"{CONFIDENCE}.bias"].float()
        self.rng = torch.Generator().manual_seed(0)
        self.trials: dict[str, Tree] = {}
        run = self._decoder.run

        def tapped(residual: Tensor, plan: Any, caches: Any, rows: Any) -> Any:
            output = run(residual, plan, caches, rows, (FINAL,))
            self.hidden = output.taps[:, 0].float()
            return output

        self._decoder.run = tapped  # type: ignore[method-assign]

    @property
    def markov(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self._markov is not None
        return self._markov

    def _trees(self, logits: Tensor, anchors: Tensor, nodes: int) -> tuple[Tensor, Tensor | None]:
        self.logits = logits[self.config.block_size - self.config.depth :].float()  # (D, V)
        self.states = self.hidden[self.config.block_size - self.config.depth :]
        self.anchor = int(anchors[0])
        return torch.zeros(3, 1, nodes, dtype=torch.int64), None

    @torch.inference_mode()
    def draft(self, rows: Any, req_indices: Tensor, lengths: Tensor) -> Draft:
        if rows[0].max_nodes < MOST:  # the answer is about to end
            return Draft.empty(1)
        super().draft(rows, req_indices, lengths)
        most = max(self.sizes)
        self.trials = {"top": self.top(1.0, most), **{f"top/{scale}": self.top(scale, most) for scale in self.scales}}
        if self.lookup is not None:
            self._look_up(rows[0].sequence, most)
        if self.temperature and self.draws:
            for size in self.sizes:
                shape = self.top(self.temperature, size).parents
                self.trials[f"drawn as top {size}"] = self.drawn(shape)
                self.trials[f"drawn, candidates alone {size}"] = self.drawn_here(size)
                if self.fixed:
                    self.trials[f"drawn, fixed {size}"] = self.drawn(fixed_shape(size, self.config.depth))
            self.noise = -torch.empty(self.config.depth, self.vocab_size).exponential_(generator=self.rng).log()
            for scale in self.sharpness:
                self.trials[f"coupled/{scale}"] = self.coupled(scale, most)
        self.union: dict[tuple[int, ...], int] = {}  # path -> node
        self.places = {name: self._placed(tree) for name, tree in self.trials.items()}
        paths = list(self.union)
        counts = torch.tensor([len(paths)])
        return Draft(
            tokens=torch.tensor([[path[-1] for path in paths]]),
            parents=torch.tensor([[self.union.get(path[:-1], -1) for path in paths]]),
            depth=torch.tensor([[len(path) for path in paths]]),
            num_nodes=counts,
        )

    def _look_up(self, sequence: Any, most: int) -> None:
        """`suffix`: the lookup's tree; `merged n`: its nodes in turn with the drafter's own, n in all."""
        assert self.lookup is not None
        self.support = self.lookup.level(sequence)
        found = self.lookup.propose([DraftRequest(sequence, most)])
        count = int(found.num_nodes[0])
        self.trials["suffix"] = Tree(found.tokens[0, :count].tolist(), found.parents[0, :count].tolist(), [], {})
        for size in self.sizes:
            self.trials[f"merged {size}"] = merged(self.trials["top"], self.trials["suffix"], size)

    def _placed(self, tree: Tree) -> list[int]:
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            path = (*(paths[parent] if parent >= 0 else ()), token)
            self.union.setdefault(path, len(self.union))
            paths.append(path)
        return [self.union[path] for path in paths]

    def top(self, scale: float, count: int) -> Tree:
        before, w1 = self.markov[0][self.anchor][None].float() / scale, self.markov[1].float() / scale
        found = grow(lattice(self.logits[None] / scale, before, w1, self.markov[2].float(), CANDIDATES), count)
        return Tree(self._ids[found.tokens[0]].tolist(), found.parents[0].tolist(), found.score[0].tolist(), {})

    def q(self, depth: int, token: int) -> Tensor:
        """(draft vocabulary,) the drafter's distribution behind a token, at the request's temperature."""
        logits = self.logits[depth] + (self.markov[2] @ self.markov[0][token]).float()
        return (logits / self.temperature).softmax(-1)

    def coupled(self, scale: float, count: int) -> Tree:
        """The likeliest nodes once the noise is known by which the target's tokens are drawn (law 3): log q plus noise,
        divided by `scale`, is taken for the logarithm of a probability."""
        before = self.markov[0][self.anchor][None].float() / self.temperature
        given = (
            self.logits[None] / self.temperature,
            before,
            self.markov[1].float() / self.temperature,
            self.markov[2].float(),
        )
        tokens, first, later = Shares.of(lattice(*given, CANDIDATES))
        noise = self.noise[torch.arange(len(self.logits))[:, None], self._ids[tokens[0]]][None]  # (1, D, C)
        first = ((first + noise[:, 0]) / scale).log_softmax(-1)
        later = ((later + noise[:, 1:, None]) / scale).log_softmax(-1)
        found = grow(Shares(tokens, first, later), count)
        return Tree(self._ids[found.tokens[0]].tolist(), found.parents[0].tolist(), found.score[0].tolist(), {})

    def agreed(self, name: str, p: Tensor) -> list[float]:
        """(nodes,) 1 for nodes on the path of the tokens that the target draws by the same noise."""
        tree, at, found, depths = self.trials[name], self.places[name], list[float](), list[int]()
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            on_path = parent < 0 or found[parent] > 0
            row = 0 if parent < 0 else at[parent] + 1
            found.append(float(on_path and int((p[row].log() + self.noise[depths[-1]]).argmax()) == token))
        return found

    def drawn(self, parents: list[int]) -> Tree:
        tokens, depths, q = [0] * len(parents), [0] * len(parents), {}
        for parent in dict.fromkeys(parents):
            children = [node for node, above in enumerate(parents) if above == parent]
            depth, token = (0, self.anchor) if parent < 0 else (depths[parent], tokens[parent])
            q[parent] = self.q(depth, token)
            noise = -torch.empty_like(q[parent]).exponential_(generator=self.rng).log()
            best = (q[parent].log() + noise).topk(len(children)).indices
            for child, chosen in zip(children, self._ids[best].tolist(), strict=True):
                tokens[child], depths[child] = chosen, depth + 1
        return Tree(tokens, parents, [], q)

    def drawn_here(self, count: int) -> Tree:
        """As drawn_trees.py draws in the engine: q is over the candidates of each position alone."""
        found = lattice(
            self.logits[None], self.markov[0][self.anchor][None], self.markov[1], self.markov[2], CANDIDATES
        )
        params = SamplingParams(temperature=self.temperature, top_p=1.0, top_k=0).resolve({})
        key = int(torch.randint(1 << 40, (), generator=self.rng))
        tree = draw(found, Drawing(0, params, key, 0), count, BEAM)
        q = {}
        for slot, (tokens, shares) in tree.q.items():
            q[slot - 1] = torch.zeros(len(self._ids)).index_copy_(0, torch.as_tensor(tokens), torch.as_tensor(shares))
        return Tree(self._ids[tree.tokens].tolist(), tree.parents, [], q)

    def confident(self, tree: Tree) -> list[float]:
        """Of each node: the confidence head's probability that a token drawn from its parent's q is accepted."""
        weight, bias = self.confidence
        found, depths = [], []
        for parent in tree.parents:
            depth, token = (0, self.anchor) if parent < 0 else (depths[parent], tree.tokens[parent])
            given = torch.cat((self.states[depth], self.markov[0][token].float()))
            found.append(float(torch.sigmoid(weight @ given + bias)))
            depths.append(depth + 1)
        return found

    def survival(self, name: str, p: Tensor) -> list[float]:
        """(nodes,) the probability that each node of a deterministic tree is on the accepted path."""
        tree, at, found = self.trials[name], self.places[name], []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            row = 0 if parent < 0 else at[parent] + 1
            found.append((found[parent] if parent >= 0 else 1.0) * float(p[row, token]))
        return found

    def descended(self, name: str, p: Tensor) -> float:
        """The same by the rule that goes down from the root and reads no p beside its path: children in turn, each with
        min(1, p/q), then from the excess of p over q."""
        tree, at = self.trials[name], self.places[name]
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)

        def below(node: int) -> float:
            if node not in children:
                return 0.0
            target = p[0 if node < 0 else at[node] + 1].double()
            q = torch.zeros_like(target).index_copy_(0, self._ids, tree.q[node].double())
            expected, alive = 0.0, 1.0
            for child in children[node]:
                token = tree.tokens[child]
                share = float(q[token])
                accepts = min(1.0, float(target[token]) / share) if share > 0 else 0.0
                expected, alive = expected + alive * accepts * (1 + below(child)), alive * (1 - accepts)
                excess = (target - q).clamp_min(0)
                if float(excess.sum()) > 0:
                    target = excess / excess.sum()
                q[token] = 0
                q = q / q.sum().clamp_min(1e-30)
            return expected

        return below(-1)

    def traversed(self, name: str, p: Tensor) -> float:
        """The expected number of accepted tokens of a drawn tree, by the rule of verify/tree.py."""
        tree, at, ids = self.trials[name], self.places[name], self._ids
        count = len(tree.tokens)
        target, q = {}, {}
        for parent in tree.q:
            target[parent] = p[0 if parent < 0 else at[parent] + 1].double()
            q[parent] = torch.zeros_like(target[parent]).index_copy_(0, ids, tree.q[parent].double())
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        settled: dict[int, float] = {-1: 1.0}

        def a(node: int) -> float:
            if node in settled:
                return settled[node]
            above, token = tree.parents[node], tree.tokens[node]
            share = float(q[above][token])
            return min(1.0, a(above) * float(target[above][token]) / share) if share > 0 else 0.0

        depth = [0] * count
        for node, parent in enumerate(tree.parents):
            depth[node] = 1 + (depth[parent] if parent >= 0 else 0)
        expected, alive = 0.0, 1.0

        def visit(node: int) -> None:
            nonlocal expected, alive
            for child in children.get(node, ()):
                visit(child)
            if node < 0 or alive < 1e-9:
                return
            accepts = a(node)
            expected, alive = expected + alive * accepts * depth[node], alive * (1 - accepts)
            above = tree.parents[node]
            scale = a(above)
            excess = (target[above] * scale - q[above]).clamp_min(0)
            surplus = float(excess.sum())
            if surplus > 0:
                target[above] = excess / surplus
            q[above][tree.tokens[node]] = 0
            q[above] /= q[above].sum().clamp_min(1e-30)
            total = surplus + 1 - scale
            settled[above] = surplus / total if total > 0 else scale

        visit(-1)
        return expected


def collect(args: argparse.Namespace) -> list[dict[str, Any]]:
    target = build.load(args.model, device="cpu")
    speculation = SpeculationConfig(method=AUTO, drafter=tuple(args.drafter or ()))
    context = build.drafter_context(target.loaded, speculation)
    assert context.checkpoint is not None
    (method,) = (each for each in drafter_specs(speculation, [context.checkpoint]) if each.method.recognise)
    drafter = Trials.from_context(context, method.name)
    assert isinstance(drafter, Trials)
    drafter.prepare(context.checkpoint, target.loaded.config.vocab_size, args)
    acceptance.MAX_K = level.MAX_K = MOST
    drafters: list[Any] = [drafter]
    if args.lookup:
        drafter.lookup = METHODS[SUFFIX].make(context)
        drafters.append(drafter.lookup)
    policy = AdaptivePolicy(method.name, MOST)
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=4 * MOST)
    engine = Engine(target.loaded.decoder, config, tokenizer=target.loaded.tokenizer, drafters=drafters, policy=policy)
    sampler, steps = engine.runner.sampler, []
    verify = sampler.verify

    def watched(sequences: Any, draft: Draft, logits: Tensor, row_of: Tensor, **given: Any) -> Any:
        if draft.width:
            of = logits[row_of[0]].float()
            if args.temperature:
                p = (of / args.temperature).softmax(-1)
            else:
                p = torch.zeros_like(of).scatter_(1, of.argmax(-1, keepdim=True), 1)
            steps.append(measured(drafter, p))
        return verify(sequences, draft, logits, row_of, **given)

    sampler.verify = watched  # type: ignore[method-assign]
    lines = index_prompts([args.prompts] if args.prompts else [], None)
    every = max(1, len(lines) // args.count)
    for at, line in enumerate(lines[::every][: args.count]):
        text = line["turns"][0] if "turns" in line else line["prompt"]
        prompt = target.loaded.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        params = SamplingParams(temperature=args.temperature, top_p=1.0, top_k=0, max_tokens=args.max_tokens)
        engine.add_request(str(at), prompt, params.resolve({}))
        first = len(steps)
        while engine.has_work:
            engine.step()
        for step in steps[first:]:
            step["prompt"] = at
        print(f"prompt {at}: {len(steps)} steps", flush=True)
    if engine.drafters.failures:
        raise SystemExit("a draft failed; see the warning above")
    return steps


def measured(drafter: Trials, p: Tensor) -> dict[str, Any]:
    step: dict[str, Any] = {"nodes": len(drafter.union)}
    for name, tree in drafter.trials.items():
        if tree.q:
            step[name] = drafter.traversed(name, p)
            step[f"{name}, top-down"] = drafter.descended(name, p)
        elif name.startswith("coupled"):
            step[name] = drafter.agreed(name, p)
        else:
            step[name] = drafter.survival(name, p)
            if tree.score:
                step[f"{name} score"] = tree.score
    step["support"] = drafter.support
    step["confidence"] = drafter.confident(drafter.trials["top"])
    step["parents"] = drafter.trials["top"].parents
    return step


def table(steps: list[dict[str, Any]], sizes: list[int]) -> dict[str, float]:
    """The mean number of tokens a step commits, by trial and nodes."""
    found: dict[str, float] = {}
    for name, value in steps[0].items():
        if isinstance(value, list) and name.startswith(KINDS) and not name.endswith("score"):
            for size in sizes:
                found[f"{name} {size}"] = 1 + float(np.mean([sum(step[name][:size]) for step in steps]))
        elif name.startswith("drawn"):
            found[name] = 1 + float(np.mean([step[name] for step in steps]))
    return found


def interval(steps: list[dict[str, Any]], name: str, base: str, size: int) -> tuple[float, float]:
    """Gain of one trial over another in tokens a step, and its standard error over prompts."""

    def per_step(step: dict[str, Any], of: str) -> float:
        return 1 + (sum(step[of][:size]) if isinstance(step[of], list) else step[of])

    pairs: dict[int, list[tuple[float, float]]] = {}
    for step in steps:
        pairs.setdefault(step["prompt"], []).append((per_step(step, name), per_step(step, base)))
    sums = np.array([np.sum(each, 0) for each in pairs.values()])
    gain = float(sums[:, 0].sum() / sums[:, 1].sum()) - 1
    spread = (sums[:, 0] - (1 + gain) * sums[:, 1]).std(ddof=1) * math.sqrt(len(sums)) / sums[:, 1].sum()
    return gain, float(spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", nargs=1, help="a folder; the packaged one, if none is given")
    parser.add_argument("--prompts", help="a file; copy-heavy prompts of our own, if none is given")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--sizes", type=int, nargs="+", default=[7, 15, 60])
    parser.add_argument("--scales", type=float, nargs="*", default=[0.7])
    parser.add_argument("--sharpness", type=float, nargs="*", default=[0.4, 0.7, 1.0])
    parser.add_argument("--lookup", action="store_true", help="merged with a lookup's tree, in place of drawn trees")
    parser.add_argument("--fixed", action="store_true", help="fixed shapes too")
    parser.add_argument("--out", help="all steps, as JSON")
    args = parser.parse_args()
    steps = collect(args)
    if args.out:
        Path(args.out).write_text(json.dumps(steps))
    found = table(steps, args.sizes)
    for size in args.sizes:
        print(f"{size} nodes: top {found[f'top {size}']:.3f}")
        names = [f"top/{scale}" for scale in args.scales]
        names += [name for scale in args.sharpness if (name := f"coupled/{scale}") in steps[0]]
        if args.lookup:
            names += ["suffix", f"merged {size}"]
        drawn = [name for name in found if name.startswith("drawn")]
        names += [name for name in drawn if name.removesuffix(", top-down").endswith(f" {size}")]
        for name in names:
            gain, error = interval(steps, name, "top", size)
            print(f"  {name}: {100 * gain:+.1f} % (standard error {100 * error:.1f})")
    finish("tree_trials", {"temperature": args.temperature, "steps": len(steps), "tokens a step": found})


if __name__ == "__main__":
    main()
