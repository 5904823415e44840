"""Accepted paths come to lie where a block table expects them, in every layer, and nothing else is touched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from paceline.models.kv_cache import KVCache, KVSpec
from tests.verify.device import interpreted, missing

SPECS = [KVSpec(num_kv_heads=2, head_dim=8)] * 3 + [KVSpec(num_kv_heads=5, head_dim=9)]  # two storages, one uneven
BLOCKS, SIZE = 30, 4


@pytest.fixture(params=["torch", "interpreted", pytest.param("compiled", marks=pytest.mark.cuda)])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "torch":
        return torch.device("cpu")
    if (reason := missing()) is not None:
        pytest.skip(reason)
    import triton

    from paceline.models.backends.cuda import compact

    if interpreted() != (request.param == "interpreted"):
        pytest.skip("where there is a CUDA device, nothing is interpreted")
    if interpreted() and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("triton's interpreter works with this numpy from 3.7 on")
    monkeypatch.setattr(compact, "MOST", 32)  # several programs share a slot
    if interpreted():
        monkeypatch.setattr(KVCache, "compact", by_kernel)
    return torch.device("cpu" if interpreted() else "cuda")


def by_kernel(cache: KVCache, nodes: torch.Tensor, path: torch.Tensor) -> None:
    """Compact by the kernel, as where there is a device."""
    from paceline.models.backends.cuda.compact import compact

    for storage in cache._storage:
        compact(storage, nodes, path)


def tree(noise: random.Random, nodes: int) -> list[int]:
    """A path down a random tree, whose nodes come after their parents."""
    parents = [noise.randrange(-1, node) if noise.random() < 0.5 else node - 1 for node in range(nodes)]
    node, path = noise.randrange(nodes // 2, nodes), []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1][: noise.randint(1, len(path))]


@contextmanager
def without_waiting(where: torch.device) -> Iterator[None]:
    """The host may not ask the device for anything."""
    if where.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if where.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("seed", range(8))
def test_each_accepted_node_comes_to_lie_at_its_depth(where: torch.device, seed: int) -> None:
    noise, rows, width = random.Random(seed), 5, 9
    cache = KVCache(SPECS, num_blocks=BLOCKS, block_size=SIZE, dtype=torch.float32, device=where)
    for layer in cache.layers:
        layer.k.normal_()
        layer.v.normal_()
    expected = [part.clone() for layer in cache.layers for part in (layer.k, layer.v)]
    slots = torch.randperm(BLOCKS * SIZE, generator=torch.Generator().manual_seed(seed)).tolist()
    path, nodes = torch.full((rows, width), -1), []
    for row in sorted(noise.sample(range(rows), noise.randint(1, rows))):  # those whose draft branches
        count = noise.randint(2, width)
        own = [slots.pop() for _ in range(count)]
        accepted = tree(noise, count)
        path[row, : len(accepted)] = torch.tensor(accepted, dtype=torch.int64)
        nodes.append([row, *own, *[-1] * (width - count)])
        for part in expected:
            part[own[: len(accepted)]] = part[[own[node] for node in accepted]].clone()
    given = torch.tensor(nodes, device=where), path[:, : int((path >= 0).sum(1).max()) or 1].to(where)
    with without_waiting(where):
        cache.compact(*given)
    for part, wanted in zip([part for layer in cache.layers for part in (layer.k, layer.v)], expected, strict=True):
        assert torch.equal(part, wanted)
    cache.warmup()
    assert torch.equal(cache.layers[-1].v, expected[-1])
