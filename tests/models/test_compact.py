"""Accepted paths come to lie where a block table expects them, in every layer, and nothing else is touched."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.models import kv_cache
from paceline.models.kv_cache import KVCache, KVSpec
from tests.verify.device import missing

SPECS = [KVSpec(num_kv_heads=2, head_dim=8)] * 3 + [KVSpec(num_kv_heads=5, head_dim=9)]  # two storages, one uneven
BLOCKS, SIZE = 30, 4


@pytest.fixture(params=["torch", "kernel"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device whose way it is; the kernel's is interpreted where there is none."""
    if request.param == "torch":
        return torch.device("cpu")
    if (reason := missing()) is not None:
        pytest.skip(reason)
    from paceline.models.triton import compact

    monkeypatch.setattr(compact, "MOST", 32)  # several programs share a slot
    monkeypatch.setattr(kv_cache, "_compact", compact.compact)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tree(noise: random.Random, nodes: int) -> list[int]:
    """A path down a random tree, whose nodes come after their parents."""
    parents = [noise.randrange(-1, node) if noise.random() < 0.5 else node - 1 for node in range(nodes)]
    node, path = noise.randrange(nodes), []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1][: noise.randint(0, len(path))]


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
    cache.compact(torch.tensor(nodes, device=where), path[:, : int((path >= 0).sum(1).max()) or 1].to(where))
    for part, wanted in zip([part for layer in cache.layers for part in (layer.k, layer.v)], expected, strict=True):
        assert torch.equal(part, wanted)
    cache.rehearse()
    assert torch.equal(cache.layers[-1].v, expected[-1])
