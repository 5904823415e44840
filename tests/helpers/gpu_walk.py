"""All that a GPU runs, once and small: an engine's start and steps, and the kernels that these do not reach."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import paceline
from paceline.config import EngineConfig
from paceline.drafters import METHODS
from paceline.drafters.block.cuda_tree import device_trees
from paceline.drafters.model.draft_model import DraftModelDrafter
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan
from paceline.models.backends.cuda import elementwise, linear
from paceline.models.backends.cuda.attention import division
from paceline.models.backends.cuda.codes.codes import expanded
from paceline.models.backends.cuda.kernels import TritonKernels
from paceline.models.backends.cuda.place import place_trees
from paceline.models.decoder import Decoder
from paceline.models.kernels import kernels_for
from paceline.models.kv_cache import KVCache, KVSpec
from paceline.models.plan import DeviceTrees, PassPlan
from paceline.models.weights import Dtypes, WeightKind
from tests.helpers.contract_toys import ByRequest, context_for
from tests.helpers.random_llama import llama, random_weights
from tests.models.test_weights import codes_of

VOCAB, BLOCK = 40, 16
CODES = (
    (WeightKind.INT8, "zeros"),
    (WeightKind.INT4, "offsets"),
    (WeightKind.INT4, "none"),
    (WeightKind.FP8, "none"),
)
SOURCE = Path(paceline.__file__).parent


def kernels_in_source() -> dict[str, str]:
    """Return every function that Triton compiles, by its dotted name, and its decorator: triton, gluon or kernel."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        module = ".".join(("paceline", *path.relative_to(SOURCE).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                spelt = ast.unparse(decorator).partition("(")[0]
                if spelt in ("triton.jit", "gluon.jit", "kernel"):
                    found[f"{module}.{node.name}"] = spelt.partition(".")[0]
    return found


def small_engine(device: torch.device, dtype: torch.dtype, head_dim: int) -> Engine:
    """Make an engine whose request "0" is drafted for by a draft model, "1" by lookup."""
    target, small = (
        Decoder(config, weights, kernels_for(device), device=device, dtypes=Dtypes.of(dtype, device))
        for config, weights in (model(head_dim, normed=False), model(head_dim, normed=True))
    )
    config = EngineConfig(
        prefix_caching=False, num_blocks=8, block_size=BLOCK, max_num_seqs=2, max_num_batched_tokens=8
    )
    drafters = [METHODS["suffix"].make(context_for(target.config)), DraftModelDrafter(small)]
    policy = ByRequest({"0": DraftPlan("draft-model", 3), "1": DraftPlan("suffix", 3)})
    return Engine(target, config, drafters=drafters, policy=policy)


def model(head_dim: int, *, normed: bool):
    config = llama(
        vocab_size=VOCAB, hidden_size=2 * head_dim, intermediate_size=32, num_heads=2, num_kv_heads=1,
        head_dim=head_dim, max_positions=64, num_layers=1, qk_norm=normed,
    )  # fmt: skip
    torch.manual_seed(0)
    return config, random_weights(config, 1.5)


def further_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Launch what the engine does not: other tiles of products, codes, direct attention, trees of the device."""
    kernels = TritonKernels(device)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(device, dtype)

    elementwise.gate(numbers(3, 64))
    weight, x = kernels.pack(numbers(64, 4096)), numbers(3, 4096)
    parts = linear.linear(x, weight, in_segments=True)
    elementwise.rms_norm(numbers(3, 64), parts, numbers(64), 1e-5)
    linear.linear(x, weight)
    linear.linear(numbers(70, 128), kernels.pack(numbers(96, 128)), tile=linear.Tile(64, 64, 64, 4, 2, boxes=True))
    for kind, shift in CODES:
        group = 128 if kind is WeightKind.FP8 else 64
        codes = kernels.pack(codes_of(kind, 64, 128, group, shift).to(None, device))
        expanded(codes.weight, dtype)
        linear.linear(numbers(3, 128), codes)
    place_two_trees(device)
    logits, ids, anchors = numbers(1, 3, VOCAB)[:, 1:].float(), torch.arange(VOCAB, device=device), torch.tensor([1])
    markov = [torch.randn(VOCAB, 4).to(device) for _ in range(3)]
    device_trees(logits, anchors.to(device), *markov, ids, 6, 2, count=8, part=16)
    for head_dim in (64, 32):  # pipelined on a Hopper, and shared
        attend(kernels, device, dtype, head_dim)


def attend(kernels: TritonKernels, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Attend in parts and, with more rows than programs, directly; with a window; two rows with drafted ancestors."""
    cache = KVCache(
        [KVSpec(num_kv_heads=1, head_dim=head_dim)], num_blocks=16, block_size=BLOCK, dtype=dtype, device=device
    )
    (layer,) = cache.layers
    for tensor in (layer.k, layer.v):
        tensor.zero_()
    for rows, programs, window, paths in ((2, 256, None, 0), (2, 256, 50, 0), (40, 2, None, 0), (2, 256, None, 4)):
        positions, owners = torch.arange(rows) + 90, torch.arange(rows) // 10
        tables = torch.arange(16, dtype=torch.int32).repeat(4, 1)
        plan = PassPlan.in_order(positions, torch.full((rows,), -1), owners, tables, BLOCK, 200)
        if paths:
            plan = replace(plan, prefix=plan.prefix - 2, path=torch.ones(rows, paths, dtype=torch.int32))
        with mock.patch.object(division, "PROGRAMS", programs):
            kernels.attention(torch.randn(rows, 2, head_dim).to(device, dtype), plan.to(device), layer, 0.125, window)


def place_two_trees(device: torch.device) -> None:
    rows = 8

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    plan = PassPlan(
        positions=ints(rows), slots=ints(rows), sequence=ints(rows), prefix=ints(rows), reach=ints(rows),
        path=ints(rows, 8), block_tables=ints(1, 1), block_size=BLOCK, max_len=64,
    )  # fmt: skip
    parents = torch.tensor([[-1, 0, 0], [-1, 0, 1]]).to(device)
    trees = DeviceTrees(np.array([[0, 1, 3, 9], [1, 5, 3, 20]], np.int32), torch.zeros_like(parents), parents, 3)
    place_trees(plan, ints(rows), torch.from_numpy(trees.numbers.ravel()).to(device), trees)
