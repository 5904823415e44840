"""From what sequences asked for to the tensors verification takes; drafters that sample use the same for their q.

Most of it never changes while the same sequences decode together, so it is built once per composition of the batch;
only lengths, and the histories penalties and bad words look at, are new each step. Parts nobody asked for are None.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.sampling_params import SamplingParams
from paceline.sequence import Sequence
from paceline.verify import BadWords, Bias, Controls, Draws, MinTokens, Penalties


@dataclass
class _History:
    """Token counts of one sequence, brought up to date as it grows."""

    sequence: Sequence
    in_prompt: Tensor  # (V,) bool
    counts: Tensor  # (V,) int32
    num_counted: int


class ControlsBuilder:
    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._vocab_size, self._eos, self._device = vocab_size, sorted(eos_token_ids), device
        self._composition: tuple[Sequence, ...] = ()
        self._controls = Controls()
        self._keys = self._ints([])
        self._histories: dict[str, _History] = {}

    def controls(self, sequences: SequenceOf[Sequence]) -> Controls:
        """What these sequences asked for, at the length they have now."""
        self._compose(sequences)
        return self._with_history(sequences)

    def draws(self, sequences: SequenceOf[Sequence], owners: SequenceOf[int]) -> Draws:
        """How each row of logits becomes a token; row i belongs to sequence `owners[i]`."""
        self._compose(sequences)
        if all(sequence.params.greedy for sequence in sequences):
            return Draws(key=self._keys, committed=self._keys)  # nobody draws, so nobody looks at lengths
        return Draws.of(
            key=self._keys,
            committed=self._ints([len(sequence.tokens) for sequence in sequences]),
            seq=owners,
            greedy=[sequence.params.greedy for sequence in sequences],
            seeded=[sequence.seed is not None for sequence in sequences],
        )

    def _compose(self, sequences: SequenceOf[Sequence]) -> None:
        composition = tuple(sequences)  # sequences compare by identity: a request id may be used again
        if composition == self._composition:
            return
        self._composition = composition
        self._keys = self._ints([sequence.noise_key for sequence in sequences])
        params = [sequence.params for sequence in sequences]
        self._controls = Controls(
            temperature=self._floats([p.temperature for p in params], 0.0),
            top_k=self._top_k(params),
            top_p=self._floats([p.top_p for p in params], 1.0, torch.float64),
            min_p=self._floats([p.min_p for p in params], 0.0),
            bias=self._bias(params),
            fallback=self._ints([self._eos[0] if self._eos else 0] * len(params)),
        )

    def _with_history(self, sequences: SequenceOf[Sequence]) -> Controls:
        """Add the parts that change with every token."""
        controls = self._controls
        if any(sequence.params.penalised for sequence in sequences):
            controls = replace(controls, penalties=self._penalties(sequences))
        if any(sequence.bad_words for sequence in sequences):
            controls = replace(controls, bad_words=self._bad_words(sequences))
        if any(sequence.num_output < sequence.params.min_tokens for sequence in sequences):
            controls = replace(controls, min_tokens=self._min_tokens(sequences))
        return controls

    def _penalties(self, sequences: SequenceOf[Sequence]) -> Penalties:
        live = {sequence.key for sequence in sequences}
        self._histories = {key: history for key, history in self._histories.items() if key in live}
        histories = [self._history(sequence) for sequence in sequences]

        def values(of: Callable[[SamplingParams], float | None], neutral: float) -> Tensor:
            given = [of(sequence.params) for sequence in sequences]
            return torch.tensor([neutral if value is None else value for value in given], device=self._device)

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

    def _bias(self, params: SequenceOf[SamplingParams]) -> Bias | None:
        if not any(p.logit_bias for p in params):
            return None
        tokens = [list((p.logit_bias or {}).keys()) for p in params]
        width = max(map(len, tokens))
        values = [list((p.logit_bias or {}).values()) + [0.0] * (width - len(p.logit_bias or {})) for p in params]
        return Bias(tokens=self._ragged(tokens), values=torch.tensor(values, device=self._device))

    def _top_k(self, params: SequenceOf[SamplingParams]) -> Tensor | None:
        wanted = [max(p.top_k or 0, 0) for p in params]
        return self._ints(wanted) if any(wanted) else None

    def _floats(
        self, values: SequenceOf[float | None], neutral: float, dtype: torch.dtype = torch.float32
    ) -> Tensor | None:
        """None where nobody departs from the neutral value."""
        given = [neutral if value is None else value for value in values]
        if all(value == neutral for value in given):
            return None
        return torch.tensor(given, dtype=dtype, device=self._device)

    def _ragged(self, rows: SequenceOf[SequenceOf[int]]) -> Tensor:
        width = max(map(len, rows))
        return self._ints([[*row, *[-1] * (width - len(row))] for row in rows]).view(len(rows), width)

    def _ints(self, values: SequenceOf[int] | SequenceOf[SequenceOf[int]] | SequenceOf[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
