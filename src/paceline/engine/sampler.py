"""Verification as the engine calls it: the parameters of each sequence, and the row of logits of each node; and the
logprobs of prompts, whose rows of logits are computed beside those that are verified.

On a CPU the common step is walked on the host. On a CUDA device a step is one replay of a graph captured at start-up
(verify/cuda/graphs.py): penalties, biases and bans change the logits before it, log-probabilities are taken after it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from paceline.core.draft import Draft, packed_to
from paceline.core.sequence import Sequence, TokenLogprobs
from paceline.core.verdict import Logprobs, Verdict
from paceline.engine.layout import PassLayout, PromptRows
from paceline.models import kernels
from paceline.platform.cuda_graph import CompileCounter
from paceline.platform.staging import Staging
from paceline.verify import Nodes, edit, logprobs_at, verify, with_logprobs
from paceline.verify.cuda.graphs import GraphCache, StepKey
from paceline.verify.host import walk_on_host
from paceline.verify.metadata import BAD_WORDS, PENALISED, SENT, BatchParams, Ints, SamplingMetadataBuilder
from paceline.verify.top_tokens import top_tokens

PATHS = PENALISED | BAD_WORDS
Verify = Callable[..., Verdict]


class Sampler:
    """Verification of the engine's steps. `verifier`: a function in place of `verify`, called for every step; None:
    `verify`, or the host's walk or one of the `graphs` where they serve."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        *,
        verifier: Verify | None = None,
        graphs: GraphCache | None = None,
    ) -> None:
        self._device, self._on_host, self._verifier = device, device.type == "cpu", verifier
        self._native, self._native_top = kernels.draw_of(device), kernels.top_tokens_of(device)
        self._builder = SamplingMetadataBuilder(vocab_size, eos_token_ids, device)
        self._graphs = GraphCache(device, Staging(device)) if graphs is None else graphs
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
        """Return the verdict on a draft. `row_of` (B, N + 1), on the host: the row of logits of the last token (0) and
        of each node (i + 1), in order; `lengths` of sequences with tokens that the host has not read; `req_indices` of
        sequences that were admitted."""
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
        key = self._graphs.key(params.filter_set, draft, logits)
        if key is None:
            self.uncaptured += self._graphs.enabled
            verdict = self._uncaptured(verify, params, draft, logits, row_of)
        elif simple:
            verdict = self._captured(key, params, draft, row_of)
        else:
            verdict = self._edited(key, params, draft, logits, row_of)
        self.time_is_typical = compiled == self._compiled.count
        return verdict

    def top_tokens(self, logits: Tensor, n: int, threads: int) -> Tensor:
        """Return the `n` likeliest tokens of each row, packed as by `verify.top_tokens`; the host does not wait."""
        return top_tokens(logits, n) if self._native_top is None else self._native_top(logits, n, threads)

    @torch.inference_mode()
    def warmup(self, logits: Tensor, sequences: int, rows: int, *, q_rows: int = 0) -> None:
        """Compile kernels, several at a time, and capture the verification of steps of at most `sequences`, `rows` of
        logits and `q_rows` of q. `logits`: the whole buffer that passes write to."""
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
        """Verify edited logits, which are written to the buffer of the pass until the graph has read them."""
        raw, (_, rows, nodes) = None, self._on_device(params, draft, row_of)
        if params.edits:
            raw = logits.clone()
            logits.copy_(edit(raw, self._builder.edits(params, self._builder.masks(params, draft)), nodes))
        verdict = self._captured(key, params, draft, row_of)
        if raw is not None:
            logits.copy_(raw)
        wanted = params.num_logprobs
        return verdict if wanted is None else with_logprobs(verdict, logits, rows, wanted, draft.max_depth)

    def _uncaptured(
        self, verifier: Verify, params: BatchParams, draft: Draft, logits: Tensor, row_of: Tensor
    ) -> Verdict:
        metadata, draws = self._builder.build(params, self._builder.masks(params, draft))
        on_device, rows, nodes = self._on_device(params, draft, row_of)
        options = {"max_depth": draft.max_depth, "num_logprobs": params.num_logprobs}
        return verifier(on_device, logits, rows, nodes, metadata, draws, **options)

    def _on_device(self, params: BatchParams, draft: Draft, row_of: Tensor) -> tuple[Draft, Tensor, Nodes]:
        """Return draft, rows and nodes on the device of the logits; only penalties and bad words read nodes' paths."""
        if not draft.width:
            (rows,) = packed_to(self._device, row_of)
            return draft.to(self._device), rows, Nodes.roots(draft.batch, self._device)
        seq, slots = np.nonzero(row_of.numpy() >= 0)  # rows are in order of sequence and slot
        deepest, draft = draft.max_depth, draft.to(self._device)
        rows, owner, node = packed_to(self._device, row_of, torch.from_numpy(seq), torch.from_numpy(slots - 1))
        return draft, rows, Nodes.of(draft, owner, node, deepest, with_path=bool(params.extra & PATHS))


@dataclass
class PromptLogprobs:
    """The logprobs of prompt tokens of a pass, on the device until they are handed out."""

    rows: list[PromptRows]
    logprobs: Logprobs  # logprobs of the rows of all, in order

    def hand_out(self) -> None:
        """Append them to their sequences; tokens computed again after a preemption are left out."""
        on_host, at = self.logprobs.each(Tensor.cpu), 0
        for sequence, first, count, _ in self.rows:
            part, at = on_host.each(itemgetter(slice(at, at + count))), at + count
            known, most = sequence.prompt_logprobs, sequence.params.prompt_logprobs or 0
            assert known is not None
            assert len(known) >= first - 1, "a part of the prompt was never computed"
            known += logprob_entries(part, sequence.tokens[first : first + count], most)[len(known) - first + 1 :]


def rows_with_logits(layout: PassLayout) -> Tensor:
    """Return the rows of the pass whose logits are computed, in order."""
    if not layout.prompts:
        return layout.shape.logit_rows
    of_prompts = [torch.arange(part.row, part.row + part.size) for part in layout.prompts]
    return torch.cat([layout.shape.logit_rows, *of_prompts]).sort().values


def look_at_prompts(layout: PassLayout, rows: Tensor, logits: Tensor) -> PromptLogprobs:
    """Return the logprobs of prompt tokens, from `logits` of the `rows` of the pass."""
    at = [torch.arange(count) + torch.searchsorted(rows, row) for _, _, count, row in layout.prompts]
    expected = [token for one, first, size, _ in layout.prompts for token in one.tokens[first : first + size]]
    index, chosen = packed_to(logits.device, torch.cat(at), torch.tensor(expected))
    most = max(part.sequence.params.prompt_logprobs or 0 for part in layout.prompts)
    return PromptLogprobs(layout.prompts, logprobs_at(logits, index, chosen, most))


def moved_to_front(logits: Tensor, rows: Tensor) -> Tensor:
    """Move rows of logits to where captured verification reads them: the beginning of the buffer."""
    (index,) = packed_to(logits.device, rows)
    logits[: len(rows)] = logits[index]
    return logits[: len(rows)]


def logprob_entries(logprobs: Logprobs, tokens: list[int], most: int) -> list[TokenLogprobs]:
    """Return an entry for each of the first places of one row, where these tokens were chosen."""
    count = len(tokens)
    chosen = zip(tokens, logprobs.chosen[:count].tolist(), logprobs.rank[:count].tolist(), strict=True)
    best = zip(logprobs.top_tokens[:count, :most].tolist(), logprobs.top[:count, :most].tolist(), strict=True)
    return [
        {token: (value, rank)} | {likely: (high, at) for at, (likely, high) in enumerate(zip(*pair, strict=True), 1)}
        for (token, value, rank), pair in zip(chosen, best, strict=True)
    ]
