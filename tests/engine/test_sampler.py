"""How likely the tokens of a prompt were: those of the model, however the prompt was cut into passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.engine.policy import DraftPlan
from paceline.testing import context_logits
from tests.engine.test_engine import VOCAB, ByRequest, greedy_alone, make_engine, params, prompt_of, run
from tests.helpers.fakes import ChainDrafter, TapDrafter, TreeDrafter


def by_definition(prompt, most):
    """Return logprobs of every token but the first, without any engine."""
    entries = []
    for at in range(1, len(prompt)):
        scores = torch.log_softmax(torch.tensor(context_logits(prompt[:at], VOCAB)), -1)
        ranked = scores.argsort(descending=True).tolist()
        tokens = dict.fromkeys([prompt[at], *ranked[:most]])
        entries.append({token: (float(scores[token]), ranked.index(token) + 1) for token in tokens})
    return entries


def assert_equal(found, expected):
    assert [list(entry) for entry in found] == [list(entry) for entry in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for token, (value, rank) in theirs.items():
            assert mine[token][1] == rank
            assert mine[token][0] == pytest.approx(value, abs=1e-5)


asked = st.tuples(
    st.integers(0, 8),  # arrival
    st.integers(0, 1),  # which shared beginning
    st.integers(1, 30),  # prompt length
    st.sampled_from([None, 0, 3]),  # prompt_logprobs
    st.sampled_from(["none", "chain", "tree", "tapped"]),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(asked, min_size=1, max_size=6), st.integers(14, 40), st.integers(8, 40), st.booleans())
def test_in_chunks_beside_drafts_after_prefix_hits_and_preemption(wanted, num_blocks, step_tokens, ahead):
    drafters = [ChainDrafter("chain"), TreeDrafter("tree"), TapDrafter()]
    policy = ByRequest({str(i): DraftPlan(method, 4) for i, (*_, method) in enumerate(wanted) if method != "none"})
    engine = make_engine(
        drafters=drafters, policy=policy, num_blocks=num_blocks, max_num_batched_tokens=step_tokens, max_num_seqs=4
    )
    engine.runs_ahead = ahead
    requests = [
        (arrival, str(i), prompt_of(shared, length), params(max_tokens=6, prompt_logprobs=most))
        for i, (arrival, shared, length, most, _) in enumerate(wanted)
    ]
    answers = run(engine, requests)
    for _, name, prompt, wish in requests:
        (sequence,) = answers[name]
        assert sequence.output_tokens == greedy_alone(prompt, 6)
        if wish.prompt_logprobs is None:
            assert sequence.prompt_logprobs is None
        else:
            assert_equal(sequence.prompt_logprobs, by_definition(prompt, wish.prompt_logprobs))


def test_a_prompt_in_the_cache_is_computed_again_and_only_by_the_first_of_n():
    engine = make_engine()
    prompt = prompt_of(0, 21)
    wish = params(max_tokens=2, n=3, temperature=1.0, seed=1, prompt_logprobs=2)
    run(engine, [(0, "before", prompt, params(max_tokens=2))])
    engine.model.rows_per_pass.clear()
    first, *others = run(engine, [(0, "asked", prompt, wish)])["asked"]
    assert_equal(first.prompt_logprobs, by_definition(prompt, 2))
    assert [one.prompt_logprobs for one in others] == [None, None]
    assert max(engine.model.rows_per_pass) >= len(prompt)
    assert sum(engine.model.rows_per_pass) < 2 * len(prompt)
