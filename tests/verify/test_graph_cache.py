"""Captured work gives what uncaptured work gives: here with a graph that calls the work again, on a device with graphs.

What a device adds is checked where there is one: verdicts of all kinds, with other keys and lengths at every replay.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from paceline.draft import Draft, Verdict
from paceline.engine.sampler import Sampler
from paceline.verify.graph_cache import GraphCache, _sort
from tests.verify import steps


@dataclass(frozen=True)
class Given:
    left: torch.Tensor
    right: torch.Tensor | None = None
    times: int = 1


class Graph:
    """A recording by hand: the work once more, its results into the tensors of the first time."""

    def __init__(self, work, result):
        self.work, self.result = work, result

    def replay(self):
        outputs, again = [], []
        _sort(self.result, outputs, None)
        _sort(self.work(), again, None)
        for into, value in zip(outputs, again, strict=True):
            into.copy_(value)


class Recorder(GraphCache):
    def __init__(self, **options):
        super().__init__(torch.device("cpu"), **{"first": 1, **options})
        self.records, self.captures, self._recorder = True, 0, self

    def capture(self, work):
        self.captures += 1
        return Graph(work, work())


class Work:
    """Counts how often it is called from outside of a recording."""

    def __init__(self):
        self.seen = []

    def __call__(self, given, offset, *, sign=1):
        self.seen.append(given.left)
        total = given.left if given.right is None else given.left + given.right
        return {"sum": sign * total * given.times + offset, "empty": offset[:0]}


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_third_call_of_a_kind_is_replayed_with_what_it_was_given():
    recorded, work, offset = Recorder(), Work(), numbers(10.0, 20.0)
    for value in (1.0, 2.0, 3.0, 4.0):
        got = recorded(work, Given(numbers(value, value)), offset, sign=-1)
        assert got["sum"].tolist() == [10 - value, 20 - value]
        assert recorded.warm == (value != 2)  # when it was recorded
    assert recorded.captures == len(recorded) == 1


def test_what_comes_a_few_times_only_is_not_recorded():
    recorded, work = Recorder(first=3), Work()
    for turn in range(5):
        recorded(work, Given(numbers(1.0)), numbers(0.0))
        assert recorded.warm == (turn != 3)
        assert len(recorded) == (turn >= 3)


def test_results_stay_as_they_were_when_the_recording_is_played_again():
    recorded, work = Recorder(), Work()
    results = [recorded(work, Given(numbers(float(at))), numbers(0.0))["sum"] for at in range(6)]
    assert [float(one) for one in results] == [0, 1, 2, 3, 4, 5]


def test_other_structures_shapes_values_and_work_are_recorded_for_themselves():
    recorded, offset = Recorder(), numbers(1.0)
    work = Work()
    calls = [
        (Given(numbers(1.0)), {}),
        (Given(numbers(1.0), numbers(2.0)), {}),
        (Given(numbers(1.0), times=2), {}),
        (Given(numbers(1.0, 2.0)), {}),
        (Given(numbers(1.0).float()), {}),
        (Given(numbers(1.0)), {"sign": -1}),
    ]
    for _ in range(3):
        for given, options in calls:
            assert torch.equal(recorded(work, given, offset, **options)["sum"], Work()(given, offset, **options)["sum"])
    assert len(recorded) == len(calls)
    recorded(Work(), calls[0][0], offset)
    assert len(recorded._known) == len(calls) + 1


def test_a_standing_tensor_is_read_where_it_lies_and_known_by_its_place():
    recorded, work = Recorder(), Work()
    here, there = numbers(1.0), numbers(5.0)
    for value in (1.0, 2.0, 3.0):
        here.fill_(value)
        assert recorded(work, Given(here), numbers(0.0), standing=here)["sum"] == value
    assert work.seen[-1] is here
    assert recorded(work, Given(there), numbers(0.0), standing=there)["sum"] == 5
    assert work.seen[-1] is there


def test_no_more_than_so_many_are_kept():
    recorded, work = Recorder(most=2), Work()
    for size in (1, 2, 3):
        for _ in range(3):
            recorded(work, Given(torch.ones(size)), torch.ones(size))
    assert len(recorded) == 2
    recorded(work, Given(torch.ones(2)), torch.ones(2))
    recorded(work, Given(torch.ones(1)), torch.ones(1))  # in the place of the three
    assert [key[1][0][0][1][0] for key in recorded._known] == [torch.Size([2]), torch.Size([1])]


def test_large_inputs_of_all_recordings_lie_in_one_place(monkeypatch):
    monkeypatch.setattr("paceline.verify.graph_cache.LARGE", 64)
    recorded, work = Recorder(), Work()
    for size in (100, 20, 90):
        for at in range(3):
            left, right = torch.full((size,), float(at)), torch.arange(float(size))
            assert torch.equal(recorded(work, Given(left, right), left)["sum"], left + right + left)
    places = {(one.data_ptr(), len(one)) for one in work.seen if one.untyped_storage().nbytes() == 2048}
    assert places == {(recorded._large.data_ptr(), size) for size in (100, 20, 90)}


def test_work_that_cannot_be_recorded_runs_as_it_is_and_is_said_once(monkeypatch, caplog):
    def refuse(self, work):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(Recorder, "capture", refuse)
    recorded, work = Recorder(), Work()
    for value in (1.0, 2.0, 3.0, 4.0):
        assert recorded(work, Given(numbers(value)), numbers(0.0))["sum"] == value
    assert [record.message for record in caplog.records] == [
        "cannot be recorded, and runs as it is: operation not permitted when stream is capturing"
    ]
    assert len(recorded) == 0
    assert recorded.warm


def test_without_a_device_nothing_is_recorded():
    recorded, work = GraphCache(torch.device("cpu")), Work()
    for _ in range(3):
        recorded(work, Given(numbers(1.0)), numbers(0.0))
    assert len(recorded) == 0
    assert recorded.warm


@pytest.mark.parametrize("depth", [0, 3])
def test_a_verdict_comes_out_packed_as_it_was(depth):
    def judge(draft):
        verdict = Verdict.blank(draft.batch, depth, draft.tokens.device)
        verdict.tokens.copy_(draft.tokens)
        verdict.kinds.fill_(2)
        verdict.num_accepted.copy_(draft.num_nodes)
        verdict.path.fill_(-1)
        return verdict

    recorded = Recorder()
    for at in range(4):
        tokens = torch.full((3, depth + 1), at)
        draft = Draft.chains(tokens, torch.tensor([1, 0, 1]), unseen=True)
        verdict, again = recorded(judge, draft), judge(draft)
        for name in ("tokens", "num_accepted", "path", "kinds"):
            assert torch.equal(getattr(verdict, name), getattr(again, name))
        assert verdict.tokens.untyped_storage().data_ptr() == verdict.packed.data_ptr()
        assert torch.equal(verdict.packed[: 24 * (depth + 1)], again.packed[: 24 * (depth + 1)])


@pytest.mark.parametrize("draft", steps.DRAFTS)
@pytest.mark.parametrize("asked", steps.ASKED)
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@torch.inference_mode()
def test_steps_are_judged_alike_recorded_or_not(where, asked, draft):
    """Other tokens, lengths and numbers of rows at every step; what stands behind the logits is no number."""
    device = torch.device(where)
    recording, plain = (Sampler(40, frozenset({2}), device) for _ in range(2))
    plain._graphs.records = False
    recording._graphs = Recorder() if device.type == "cpu" else GraphCache(device, first=1)
    generator, batch = torch.Generator().manual_seed(7), 3
    logits = torch.full((40, 40), torch.nan, device=device)
    sequences = steps.sequences_of(asked, batch)
    for turn in range(6):
        made, rows, row_of = steps.step(draft, batch, 4, logits[:15], turn % 2, generator)
        logits[len(rows) :] = torch.nan
        chains = "trees" not in draft
        verdicts = [one.verify(sequences, made, rows, row_of, only_chains=chains) for one in (plain, recording)]
        assert steps.unlike(*verdicts) == []
        for sequence in sequences:
            sequence.tokens.append(5)
    assert recording.warm
    assert len(recording._graphs) == len(recording._graphs._known)  # none where the host judges by itself


@pytest.mark.parametrize("asked", ["greedy", "sampled", "seeded", "logprobs", "penalties"])
@torch.inference_mode()
def test_plain_steps_of_fewer_rows_are_judged_as_those_before_until_they_stay(asked):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recording, plain = (Sampler(40, frozenset({2}), device) for _ in range(2))
    plain._graphs.records = False
    recording._graphs = Recorder() if device.type == "cpu" else GraphCache(device, first=1)
    logits = torch.full((24, 40), torch.nan, device=device)
    generator, sequences, sizes = torch.Generator().manual_seed(3), steps.sequences_of(asked, 20), set()
    for rows in [20] * 12 + [19, 17, 13, 9, 1, 14] + [5] * 12:
        logits[:rows] = 3 * torch.randn(rows, 40, generator=generator).to(device)
        given = sequences[:rows], Draft.empty(rows), logits[:rows], torch.arange(rows)[:, None]
        lengths = np.array([len(sequence.tokens) + 2 for sequence in given[0]])
        verdicts = [one.verify(*given, lengths=lengths) for one in (plain, recording)]
        assert steps.unlike(*verdicts) == []
        assert verdicts[1].packed is None or verdicts[1].packed_rows in (0, 20, 5)
        sizes.add(len(recording._graphs))
        logits[:] = torch.nan
        for sequence in sequences:
            sequence.tokens.append(5)
    assert max(sizes) == 2, "one recording for 20 rows and fewer, one for 5 once they have stayed"
