"""Moving accepted tree paths into place: by the host, which reads the verdict first, and by one launch behind it.

    python benchmarks/gpu_compact.py

Microseconds the host spends on it after the verdict is there, and the device's from the first launch to the last
move. What the host does for the launch it does while the device still computes the pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_passes import device_ms
from harness import finish

from paceline.core.draft import packed_to, sent
from paceline.models.kv_cache import KVCache, KVSpec

SHAPES = {"small": (30, 3, 64), "yardstick": (32, 8, 128)}  # layers, K/V heads, width of a head
NODES, ACCEPTED, REPEATS = 16, 5, 200


def by_host(cache: KVCache, nodes: list[list[int]], path: torch.Tensor) -> None:
    source, target = [], []
    for (_, *slots), accepted in zip(nodes, path.tolist(), strict=True):
        for depth, node in enumerate(accepted):
            if node > depth:
                source.append(slots[node])
                target.append(slots[depth])
    at, to = packed_to(path.device, torch.tensor(source), torch.tensor(target))
    for storage in cache._storage:
        storage[:, :, to] = storage[:, :, at]


def host_us(work: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times[REPEATS // 4 :])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device, found = torch.device(parser.parse_args().device), {}
    for name, (layers, heads, dim) in SHAPES.items():
        for batch in (1, 16, 64):
            spec, blocks = KVSpec(num_kv_heads=heads, head_dim=dim), batch * NODES // 16
            cache = KVCache([spec] * layers, num_blocks=blocks, block_size=16, dtype=torch.bfloat16, device=device)
            nodes = [[row, *range(row * NODES, (row + 1) * NODES)] for row in range(batch)]
            path = torch.full((batch, 8), -1)
            path[:, :ACCEPTED] = 3 * torch.arange(ACCEPTED)
            path, laid_out = path.to(device), torch.tensor(nodes)
            ways = {
                "by the host": lambda c=cache, n=nodes, p=path: by_host(c, n, p),
                "behind it": lambda c=cache, n=laid_out, p=path: c.compact(sent(n, p.device), p),
            }
            cell = {
                way: {"host_us": host_us(work, device), "device_us": 1e3 * device_ms(work)}
                for way, work in ways.items()
            }
            found[f"{name} x{batch}"] = cell
            print(f"{name}, {batch} sequences: {cell}", flush=True)
    finish("gpu_compact", found)


if __name__ == "__main__":
    main()
