"""The memory that the K/V cache may take, and the error when it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.errors import DeviceError

ON_CPU = 2 << 30  # bytes of the cache, if not configured
RESERVED = 2 << 30  # bytes of a GPU for graphs, logits and the scratch of attention


def cache_bytes(device: torch.device, fraction: float) -> int:
    """Return the bytes for the cache; on a GPU `fraction` of its memory, less the memory in use and RESERVED."""
    if device.type != "cuda":
        return ON_CPU
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    left = int(total * fraction) - (total - free) - RESERVED
    if left <= 0:
        raise DeviceError(
            f"no GPU memory is left for the cache: {free / 1e9:.1f} of {total / 1e9:.1f} GB are free, "
            f"and gpu_memory_fraction is {fraction}; raise it, or use a smaller model"
        )
    return left


@contextmanager
def out_of_memory_advice() -> Iterator[None]:
    """Turn a failed allocation into a DeviceError that names the options to lower."""
    try:
        yield
    except Exception as error:
        if (advice := memory_advice(error)) is not error:
            raise advice from error
        raise


def memory_advice(error: Exception) -> Exception:
    """Return the DeviceError for a failed allocation, and any other error itself."""
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceError(
            "the GPU is out of memory; lower gpu_memory_fraction (or kv_cache_bytes), max_num_batched_tokens, "
            "max_num_seqs or max_model_len"
        )
    # torch raises RuntimeError for a CPU's memory and for a size beyond 64 bits.
    names_memory = any(word in str(error).lower() for word in ("memory", "overflow"))
    if isinstance(error, MemoryError | OverflowError) or (isinstance(error, RuntimeError) and names_memory):
        return DeviceError(
            "the memory does not hold the cache; lower kv_cache_bytes, max_num_batched_tokens or max_num_seqs"
        )
    return error
