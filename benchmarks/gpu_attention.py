"""Attention alone: the two kernels of its shared part against each other bit for bit, then as many layers as the
yardstick has in a row, replayed from a graph, by nodes and context.

    python benchmarks/gpu_attention.py
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
from gpu_passes import BLOCK, device_ms
from torch import Tensor

from paceline.models.kv_cache import KVCache, KVSpec, LayerCache
from paceline.models.plan import PassPlan
from paceline.models.triton import attention as attention_module
from paceline.models.triton.attention import Workspace, attention, work_of

LAYERS, Q_HEADS, KV_HEADS, DIM = 32, 32, 8, 128
NODES, CONTEXTS = (1, 8, 32, 64), (1024, 16384)
SHAPES = ((8, 4, 128, torch.bfloat16), (3, 3, 64, torch.bfloat16), (2, 7, 128, torch.float16))  # K/V heads, group, ...
LENGTHS = (1, 63, 64, 65, 130, 700, 1100, 3000, 9000)  # of contexts
ROWS = (1, 1, 1, 3, 40, 1, 20, 70, 33)  # the last of each that are in the pass


class Subject:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        blocks = (max(CONTEXTS) + max(NODES)) // BLOCK
        specs = [KVSpec(num_kv_heads=KV_HEADS, head_dim=DIM)] * LAYERS
        cache = KVCache(specs, num_blocks=blocks, block_size=BLOCK, dtype=torch.bfloat16, device=device)
        self.layers, self.workspace = cache.layers, Workspace(device)
        for layer in self.layers:
            layer.k.normal_()
            layer.v.normal_(std=0.5)
        self.table = torch.randperm(blocks, dtype=torch.int32)[None].to(device)
        self.q = torch.randn(max(NODES), Q_HEADS, DIM, dtype=torch.bfloat16, device=device)

    def plan(self, context: int, nodes: int) -> PassPlan:
        positions = torch.arange(context, context + nodes, dtype=torch.int32, device=self.device)
        alone = torch.zeros_like(positions)
        return PassPlan.in_order(positions, positions, alone, self.table, BLOCK, context + nodes)

    def replayed_ms(self, plan: PassPlan) -> float:
        q, graph = self.q[: len(plan.positions)], torch.cuda.CUDAGraph()
        work = work_of(plan, Q_HEADS // KV_HEADS, KV_HEADS)

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


def main() -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    found = {"same": agreement(device)}
    subject, ms = Subject(device), {}
    for context in CONTEXTS:
        for nodes in NODES:
            ms[f"{nodes}@{context}"] = took = subject.replayed_ms(subject.plan(context, nodes))
            print(f"   {nodes:>3} nodes at {context:>6}: {took:.3f} ms in {LAYERS} layers", flush=True)
    print(json.dumps({"benchmark": "gpu_attention", **found, "ms": ms}))


if __name__ == "__main__":
    main()
