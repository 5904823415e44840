"""Kernels alone on a CUDA device.

    python -m benchmarks.gpu_kernels attention
    python -m benchmarks.gpu_kernels verify

`attention`: the yardstick's layers in a row, replayed from a graph: by nodes and context, and for whole passes,
undivided (a program for each tile) and dealt by length. `verify`: drafts of 64 nodes, captured in a graph and replayed,
the L2 cache flushed before each.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.passes import BLOCK, device_ms
from benchmarks.harness import finish
from paceline.core.draft import Draft, Proposal
from paceline.core.verdict import Verdict
from paceline.models.backends.cuda.attention.attention import Work, Workspace, attention, tiles_of, work_of
from paceline.models.backends.cuda.attention.division import HEADER, KEYS, PROGRAMS, chunks_of
from paceline.models.kv_cache import KVCache, KVSpec, LayerCache
from paceline.models.plan import PassPlan
from paceline.verify import DrawKeys, Nodes, SamplingMetadata, SamplingMode, probabilities, verify

LAYERS, Q_HEADS, KV_HEADS, DIM = 32, 32, 8, 128
NODES, CONTEXTS = (1, 8, 32, 64), (1024, 16384)
Spans = list[tuple[int, int]]  # keys before the pass, and rows, of each sequence
DECODES: Spans = [(100 + 500 * at // 30, 1) for at in range(31)]
PASSES: dict[str, Spans] = {
    "31 decodes, 225 of a prompt at 3870": [*DECODES, (3870, 225)],
    **{f"{count} decodes at 512, one at 8000": [*[(511, 1)] * count, (7999, 1)] for count in (31, 128)},
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
    for name, runs in PASSES.items():
        plan = subject.batch(runs)
        ms = {way: subject.replayed_ms(plan, work) for way, work in subject.ways(plan).items()}
        chosen = "undivided" if subject.work(plan).division.direct else "dealt"
        found[name] = {**ms, "chosen": chosen}
        print(f"   {name:<40} ms in {LAYERS} layers: {ms}, chosen: {chosen}", flush=True)
    return found


def run_attention() -> dict[str, Any]:
    subject = AttentionSubject(torch.device("cuda"))
    return {"ms": by_nodes(subject), "passes": by_pass(subject)}


# -- verification

DEVICE = torch.device("cuda")
VOCAB = 128_256


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    greedy: bool = False
    seeded: bool = False
    top_p: float | None = None
    q: float | None = None  # how far the drafter's logits are from the target's; None: a deterministic draft
    children: int = 1  # children of a node


CASES = (
    Case("greedy, tree", greedy=True, children=3),
    Case("T = 1, tree", children=3),
    Case("T = 1, top-p 0.9, tree", top_p=0.9, children=3),
    Case("seeded, top-p 0.9, tree", seeded=True, top_p=0.9, children=3),
    Case("block, chain", q=0.5),
    Case("block, chain, top-p 0.9", q=0.5, top_p=0.9),
)


def batch(case: Case, rows: int, nodes: int, vocab: int) -> Callable[[], Verdict]:
    """Return work that verifies such a batch."""
    torch.manual_seed(0)
    parents = [node // case.children - 1 for node in range(nodes)]
    depth: list[int] = []
    for parent in parents:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    slots = nodes + 1
    logits = torch.randn(rows * slots, vocab, device=DEVICE) * 3
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
    return lambda: verify(*given, max_depth=max(depth))


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


def run_verify() -> dict[str, Any]:
    lines = []
    for rows, case in itertools.product((1, 16), CASES):
        work = batch(case, rows, max(NODES), VOCAB)
        accepted = float(work().num_accepted.double().mean())
        line = {"case": case.name, "rows": rows, "graph_ms": replay_ms(captured(work), 30), "accepted": accepted}
        lines.append(line)
        print(line, flush=True)
        del work
        torch.cuda.empty_cache()
    return {"nodes": max(NODES), "vocab": VOCAB, "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attention", "verify"))
    what = parser.parse_args().what
    torch.manual_seed(0)
    finish(f"gpu_{what}", {"attention": run_attention, "verify": run_verify}[what]())


if __name__ == "__main__":
    main()
