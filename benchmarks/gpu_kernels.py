"""Kernels alone on a CUDA device.

    python -m benchmarks.gpu_kernels attention [--parts nodes passes]
    python -m benchmarks.gpu_kernels verify [--nodes 64] [--vocabs 128256 49152] [--rows 1 16]

`attention`: the yardstick's layers in a row, replayed from a graph: by nodes and context, and for whole passes,
undivided (a program for each tile) and dealt by length, with equal bits. `verify`: drafts of 64 nodes, captured in a
graph and replayed, the L2 cache flushed before each; eager calls; and calls as the engine makes them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.passes import BLOCK, device_ms
from benchmarks.harness import finish
from paceline.core.draft import Draft, Proposal
from paceline.core.sequence import Sequence as Answer
from paceline.engine.sampler import Sampler
from paceline.models.backends.cuda.attention.attention import Work, Workspace, attention, tiles_of, work_of
from paceline.models.backends.cuda.attention.division import HEADER, KEYS, PROGRAMS, chunks_of
from paceline.models.kv_cache import KVCache, KVSpec, LayerCache
from paceline.models.plan import PassPlan
from paceline.sampling_params import SamplingParams
from paceline.verify import DrawKeys, Nodes, SamplingMetadata, SamplingMode, probabilities, verify

LAYERS, Q_HEADS, KV_HEADS, DIM = 32, 32, 8, 128
NODES, CONTEXTS = (1, 8, 32, 64), (1024, 16384)
Spans = list[tuple[int, int]]  # of each sequence: keys before the pass, and rows
DECODES: Spans = [(100 + 500 * at // 30, 1) for at in range(31)]
PASSES: dict[str, Spans] = {
    "31 decodes, 225 of a prompt at 0": [*DECODES, (0, 225)],
    "31 decodes, 225 of a prompt at 1900": [*DECODES, (1900, 225)],
    "31 decodes, 225 of a prompt at 3870": [*DECODES, (3870, 225)],
    "31 decodes, 224 of a prompt at 3870": [*DECODES, (3870, 224)],
    "31 decodes, 353 of a prompt at 3870": [*DECODES, (3870, 353)],
    "31 decodes, 481 of a prompt at 3870": [*DECODES, (3870, 481)],
    "225 of a prompt at 3870": [(3870, 225)],
    "30 decodes, 2 prompts of 49": [*DECODES[:30], (0, 49), (0, 49)],
    **{f"{count} decodes at 512": [(511, 1)] * count for count in (8, 16, 32, 64, 128, 256)},
    "31 decodes at 512, one at 8000": [*[(511, 1)] * 31, (7999, 1)],
    "2048 of a prompt at 0": [(0, 2048)],
    "2048 of a prompt at 2048": [(2048, 2048)],
}
SLOTS = max(
    max(CONTEXTS) + max(NODES), *(sum(first + rows + BLOCK for first, rows in runs) for runs in PASSES.values())
)


class AttentionSubject:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        blocks = SLOTS // BLOCK
        specs = [KVSpec(num_kv_heads=KV_HEADS, head_dim=DIM)] * LAYERS
        cache = KVCache(specs, num_blocks=blocks, block_size=BLOCK, dtype=torch.bfloat16, device=device)
        self.layers, self.workspace = cache.layers, Workspace(device)
        for layer in self.layers:
            layer.k.normal_()
            layer.v.normal_(std=0.5)
        self.table = torch.randperm(blocks, dtype=torch.int32)[None].to(device)
        most = max(*NODES, *(sum(rows for _, rows in runs) for runs in PASSES.values()))
        self.q = torch.randn(most, Q_HEADS, DIM, dtype=torch.bfloat16, device=device)

    def plan(self, context: int, nodes: int) -> PassPlan:
        positions = torch.arange(context, context + nodes, dtype=torch.int32, device=self.device)
        alone = torch.zeros_like(positions)
        return PassPlan.in_order(positions, positions, alone, self.table, BLOCK, context + nodes)

    def batch(self, runs: Spans) -> PassPlan:
        """A pass of several sequences, each with blocks of its own."""
        counts = torch.tensor([rows for _, rows in runs])
        sequence = torch.arange(len(runs)).repeat_interleave(counts)
        positions = torch.cat([torch.arange(first, first + rows) for first, rows in runs])
        needed = [-(-(first + rows) // BLOCK) for first, rows in runs]
        tables = torch.zeros(len(runs), max(needed), dtype=torch.int32)
        for row, blocks in zip(tables, self.table[0, : sum(needed)].cpu().split(needed), strict=True):
            row[: len(blocks)] = blocks
        plan = PassPlan.in_order(positions, positions, sequence, tables, BLOCK, int(positions.max()) + 1)
        return plan.to(self.device)

    def work(self, plan: PassPlan) -> Work:
        return work_of(plan, Q_HEADS // KV_HEADS, KV_HEADS)

    def ways(self, plan: PassPlan) -> dict[str, Work]:
        """The work of a pass with a program for each tile, and dealt by length, whichever would be chosen."""
        chosen, blocks = self.work(plan).division, -(-plan.max_len // KEYS)
        units = blocks if chosen.by_block(plan.max_len) else int(chunks_of(blocks))
        tiles = chosen.num_tiles
        _, begin, count = tiles_of(plan.sequence.cpu().numpy(), Q_HEADS // KV_HEADS)
        found = {}
        for name, division in (
            ("undivided", replace(chosen, direct=True, units=1, shares=tiles)),
            ("dealt", replace(chosen, direct=False, units=units, shares=tiles + PROGRAMS // KV_HEADS)),
        ):
            header = division.header(plan.max_len, plan.block_tables.shape[1])
            dealt = division.dealt(begin, count, plan.reach.cpu().numpy(), plan.max_len)
            assert len(header) == HEADER
            found[name] = Work(division, torch.tensor([*header, *dealt.tolist()], dtype=torch.int32).to(self.device))
        return found

    def attend(self, rows: slice, plan: PassPlan, work: Work) -> Tensor:
        return attention(self.q[rows], plan, work, self.layers[0], DIM**-0.5, None, self.workspace).clone()

    def agrees(self, runs: Spans, plan: PassPlan, works: Sequence[Work]) -> bool:
        """All bits are the same in every way, and those of some rows alone."""
        rows = sum(rows for _, rows in runs)
        expected, *others = [self.attend(slice(rows), plan, work) for work in works]
        same = bool(expected.isfinite().all()) and all(torch.equal(other, expected) for other in others)
        for row in {0, rows // 3, rows - 40 if rows > 40 else 0, rows - 1}:
            at, tables = plan.positions[row : row + 1], plan.block_tables[plan.sequence[row].long()][None]
            alone = PassPlan.in_order(at, at, torch.zeros_like(at), tables, BLOCK, int(at) + 1)
            same &= torch.equal(self.attend(slice(row, row + 1), alone, self.work(alone))[0], expected[row])
        return same

    def replayed_ms(self, plan: PassPlan, work: Work) -> float:
        q, graph = self.q[: len(plan.positions)], torch.cuda.CUDAGraph()

        def run(layers: list[LayerCache]) -> None:
            for layer in layers:
                attention(q, plan, work, layer, DIM**-0.5, None, self.workspace)

        run(self.layers[:1])
        with torch.cuda.graph(graph):
            run(self.layers)
        return device_ms(graph.replay)


def by_nodes(subject: AttentionSubject) -> dict[str, float]:
    ms = {}
    for context in CONTEXTS:
        for nodes in NODES:
            plan = subject.plan(context, nodes)
            ms[f"{nodes}@{context}"] = took = subject.replayed_ms(plan, subject.work(plan))
            print(f"   {nodes:>3} nodes at {context:>6}: {took:.3f} ms in {LAYERS} layers", flush=True)
    return ms


def by_pass(subject: AttentionSubject) -> dict[str, dict[str, Any]]:
    found = {}
    print(f"   {f'ms in {LAYERS} layers':<40}{'undivided':>10}{'dealt':>8}   chosen     bits", flush=True)
    for name, runs in PASSES.items():
        plan = subject.batch(runs)
        works = subject.ways(plan)
        ms = {way: subject.replayed_ms(plan, work) for way, work in works.items()}
        chosen = "undivided" if subject.work(plan).division.direct else "dealt"
        same = subject.agrees(runs, plan, list(works.values()))
        found[name] = {**ms, "chosen": chosen, "same": same}
        bits = "same" if same else "OTHER"
        print(f"   {name:<40}{ms['undivided']:>10.3f}{ms['dealt']:>8.3f}   {chosen:<10} {bits}", flush=True)
    return found


# -- verification

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    greedy: bool = False
    seeded: bool = False
    top_p: float | None = None
    q: float | None = None  # how far the drafter's logits are from the target's; None: a deterministic draft
    children: int = 1  # of a node
    spread: float = 3.0  # of the logits
    limit_ms: float | None = None  # what is asked of one row at a vocabulary of 128k


CASES = (
    Case("greedy, tree", greedy=True, children=3, limit_ms=0.1),
    Case("T = 1, tree", children=3),
    Case("T = 1, top-p 0.9, tree", top_p=0.9, children=3, limit_ms=0.35),
    Case("T = 1, top-p 0.9, tree, flat", top_p=0.9, children=3, spread=1.0, limit_ms=0.35),
    Case("seeded, top-p 0.9, tree", seeded=True, top_p=0.9, children=3),
    Case("block, chain", q=0.5),
    Case("block, chain, top-p 0.9", q=0.5, top_p=0.9),
)


def batch(case: Case, rows: int, nodes: int, vocab: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Work that verifies such a batch, and the same as the engine does it."""
    torch.manual_seed(0)
    parents = [node // case.children - 1 for node in range(nodes)]
    depth: list[int] = []
    for parent in parents:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    slots = nodes + 1
    logits = torch.randn(rows * slots, vocab, device=DEVICE) * case.spread
    row_of = torch.arange(rows * slots, device=DEVICE).view(rows, slots)
    shape = (rows, nodes)
    proposal, tokens = None, logits.argmax(-1).view(rows, slots)[:, torch.tensor(parents, device=DEVICE) + 1]
    if case.q is not None:
        probs = probabilities(logits + torch.randn_like(logits) * case.q)
        tokens = torch.multinomial(probs, 1).view(rows, slots)[:, :-1]
        proposal = Proposal(probs=probs, row_of=row_of)
    draft = Draft(
        tokens=tokens.contiguous(),
        parents=torch.tensor(parents, device=DEVICE).expand(shape).contiguous(),
        depth=torch.tensor(depth, device=DEVICE).expand(shape).contiguous(),
        num_nodes=torch.full((rows,), nodes, device=DEVICE),
        q=proposal,
    )
    seq = torch.arange(rows, device=DEVICE).repeat_interleave(slots)
    node = torch.arange(-1, nodes, device=DEVICE).repeat(rows)
    key = torch.arange(rows, device=DEVICE) + 7
    kind = SamplingMode.GREEDY if case.greedy else SamplingMode.SEEDED if case.seeded else SamplingMode.COIN
    draws = DrawKeys(key=key, committed=key + 93, kind=None if case.greedy else torch.full_like(key, kind))
    metadata = SamplingMetadata(
        temperature=None if case.greedy else torch.ones(rows, device=DEVICE),
        top_p=None if case.top_p is None else torch.full((rows,), case.top_p, dtype=torch.float64, device=DEVICE),
    )
    given = (draft, logits, row_of, Nodes.of(draft, seq, node, max(depth), with_path=False), metadata, draws)
    return lambda: verify(*given, max_depth=max(depth)), as_the_engine(case, draft, logits, row_of)


def as_the_engine(case: Case, draft: Draft, logits: Tensor, row_of: Tensor) -> Callable[[], object]:
    """One replay, where such steps are captured: not where chains with a q have more than 16 nodes."""
    asked = {"temperature": 0.0 if case.greedy else 1.0, "top_p": case.top_p, "seed": 3 if case.seeded else None}
    params = SamplingParams(**{name: value for name, value in asked.items() if value is not None}).resolve({})
    sequences = [Answer(str(row), [0] * 100, params, max_len=1000) for row in range(draft.batch)]
    sampler, host = Sampler(logits.shape[1], frozenset({0}), DEVICE), row_of.cpu()
    parts = {name: getattr(draft, name).cpu() for name in ("tokens", "parents", "depth", "num_nodes")}
    q = None if draft.q is None else replace(draft.q, row_of=draft.q.row_of.cpu())
    on_host = Draft(**parts, q=q)
    sampler.warmup(logits, draft.batch, len(logits), q_rows=0 if q is None else len(logits))
    return lambda: sampler.verify(sequences, on_host, logits, host)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    flush, times = torch.empty(2**28, dtype=torch.int8, device=DEVICE), []
    for _ in range(replays):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def call_ms(work: Callable[[], object], rounds: int = 5) -> tuple[float, float]:
    """Until a call returns, and until the device has done what it asked for."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        times.append((1e3 * (returned - started), 1e3 * (time.perf_counter() - started)))
    host, all_of_it = zip(*times, strict=True)
    return statistics.median(host), statistics.median(all_of_it)


def run_attention(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda")
    torch.manual_seed(0)
    subject, found = AttentionSubject(device), dict[str, Any]()
    if "nodes" in args.parts:
        found["ms"] = by_nodes(subject)
    if "passes" in args.parts:
        found["passes"] = by_pass(subject)
    return found


def run_verify(args: argparse.Namespace) -> dict[str, Any]:
    lines = []
    for vocab in args.vocabs:
        for rows in args.rows:
            for case in CASES:
                work, engine = batch(case, rows, args.nodes, vocab)
                verdict = work()
                accepted = float(verdict.num_accepted.double().mean())  # type: ignore[attr-defined]
                replay, (_, eager) = replay_ms(captured(work), args.replays), call_ms(work)
                engine()
                host, whole = call_ms(engine, args.replays)
                row = {"case": case.name, "vocab": vocab, "rows": rows, "graph_ms": replay, "eager_ms": eager}
                lines.append(row | {"engine_ms": whole, "engine_host_ms": host, "accepted": accepted})
                print(lines[-1], flush=True)
                del work, engine, verdict
                torch.cuda.empty_cache()
    return {"nodes": args.nodes, "lines": lines}


PARTS = {"attention": run_attention, "verify": run_verify}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("--parts", nargs="+", choices=("nodes", "passes"), default=["nodes", "passes"])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--vocabs", type=int, nargs="+", default=[128_256, 49_152])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    args = parser.parse_args()
    finish(f"gpu_{args.what}", PARTS[args.what](args))


if __name__ == "__main__":
    main()
