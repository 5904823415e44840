# ruff: noqa: E402
"""DSpark as on a GPU, drafts and context K/V captured, through Triton's interpreter: a replay runs the same work; and
by native code, in one call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.interpreter import require_interpreter

require_interpreter()

from paceline.core.sequence import Sequence
from paceline.core.verdict import UnreadVerdict
from paceline.drafters.base import DraftRequest
from paceline.drafters.block import block_pass, context_kv
from paceline.drafters.hidden_states import TapRing
from paceline.models.backends.cpu.kernels import NativeKernels
from paceline.models.backends.cuda.attention import division
from paceline.models.backends.cuda.kernels import TritonKernels
from paceline.models.kv_cache import KVCache
from paceline.models.weights import Dtypes
from paceline.native.library import open_library, runnable_variants
from paceline.platform.cuda_graph import CudaGraph
from tests.cuda.test_cuda import CONFIG as TINY
from tests.drafters.block.dspark_reference import drafter_config, make, random_tensors
from tests.helpers.contract_toys import params

# The interpreter's numpy on infinities, which kernels mask.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BLOCK, CPU = 16, torch.device("cpu")
CONFIG = replace(TINY, hidden_size=32, vocab_size=48)
VARIANTS = runnable_variants()


class Repeats:
    """A recorder of graphs whose replay runs the work again."""

    def capture(self, work):
        def replay():
            graph.result = work()

        graph = CudaGraph(type("Graph", (), {"replay": staticmethod(replay)}), None)
        return graph


def scene(kernels, recorder, lengths, monkeypatch):
    """Return a drafter with the context K/V of its sequences up to their last token, and the sequences."""
    monkeypatch.setattr(block_pass, "SEQUENCES", (2,))
    monkeypatch.setattr(division, "PROGRAMS", 16)  # the interpreter runs one program after the other
    monkeypatch.setattr(context_kv, "POSITIONS", (16,))
    config = drafter_config(CONFIG, qk_norm=True, tap_norm=True, mask_embedding=True, draft_vocab_size=40, num_layers=1)
    embedding = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=torch.Generator().manual_seed(3))
    dtypes = Dtypes.of(torch.float32, CPU)
    drafter = make(config, random_tensors(config), embedding, kernels=kernels, dtypes=dtypes)
    drafter._recorder = lambda: recorder
    cache = KVCache(drafter.kv_layers, num_blocks=12, block_size=BLOCK, dtype=torch.float32, device=CPU)
    for layer in cache.layers:
        layer.k.fill_(float("nan"))  # slots without context K/V may not be read
        layer.v.fill_(float("nan"))
    drafter.bind(cache.layers, BLOCK)
    ring = TapRing()
    drafter.bind_taps(ring, [2, 0])
    sequences = []
    generator = torch.Generator().manual_seed(4)
    for req_index, length in enumerate(lengths):
        tokens = torch.randint(0, CONFIG.vocab_size, (length,), generator=generator)
        sequence = Sequence(str(req_index), tokens.tolist(), params(max_tokens=9), max_len=100)
        sequence.req_index, sequence.blocks = (
            req_index,
            [3 * req_index + 2, 3 * req_index, 3 * req_index + 1][: -(-(length + 6) // BLOCK)],
        )
        drafter.admit(sequence, 0, 0)
        taps = torch.randn(length - 1, 3, CONFIG.hidden_size, generator=generator)
        for at in range(length - 1):
            nothing = torch.zeros(1, 0, dtype=torch.int64)
            one = torch.tensor([req_index])
            after = UnreadVerdict(
                tokens=tokens[None, at + 1 : at + 2], num_accepted=one * 0, path=nothing, rows=[0],
                length=one * 0 + at + 1, node_row=one * 0 + 1, req_index=one,
            )  # fmt: skip
            ring.store(after, taps[at : at + 1], len(lengths))
        sequences.append(sequence)
    return drafter, sequences


OTHERS = {"captured": lambda: (TritonKernels(CPU), Repeats())}
OTHERS |= {variant: lambda variant=variant: (NativeKernels(open_library(variant), 2), None) for variant in VARIANTS}


@pytest.mark.parametrize("other", OTHERS)
def test_captured_and_native_drafts_are_those_of_the_reference_kernels(other, monkeypatch):
    """Three sequences; captured, they are drafted for in two parts, the second padded, and so is their context K/V."""
    drafts, caches, lengths = [], [], [5, 18, 8]
    for kernels, recorder in ((None, None), OTHERS[other]()):
        drafter, sequences = scene(kernels, recorder, lengths, monkeypatch)
        assert bool(drafter._passes._captured) == bool(drafter._context_kv._graphs) == (recorder is not None)
        node_limits = [5 + 7 * at for at in range(len(sequences))]
        rows = [DraftRequest(*pair) for pair in zip(sequences, node_limits, strict=True)]
        drafts.append(drafter.propose(rows).on_host(CONFIG.vocab_size))
        caches.append(drafter._passes._caches[0])
        for sequence, length in zip(sequences, lengths, strict=True):
            assert drafter.kv_range(sequence) == (0, length - 1)
            slots = torch.tensor([sequence.blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(length - 1)])
            assert not caches[-1].k[slots].isnan().any()
    plain, captured = drafts
    assert torch.equal(plain.num_nodes, captured.num_nodes)
    assert torch.equal(plain.tokens, captured.tokens)
    assert torch.equal(plain.parents, captured.parents)
