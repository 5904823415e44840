"""Sampling metadata: from the parameters of sequences to the tensors of verification, and of drafters that sample.

Parameters that do not change lie in columns by `Sequence.req_index`. They are filled in once, when the sequence gets
its index; a step gathers those of its rows in one operation. Only lengths, and the histories of penalties and bad
words, are new each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.draft import Draft, sent
from paceline.core.sequence import Sequence
from paceline.sampling_params import SamplingParams
from paceline.text.grammar import masks_of
from paceline.verify import (
    BadWords,
    Bias,
    DrawKeys,
    FilterSet,
    GrammarMasks,
    MinTokens,
    Penalties,
    SamplingMetadata,
    SamplingMode,
)
from paceline.verify.host import TokenSampler

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
# Rows of the columns: noise key, SamplingMode, temperature, top_k, top_p, min_p; then FilterSet and the bits of EXTRA.
KEY, KIND, TEMPERATURE, TOP_K, TOP_P, MIN_P, FILTER_SET, EXTRA = range(8)
SENT = FILTER_SET  # rows a device reads
PENALISED, BIASED, ALLOWED, BAD_WORDS, MIN_TOKENS, GRAMMAR, LOGPROBS = (1 << bit for bit in range(7))  # bits of EXTRA
EDITS = PENALISED | BIASED | ALLOWED | BAD_WORDS | MIN_TOKENS | GRAMMAR
MOST_TOP_K = 1 << 31  # tokens; more than any vocabulary, so the filter is off
# A lower temperature could round to 0, which stands for greedy, and a higher one to infinity.
_COLDEST, _HOTTEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class ParamColumns:
    """(8, S) int64, the rows above by `req_index`; rows that hold fractions are float64 in those bits."""

    def __init__(self) -> None:
        self._ints: Ints = np.zeros((EXTRA + 1, 1), np.int64)
        self._owners: list[Sequence | None] = [None]
        self._plain: list[TokenSampler | None] = [None]  # None: not by drawing alone

    def fill(self, req_index: int, sequence: Sequence) -> None:
        """Fill in the column of a sequence, once for each that gets the index."""
        if req_index >= len(self._owners):
            more = max(req_index + 1, 2 * len(self._owners)) - len(self._owners)
            self._ints = np.pad(self._ints, ((0, 0), (0, more)))
            self._owners += [None] * more
            self._plain += [None] * more
        self._owners[req_index] = sequence
        p = sequence.params
        ints, floats = self._ints[:, req_index], self._ints.view(np.float64)[:, req_index]
        temperature, top_k = p.temperature or 0.0, min(max(p.top_k or 0, 0), MOST_TOP_K)
        top_p, min_p = 1.0 if p.top_p is None else p.top_p, p.min_p or 0.0
        ints[KEY] = sequence.noise_key
        ints[KIND] = SamplingMode.GREEDY if p.greedy else SamplingMode.COIN if p.seed is None else SamplingMode.SEEDED
        # Verification rounds temperature and min_p to float32 on every device.
        temperature = float(np.float32(temperature and min(max(temperature, _COLDEST), _HOTTEST)))
        floats[TEMPERATURE] = temperature
        ints[TOP_K], floats[TOP_P], floats[MIN_P] = top_k, top_p, np.float32(min_p)
        ints[FILTER_SET] = FilterSet.of(greedy=p.greedy, top_k=top_k > 0, filters=top_p < 1 or min_p > 0)
        bans = (p.allowed_token_ids, sequence.bad_words, p.min_tokens, p.structured_outputs)
        asked = (p.penalised, p.logit_bias, *bans, p.logprobs is not None)
        ints[EXTRA] = extra = sum(1 << bit for bit, one in enumerate(asked) if one)
        filters = top_k, top_p, float(np.float32(min_p))
        sampler = TokenSampler(temperature, sequence.noise_key, p.seed is not None and not p.greedy, *filters)
        self._plain[req_index] = None if extra & ~MIN_TOKENS else sampler

    def samplers(self, sequences: SequenceOf[Sequence], req_indices: Iterable[int]) -> list[TokenSampler] | None:
        """Return the sequences' samplers; None where one has changed logits, or logprobs."""
        samplers: list[TokenSampler] = []
        for sequence, req_index in zip(sequences, req_indices, strict=True):
            sampler = self._plain[req_index]
            if sampler is None or len(sequence.tokens) - sequence.num_prompt < sequence.params.min_tokens:
                return None
            samplers.append(sampler)
        return samplers

    def req_indices(self, sequences: SequenceOf[Sequence]) -> Ints:
        """Return the indices of the sequences; columns of new sequences are filled in."""
        for sequence in sequences:
            req_index = sequence.req_index
            if req_index >= len(self._owners) or self._owners[req_index] is not sequence:
                self.fill(req_index, sequence)
        return np.array([sequence.req_index for sequence in sequences], np.int64)

    def take(self, req_indices: Ints) -> Ints:
        """Return (8, B) columns."""
        return self._ints.take(req_indices, 1)


class BatchParams(NamedTuple):
    """The parameters of a step's B sequences, on the host."""

    sequences: SequenceOf[Sequence]
    columns: Ints  # (8, B)
    lengths: Ints  # (B,) committed tokens
    filter_set: FilterSet
    extra: int  # bits of EXTRA that some sequence has

    @property
    def edits(self) -> bool:
        """Return whether a sequence changes single logits."""
        if not self.extra & EDITS:
            return False
        if self.extra & EDITS != MIN_TOKENS:
            return True
        return any(sequence.num_output < sequence.params.min_tokens for sequence in self.sequences)

    @property
    def num_logprobs(self) -> int | None:
        """Return the largest `logprobs` of the sequences."""
        if not self.extra & LOGPROBS:
            return None
        return max(one.params.logprobs for one in self.sequences if one.params.logprobs is not None)


@dataclass
class _History:
    """Token counts of one sequence, brought up to date as it grows."""

    sequence: Sequence
    in_prompt: Tensor  # (V,) bool
    counts: Tensor  # (V,) int32
    num_counted: int


class _Allowed(NamedTuple):
    """Tokens that one request may draw."""

    params: SamplingParams  # the key is their identity, so they must stay alive
    mask: Tensor  # (V,) bool
    fallback: int


class SamplingMetadataBuilder:
    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._vocab_size, self._eos, self._device = vocab_size, sorted(eos_token_ids), device
        self.columns = ParamColumns()
        self._histories: dict[str, _History] = {}
        self._masks: dict[int, _Allowed] = {}

    def params(
        self, sequences: SequenceOf[Sequence], lengths: Ints | None = None, req_indices: Ints | None = None
    ) -> BatchParams:
        """Return the step's parameters.

        `lengths` of sequences that have tokens which the host has not read; `req_indices` of sequences that were all
        `fill`ed in, so that none is checked.
        """
        if req_indices is None and any(sequence.req_index < 0 for sequence in sequences):  # outside of an engine
            columns = ParamColumns()
            for req_index, sequence in enumerate(sequences):
                columns.fill(req_index, sequence)
            step_columns = columns.take(np.arange(len(sequences)))
        else:
            indices = self.columns.req_indices(sequences) if req_indices is None else req_indices
            step_columns = self.columns.take(indices)
        if lengths is None:
            lengths = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
        filter_set = FilterSet(int(np.maximum.reduce(step_columns[FILTER_SET])))
        extra = int(np.bitwise_or.reduce(step_columns[EXTRA]))
        return BatchParams(sequences, step_columns, lengths, filter_set, extra)

    def samplers(self, sequences: SequenceOf[Sequence], req_indices: Ints | None) -> list[TokenSampler] | None:
        """Return samplers for the walk on the host; None where it does not serve. `req_indices` as in `params`."""
        if req_indices is not None:
            return self.columns.samplers(sequences, req_indices.tolist())
        columns = ParamColumns()
        for req_index, sequence in enumerate(sequences):
            columns.fill(req_index, sequence)
        return columns.samplers(sequences, range(len(sequences)))

    def metadata(self, sequences: SequenceOf[Sequence]) -> SamplingMetadata:
        """Return the metadata at the sequences' current lengths."""
        return self.build(self.params(sequences))[0]

    def draws(self, sequences: SequenceOf[Sequence]) -> DrawKeys:
        return self.build(self.params(sequences))[1]

    def build(self, of: BatchParams, grammar: GrammarMasks | None = None) -> tuple[SamplingMetadata, DrawKeys]:
        """Build tensors on the device, in one copy. `grammar` masks p at the nodes of a draft; a drafter omits it."""
        on_device = sent(torch.from_numpy(np.vstack((of.columns[:SENT], of.lengths))), self._device)
        floats = on_device.view(torch.float64)
        draws = DrawKeys(key=on_device[KEY], committed=on_device[SENT])
        if of.filter_set is not FilterSet.GREEDY:
            coins = bool((of.columns[KIND] == SamplingMode.COIN).any())
            draws = DrawKeys(key=on_device[KEY], committed=on_device[SENT], kind=on_device[KIND], coins=coins)
        filters = floats[TEMPERATURE], on_device[TOP_K], floats[TOP_P], floats[MIN_P]
        return SamplingMetadata.of(of.filter_set, *filters, grammar=grammar, **self._edits(of)), draws

    def edits(self, of: BatchParams, grammar: GrammarMasks | None = None) -> SamplingMetadata:
        """Build only what changes single logits."""
        return SamplingMetadata.of(FilterSet.GREEDY, grammar=grammar, **self._edits(of))

    def masks(self, of: BatchParams, draft: Draft) -> GrammarMasks | None:
        """Return the masks of sequences with a grammar, at every node. The draft's tokens are read, on any device."""
        if not of.extra & GRAMMAR:
            return None
        tokens, parents = (part.cpu().numpy() for part in (draft.tokens, draft.parents))
        bits, row_of = masks_of(of.sequences, tokens, parents, draft.num_nodes.tolist())
        return GrammarMasks(
            bits=sent(torch.from_numpy(bits), self._device), row_of=sent(torch.from_numpy(row_of), self._device)
        )

    def _edits(self, of: BatchParams) -> dict[str, Any]:
        sequences, extra = of.sequences, of.extra
        parts: dict[str, Any] = {}
        masks: dict[int, _Allowed] | None = None
        if not of.edits:
            return parts
        if extra & PENALISED:
            parts["penalties"] = self._penalties(sequences)
        if extra & BIASED:
            parts["bias"] = self._bias([sequence.params for sequence in sequences])
        if extra & ALLOWED:
            masks = self._allowed(sequences)
            parts["allowed"] = torch.stack([masks[id(sequence.params)].mask for sequence in sequences])
        if extra & BAD_WORDS:
            parts["bad_words"] = self._bad_words(sequences)
        if extra & MIN_TOKENS:
            parts["min_tokens"] = self._min_tokens(sequences)
        eos = self._eos[0] if self._eos else 0
        fallbacks = [eos if masks is None else masks[id(sequence.params)].fallback for sequence in sequences]
        return parts | {"fallback": self._ints(fallbacks)}

    def _allowed(self, sequences: SequenceOf[Sequence]) -> dict[int, _Allowed]:
        """Return masks by identity of the parameters, which the n answers to a prompt share."""
        live = {id(sequence.params): sequence.params for sequence in sequences}
        self._masks = {key: self._masks.get(key) or self._mask(params) for key, params in live.items()}
        return self._masks

    def _mask(self, params: SamplingParams) -> _Allowed:
        """Return the tokens that are allowed; the fallback where all are banned is EOS if it is one of them."""
        ids, eos = params.allowed_token_ids, self._eos[0] if self._eos else 0
        if not ids:
            return _Allowed(params, torch.ones(self._vocab_size, dtype=torch.bool, device=self._device), eos)
        mask = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        return _Allowed(params, mask.index_fill_(0, self._ints(ids), True), eos if eos in ids else ids[0])

    def _penalties(self, sequences: SequenceOf[Sequence]) -> Penalties:
        live = {sequence.key for sequence in sequences}
        self._histories = {key: history for key, history in self._histories.items() if key in live}
        histories = [self._history(sequence) for sequence in sequences]

        def values(of: Callable[[SamplingParams], float | None], neutral: float) -> Tensor:
            params = [of(sequence.params) for sequence in sequences]
            return sent(torch.tensor([neutral if value is None else value for value in params]), self._device)

        return Penalties(
            repetition=values(lambda p: p.repetition_penalty, 1.0),
            presence=values(lambda p: p.presence_penalty, 0.0),
            frequency=values(lambda p: p.frequency_penalty, 0.0),
            in_prompt=torch.stack([history.in_prompt for history in histories]),
            counts=torch.stack([history.counts for history in histories]),
        )

    def _history(self, sequence: Sequence) -> _History:
        history = self._histories.get(sequence.key)
        if history is None or history.sequence is not sequence:
            in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            in_prompt[self._ints(sequence.tokens[: sequence.num_prompt])] = True
            counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
            history = self._histories[sequence.key] = _History(sequence, in_prompt, counts, sequence.num_prompt)
        new = self._ints(sequence.tokens[history.num_counted :])
        history.counts.index_add_(0, new, torch.ones_like(new, dtype=torch.int32))
        history.num_counted = len(sequence.tokens)
        return history

    def _bad_words(self, sequences: SequenceOf[Sequence]) -> BadWords:
        longest = max(len(word) for sequence in sequences for word in sequence.bad_words)
        most = max(len(sequence.bad_words) for sequence in sequences)

        def flush_right(tokens: SequenceOf[int], width: int) -> list[int]:
            last = list(tokens)[-width:] if width else []
            return [-1] * (width - len(last)) + last

        words = [
            [flush_right(word, longest) for word in (*sequence.bad_words, *[()] * (most - len(sequence.bad_words)))]
            for sequence in sequences
        ]
        tails = [flush_right(sequence.tokens[-longest:], longest - 1) for sequence in sequences]
        return BadWords(words=self._ints(words), tail=self._ints(tails).view(len(sequences), longest - 1))

    def _min_tokens(self, sequences: SequenceOf[Sequence]) -> MinTokens:
        ends = [
            [*([] if sequence.params.ignore_eos else self._eos), *sequence.params.stop_token_ids]
            for sequence in sequences
        ]
        return MinTokens(
            minimum=self._ints([sequence.params.min_tokens for sequence in sequences]),
            output_len=self._ints([sequence.num_output for sequence in sequences]),
            ends=self._ragged(ends),
        )

    def _bias(self, params: SequenceOf[SamplingParams]) -> Bias:
        tokens = [list((p.logit_bias or {}).keys()) for p in params]
        width = max(map(len, tokens))
        values = [list((p.logit_bias or {}).values()) + [0.0] * (width - len(p.logit_bias or {})) for p in params]
        return Bias(tokens=self._ragged(tokens), values=sent(torch.tensor(values), self._device))

    def _ragged(self, rows: SequenceOf[SequenceOf[int]]) -> Tensor:
        width = max(map(len, rows))
        return self._ints([[*row, *[-1] * (width - len(row))] for row in rows]).view(len(rows), width)

    def _ints(self, values: SequenceOf[int] | SequenceOf[SequenceOf[int]] | SequenceOf[object] | Ints) -> Tensor:
        return sent(torch.from_numpy(np.array(values, np.int64)), self._device)
