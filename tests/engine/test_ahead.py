"""The two orders of a step: a step launched before the one before it is read, or before it is published, gives the same
answers and figures, whatever happens in between."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.engine.policy import DraftPlan, FixedPolicy
from tests.engine.test_engine import ByRequest, greedy_alone, make_engine, params, prompt_of, run
from tests.helpers.contract_toys import Letters
from tests.helpers.fakes import ChainDrafter, DrawnChainDrafter, TapDrafter, TreeDrafter, requests_strategy
from tests.helpers.results import rows_of

EOS = 3


def ahead_engine(**config):
    """And (rows of the flight, rows of the step launched behind it), for each such step."""
    engine = make_engine(**config)
    engine.runs_ahead = True
    launched, launch = [], engine.runner.launch

    def count(batch, draft, after=None):
        if after is not None:
            launched.append((len(after.batch), len(batch)))
        return launch(batch, draft, after)

    engine.runner.launch = count
    return engine, launched


OPTIONS = st.sampled_from(
    [
        *({}, {}, {"stop_token_ids": [7]}, {"presence_penalty": 0.5}, {"min_tokens": 6}, {"logprobs": 1}),
        {"prompt_logprobs": 1},
        *({"stop": ["ab", "ke", "c"]}, {"stop": ["hi"], "min_tokens": 4}),
    ]
)
METHODS = st.sampled_from(["none", "none", "chain", "tree", "drawn", "tapped"])


class Resting(ByRequest):
    """ByRequest, but some steps are plain and known to be so before the step before them is read."""

    def __init__(self, choices, often):
        super().__init__(choices)
        self.often, self.planned = often, 0

    def plan(self, sequences, *step):
        self.planned += 1
        return super().plan(sequences, *step)

    def skip_plan(self, sequences, offers):
        plain = all(sequence.request_id not in self.choices for sequence in sequences)
        return plain or len(sequences[0].tokens) % self.often > 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests_strategy(OPTIONS, METHODS, st.integers(1, 6)),  # and max_nodes
    st.integers(14, 60),  # blocks
    st.integers(4, 40),  # tokens a step
    st.integers(1, 4),  # req_indices
    st.booleans(),
    st.booleans(),
    st.integers(1, 4),
    st.integers(0, 10**6),
)
def test_no_answer_and_no_figure_depends_on_the_order_of_a_step(
    wanted, num_blocks, step_tokens, req_indices, prefix_caching, speaks, often, seed
):
    """Also where the order is drawn at random for every step."""
    drafted = {
        str(i): DraftPlan(method, max_nodes) for i, (*_, method, max_nodes) in enumerate(wanted) if method != "none"
    }
    engine, _ = ahead_engine(
        drafters=[ChainDrafter("chain"), TreeDrafter("tree"), DrawnChainDrafter("drawn"), TapDrafter()],
        policy=Resting(drafted, often),
        num_blocks=num_blocks,
        max_num_seqs=req_indices,
        max_num_batched_tokens=step_tokens,
        prefix_caching=prefix_caching,
        eos=(EOS,),
    )
    engine.admission.tokenizer = Letters() if speaks else None
    noise, behind = random.Random(seed), engine._launch_ahead
    engine._launch_ahead = lambda flight: behind(flight) if seed % 2 or noise.random() < 0.7 else None
    requests, cancel = [], []
    for i, (arrival, shared, length, max_tokens, seeded, cancelled, more, *_) in enumerate(wanted):
        more = more if speaks else {name: value for name, value in more.items() if name != "stop"}
        asked = {"max_tokens": max_tokens, **more, **({} if seeded is None else {"seed": seeded, "temperature": 0.8})}
        asked["max_tokens"] = max(max_tokens, asked.get("min_tokens", 0))
        requests.append((arrival, str(i), prompt_of(shared, length), params(**asked)))
        if cancelled < 20:
            cancel.append((cancelled, str(i)))
    sequences = run(engine, requests, cancel)
    for _, name, prompt, sampling in requests:
        (sequence,) = sequences[name]
        plain = make_engine(eos=(EOS,), prefix_caching=False)
        plain.admission.tokenizer = engine.admission.tokenizer
        (alone,) = run(plain, [(0, "0", prompt, sampling)])["0"]
        if sequence.finish_reason == "abort":
            assert sequence.output_tokens == alone.output_tokens[: sequence.num_output]
            assert alone.text.startswith(sequence.text)
        else:
            assert (sequence.output_tokens, sequence.text) == (alone.output_tokens, alone.text)
            assert (sequence.finish_reason, sequence.stop_reason) == (alone.finish_reason, alone.stop_reason)
            assert sequence.logprobs == alone.logprobs
        assert sequence.stats.num_committed_tokens == sequence.num_output
        if name not in drafted:
            assert sequence.stats.num_target_passes == sequence.num_output
    assert engine.drafters.failures == 0
    assert engine.blocks.num_free == num_blocks
    assert not engine.committer._texts
    assert not engine._requests


def test_plain_decoding_is_one_step_ahead_and_returns_every_token_once():
    engine, launched = ahead_engine()
    engine.add_request("a", prompt_of(0, 5), params(max_tokens=12))
    committed = []
    while engine.has_work:
        committed.append(engine.step().tokens)
    assert [tokens for step in committed for tokens in step] == [[token] for token in greedy_alone(prompt_of(0, 5), 12)]
    assert len(launched) == 11, "every step but the first is launched before the one before it is read"
    assert engine.model.num_passes == 12, "the end of the length is foreseen"


def test_a_sequence_that_ends_is_left_out_of_the_step_that_was_launched_with_it():
    answers = {name: greedy_alone(prompt_of(i, 6), 30, eos=(EOS,)) for i, name in enumerate("abc")}
    engine, launched = ahead_engine(eos=(EOS,), num_blocks=128)
    sequences = run(engine, [(0, name, prompt_of(i, 6), params(max_tokens=30)) for i, name in enumerate("abc")])
    assert {name: sequences[name][0].output_tokens for name in "abc"} == answers
    assert len({len(answer) for answer in answers.values()}) > 1, "they end at different steps"
    assert any(going < rows for rows, going in launched), "some step goes on with fewer rows than the one before"


def test_cancelling_between_steps_frees_blocks_although_a_step_is_under_way():
    engine, launched = ahead_engine()
    for name in "ab":
        engine.add_request(name, prompt_of(0, 9), params(max_tokens=20))
    for _ in range(4):
        engine.step()
    assert launched
    engine.cancel("a")
    engine.blocks.check(engine.scheduler.sequences())
    (newcomer,) = engine.add_request("a", prompt_of(1, 20), params(max_tokens=8))  # id and blocks are used again
    while engine.has_work:
        for sequence in engine.step().sequences:
            assert sequence.request_id == "b" or sequence is newcomer
    assert newcomer.output_tokens == greedy_alone(prompt_of(1, 20), 8)
    assert engine.blocks.num_free == 64


def test_after_the_last_answer_nothing_is_under_way():
    engine, _ = ahead_engine(eos=(EOS,), num_blocks=128)
    for name in ("first", "second"):
        (sequence,) = engine.add_request(name, prompt_of(0, 6), params(max_tokens=60))
        steps = 0
        while engine.has_work:
            steps += bool(engine.step())
        assert steps == sequence.num_output


def test_drafters_keep_up_with_steps_taken_ahead_of_them():
    chain, tree, taps = ChainDrafter("chain"), TreeDrafter("tree"), TapDrafter(capacity=8)
    policy = Resting({"a": DraftPlan("chain", 3), "b": DraftPlan("tree", 4), "c": DraftPlan("tapped", 2)}, 9)
    engine, launched = ahead_engine(drafters=[chain, tree, taps], policy=policy, num_blocks=128)
    sequences = run(engine, [(i, name, prompt_of(i, 6), params(max_tokens=60)) for i, name in enumerate("abc")])
    for i, name in enumerate("abc"):
        assert sequences[name][0].output_tokens == greedy_alone(prompt_of(i, 6), 60)
        assert sequences[name][0].stats.num_drafts > 0
    assert launched, "some steps were plain"
    assert engine.stats.num_steps > policy.planned
    assert taps.checked_slots > 50
    assert taps.late_starts == 0, "context K/V are written before their taps leave the ring"
    assert engine.drafters.failures == 0


def test_a_tapped_drafter_begins_behind_the_step_under_way():
    taps = TapDrafter()
    engine, _ = ahead_engine(drafters=[taps], policy=Always(DraftPlan("tapped", 3)), num_blocks=128)
    sequences = run(engine, [(i, name, prompt_of(i, 6), params(max_tokens=30)) for i, name in enumerate("ab")])
    for i, name in enumerate("ab"):
        assert sequences[name][0].output_tokens == greedy_alone(prompt_of(i, 6), 30)
    assert taps.begun > 10
    assert engine.drafters.failures == 0


def test_a_broken_tree_costs_acceptance_and_nothing_else():
    taps = TapDrafter(malformed=True)
    engine, _ = ahead_engine(drafters=[taps], policy=Always(DraftPlan("tapped", 5)), num_blocks=128)
    (sequence,) = run(engine, [(0, "a", prompt_of(0, 6), params(max_tokens=40))])["a"]
    assert sequence.output_tokens == greedy_alone(prompt_of(0, 6), 40)
    assert engine.drafters.failures == 0


@pytest.mark.parametrize("why", ["a drafter", "penalties", "min_tokens"])
def test_a_step_is_read_first_where_the_host_has_to_see_its_tokens(why):
    drafters = {"drafters": [ChainDrafter("chain")], "policy": ByRequest({})} if why == "a drafter" else {}
    asked = {"penalties": {"repetition_penalty": 1.2}, "min_tokens": {"min_tokens": 6}}
    engine, launched = ahead_engine(**drafters)
    run(engine, [(0, "a", prompt_of(0, 3), params(max_tokens=6, **asked.get(why, {})))])
    assert not launched


def test_prompts_and_newcomers_join_without_a_change_of_order():
    engine, launched = ahead_engine(max_num_seqs=3, max_num_batched_tokens=4)
    engine.add_request("a", prompt_of(0, 3), params(max_tokens=30))
    engine.step()
    engine.add_request("b", prompt_of(1, 12), params(max_tokens=12, logprobs=1))  # three tokens of it beside a's one
    engine.add_request("c", prompt_of(2, 2), params(max_tokens=12))
    while engine.has_work:
        engine.step()
    assert len(launched) >= engine.stats.num_steps - 1, "all but the first, and one that found no row left"
    assert (2, 2) in launched
    assert (3, 3) in launched


def test_a_step_launched_ahead_preempts_no_sequence():
    """Two sequences whose growth fills the cache: the next block can be had by preempting only."""
    engine, launched = ahead_engine(num_blocks=6, max_num_seqs=2)
    requests = [(0, name, prompt_of(i, 6), params(max_tokens=14)) for i, name in enumerate("ab")]
    sequences = run(engine, requests)
    for _, name, prompt, _ in requests:
        assert sequences[name][0].output_tokens == greedy_alone(prompt, 14)
    assert sequences["b"][0].num_preemptions > 0
    assert sequences["a"][0].num_preemptions == 0
    assert launched


class Always(FixedPolicy):
    def __init__(self, choice):
        self.choice, self.forgotten = choice, []

    def choose(self, sequence):
        return self.choice

    def forget(self, sequence):
        self.forgotten.append(sequence.request_id)


class Early:
    """An engine that drafts for all, and the order in which steps are launched, read and published."""

    def __init__(self, tokenizer=None, req_indices=8, blocks=128, eos=(), most_tokens=32):
        self.engine = make_engine(
            drafters=[ChainDrafter("chain")],
            policy=Always(DraftPlan("chain", 3)),
            num_blocks=blocks,
            max_num_seqs=req_indices,
            max_num_batched_tokens=most_tokens,
            eos=eos,
        )
        self.engine.admission.tokenizer, self.engine.runs_ahead = tokenizer, True
        self.events, self.fails = [], set()  # numbers of passes
        forward, read, publish = (
            self.engine.model.forward,
            self.engine.committer.read,
            self.engine.committer.publish,
        )

        def passing(*args):
            self.events.append("pass")
            if self.events.count("pass") in self.fails:
                raise RuntimeError("lost")
            return forward(*args)

        def verdict_copy(flight):
            self.events.append("read")
            return read(flight)

        def publishing(*step):
            self.events.append("published")
            return publish(*step)

        self.engine.model.forward = passing
        self.engine.committer.read, self.engine.committer.publish = verdict_copy, publishing

    @property
    def early(self):
        """Steps that were launched before the one before was published."""
        return " ".join(self.events).count("read pass published")


def test_with_drafts_the_next_pass_is_launched_before_a_step_is_published():
    toy = Early()
    sequences = run(toy.engine, [(0, name, prompt_of(i, 6), params(max_tokens=20)) for i, name in enumerate("ab")])
    for i, name in enumerate("ab"):
        assert sequences[name][0].output_tokens == greedy_alone(prompt_of(i, 6), 20)
    assert toy.events.count("pass") == toy.events.count("published") == toy.engine.stats.num_steps
    assert toy.early >= toy.engine.stats.num_steps - 2, "but the first, and where no sequence is left"


def test_a_sequence_that_its_text_ends_is_left_out_of_the_step_launched_with_it():
    whole = {name: greedy_alone(prompt_of(i, 6), 30) for i, name in enumerate("abc")}
    text = Letters().decode(whole["b"])
    stop = text[9:12]
    toy = Early(tokenizer=Letters())
    asked = {"a": params(max_tokens=30), "b": params(max_tokens=30, stop=[stop]), "c": params(max_tokens=30)}
    sequences = run(toy.engine, [(0, name, prompt_of(i, 6), asked[name]) for i, name in enumerate("abc")])
    assert sequences["a"][0].output_tokens == whole["a"]
    assert sequences["c"][0].output_tokens == whole["c"]
    (ended,) = sequences["b"]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    assert ended.text == text[: text.index(stop)]
    assert ended.output_tokens == whole["b"][: text.index(stop) + len(stop)]
    assert ended.stats.num_committed_tokens == ended.num_output
    assert "b" in toy.engine.policy.forgotten
    assert toy.engine.blocks.num_free == toy.engine.blocks.num_blocks


@pytest.mark.parametrize("early", [True, False])
def test_a_pass_that_fails_ends_its_own_requests_with_the_reason_and_nothing_else(early):
    toy = Early(tokenizer=Letters(), req_indices=2)
    toy.engine.runs_ahead = early
    toy.fails = {4}
    sequences = [
        toy.engine.add_request(name, prompt_of(i, 6), params(max_tokens=25))[0] for i, name in enumerate("abc")
    ]
    committed = {sequence.key: [] for sequence in sequences}
    ended = []
    while toy.engine.has_work:
        for output in rows_of(toy.engine.step()):
            committed[output.sequence.key] += output.tokens
            if output.finished:
                ended.append(output.sequence)
        toy.engine.blocks.check(toy.engine.scheduler.sequences())
    assert set(ended) == set(sequences), "every request ends once"
    assert len(ended) == 3
    for i, sequence in enumerate(sequences[:2]):
        assert sequence.finish_reason == "error"
        assert "lost" in sequence.error
        assert sequence.output_tokens == greedy_alone(prompt_of(i, 6), 25)[: sequence.num_output]
    assert sequences[2].output_tokens == greedy_alone(prompt_of(2, 6), 25), "the one that waited goes on"
    assert all(committed[sequence.key] == sequence.output_tokens for sequence in sequences)
    assert toy.engine.blocks.num_free == toy.engine.blocks.num_blocks
    assert not toy.engine._requests


def test_a_verdict_that_cannot_be_read_ends_the_requests_of_both_steps():
    engine, _ = ahead_engine()
    read, calls = engine.committer.read, []

    def failing(flight):
        calls.append(flight)
        if len(calls) == 4:
            raise RuntimeError("the copy failed")
        return read(flight)

    engine.committer.read = failing
    sequences = run(engine, [(0, "a", prompt_of(0, 5), params(max_tokens=12)), (9, "b", prompt_of(1, 5), params())])
    assert sequences["a"][0].finish_reason == "error"
    assert sequences["a"][0].num_output == 3
    assert sequences["b"][0].output_tokens == greedy_alone(prompt_of(1, 5), sequences["b"][0].num_output)
    assert engine.blocks.num_free == 64


@pytest.mark.parametrize("why", ["a request waits", "few blocks"])
def test_a_step_is_published_first_where_that_makes_room(why):
    toy = Early(req_indices=1 if why == "a request waits" else 8, blocks=8 if why == "few blocks" else 128)
    names = "abcd" if why == "few blocks" else "ab"
    sequences = run(toy.engine, [(0, name, prompt_of(i, 4), params(max_tokens=4)) for i, name in enumerate(names)])
    for i, name in enumerate(names):
        assert sequences[name][0].output_tokens == greedy_alone(prompt_of(i, 4), 4)
    if why == "a request waits":
        last = sequences["a"][0].stats.num_target_passes
        assert toy.early > 0
        assert toy.events[3 * last - 2 : 3 * last + 1] == ["read", "published", "pass"]
    else:
        assert toy.early == 0


def test_no_sequence_is_preempted_by_a_step_launched_before_the_last_one_is_published():
    """A prompt read in two chunks, for the second of which there may be no room: others have grown meanwhile."""
    toy = Early(blocks=32, most_tokens=64)
    preempt, preempted = toy.engine.scheduler._preempt, []

    def preempting(sequence):
        preempted.append(toy.events[-1])
        return preempt(sequence)

    toy.engine.scheduler._preempt = preempting
    asked = [(0, "a", prompt_of(0, 4), 40), (2, "b", prompt_of(1, 110), 8)]
    sequences = run(toy.engine, [(at, name, prompt, params(max_tokens=most)) for at, name, prompt, most in asked])
    for _, name, prompt, most in asked:
        assert sequences[name][0].output_tokens == greedy_alone(prompt, most)
    assert "read" not in preempted
    assert toy.early > 0
