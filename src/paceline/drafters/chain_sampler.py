"""How the rows of a chain draw their tokens on the device, pass by pass, and the drafts made of them.

Coins and noise are keyed by the length a row has when its draft begins. Behind a verdict that is not read yet only the
device knows it: the tokens before that step, those it accepts, and one. Drawing is dozens of small kernels, so for few
rows that all draw in one way it is captured as a CUDA graph, whose inputs lie in fixed places; for more rows the device
takes so long that the launches hide behind it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.controls import ControlsBuilder
from paceline.cuda_graph import CudaGraph, GraphRecorder
from paceline.draft import Draft, Proposal, UnreadVerdict, packed_to
from paceline.sampling_params import SamplingParams
from paceline.sequence import Sequence
from paceline.verify import Controls, Draws, Nodes, propose

log = logging.getLogger("paceline")
MOST_ROWS = 16  # of a graph
MOST = 48  # graphs; the least recently used gives way
CONTROLS = ("temperature", "top_k", "top_p", "min_p")
KINDS: tuple[dict[str, float], ...] = ({}, {"seed": 0}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.9})  # of the warm-up


@dataclass(frozen=True)
class Drafted:
    """Chains whose tokens are on the device, all as deep as the deepest."""

    tokens: Tensor  # (R, K)
    q: Tensor | None = None  # (K * C, V), depth by depth, of the C rows drawn by coins
    coins: tuple[int, ...] = ()  # the indices of those rows

    def chains(self, rows: list[int], counts: list[int]) -> Draft:
        """Some of the rows, each to its own length. A length must not depend on the tokens drawn."""
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


class ChainSampler:
    """The `pick` of one chain of up to `count` tokens, each row's under its request's parameters; q is kept."""

    def __init__(
        self, graphs: SamplingGraphs, sequences: SequenceOf[Sequence], count: int, said: UnreadVerdict | None
    ) -> None:
        self._controls = graphs.builder.controls(sequences)
        self._draws = graphs.builder.draws(sequences, range(len(sequences)))
        if said is not None:
            (rows,) = packed_to(said.num_accepted.device, torch.tensor(said.rows))
            committed = self._draws.committed + said.num_accepted[rows] + 1
            self._draws = replace(self._draws, committed=committed)
        self._coins = tuple(at for at, one in enumerate(sequences) if not one.params.greedy and one.params.seed is None)
        self._seq = torch.arange(len(sequences), device=graphs.device)
        self._q = torch.empty(count if self._coins else 0, len(self._coins), graphs.vocab_size, device=graphs.device)
        self._graph = graphs.of(self._controls, self._draws)
        if self._graph is not None:
            self._graph.begin(self._controls, self._draws)

    def __call__(self, logits: Tensor, depth: int) -> Tensor:
        tokens, q = self._propose(logits, depth) if self._graph is None else self._graph.draw(logits)
        if q is not None:
            self._q[depth] = q
        return tokens

    def _propose(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """A logit that is no number counts as 0: q is finite, and what was drawn from, without a look at the values."""
        depths = torch.full_like(self._seq, depth)
        nodes = Nodes(seq=self._seq, node=depths - 1, depth=depths, path=depths.new_empty(len(depths), 0))
        return propose(logits.nan_to_num(), self._controls, self._draws, nodes)

    def drafted(self, tokens: Tensor) -> Drafted:
        return Drafted(tokens, self._q.flatten(0, 1), self._coins) if self._coins else Drafted(tokens)


class SamplingGraphs:
    """One for each number of rows, rounded up, and way of drawing; captured when it first occurs."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.builder = ControlsBuilder(vocab_size, frozenset(), device)
        self.vocab_size, self.device = vocab_size, device
        self._made: OrderedDict[tuple[object, ...], SamplingGraph] = OrderedDict()
        self._logits = torch.empty(0)  # the input of every graph: one is replayed at a time
        self._recorder = GraphRecorder()

    def of(self, controls: Controls, draws: Draws) -> SamplingGraph | None:
        """None: too many rows, or rows that draw in different ways."""
        rows, seeded = len(draws.key), draws.coins is None
        drawing = draws.seeded if seeded else draws.coins
        if drawing is None or len(drawing) < rows or rows > MOST_ROWS or controls.edits:
            return None
        rows = 1 << (rows - 1).bit_length()
        key = (rows, seeded, *(getattr(controls, name) is None for name in CONTROLS))
        if key not in self._made:
            if not self._made:
                self._logits = torch.zeros(MOST_ROWS, self.vocab_size, device=self.device)
            self._made[key] = SamplingGraph(self._logits[:rows], controls, seeded, self._recorder)
            if len(self._made) > MOST:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]


class SamplingGraph:
    """`propose` for up to so many rows. Padding rows draw too, and are ignored."""

    def __init__(self, logits: Tensor, like: Controls, seeded: bool, recorder: GraphRecorder) -> None:
        self._logits, rows = logits, len(logits)
        every = self._every = torch.arange(rows, device=logits.device)
        self._key, self._committed, self._depth = (torch.zeros_like(every) for _ in range(3))

        def blank(part: Tensor | None) -> Tensor | None:
            return None if part is None else torch.ones(rows, dtype=part.dtype, device=part.device)

        self._controls = Controls(
            temperature=blank(like.temperature),
            top_k=blank(like.top_k),
            top_p=blank(like.top_p),
            min_p=blank(like.min_p),
        )
        self._draws = Draws(
            key=self._key, committed=self._committed, coins=None if seeded else every, seeded=every if seeded else None
        )
        self._recorder, self._captures = recorder, logits.is_cuda
        self._captured: CudaGraph | None = None

    def begin(self, controls: Controls, draws: Draws) -> None:
        """The next tokens belong to these requests, and nothing is drafted yet."""
        rows = len(draws.key)
        for name in CONTROLS:
            if (mine := getattr(self._controls, name)) is not None:
                mine[:rows] = getattr(controls, name)
        self._key[:rows] = draws.key
        self._committed[:rows] = draws.committed
        self._depth.zero_()

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `propose`, one token further with each call. The result holds until the next call."""
        rows = len(logits)
        torch.nan_to_num(logits, out=self._logits[:rows])
        if self._captured is not None:
            self._captured.replay()
            tokens, q = self._captured.result
        else:
            tokens, q = self._propose()
            if self._captures:
                self._capture()
        return tokens[:rows], None if q is None else q[:rows]

    def _propose(self) -> tuple[Tensor, Tensor | None]:
        depth = self._depth.clone()
        nodes = Nodes(seq=self._every, node=depth - 1, depth=depth, path=depth.new_empty(len(depth), 0))
        controls = replace(self._controls)  # which keep, on a host, the numbers they held when first read
        drawn = propose(self._logits, controls, self._draws, nodes)
        self._depth += 1
        return drawn

    def _capture(self) -> None:
        """The kernels have just run, so they are compiled and loaded. Where capturing fails, they run one by one."""
        self._captures = False
        try:
            self._captured = self._recorder.capture(self._propose)
        except RuntimeError as problem:
            reason = str(problem).partition("\n")[0]
            log.warning("drawing drafts cannot be captured, and runs kernel by kernel: %s", reason)


def warmup(graphs: SamplingGraphs) -> bool:
    """Draw by made-up logits in every common way, so that no request waits for it; False: it does not work here."""
    try:
        _warmup(graphs)
    except Exception as problem:  # drafts by passes with the host between them serve
        log.warning("rows that sample are drafted pass by pass: %r", problem)
        return False
    return True


@torch.inference_mode()
def _warmup(graphs: SamplingGraphs) -> None:
    """Compile the kernels, several at a time, and capture the graphs."""
    logits = torch.zeros(2 * MOST_ROWS, graphs.vocab_size, device=graphs.device)

    def draw(kind: dict[str, float], rows: int, graphs: SamplingGraphs) -> None:
        params = SamplingParams(**{"temperature": 0.7, **kind}).resolve({})  # type: ignore[arg-type]
        sequences = [Sequence("warm-up", [0], params, max_len=4) for _ in range(rows)]
        ChainSampler(graphs, sequences, 1, None)(logits[:rows], 0)

    @torch.inference_mode()
    def compile_for(kind: dict[str, float]) -> None:
        with torch.cuda.device(graphs.device):
            draw(kind, len(logits), SamplingGraphs(graphs.vocab_size, graphs.device))

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_for, KINDS))
    for kind in KINDS[:-1]:
        for power in range(MOST_ROWS.bit_length()):
            draw(kind, 1 << power, graphs)


def is_plain(sequence: Sequence) -> bool:
    """Nothing it asked for depends on the tokens before: temperature and filters are the same at every node."""
    params = sequence.params
    return not (params.penalised or params.logit_bias or sequence.bad_words or sequence.num_output < params.min_tokens)
