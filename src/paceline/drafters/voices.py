"""How the rows of a chain draw their tokens on the device, pass by pass, and the drafts that come of it.

Coins and noise are keyed by the length a row has when its draft begins. Behind a step under way only the device knows
it: the tokens before that step, those it accepts, and one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.draft import Draft, Proposal, packed_to
from paceline.drafters.booths import MOST_ROWS, Booths
from paceline.models.chain import Said
from paceline.sampling_params import SamplingParams
from paceline.sequence import Sequence
from paceline.verify import Nodes, propose

log = logging.getLogger("paceline")
KINDS: tuple[dict[str, float], ...] = ({}, {"seed": 0}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.9})


@dataclass(frozen=True)
class Drafted:
    """Chains the host has not seen, as deep as any of them goes."""

    tokens: Tensor  # (R, K)
    q: Tensor | None = None  # (K * C, V), depth by depth, of the C rows drawn by coins
    coins: tuple[int, ...] = ()  # which rows those are

    def chains(self, rows: list[int], counts: list[int]) -> Draft:
        """Some of the rows, each as far as it is wanted. How far must not depend on what was drawn."""
        width, tokens = max(counts), self.tokens
        if rows != list(range(len(tokens))):
            (index,) = packed_to(tokens.device, torch.tensor(rows))
            tokens = tokens[index]
        q = None if self.q is None else Proposal(probs=self.q, row_of=self._row_of(rows, counts, width))
        return Draft.chains(tokens[:, :width].contiguous(), torch.tensor(counts), q, unseen=True)

    def _row_of(self, rows: list[int], counts: list[int], width: int) -> Tensor:
        row_of = torch.full((len(rows), width + 1), -1)
        for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if row in self.coins:
                row_of[at, :count] = torch.arange(count) * len(self.coins) + self.coins.index(row)
        return row_of


class Voices:
    """The `pick` of one chain of up to `count` tokens, each row's under its request's parameters; q is kept."""

    def __init__(self, booths: Booths, sequences: SequenceOf[Sequence], count: int, said: Said | None) -> None:
        self._controls = booths.builder.controls(sequences)
        self._draws = booths.builder.draws(sequences, range(len(sequences)))
        if said is not None:
            (rows,) = packed_to(said.num_accepted.device, torch.tensor(said.rows))
            committed = self._draws.committed + said.num_accepted[rows] + 1
            self._draws = replace(self._draws, committed=committed)
        self._coins = tuple(at for at, one in enumerate(sequences) if not one.params.greedy and one.params.seed is None)
        self._seq = torch.arange(len(sequences), device=booths.device)
        self._q = torch.empty(count if self._coins else 0, len(self._coins), booths.vocab_size, device=booths.device)
        self._booth = booths.of(self._controls, self._draws)
        if self._booth is not None:
            self._booth.begin(self._controls, self._draws)

    def __call__(self, logits: Tensor, depth: int) -> Tensor:
        tokens, q = self._propose(logits, depth) if self._booth is None else self._booth.say(logits)
        if q is not None:
            self._q[depth] = q
        return tokens

    def _propose(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """What is no number counts as 0: so q is finite, and what was drawn from, without anybody looking."""
        depths = torch.full_like(self._seq, depth)
        nodes = Nodes(seq=self._seq, node=depths - 1, depth=depths, path=depths.new_empty(len(depths), 0))
        return propose(logits.nan_to_num(), self._controls, self._draws, nodes)

    def drafted(self, tokens: Tensor) -> Drafted:
        return Drafted(tokens, self._q.flatten(0, 1), self._coins) if self._coins else Drafted(tokens)


def rehearse(booths: Booths) -> bool:
    """Draw by made-up logits in every common way, so that nobody waits for it later; False: it does not work here."""
    try:
        _rehearse(booths)
    except Exception as problem:  # drafts by passes with the host between them serve
        log.warning("rows that sample are drafted pass by pass: %r", problem)
        return False
    return True


@torch.inference_mode()
def _rehearse(booths: Booths) -> None:
    """Kernels get compiled, several at a time, and all of it recorded."""
    logits = torch.zeros(2 * MOST_ROWS, booths.vocab_size, device=booths.device)

    def draw(kind: dict[str, float], rows: int, booths: Booths) -> None:
        params = SamplingParams(**{"temperature": 0.7, **kind}).resolve({})  # type: ignore[arg-type]
        sequences = [Sequence("rehearsal", [0], params, max_len=4) for _ in range(rows)]
        Voices(booths, sequences, 1, None)(logits[:rows], 0)

    @torch.inference_mode()
    def compile_for(kind: dict[str, float]) -> None:
        with torch.cuda.device(booths.device):
            draw(kind, len(logits), Booths(booths.vocab_size, booths.device))

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_for, KINDS))
    for kind in KINDS[:-1]:
        for power in range(MOST_ROWS.bit_length()):
            draw(kind, 1 << power, booths)


def is_plain(sequence: Sequence) -> bool:
    """Nothing it asked for depends on the tokens before: temperature and filters are the same at every node."""
    params = sequence.params
    return not (params.penalised or params.logit_bias or sequence.bad_words or sequence.num_output < params.min_tokens)
