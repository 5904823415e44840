"""Two engines over the same weights, one with drafters and one without, and how many sequences each one's cache holds.

On a GPU the cache gets what weights leave, so a drafter's weights cost sequences; on a CPU the cache has a size of its
own, and only the drafter's K/V, which lie in it, do.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from paceline.advisor.traffic import Seats, Traffic
from paceline.build import LoadedTarget, make_drafters, make_engine, make_policy
from paceline.config import MAX_K, EngineConfig, SpeculationConfig
from paceline.drafters import Drafter
from paceline.engine.engine import Engine
from paceline.errors import InvalidParameter
from paceline.models.kv_cache import KVCache
from paceline.platform.memory import cache_bytes


def build_pair(
    target: LoadedTarget, speculation: SpeculationConfig, traffic: Traffic, config: EngineConfig
) -> tuple[Engine, Engine, Seats]:
    """Plain, with drafters, and what the drafters cost."""
    loaded, length = target.loaded, traffic.prompt + traffic.answer
    most, device = loaded.config.max_positions, loaded.decoder.device
    if length >= most:
        raise InvalidParameter("traffic", f"prompt and answer have {length} tokens, and the model's context is {most}")
    whole, before = cache_bytes(device, config.gpu_memory_fraction), held_bytes(device)
    drafters = make_drafters(loaded, speculation)
    weights = max(held_bytes(device) - before, 0)

    def block_bytes(those: Sequence[Drafter]) -> int:
        specs = (*loaded.decoder.kv_specs, *(spec for drafter in those for spec in drafter.kv_layers))
        return KVCache.bytes_per_block(specs, config.block_size, loaded.decoder.cache_dtype)

    left = whole - weights if device.type == "cuda" else whole
    each = -(-length // config.block_size)  # blocks of a sequence
    seats = Seats(
        plain=whole // (each * block_bytes([])),
        drafting=max(left, 0) // (each * block_bytes(drafters)),
        weight_bytes=weights,
        kv_bytes=(block_bytes(drafters) - block_bytes([])) // config.block_size,
    )
    wanted = -(-(length + MAX_K + 1) // config.block_size) * config.max_num_seqs + 2
    fitting = max(left, 0) // (block_bytes([]) + block_bytes(drafters))  # both engines are there at once
    sized = replace(config, num_blocks=max(min(wanted, fitting), 1), prefix_caching=False)
    plain = make_engine(loaded, sized, [], make_policy(loaded, [], SpeculationConfig()))
    return plain, make_engine(loaded, sized, drafters, make_policy(loaded, drafters, speculation)), seats


def held_bytes(device: torch.device) -> int:
    """Memory in use, on the device that holds the weights."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # its peak, in bytes on macOS
