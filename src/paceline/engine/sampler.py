"""Verification as the engine calls it: which row of logits is which node, and what each sequence asked for."""

from __future__ import annotations

import functools
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from paceline.controls import ControlsBuilder, Ints
from paceline.draft import Draft, Proposal, Verdict, packed_to
from paceline.models import kernels
from paceline.sampling_params import SamplingParams
from paceline.sequence import Sequence
from paceline.verify import Nodes, verify
from paceline.verify.graph_cache import GraphCache
from paceline.verify.host import TokenSampler, walk_on_host

SETTLED = 8  # plain steps of one size in a row
WIDTHS = (1, 8, 16, 32)  # nodes of drafts that are judged by kernels of their own


class Sampler:
    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._vocab_size, self._eos, self._device = vocab_size, eos_token_ids, device
        self.shortcut = True  # on the host without edits, or recorded; not while `prove` puts in a fault
        self._native = kernels.draw_of(device)
        self._builder = ControlsBuilder(vocab_size, eos_token_ids, device)
        self._empty = functools.lru_cache(64)(self._plain)
        self._graphs = GraphCache(device)
        self._rows = self._stayed = 0  # of plain steps: their size, and for how many it has been the same
        self._settled: set[int] = set()  # sizes that have stayed for a while

    @property
    def warm(self) -> bool:
        """The last step took what its like will take again."""
        return self._graphs.warm

    def verify(
        self,
        sequences: SequenceOf[Sequence],
        draft: Draft,
        logits: Tensor,
        row_of: Tensor,
        *,
        only_chains: bool = False,
        lengths: Ints | None = None,
    ) -> Verdict:
        """`row_of` (B, N + 1): which row of logits belongs to the last token (0) and to each node (i + 1).

        Draft and `row_of` come from the host, where what depends on them alone is found without waiting for a device.
        `lengths` of the sequences, where they have tokens that the host has not seen.
        """
        recorded, batch = self.shortcut and self._graphs.records, len(sequences)
        if recorded and not draft.width:
            sequences, logits, lengths = self._widened(sequences, logits, lengths)
        controls, wanted = self._builder.controls(sequences), self._builder.num_logprobs(sequences)
        deepest = int(draft.depth.numpy().max()) if draft.width else 0
        if (
            logits.is_cpu
            and self.shortcut
            and not recorded
            and wanted is None
            and draft.q is None
            and not controls.edits
        ):
            samplers = None
            if not controls.neutral:
                known = [len(sequence.tokens) for sequence in sequences] if lengths is None else lengths.tolist()
                samplers = [_token_sampler(*one) for one in zip(sequences, controls.on_host, known, strict=True)]
            return walk_on_host(draft, logits, row_of, deepest, samplers, self._native)
        owners: SequenceOf[int] = range(len(sequences))
        if draft.width:
            needs_path = controls.penalties is not None or controls.bad_words is not None
            logits = self._padded(logits, rounded(len(logits)))
            owners, draft, row_of, nodes = self._on_device(draft, row_of, len(logits), deepest, needs_path)
        else:
            draft, row_of, nodes = self._empty(len(sequences))
        judged = draft, logits, row_of, nodes, controls, self._builder.draws(sequences, owners, lengths)
        options = {"max_depth": deepest, "num_logprobs": wanted, "only_chains": only_chains}
        if not self.shortcut:
            return verify(*judged, **options)  # type: ignore[arg-type]
        verdict = self._graphs(verify, *judged, standing=logits, **options)
        return verdict if len(sequences) == batch else verdict.first(batch)

    @torch.inference_mode()
    def warmup(self) -> None:
        """Verify a made-up step of each common kind, which compiles its kernels, several at a time."""
        chains = [_chain(width) for width in WIDTHS]
        sampled = [self._sampled(width) for width in WIDTHS[:-1]]
        logits = torch.zeros(WIDTHS[-1] + 1, self._vocab_size, device=self._device)
        steps: list[tuple[dict[str, float], Draft]] = []
        for asked, drafts in (
            ({"temperature": 0.0}, [*chains, _bush(WIDTHS[-1])]),
            ({"temperature": 0.7}, [chains[0], *sampled]),
            ({"top_p": 0.9}, [chains[0], *sampled]),
            ({"temperature": 0.7, "seed": 0}, chains[:1]),
        ):
            steps += [(asked, draft) for draft in (Draft.empty(1), *drafts)]
        with ThreadPoolExecutor(None if logits.is_cuda else 1) as pool:
            list(pool.map(self._warmup_step, *zip(*steps, strict=True), repeat(logits)))

    @torch.inference_mode()
    def _warmup_step(self, asked: dict[str, float], draft: Draft, logits: Tensor) -> None:
        """By a sampler of its own: a sampler keeps what it built last."""
        params = SamplingParams(**{"temperature": 1.0, **asked}).resolve({})  # type: ignore[arg-type]
        sequences, rows = [Sequence("warm-up", [0], params, max_len=2 * WIDTHS[-1])], draft.width + 1
        own = Sampler(self._vocab_size, self._eos, self._device)
        with torch.cuda.device(self._device) if logits.is_cuda else nullcontext():
            own.verify(sequences, draft, logits[:rows], torch.arange(rows)[None], only_chains=True)

    def _sampled(self, width: int) -> Draft:
        q = torch.full((width, self._vocab_size), 1 / self._vocab_size, device=self._device)
        return replace(_chain(width), q=Proposal(probs=q, row_of=torch.tensor([[*range(width), -1]])))

    def _padded(self, logits: Tensor, rows: int) -> Tensor:
        """Numbers of rows that differ little are judged as one, where a pass leaves room behind its logits: what stands
        there belongs to no slot."""
        vocab = logits.shape[1]
        room = logits.untyped_storage().nbytes() // logits.itemsize - logits.storage_offset()
        if not self._graphs.records or not logits.is_contiguous() or rows * vocab > room:
            return logits
        return logits.as_strided((rows, vocab), (vocab, 1))

    def _widened(
        self, sequences: SequenceOf[Sequence], logits: Tensor, lengths: Ints | None
    ) -> tuple[SequenceOf[Sequence], Tensor, Ints | None]:
        """A plain step as one of more rows, the last of which come again: as batches shrink and grow, steps of ever new
        sizes would be judged kernel by kernel. A size that has stayed for a while gets a recording of its own."""
        rows = rounded(len(sequences))
        self._stayed = self._stayed + 1 if rows == self._rows else 0
        self._rows = rows
        if self._stayed == SETTLED:
            self._settled.add(rows)
        if rows not in self._settled:
            rows = min((width for width in self._settled if width > rows), default=rows)
        logits = self._padded(logits, rows)
        more = len(logits) - len(sequences)
        if more:
            sequences = [*sequences, *[sequences[-1]] * more]
            lengths = None if lengths is None else np.append(lengths, lengths[-1:].repeat(more))
        return sequences, logits, lengths

    def _on_device(
        self, draft: Draft, row_of: Tensor, rows: int, deepest: int, needs_path: bool
    ) -> tuple[list[int], Draft, Tensor, Nodes]:
        """The owner of every row of logits, on the host, and the rest where the logits are. Rows beyond the draft's are
        taken for more of the last one's."""
        seq, slots = np.nonzero(row_of.numpy() >= 0)  # rows lie in order of sequence and slot
        if beyond := rows - len(seq):
            seq, slots = np.append(seq, seq[-1:].repeat(beyond)), np.append(slots, [0] * beyond)
        depth = np.where(slots, draft.depth.numpy()[seq, slots - 1], 0)
        on_host = (torch.from_numpy(part) for part in (seq, slots - 1, depth))
        draft = draft.to(self._device)
        row_of, owners, node, depths = packed_to(self._device, row_of, *on_host)
        if needs_path:
            nodes = Nodes.of(draft, owners, node, deepest)
        else:
            nodes = Nodes(seq=owners, node=node, depth=depths, path=owners.new_empty(len(owners), 0))
        return seq.tolist(), draft, row_of, nodes

    def _plain(self, batch: int) -> tuple[Draft, Tensor, Nodes]:
        """Plain steps ask for the same few numbers of rows again and again."""
        row_of = torch.arange(batch, device=self._device)[:, None]
        return Draft.empty(batch, self._device), row_of, Nodes.roots(batch, self._device)


def rounded(rows: int) -> int:
    """Up, by an eighth at most."""
    step = 1 << max((rows - 1).bit_length() - 3, 0)
    return -(-rows // step) * step


def _chain(width: int) -> Draft:
    return Draft.chains(torch.zeros(1, width, dtype=torch.int64), torch.tensor([width]))


def _bush(width: int) -> Draft:
    """All nodes hang from the root."""
    chain = _chain(width)
    return replace(chain, parents=torch.full_like(chain.parents, -1), depth=torch.ones_like(chain.depth))


def _token_sampler(sequence: Sequence, asked: tuple[float, int, float, float], length: int) -> TokenSampler:
    temperature, top_k, top_p, min_p = asked
    return TokenSampler(temperature, sequence.noise_key, length, sequence.seed is not None, top_k, top_p, min_p)
