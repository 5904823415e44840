"""Attention alone: the two kernels of its shared part against each other bit for bit, then as many layers as the
yardstick has in a row, replayed from a graph: by nodes and context, and for whole passes, undivided (a program for
each tile) and dealt by length.

    python benchmarks/gpu_attention.py [--parts same nodes passes]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from gpu_passes import BLOCK, device_ms
from torch import Tensor

from paceline.models.backends.cuda.attention import attention as attention_module
from paceline.models.backends.cuda.attention.attention import Work, Workspace, attention, tiles_of, work_of
from paceline.models.backends.cuda.attention.division import HEADER, KEYS, PROGRAMS, chunks_of
from paceline.models.kv_cache import KVCache, KVSpec, LayerCache
from paceline.models.plan import PassPlan

LAYERS, Q_HEADS, KV_HEADS, DIM = 32, 32, 8, 128
NODES, CONTEXTS = (1, 8, 32, 64), (1024, 16384)
SHAPES = ((8, 4, 128, torch.bfloat16), (3, 3, 64, torch.bfloat16), (2, 7, 128, torch.float16))  # K/V heads, group, ...
LENGTHS = (1, 63, 64, 65, 130, 700, 1100, 3000, 9000)  # of contexts
ROWS = (1, 1, 1, 3, 40, 1, 20, 70, 33)  # the last of each that are in the pass
Runs = list[tuple[int, int]]  # of each sequence: keys before the pass, and rows
DECODES: Runs = [(100 + 500 * at // 30, 1) for at in range(31)]
PASSES: dict[str, Runs] = {
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


class Subject:
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

    def batch(self, runs: Runs) -> PassPlan:
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

    def agrees(self, runs: Runs, plan: PassPlan, works: Sequence[Work]) -> bool:
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


def agreement(device: torch.device) -> dict[str, bool]:
    """A batch of contexts and trees, whole and row by row, through both kernels: whether all bits are the same."""
    found = {}
    for kv_heads, group, dim, dtype in SHAPES:
        scene = Scene(kv_heads, dim, dtype, device)
        q = torch.randn(sum(ROWS), kv_heads * group, dim, dtype=dtype, device=device)
        plans = [scene.plan(), scene.tree()]
        with mock.patch.object(attention_module, "pipelines", return_value=False):
            expected = scene.attend(q, plans[0])
        results = [scene.attend(q, plan) for plan in plans]
        for row in (0, 3, 8, 60, 100, 169):
            results.append(expected.clone())
            results[-1][row] = scene.attend(q[row : row + 1], scene.plan([row]))[0]
        same = bool(expected.isfinite().all()) and all(torch.equal(result, expected) for result in results)
        found[f"{kv_heads}x{group}x{dim} {dtype}"] = same
        print(
            f"   {kv_heads} K/V heads for {group} each, {dim} wide, {dtype}: {'same' if same else 'OTHER'} bits",
            flush=True,
        )
    return found


class Scene:
    """Contexts of random keys in shuffled blocks of a cache that holds NaN elsewhere."""

    def __init__(self, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        counts = [-(-length // BLOCK) for length in LENGTHS]
        spare = sum(ROWS) * max(ROWS)  # slots for trees: every row's ancestors in some of their own
        slots = sum(counts) * BLOCK
        k, v = (torch.full((slots + spare, kv_heads, dim), float("nan"), dtype=dtype) for _ in range(2))
        order = torch.randperm(sum(counts), dtype=torch.int32)
        self.tables = torch.full((len(LENGTHS), max(counts)), -1, dtype=torch.int32)
        for sequence, (length, blocks) in enumerate(zip(LENGTHS, order.split(counts), strict=True)):
            self.tables[sequence, : len(blocks)] = blocks
            own = self.slots(torch.tensor(sequence), torch.arange(length))
            k[own], v[own] = (torch.randn(length, kv_heads, dim).to(dtype) for _ in range(2))
        rows = [(s, length - n + i) for s, (length, n) in enumerate(zip(LENGTHS, ROWS, strict=True)) for i in range(n)]
        self.sequence, self.positions = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
        first = torch.tensor([length - n for length, n in zip(LENGTHS, ROWS, strict=True)], dtype=torch.int32)
        self.committed = first[self.sequence.long()]
        self.path = slots + torch.randperm(spare, dtype=torch.int32).view(sum(ROWS), max(ROWS))
        for row, (sequence, position) in enumerate(rows):
            drafted = torch.arange(int(self.committed[row]), position + 1)
            mine, theirs = self.path[row, : len(drafted)].long(), self.slots(torch.tensor(sequence), drafted)
            k[mine], v[mine] = k[theirs], v[theirs]
        self.cache, self.device = LayerCache(k.to(device), v.to(device)), device
        self.workspace = Workspace(device)

    def slots(self, sequence: Tensor, positions: Tensor) -> Tensor:
        return self.tables[sequence, positions // BLOCK].long() * BLOCK + positions % BLOCK

    def plan(self, rows: list[int] | None = None) -> PassPlan:
        chosen: Any = slice(None) if rows is None else rows
        positions, sequence = self.positions[chosen], self.sequence[chosen]
        return PassPlan.in_order(positions, positions, sequence, self.tables, BLOCK, int(positions.max()) + 1)

    def tree(self) -> PassPlan:
        return PassPlan(
            positions=self.positions,
            slots=self.positions,
            sequence=self.sequence,
            prefix=self.committed,
            path=self.path,
            reach=self.positions + 1,
            block_tables=self.tables,
            block_size=BLOCK,
            max_len=max(LENGTHS),
        )

    def attend(self, q: Tensor, plan: PassPlan) -> Tensor:
        plan = plan.to(self.device)
        work = work_of(plan, q.shape[1] // self.cache.k.shape[1], self.cache.k.shape[1])
        return attention(q, plan, work, self.cache, q.shape[-1] ** -0.5, None, self.workspace).clone()


def by_nodes(subject: Subject) -> dict[str, float]:
    ms = {}
    for context in CONTEXTS:
        for nodes in NODES:
            plan = subject.plan(context, nodes)
            ms[f"{nodes}@{context}"] = took = subject.replayed_ms(plan, subject.work(plan))
            print(f"   {nodes:>3} nodes at {context:>6}: {took:.3f} ms in {LAYERS} layers", flush=True)
    return ms


def by_pass(subject: Subject) -> dict[str, dict[str, Any]]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("same", "nodes", "passes"), default=["same", "nodes", "passes"])
    parts = parser.parse_args().parts
    device = torch.device("cuda")
    torch.manual_seed(0)
    found: dict[str, Any] = {"same": agreement(device)} if "same" in parts else {}
    subject = Subject(device)
    if "nodes" in parts:
        found["ms"] = by_nodes(subject)
    if "passes" in parts:
        found["passes"] = by_pass(subject)
    print(json.dumps({"benchmark": "gpu_attention", **found}))


if __name__ == "__main__":
    main()
