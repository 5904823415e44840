"""Captured verification gives what uncaptured verification gives, for every FilterSet and size: here with graphs that
call their work again, on a device with real ones."""

import itertools

import numpy as np
import pytest
import torch

from paceline.core.draft import Draft
from paceline.engine.sampler import Sampler
from paceline.platform.staging import Staging
from paceline.verify import FilterSet, Nodes, distribution, logprobs, verify
from paceline.verify.cuda.graphs import WIDTHS, GraphCache, rounded
from paceline.verify.metadata import SamplingMetadataBuilder
from tests.verify import steps

VOCAB, ROWS, SEQUENCES = 40, 24, 20


class Again:
    """A graph by hand: its work once more, into where it wrote first."""

    def __init__(self, work):
        self.work, self.result = work, work().clone()

    def replay(self):
        self.result.copy_(self.work())


class ByHand:
    captures = 0

    def capture(self, work):
        self.captures += 1
        return Again(work)


def samplers(device, logits, **most):
    """One whose steps are captured, and one whose steps are not."""
    recorder = ByHand() if device.type == "cpu" else None
    graphs = GraphCache(device, Staging(device), recorder)
    graphs.enabled = True
    captured = Sampler(VOCAB, frozenset({2}), device, graphs=graphs)
    plain = Sampler(VOCAB, frozenset({2}), device, verifier=verify)
    captured.warmup(logits, **{"sequences": SEQUENCES, "rows": len(logits), "q_rows": 30, **most})
    return captured, plain, graphs, recorder


@pytest.mark.parametrize("draft", steps.DRAFTS)
@pytest.mark.parametrize("asked", steps.ASKED)
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@torch.inference_mode()
def test_steps_are_judged_alike_captured_or_not(where, asked, draft):
    """Other tokens, lengths and numbers of rows at every step; what stands behind the logits is no number."""
    device, batch = torch.device(where), 3
    logits = torch.full((ROWS, VOCAB), torch.nan, device=device)
    captured, plain, graphs, _ = samplers(device, logits)
    generator, sequences = torch.Generator().manual_seed(7), steps.sequences_of(asked, batch)
    before = len(graphs)
    for turn in range(6):
        made, rows, row_of = steps.step(draft, batch, 4, logits[:15], turn % 2, generator)
        logits[len(rows) :] = torch.nan
        raw = rows.clone()
        verdicts = [one.verify(sequences, made, rows, row_of) for one in (plain, captured)]
        assert steps.unlike(*verdicts) == []
        assert torch.equal(rows, raw), "the logits are left as they were"
        for sequence in sequences:
            sequence.tokens.append(5)
    assert len(graphs) == before > 0
    assert captured.uncaptured == 0
    assert captured.late_captures == 0 or where == "cuda"
    assert captured.time_is_typical


@pytest.mark.parametrize("asked", steps.ASKED)
@torch.inference_mode()
def test_plain_steps_of_any_size_are_judged_alike(asked):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits = torch.full((ROWS, VOCAB), torch.nan, device=device)
    captured, plain, *_ = samplers(device, logits)
    generator, sequences = torch.Generator().manual_seed(3), steps.sequences_of(asked, SEQUENCES)
    for req_index, sequence in enumerate(sequences):
        sequence.req_index = 2 * req_index + 1
        captured.joined(sequence)
    for rows in [20, 20, 19, 17, 13, 9, 1, 14, 5, 5, 5, 20]:
        logits[:rows] = 3 * torch.randn(rows, VOCAB, generator=generator).to(device)
        given = sequences[:rows], Draft.empty(rows), logits[:rows], torch.arange(rows)[:, None]
        lengths = np.array([len(sequence.tokens) + 2 for sequence in given[0]])
        req_indices = np.array([sequence.req_index for sequence in given[0]])
        one, other = (
            plain.verify(*given, lengths=lengths),
            captured.verify(*given, lengths=lengths, req_indices=req_indices),
        )
        assert steps.unlike(one, other) == []
        assert other.packed_rows in (0, rounded(rows))
        logits[:] = torch.nan
        for sequence in sequences:
            sequence.tokens.append(5)
    assert captured.uncaptured == 0


@torch.inference_mode()
def test_logprobs_beside_a_wide_captured_tree_are_of_the_drafts_depth(monkeypatch):
    """Trees of 20 nodes and depth 3 are verified by a graph as deep as it is wide, and nothing so deep is looked at;
    nor are many rows at once, which take a row of the vocabulary each, several times."""
    batch, width, device = 24, 20, torch.device("cpu")
    logits = torch.full((batch * (width + 1), VOCAB), torch.nan)
    captured, plain, *_ = samplers(device, logits, sequences=batch)
    parents = torch.tensor([-1] * 8 + [node % 8 for node in range(8)] + [8, 9, 10, 11]).expand(batch, -1)
    depth = torch.tensor([1] * 8 + [2] * 8 + [3] * 4).expand(batch, -1)
    tokens = torch.randint(VOCAB, (batch, width), generator=torch.Generator().manual_seed(1))
    draft = Draft(tokens=tokens, parents=parents, depth=depth, num_nodes=torch.full((batch,), width))
    row_of = torch.arange(len(logits)).view(batch, -1)
    logits.copy_(torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)))
    logits[row_of.gather(1, parents + 1), tokens] += 4
    looked_at, sequences = [], steps.sequences_of("logprobs", batch)
    monkeypatch.setattr(
        distribution, "logprobs", lambda raw, *given: (looked_at.append(tuple(raw.shape)), logprobs(raw, *given))[1]
    )
    verdicts = [one.verify(sequences, draft, logits, row_of) for one in (plain, captured)]
    assert captured.uncaptured == 0
    assert verdicts[1].tokens.shape[1] == WIDTHS[-1] + 1
    assert verdicts[1].logprobs.chosen.shape == (batch, 4)
    assert int(verdicts[1].num_accepted.max()) == 3
    assert steps.unlike(*verdicts) == []
    assert [rows for rows, _ in looked_at] == [64, 32] * 2


@torch.inference_mode()
def test_nothing_is_captured_but_in_the_warmup_and_other_sizes_run_uncaptured():
    device = torch.device("cpu")
    logits = torch.randn(ROWS, VOCAB)
    captured, plain, graphs, recorder = samplers(device, logits, q_rows=0)
    before = recorder.captures
    assert before == len(graphs) == len(set(graphs.keys()))
    sequences = steps.sequences_of("each its own", 3)
    generator = torch.Generator().manual_seed(2)
    wide = Draft.chains(torch.zeros(3, WIDTHS[-1] + 1, dtype=torch.int64), torch.tensor([1, 0, 2]))
    row_of = torch.full((3, WIDTHS[-1] + 2), -1)
    row_of[wide.parents.new_tensor([0, 0, 1, 2, 2, 2]), wide.parents.new_tensor([0, 1, 0, 0, 1, 2])] = torch.arange(6)
    elsewhere = logits.clone()
    sampled, _, of_sampled = steps.step("sampled chains", 3, 4, logits, 0, generator)
    for draft, rows, at in (
        (wide, logits[:6], row_of),
        (Draft.empty(3), elsewhere[:3], torch.arange(3)[:, None]),
        (sampled, logits[: int((of_sampled >= 0).sum())], of_sampled),
    ):
        verdicts = [one.verify(sequences, draft, rows, at) for one in (plain, captured)]
        assert steps.unlike(*verdicts) == []
    assert captured.uncaptured == 3
    assert recorder.captures == before


def test_the_number_of_graphs_is_bounded():
    """Each takes some 10 ms at start-up."""
    cache = GraphCache(torch.device("cpu"), Staging(torch.device("cpu")))
    for sequences, rows, q_rows, most in ((64, 512, 0, 170), (512, 512, 512, 240), (512, 2048, 512, 290)):
        cache.prepare(torch.empty(rows, 1), sequences, rows, q_rows)
        assert len(list(cache.keys())) <= most
        assert len(cache.kinds()) == len(FilterSet) * len(WIDTHS) + (3 if q_rows else 0)


def test_every_step_that_fits_has_a_graph():
    cache = GraphCache(torch.device("cpu"), Staging(torch.device("cpu")))
    logits = torch.empty(512, 1)
    cache.prepare(logits, 100, 512, 0)
    cache.enabled, cache._graphs = True, dict.fromkeys(cache.keys())
    for batch, width in itertools.product((1, 2, 3, 50, 99, 100), (0, 1, 16, 17, 64)):
        for rows in {batch, min(batch * (1 + width), 512), min(batch + width, 512)} if width else {batch}:
            draft = Draft.empty(batch, width=width)
            if rows == batch and width:
                continue  # nothing was drafted
            key = cache.key(FilterSet.DRAWS, draft, logits[:rows])
            assert key.rows >= rows
            assert key.batch >= batch
            assert key.width >= width


def test_rows_are_padded_by_half_at_most():
    sizes = [rounded(rows) for rows in range(1, 600)]
    assert all(rows <= size <= 1.5 * rows for rows, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 22


# --- forms ---


@pytest.mark.parametrize("kernel", [False, True], ids=["host", "kernels"])
def test_a_rows_token_is_the_same_in_any_form(kernel, request):
    """Neutral values are neutral to the bit: p and the tokens drawn are equal with columns no sequence asked for."""
    if kernel:
        request.getfixturevalue("kernels")
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(60, 60, generator=generator) * 4
    logits[::7, 5:40] = -torch.inf
    logits[3] = 0.0
    for asked in ("greedy", "sampled", "seeded", "top-p", "each its own"):
        sequences = steps.sequences_of(asked, 60)
        builder = SamplingMetadataBuilder(60, frozenset({2}), torch.device("cpu"))
        params, tokens = builder.params(sequences), []
        _, draws = builder.build(params)
        for filter_set in range(params.filter_set, len(FilterSet)):
            wide, _ = builder.build(params._replace(filter_set=FilterSet(filter_set)))
            given = Draft.empty(60), logits, torch.arange(60)[:, None], Nodes.roots(60), wide, draws
            tokens.append(verify(*given, max_depth=0).tokens)
        assert all(torch.equal(one, tokens[0]) for one in tokens)
        assert len(tokens) == len(FilterSet) - params.filter_set
