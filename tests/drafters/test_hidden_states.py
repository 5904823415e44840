"""The ring of hidden states: native code and torch write what a plain loop writes."""

from __future__ import annotations

import pytest
import torch

from paceline.config import MAX_K
from paceline.core.sequence import Sequence
from paceline.core.verdict import UnreadVerdict, VerdictRow
from paceline.drafters.hidden_states import CommittedRow, TapRing
from paceline.engine.policy import DraftPlan, FixedPolicy
from tests.helpers.contract_toys import features, make_drafter, make_engine, params, prompt_of

WIDTH = 2, 3  # taps of a row, and components of each


def unread(generator: torch.Generator, batch: int, most: int) -> tuple[UnreadVerdict, torch.Tensor]:
    """A verdict of a pass in which each row has its last token and `most` - 1 nodes, and the taps of that pass."""
    accepted = torch.randint(most, (batch,), generator=generator)
    path = torch.full((batch, most + 1), -1)  # wider than the draft is deep, as a captured verdict's
    for row in range(batch):
        nodes = torch.randperm(most - 1, generator=generator)[: accepted[row]].sort().values
        path[row, : accepted[row]] = nodes
    tokens = torch.randint(1000, (batch, most + 2), generator=generator)
    verdict = UnreadVerdict(
        tokens=tokens[:, :most],
        num_accepted=accepted,
        path=path[:, : most - 1],
        rows=range(batch),
        length=torch.randint(1, 40, (batch,), generator=generator),
        node_row=torch.arange(batch) * most + 1,
        req_index=torch.randperm(batch + 2, generator=generator)[:batch],
    )
    return verdict, torch.randn(batch * most, *WIDTH, generator=generator)


def committed(verdict: UnreadVerdict) -> list[CommittedRow]:
    """The same as the host knows it."""
    assert verdict.length is not None
    assert verdict.node_row is not None
    assert verdict.req_index is not None
    columns = (verdict.req_index, verdict.length, verdict.node_row, verdict.num_accepted, verdict.tokens, verdict.path)
    return [
        CommittedRow(req_index, length, node_row, VerdictRow(tokens[: count + 1], path[:count], []))
        for req_index, length, node_row, count, tokens, path in zip(*(part.tolist() for part in columns), strict=True)
    ]


def store(ring: TapRing, way: str, verdict: UnreadVerdict, taps: torch.Tensor, req_indices: int) -> None:
    if way == "on a device":
        ring.store(verdict, taps, req_indices)
    else:
        ring.store_on_host(committed(verdict), taps, req_indices)


@pytest.mark.parametrize("way", ["native", "on the host", "on a device"])
@pytest.mark.parametrize(("batch", "most"), [(1, 1), (3, 1), (1, 5), (4, 6)])
def test_the_ring_holds_what_is_committed(way: str, batch: int, most: int) -> None:
    generator, ring = torch.Generator().manual_seed(batch + most), TapRing(capacity=8, native=way == "native")
    expected = {}
    for _ in range(3):
        verdict, taps = unread(generator, batch, most)
        store(ring, way, verdict, taps, batch + 2)
        for row in range(batch):
            for step in range(int(verdict.num_accepted[row]) + 1):
                position = int(verdict.length[row]) - 1 + step
                node = int(verdict.path[row, step - 1]) if step else -1
                written = taps[int(verdict.node_row[row]) + node], int(verdict.tokens[row, step])
                expected[int(verdict.req_index[row]), position % 8] = written
    for (req_index, position), (states, token) in expected.items():
        found, after = ring.load(torch.tensor([req_index]), torch.tensor([position]), torch.arange(WIDTH[0]))
        assert torch.equal(found[0], states)
        assert int(after[0]) == token


@pytest.mark.parametrize("way", ["native", "on the host", "on a device"])
def test_the_ring_holds_the_longest_commit(way: str) -> None:
    """A chain of as many nodes as a row may draft, all accepted."""
    ring, most = TapRing(native=way == "native"), MAX_K + 1
    taps, columns = torch.randn(most, *WIDTH), {"length": torch.tensor([7]), "req_index": torch.tensor([2])}
    verdict = UnreadVerdict(
        tokens=torch.arange(most)[None],
        num_accepted=torch.tensor([MAX_K]),
        path=torch.arange(MAX_K)[None],
        rows=range(1),
        node_row=torch.tensor([1]),
        **columns,
    )
    store(ring, way, verdict, taps, 3)
    found, after = ring.load(columns["req_index"], torch.arange(most) + 6, torch.arange(WIDTH[0]))
    assert torch.equal(found, taps)
    assert after.tolist() == list(range(most))


@pytest.mark.parametrize("method", ["tapped", "medusa", "dspark", "dspark, native", "eagle3"])
def test_a_draft_behind_chunks_that_end_one_token_early_begins_at_the_last_token(method: str) -> None:
    """A preempted sequence is computed anew in chunks of at most 15 tokens. Where all but its last token are known,
    the next step drafts for it, and no verdict has put that token and its hidden states into the ring."""
    drafter, seen, length = make_drafter(method), [], 0

    class OncePreempted(FixedPolicy):
        def choose(self, sequence: Sequence) -> DraftPlan:
            return DraftPlan(drafter.name, 4) if sequence.num_preemptions else DraftPlan()

    sizes = {"max_num_batched_tokens": 15, "num_blocks": 9, "prefix_caching": False}
    engine, propose = make_engine([drafter], policy=OncePreempted(), **sizes), drafter.propose
    for at, name in enumerate("ab"):
        (sequence,) = engine.add_request(name, prompt_of(at, 9), params(max_tokens=20))

    def watched(rows, *after):
        places = torch.tensor([[row.sequence.req_index, len(row.sequence.tokens)] for row in rows]).T
        for row, token, states in zip(rows, drafter.last_tokens(*places), drafter.last_taps(*places), strict=True):
            tokens = row.sequence.tokens
            assert int(token) == tokens[-1]
            assert states.tolist() == [features(tuple(tokens[:-1]), tap) for tap in drafter.taps]
            seen.append((row.sequence.request_id, len(tokens)))
        return propose(rows, *after)

    drafter.propose = watched
    while engine.has_work:
        engine.step()
        if sequence.num_preemptions and not length:
            states, tokens, _ = drafter._ring.stored
            with torch.inference_mode():  # as if other sequences had its place in the ring meanwhile
                states.fill_(torch.nan)
                tokens.fill_(-1)
            length = len(sequence.tokens)
    assert seen[0] == ("b", length), "a draft begins where the chunk ended"
    assert engine.drafters.failures == 0
