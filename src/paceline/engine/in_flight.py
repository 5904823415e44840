"""Steps under way (`InFlightStep`), and their verdicts on the way to the host (`VerdictCopy`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.draft import UNKNOWN, Draft, packed_to
from paceline.core.feedback import NO_TOKEN, Feedback
from paceline.core.sequence import TokenLogprobs
from paceline.core.verdict import UnreadVerdict, Verdict
from paceline.engine.batch import Batch
from paceline.engine.layout import PassLayout, logit_parents
from paceline.engine.sampler import PromptLogprobs, logprob_entries
from paceline.platform.staging import Staging
from paceline.verify.top_tokens import TopTokens


class VerdictCopy:
    """A verdict on its way to the host: the copy starts at once, and `read` waits for it."""

    def __init__(self, verdict: Verdict, staging: Staging) -> None:
        self._verdict = verdict
        self._arrived: Any = None  # an event; None: the verdict was reached on the host
        self._logprobs = verdict.logprobs
        if verdict.is_cuda:
            if verdict.logprobs is not None:  # ahead of the verdict in the stream, so the same event covers them
                self._logprobs = verdict.logprobs.each(lambda part: part.to("cpu", non_blocking=True))
            self._fetch(staging)

    def _fetch(self, staging: Staging) -> None:
        buffer = staging.fetch(self._verdict.pack().view(torch.int32))
        rows, depth = self._verdict.path.shape
        places, _ = Verdict.places(self._verdict.packed_rows or rows, depth)
        self._arrived, packed = buffer.over, buffer.ints.view(np.uint8)
        tokens, accepted, path = (packed[place].view(np.int64) for place in places[:3])
        self._tokens, self._accepted = tokens.reshape(-1, depth + 1)[:rows], accepted[:rows]  # more are packed
        self._path, self._kinds = path.reshape(len(accepted), depth), packed[places[3]].reshape(-1, depth + 1)

    @property
    def is_over(self) -> bool:
        """Return whether the copy is complete; False on a CPU, where there is none."""
        return self._arrived is not None and bool(self._arrived.query())

    def read(self) -> tuple[list[list[int]], list[int]]:
        """Return, by row, the tokens it commits and the number of them that were drafted."""
        if self._arrived is None:
            verdict_rows = self._verdict.rows
            return [row.tokens for row in verdict_rows], [len(row.path) for row in verdict_rows]
        self._arrived.synchronize()
        tokens, accepted = self._tokens.tolist(), self._accepted.tolist()
        if self._tokens.shape[1] == 1:
            return tokens, accepted
        return [row[: count + 1] for row, count in zip(tokens, accepted, strict=True)], accepted

    def kinds(self, row: int) -> list[int]:
        """Return the TokenKind of each place for a token of a row that was read."""
        if self._arrived is None:
            return self._verdict.rows[row].kinds
        return list(self._kinds[row].tolist())

    def path(self, row: int, accepted: int) -> list[int]:
        """Return the accepted nodes of a row's draft that was read."""
        if self._arrived is None:
            return self._verdict.rows[row].path
        return list(self._path[row, :accepted].tolist())

    def logprobs(self, row: int, tokens: list[int], most: int) -> list[TokenLogprobs]:
        """Return, for each committed token of a row, its own logprob and those of the `most` most likely tokens."""
        assert self._logprobs is not None
        return logprob_entries(self._logprobs.each(itemgetter(row)), tokens, most)


class FeedbackCopy:
    """The likeliest tokens of a step's verified rows on their way to the host, and behind them the tokens and trees of
    its draft that only the device knows."""

    def __init__(self, top: Tensor, n: int, draft: Draft, staging: Staging) -> None:
        """`top`: packed by `verify.top_tokens`."""
        self._n, self._draft, self._num_unseen = n, draft, 0
        self._arrived: Any = None  # an event; None: everything is on the host
        if not top.is_cuda:
            self._packed = top.numpy()
            return
        unseen = [part.int().flatten() for part in draft.unseen]
        buffer = staging.fetch(torch.cat([top, *unseen]) if unseen else top)
        self._arrived, self._packed, self._num_unseen = buffer.over, buffer.ints, len(unseen)

    def read(self, batch: Batch, layout: PassLayout, rows: SequenceOf[int]) -> Feedback:
        """Return the feedback on `rows` of the verdict; their sequences have all tokens that the step verified."""
        if self._arrived is not None:
            self._arrived.synchronize()
        shape, lengths, sequences = layout.shape, batch.sampled_lengths, batch.sampled_sequences
        row_of, nodes, parents = shape.logit_row_of.numpy(), self._draft.arrays.tokens, shape.logit_parents
        count, size = len(parents), nodes.size
        if self._num_unseen:
            unseen = self._packed[count * (2 * self._n + 1) :]
            nodes = unseen[:size].reshape(nodes.shape)
            if self._num_unseen > 1:
                known, read = self._draft.arrays.parents, unseen[size : 2 * size].reshape(nodes.shape)
                used = row_of[:, 1:] >= 0
                parents = logit_parents(row_of, np.where(used, np.where(known == UNKNOWN, read, known), -1))
        tokens = np.empty(count, np.int32)
        tokens[row_of[:, 0]] = [  # a sequence that has ended since the launch may be shorter; `rows` leaves it out
            one.tokens[end - 1] if end <= len(one.tokens) else NO_TOKEN
            for one, end in zip(sequences, lengths.tolist(), strict=True)
        ]
        if size:
            tokens[parents >= 0] = nodes.take(shape.used)
        top = TopTokens.unpacked(self._packed, count, self._n)
        feedback = Feedback(sequences, lengths, row_of[:, 0], tokens, parents, *top)
        return feedback if len(rows) == len(sequences) else feedback.of(rows)


@dataclass
class InFlightStep:
    """A step under way; reading its verdict is the step's one copy from the device."""

    batch: Batch
    layout: PassLayout
    draft: Draft
    model_s: float
    time_is_typical: bool  # nothing was compiled or captured, so the step's time is typical
    ahead: bool = False  # launched before the step before it was read
    verdict: Verdict | None = None  # None: no row sampled
    verdict_copy: VerdictCopy | None = None
    prompts: PromptLogprobs | None = None
    feedback: FeedbackCopy | None = None  # None: no drafter asks for it

    @functools.cached_property
    def unread(self) -> UnreadVerdict | None:
        """The verdict on the device, cut to the draft's depth. A captured verification is padded to its graph's width;
        drafters must not read the padding."""
        batch, verdict, depth = self.batch, self.verdict, self.draft.max_depth
        if verdict is None:
            return None
        tokens, path = verdict.tokens[:, : depth + 1], verdict.path[:, :depth]
        columns = batch.sampled_lengths, self.layout.shape.node_rows, batch.sampled_req_indices
        length, node_row, req_index = packed_to(tokens.device, *map(torch.from_numpy, columns))
        return UnreadVerdict(
            tokens=tokens,
            num_accepted=verdict.num_accepted,
            path=path,
            rows=range(len(batch.sampling)),
            length=length,
            node_row=node_row,
            req_index=req_index,
        )
