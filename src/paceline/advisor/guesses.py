"""What a draft model guesses at every place of recorded answers, and a drafter that says it again without a model.

A draft that was right so far stands where the answer stands, so a chain from place t is right as long as the guesses
at t, t + 1, ... are, one by one, each after the true text. One guess for every place therefore tells what any k would
have had accepted, and many answers are read at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.advisor.records import AT_ONCE, Record, Tokens
from paceline.draft import Draft
from paceline.drafters import Commit, Drafter, DraftRow
from paceline.drafters.base import LEARNED, HostDrafter
from paceline.models.kv_cache import KVCache
from paceline.sequence import Sequence as TokenSequence

BLOCK = 16

Guesses = Mapping[Tokens, Sequence[bool]]  # by prompt: whether the guess at each place of its answer is right


def read_guesses(
    drafter: Drafter, records: Sequence[Record], dtype: torch.dtype, device: torch.device
) -> dict[Tokens, list[bool]]:
    """`drafter` is new, and has nothing bound to it yet."""
    longest = max(len(record.prompt) + len(record.answer) for record in records)
    blocks = -(-(longest + 1) // BLOCK)
    cache = KVCache(drafter.kv_layers, num_blocks=AT_ONCE * blocks, block_size=BLOCK, dtype=dtype, device=device)
    drafter.bind(cache.layers, BLOCK)
    found: dict[Tokens, list[bool]] = {}
    for start in range(0, len(records), AT_ONCE):
        readings = [_Reading.of(each, place, blocks) for place, each in enumerate(records[start : start + AT_ONCE])]
        for reading in readings:
            drafter.admit(reading.sequence, 0, 0)
        while open_ones := [reading for reading in readings if not reading.done(drafter)]:
            _guess_once(drafter, open_ones)
        for reading in readings:
            drafter.release(reading.sequence)
            missing = len(reading.record.answer) - len(reading.right)  # past the draft model's own context
            found[reading.record.prompt] = reading.right + [False] * missing
    return found


@dataclass
class _Reading:
    record: Record
    sequence: TokenSequence
    right: list[bool]

    @classmethod
    def of(cls, record: Record, place: int, blocks: int) -> _Reading:
        length = len(record.prompt) + len(record.answer)
        sequence = TokenSequence(f"{place}", record.prompt, record.params, max_len=length + 1)
        sequence.blocks = list(range(place * blocks, (place + 1) * blocks))
        return cls(record, sequence, [])

    def done(self, drafter: Drafter) -> bool:
        return len(self.right) == len(self.record.answer) or not drafter.evidence(self.sequence)


@torch.inference_mode()
def _guess_once(drafter: Drafter, readings: Sequence[_Reading]) -> None:
    """A row whose prompt is still being read gets no guess yet and is asked again."""
    draft = drafter.propose([DraftRow(reading.sequence, 1) for reading in readings])
    for reading, count, tokens in zip(readings, draft.num_nodes.tolist(), draft.tokens.tolist(), strict=True):
        if count:
            truth = reading.record.answer[len(reading.right)]
            reading.right.append(tokens[0] == truth)
            reading.sequence.tokens.append(truth)
            drafter.commit([Commit(reading.sequence, len(reading.sequence.tokens) - 2, 1, None)])


class RecordedDrafter(HostDrafter):
    """Says of a recorded answer what the draft model would have said, as far as it would have been right.

    It also lags as a model does: behind by the whole prompt until it is first asked, by every step it is not asked in.
    """

    def __init__(self, name: str, records: Mapping[Tokens, Record], guesses: Guesses, vocab_size: int) -> None:
        self.name, self._records, self._guesses, self._vocab_size = name, records, guesses, vocab_size
        self._read: dict[str, int] = {}  # tokens, by sequence
        self._drafting: set[str] = set()

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        chains = [list(self._chain(row)) for row in rows]
        self._drafting = {row.sequence.key for row in rows}
        width = max(map(len, chains), default=0)
        tokens = torch.tensor([chain + [0] * (width - len(chain)) for chain in chains], dtype=torch.int64)
        counts = torch.tensor([len(chain) for chain in chains], dtype=torch.int64)
        return Draft.chains(tokens.view(len(rows), width), counts)

    def commit(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            if commit.sequence.key in self._drafting:
                self._read[commit.sequence.key] = len(commit.sequence.tokens) - 1
        self._drafting = set()

    def release(self, sequence: TokenSequence) -> None:
        self._read.pop(sequence.key, None)

    def evidence(self, sequence: TokenSequence) -> int:
        return LEARNED

    def lag(self, sequence: TokenSequence) -> int:
        return len(sequence.tokens) - self._read.get(sequence.key, 0)

    def _chain(self, row: DraftRow) -> Iterator[int]:
        """Ends with the answer's last token, as a model's draft ends with the token that ends the answer."""
        prompt, start = tuple(row.sequence.tokens[: row.sequence.num_prompt]), row.sequence.num_output
        answer, right = self._records[prompt].answer[start:], self._guesses[prompt][start:]
        so_far = True
        for at in range(row.budget):
            if at >= len(answer) and so_far:
                return
            truth = answer[min(at, len(answer) - 1)]
            so_far = so_far and right[at]
            yield truth if so_far else (truth + 1) % self._vocab_size
