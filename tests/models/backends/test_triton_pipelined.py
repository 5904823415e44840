"""The interpreter knows no Gluon, so the kernel is only compiled here; tests/cuda compares its bits with the other
kernel's on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="triton has no Gluon")

from paceline.models.backends.cuda.attention import attention

POINTERS = {
    **dict.fromkeys(("q", "k_cache", "v_cache"), "*bf16"),
    **dict.fromkeys(("sequence", "prefix", "reach", "tables", "shares"), "*i32"),
    **dict.fromkeys(("sums", "stats"), "*fp32"),
}
SIGNATURE = POINTERS | {"log2_scale": "fp32", "rows": "i32", "num_shares": "i32"}
SHAPE = {"DIM": 128, "GROUP": 4, "KV_HEADS": 8, "BLOCK_SIZE": 16, "KEYS": 64, "EARLY": 16, "CHUNK": 8}
COMPILE = f"""
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from paceline.models.backends.cuda.attention.pipelined import attend_pipelined

names = attend_pipelined.arg_names
signature = {{name: {SIGNATURE}.get(name, "constexpr") for name in names}}
aligned = {{(names.index(name),): [["tt.divisibility", 16]] for name in {list(POINTERS)}}}
for tile, tree in ((128, False), (64, True)):
    given = {SHAPE} | {{"TILE": tile, "WIDE": tree, "TREE": tree, "OVERLAP": True}}
    constants = {{(names.index(name),): value for name, value in given.items()}}
    options = {{"num_warps": tile // 16, "enable_fp_fusion": False, "maxnreg": 128 if tile == 128 else None}}
    source = GluonASTSource(attend_pipelined, signature, constants, aligned)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared)
"""
MULTIPROCESSOR = 228 << 10  # bytes of shared memory, of which a program takes one KB more than it asks for


def test_the_kernel_compiles_for_hopper_and_two_programs_fit_a_multiprocessor() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    sizes = [int(line) for line in done.stdout.split()]
    assert len(sizes) == 2
    assert all(2 * (size + 1024) <= MULTIPROCESSOR for size in sizes)


@pytest.mark.parametrize(
    ("dim", "dtype", "capability", "expected"),
    [
        (128, torch.bfloat16, (9, 0), True),
        (64, torch.float16, (9, 0), True),
        (96, torch.bfloat16, (9, 0), False),
        (128, torch.float32, (9, 0), False),
        (128, torch.bfloat16, (8, 0), False),
    ],
)
def test_other_numbers_and_devices_keep_to_the_kernel_that_serves_all(
    monkeypatch: pytest.MonkeyPatch, dim: int, dtype: torch.dtype, capability: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(attention, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert attention.pipelines(torch.empty(1, 2, dim, dtype=dtype)) is expected
