"""Verification as the engine calls it: the parameters of each sequence, and the row of logits of each node.

On a CPU the common step is walked on the host. On a CUDA device a step is one replay of a graph captured at start-up
(verify/cuda/graphs.py): penalties, biases and bans change the logits before it, log-probabilities are taken after it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from paceline.core.draft import Draft, packed_to
from paceline.core.sequence import Sequence
from paceline.core.verdict import Verdict
from paceline.models import kernels
from paceline.platform.cuda_graph import CompileCounter
from paceline.platform.staging import Staging
from paceline.verify import Nodes, edit, verify, with_logprobs
from paceline.verify.cuda.graphs import GraphCache, StepKey
from paceline.verify.host import walk_on_host
from paceline.verify.metadata import BAD_WORDS, PENALISED, SENT, BatchParams, Ints, SamplingMetadataBuilder

PATHS = PENALISED | BAD_WORDS
Verify = Callable[..., Verdict]


class Sampler:
    """`verifier`: a function in place of `verify`, called for every step. None: `verify`, by the host's walk or a graph
    where they serve."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        *,
        verifier: Verify | None = None,
    ) -> None:
        self._device, self._on_host, self._verifier = device, device.type == "cpu", verifier
        self._native = kernels.draw_of(device)
        self._builder = SamplingMetadataBuilder(vocab_size, eos_token_ids, device)
        self._graphs = GraphCache(device, Staging(device))
        self._compiled = CompileCounter()
        self.time_is_typical = True  # nothing was compiled for the last step
        self.uncaptured = 0  # steps on a CUDA device that were outside of what was captured

    @property
    def late_captures(self) -> int:
        """Kernels compiled, or loaded from the compile cache, since `warmup`, by any part of this process. Graphs of
        verification are captured in `warmup` alone."""
        return self._compiled.count

    def joined(self, sequence: Sequence) -> None:
        """Keep the parameters of a sequence by its `req_index`, from which `verify` finds them."""
        self._builder.columns.fill(sequence.req_index, sequence)

    def left(self, sequence: Sequence) -> None:
        """Do nothing: the next sequence with this `req_index` overwrites the parameters."""

    def verify(
        self,
        sequences: SequenceOf[Sequence],
        draft: Draft,
        logits: Tensor,
        row_of: Tensor,
        *,
        lengths: Ints | None = None,
        req_indices: Ints | None = None,
    ) -> Verdict:
        """`row_of` (B, N + 1): the row of logits of the last token (0) and of each node (i + 1); they lie in order.

        `row_of` and the draft's `num_nodes` lie on the host; its tokens and trees may lie on the device. `lengths` of
        the sequences, where they have tokens that the host has not read. `req_indices` of sequences that were admitted.
        """
        draft = draft.placed(self._device)
        if self._verifier is not None:  # it may stand in for a sampler that `joined` was called on
            params = self._builder.params(sequences, lengths)
            return self._uncaptured(self._verifier, params, draft, logits, row_of)
        if self._on_host and draft.q is None and not self._graphs.enabled:
            samplers = self._builder.samplers(sequences, req_indices)
            if samplers is not None:
                committed = [len(one.tokens) for one in sequences] if lengths is None else lengths.tolist()
                row_by_slot = draft.shape.logit_rows  # `row_of`
                return walk_on_host(draft, logits, row_by_slot, draft.max_depth, samplers, committed, self._native)
        params, compiled = self._builder.params(sequences, lengths, req_indices), self._compiled.count
        simple = not params.edits and params.num_logprobs is None
        key = self._graphs.key(params.form, draft, logits)
        if key is None:
            self.uncaptured += self._graphs.enabled
            verdict = self._uncaptured(verify, params, draft, logits, row_of)
        elif simple:
            verdict = self._captured(key, params, draft, row_of)
        else:
            verdict = self._edited(key, params, draft, logits, row_of)
        self.time_is_typical = compiled == self._compiled.count
        return verdict

    @torch.inference_mode()
    def warmup(self, logits: Tensor, sequences: int, rows: int, *, q_rows: int = 0) -> None:
        """Compile, several kernels at a time, and capture what steps of up to so many sequences and rows of logits
        take, with up to `q_rows` rows of q. `logits`: the whole buffer that passes leave theirs in."""
        self._graphs.prepare(logits, sequences, rows, q_rows)
        if logits.is_cuda:
            from paceline.platform.triton import parallel_compile

            with parallel_compile():
                for key in self._graphs.kinds():
                    self._graphs.run(key, verify)
        if self._graphs.enabled:
            self._graphs.capture_all(verify)
        self._compiled.start()

    def _captured(self, key: StepKey, params: BatchParams, draft: Draft, row_of: Tensor) -> Verdict:
        return self._graphs.verify(key, np.vstack((params.columns[:SENT], params.lengths)), draft, row_of)

    def _edited(self, key: StepKey, params: BatchParams, draft: Draft, logits: Tensor, row_of: Tensor) -> Verdict:
        """The graph reads logits from the buffer of the pass, so edited logits are written there until it has run."""
        raw, (_, there, nodes) = None, self._on_device(params, draft, row_of)
        if params.edits:
            raw = logits.clone()
            logits.copy_(edit(raw, self._builder.edits(params, self._builder.masks(params, draft)), nodes))
        verdict = self._captured(key, params, draft, row_of)
        if raw is not None:
            logits.copy_(raw)
        wanted = params.num_logprobs
        return verdict if wanted is None else with_logprobs(verdict, logits, there, wanted, draft.max_depth)

    def _uncaptured(
        self, verifier: Verify, params: BatchParams, draft: Draft, logits: Tensor, row_of: Tensor
    ) -> Verdict:
        metadata, draws = self._builder.build(params, self._builder.masks(params, draft))
        on_device, there, nodes = self._on_device(params, draft, row_of)
        options = {"max_depth": draft.max_depth, "num_logprobs": params.num_logprobs}
        return verifier(on_device, logits, there, nodes, metadata, draws, **options)

    def _on_device(self, params: BatchParams, draft: Draft, row_of: Tensor) -> tuple[Draft, Tensor, Nodes]:
        """Draft, rows and nodes where the logits are. Only penalties and bad words look at the path of a node."""
        if not draft.width:
            (there,) = packed_to(self._device, row_of)
            return draft.to(self._device), there, Nodes.roots(draft.batch, self._device)
        seq, slots = np.nonzero(row_of.numpy() >= 0)  # rows lie in order of sequence and slot
        deepest, draft = draft.max_depth, draft.to(self._device)
        there, owner, node = packed_to(self._device, row_of, torch.from_numpy(seq), torch.from_numpy(slots - 1))
        return draft, there, Nodes.of(draft, owner, node, deepest, with_path=bool(params.extra & PATHS))
