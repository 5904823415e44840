"""Tables of successors against a slow reference; domains, bounds, trees."""

from __future__ import annotations

import itertools
import random
import sys

import numpy as np
import pytest
import torch

from paceline.config import AUTO, SpeculationConfig
from paceline.core.feedback import Feedback
from paceline.core.sequence import Owner
from paceline.drafters import METHODS, DrafterContext, DraftRequest
from paceline.drafters.lookup import successors
from paceline.drafters.lookup.successors import ENTRY, WIDTH
from paceline.testing import toy_config
from tests.helpers.contract_toys import ByRequest, make_drafter, make_engine, params, prompt_of, run
from tests.helpers.toys import sequence_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the native kernels are not built on Windows")


def make(method="recycling", **options):
    settings = SpeculationConfig(**{"method": method, **options})
    return METHODS["recycling"].make(DrafterContext(toy_config(1000), torch.device("cpu"), settings))


def owned(tokens, domain="", lasts=True):
    sequence = sequence_of(tokens)
    sequence.owner, sequence.key = Owner(domain, lasts=lasts), f"{domain}/{id(sequence)}"
    return sequence


def feedback_of(sequences, chance, nodes=6, committed=1):
    """Random trees behind each sequence, whose last tokens were committed in the step."""
    tokens, parents, starts = [], [], []
    for sequence in sequences:
        starts.append(len(tokens))
        tokens.append(sequence.tokens[-1 - committed])
        parents.append(-1)
        for _ in range(chance.randint(0, nodes)):
            parents.append(chance.randrange(starts[-1], len(tokens)))
            tokens.append(chance.randrange(30))
    ids = np.array([chance.sample(range(40), WIDTH + 1) for _ in tokens], np.int32)
    probs = -np.sort(-np.array([[chance.random() / 4 for _ in range(WIDTH + 1)] for _ in tokens], np.float32))
    lengths = np.array([len(sequence.tokens) - committed for sequence in sequences])
    columns = np.array(starts), np.array(tokens, np.int32), np.array(parents, np.int32)
    return Feedback(sequences, lengths, *columns, ids, probs, np.zeros(len(tokens), np.float32))


def mixed(old, ids, probs):
    """The slow reference of an entry: pairs of a token and its probability in 1 / 255."""
    new = dict(zip(ids[:WIDTH].tolist(), [round(255 * float(p)) for p in probs[:WIDTH]], strict=True))
    if old is None:
        return list(new.items())
    known = dict(old)
    order = [*new, *(token for token in known if token not in new)]
    weights = [(token, (new.get(token, 0) + known.get(token, 0) + 1) // 2) for token in order]
    return sorted(weights, key=lambda pair: -pair[1])[:WIDTH]


def test_tables_equal_a_slow_reference(monkeypatch):
    monkeypatch.setattr(successors, "FULL", 0.02)  # so empty that no set overflows
    drafter, chance, expected = make(), random.Random(4), {}
    for _ in range(40):
        texts = [[chance.randrange(30) for _ in range(chance.randint(2, 5))] for _ in range(3)]
        sequences = [owned(text, domain) for text, domain in zip(texts, ("", "a", "a"), strict=True)]
        feedback = feedback_of(sequences, chance)
        drafter.on_feedback(feedback)
        for sequence, start, end in zip(sequences, feedback.starts, feedback.ends, strict=True):
            table = expected.setdefault(sequence.owner.domain, {})
            for row in range(start, end):
                last, before = int(feedback.tokens[row]), int(feedback.before[row])
                for context in [(-1, last), *([(before, last)] if before >= 0 else [])]:
                    table[context] = mixed(table.get(context), feedback.ids[row], feedback.probs[row])
    for domain, contexts in expected.items():
        table = drafter.tables.known[domain]
        found = {
            (int(entry["before"]), int(entry["last"])): list(
                zip(entry["ids"].tolist(), entry["probs"].tolist(), strict=True)
            )
            for entry in table.entries
            if entry["stamp"]
        }
        assert found == contexts
        assert table.used == len(contexts)


def test_tables_of_all_domains_keep_within_their_bound():
    """The tables used least recently are dropped, and full ones replace their oldest entries."""
    most, chance = 6 * 1024 * ENTRY.itemsize, random.Random(1)
    drafter = make(recycling_bytes=most)
    for step in range(300):
        sequences = [
            owned([chance.randrange(900) for _ in range(3)], f"domain {(step // 40 + at) % 9}") for at in range(3)
        ]
        feedback = feedback_of(sequences, chance, nodes=30)
        feedback.tokens[:] = [chance.randrange(900) for _ in feedback.tokens]
        drafter.on_feedback(feedback)
        assert drafter.tables.nbytes <= most
    assert any(table.used for table in drafter.tables.known.values())
    nothing = make(recycling_bytes=0)
    nothing.on_feedback(feedback_of([owned([1, 2, 3])], chance))
    assert nothing.tables.nbytes == 0


def tokens_drafted(drafter, sequence, nodes=4):
    draft = drafter.propose([DraftRequest(sequence, nodes)])
    return draft.arrays.tokens[0, : draft.arrays.num_nodes[0]].tolist()


@pytest.mark.parametrize("answers", [True, False])
def test_a_table_is_read_by_its_own_domain_alone(answers):
    drafter, chance = make(suffix_answers=answers), random.Random(2)
    known = owned([5, 6, 7], "a")
    feedback = feedback_of([known], chance, nodes=0)
    drafter.on_feedback(feedback)
    wanted = set(feedback.ids[0, :WIDTH].tolist())
    assert bool(tokens_drafted(drafter, owned([9, 6], "a"))) == answers
    assert not tokens_drafted(drafter, owned([9, 6], "b"))
    assert set(tokens_drafted(drafter, owned([9, 6], "a"))) <= wanted
    drafter.release(known)
    assert bool(drafter.tables.nbytes) == answers


def test_next_next_tokens_are_children_of_the_root():
    drafter, chance = make(), random.Random(3)
    sequence = owned([5, 6])
    drafter.level(sequence)
    sequence.tokens.append(7)
    feedback = feedback_of([sequence], chance, nodes=0)
    feedback.ids[0, 2] = 7  # the token chosen is third: the others are ranked without it
    drafter.on_feedback(feedback)
    others = [token for token in feedback.ids[0].tolist() if token != 7]
    assert set(tokens_drafted(drafter, sequence, 8)) == set(others)


def test_fewer_nodes_are_a_prefix_of_more_and_unlikely_ones_are_left_out():
    drafter, chance = make(), random.Random(5)
    for _ in range(60):
        drafter.on_feedback(feedback_of([owned([chance.randrange(30) for _ in range(4)])], chance))
    sequence = owned([1, 2, 3, 1, 2])
    drafts = [drafter.propose([DraftRequest(sequence, most)]).arrays for most in range(1, 20)]
    for fewer, more in itertools.pairwise(drafts):
        count = fewer.num_nodes[0]
        assert (fewer.tokens[0] == more.tokens[0, :count]).all()
        assert (fewer.parents[0] == more.parents[0, :count]).all()
    cut = [drafter.propose([DraftRequest(sequence, 19, least)]).arrays.num_nodes[0] for least in (0.0, 0.5, 1.0)]
    assert cut[0] > cut[1] >= cut[2] == 1


def test_survival_counts_candidates_on_the_path_drafted_or_not():
    for most in (0, 5):
        drafter = make_drafter("recycling")
        policy = ByRequest({}) if not most else None
        engine = make_engine([drafter], k=5, policy=policy)
        sequences, _ = run(engine, [(0, "0", prompt_of(0, 9), params(max_tokens=40))])
        if not most:  # no draft is asked for, so nothing is looked up
            assert drafter.survival.tried.sum() == 0
            continue
        tried, right = drafter.survival.tried.sum(), drafter.survival.right.sum()
        assert right <= 40
        assert tried > sum(one.stats.num_draft_tokens for one in sequences.values())
        assert engine.drafters.failures == 0


def test_one_of_two_lookups_fills_the_store_that_both_read():
    for method, filler in (("recycling", "recycling"), ("suffix", "suffix"), (AUTO, None)):
        context = DrafterContext(toy_config(1000), torch.device("cpu"), SpeculationConfig(method=method))
        suffix, recycling = (METHODS[name].make(context) for name in ("suffix", "recycling"))
        assert suffix.store is recycling.store
        assert suffix.only_by_name != recycling.only_by_name
        if filler is not None:
            assert recycling.only_by_name == (filler == "suffix")
