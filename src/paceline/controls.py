"""From what sequences asked for to the tensors verification takes; drafters that sample use the same for their q.

Most of it never changes while the same sequences decode together, so it is built once per composition of the batch;
only lengths, and the histories penalties and bad words look at, are new each step. Parts nobody asked for are None.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.draft import packed_to, sent
from paceline.sampling_params import SamplingParams
from paceline.sequence import Sequence
from paceline.verify import BadWords, Bias, Controls, Draws, MinTokens, Penalties

Ints = np.ndarray[Any, np.dtype[np.int64]]
_GREEDY, _COINS, _SEEDED = range(3)  # how a sequence draws
_COLDEST = torch.finfo(torch.float32).tiny  # a lower temperature could round to 0, which stands for greedy


@dataclass
class _History:
    """Token counts of one sequence, brought up to date as it grows."""

    sequence: Sequence
    in_prompt: Tensor  # (V,) bool
    counts: Tensor  # (V,) int32
    num_counted: int


@dataclass(frozen=True)
class _Composition:
    """What holds as long as the same sequences decode together."""

    sequences: tuple[Sequence, ...]
    controls: Controls
    keys: Tensor  # (S,)
    drawing: np.ndarray[Any, np.dtype[np.int8]]  # (S,) _GREEDY, _COINS or _SEEDED
    penalised: bool
    has_bad_words: bool
    has_min_tokens: bool
    num_logprobs: int | None  # the most that somebody asks for
    rows: dict[range, tuple[Tensor | None, Tensor | None]]  # by owners: what `_rows` has found


class ControlsBuilder:
    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._vocab_size, self._eos, self._device = vocab_size, sorted(eos_token_ids), device
        self._composition = self._compose(())
        self._histories: dict[str, _History] = {}

    def controls(self, sequences: SequenceOf[Sequence]) -> Controls:
        """What these sequences asked for, at the length they have now."""
        of = self._of(sequences)
        controls = of.controls
        if of.penalised:
            controls = replace(controls, penalties=self._penalties(sequences))
        if of.has_bad_words:
            controls = replace(controls, bad_words=self._bad_words(sequences))
        if of.has_min_tokens and any(sequence.num_output < sequence.params.min_tokens for sequence in sequences):
            controls = replace(controls, min_tokens=self._min_tokens(sequences))
        return controls

    def num_logprobs(self, sequences: SequenceOf[Sequence]) -> int | None:
        return self._of(sequences).num_logprobs

    def draws(
        self, sequences: SequenceOf[Sequence], owners: SequenceOf[int], lengths: SequenceOf[int] | Ints | None = None
    ) -> Draws:
        """How each row of logits becomes a token; row i belongs to sequence `owners[i]`.

        `lengths` of the sequences, where they have tokens that the host has not seen.
        """
        of = self._of(sequences)
        if not of.drawing.any():
            return Draws(key=of.keys, committed=of.keys)  # nobody draws, so nobody looks at lengths
        committed = self._ints([len(sequence.tokens) for sequence in sequences] if lengths is None else lengths)
        coins, seeded = self._rows(of, owners)
        return Draws(key=of.keys, committed=committed, coins=coins, seeded=seeded)

    def _rows(self, of: _Composition, owners: SequenceOf[int]) -> tuple[Tensor | None, Tensor | None]:
        """The rows of logits that are drawn by coins and by seed. Plain steps ask for the same again and again."""
        if isinstance(owners, range) and owners in of.rows:
            return of.rows[owners]
        drawing = of.drawing[np.asarray(owners, np.int64)]
        found = [torch.from_numpy(np.flatnonzero(drawing == how)) for how in (_COINS, _SEEDED)]
        coins, seeded = (part if part.numel() else None for part in packed_to(self._device, *found))
        if isinstance(owners, range):
            of.rows[owners] = coins, seeded
        return coins, seeded

    def _of(self, sequences: SequenceOf[Sequence]) -> _Composition:
        composition = tuple(sequences)  # sequences compare by identity: a request id may be used again
        if composition != self._composition.sequences:
            self._composition = self._compose(composition)
        return self._composition

    def _compose(self, sequences: tuple[Sequence, ...]) -> _Composition:
        """Many sequences mostly share few sets of parameters: each is looked at once."""
        all_params = [sequence.params for sequence in sequences]
        sets = list({id(params): params for params in all_params}.values())
        place = {id(params): index for index, params in enumerate(sets)}
        each = np.array([place[id(params)] for params in all_params], np.int64)  # (S,) whose parameters

        def spread(values: Tensor | None) -> Tensor | None:
            return None if values is None else sent(values[torch.from_numpy(each)], self._device)

        fallback = self._eos[0] if self._eos else 0
        controls = Controls(
            temperature=spread(_floats([p.temperature and max(p.temperature, _COLDEST) for p in sets], 0.0)),
            top_k=spread(_top_k(sets)),
            top_p=spread(_floats([p.top_p for p in sets], 1.0, torch.float64)),
            min_p=spread(_floats([p.min_p for p in sets], 0.0)),
            bias=self._bias(all_params) if any(p.logit_bias for p in sets) else None,
            fallback=torch.full((len(sequences),), fallback, device=self._device),
        )
        drawing = [_GREEDY if p.greedy else _COINS if p.seed is None else _SEEDED for p in sets]
        return _Composition(
            sequences,
            controls,
            keys=self._ints([sequence.noise_key for sequence in sequences]),
            drawing=np.array(drawing, np.int8)[each],
            penalised=any(p.penalised for p in sets),
            has_bad_words=any(sequence.bad_words for sequence in sequences),
            has_min_tokens=any(p.min_tokens for p in sets),
            num_logprobs=max((p.logprobs for p in sets if p.logprobs is not None), default=None),
            rows={},
        )

    def _penalties(self, sequences: SequenceOf[Sequence]) -> Penalties:
        live = {sequence.key for sequence in sequences}
        self._histories = {key: history for key, history in self._histories.items() if key in live}
        histories = [self._history(sequence) for sequence in sequences]

        def values(of: Callable[[SamplingParams], float | None], neutral: float) -> Tensor:
            given = [of(sequence.params) for sequence in sequences]
            return sent(torch.tensor([neutral if value is None else value for value in given]), self._device)

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
            kept = list(tokens)[-width:] if width else []
            return [-1] * (width - len(kept)) + kept

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
        return sent(_host_ints(values), self._device)


def _host_ints(values: SequenceOf[int] | SequenceOf[SequenceOf[int]] | SequenceOf[object] | Ints) -> Tensor:
    """Through numpy: after a pass has swept the caches, torch.tensor takes several times as long."""
    return torch.from_numpy(np.array(values, np.int64))


def _top_k(params: SequenceOf[SamplingParams]) -> Tensor | None:
    wanted = [max(p.top_k or 0, 0) for p in params]
    return _host_ints(wanted) if any(wanted) else None


def _floats(values: SequenceOf[float | None], neutral: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """None where nobody departs from the neutral value."""
    given = [neutral if value is None else value for value in values]
    if all(value == neutral for value in given):
        return None
    return torch.tensor(given, dtype=dtype)
