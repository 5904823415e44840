"""Steps launched before the one before them is read, or before it is told: the same answers and figures, whatever
happens in between."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.engine.policy import Choice, LearnsNothing
from tests.drafters.contract_toys import Letters
from tests.engine.fakes import ChainDrafter, TapDrafter, TreeDrafter
from tests.engine.test_engine import ByRequest, greedy_alone, make_engine, params, prompt_of, run

EOS = 3
NEVER = "!"  # a stop string no answer holds: the engine decodes text only where there is one


def ahead_engine(**config):
    engine = make_engine(**config)
    engine.runs_ahead = True
    launched, launch = [], engine.runner.launch_after

    def count(flight, batch, going):
        launched.append((len(flight.layout.rows), len(going)))
        return launch(flight, batch, going)

    engine.runner.launch_after = count
    return engine, launched


requests_strategy = st.lists(
    st.tuples(
        st.integers(0, 12),  # arrival
        st.integers(0, 2),  # which shared beginning
        st.integers(1, 30),  # prompt length
        st.integers(1, 25),  # max_tokens
        st.sampled_from([None, 5, 9]),  # seed; None is greedy
        st.integers(0, 60),  # cancelled at this step, if under 20
        st.sampled_from([{}, {}, {"stop_token_ids": [7]}, {"presence_penalty": 0.5}, {"min_tokens": 6}]),
    ),
    min_size=1,
    max_size=7,
)


def asked_of(wanted):
    """Requests as `run` takes them, and who is cancelled when."""
    requests, cancel = [], []
    for i, (arrival, shared, length, max_tokens, seed, cancelled, more, *_) in enumerate(wanted):
        asked = {"max_tokens": max_tokens, **more, **({} if seed is None else {"seed": seed, "temperature": 0.8})}
        asked["max_tokens"] = max(max_tokens, asked.get("min_tokens", 0))
        requests.append((arrival, str(i), prompt_of(shared, length), params(**asked)))
        if cancelled < 20:
            cancel.append((cancelled, str(i)))
    return requests, cancel


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests_strategy, st.integers(14, 40), st.integers(4, 40), st.integers(1, 4), st.booleans())
def test_running_ahead_changes_no_answer_and_no_figure(wanted, num_blocks, step_tokens, seats, prefix_caching):
    engine, _ = ahead_engine(
        eos=(EOS,),
        num_blocks=num_blocks,
        max_num_seqs=seats,
        max_num_batched_tokens=step_tokens,
        prefix_caching=prefix_caching,
    )
    requests, cancel = asked_of(wanted)
    sequences = run(engine, requests, cancel)
    for _, name, prompt, sampling in requests:
        (sequence,) = sequences[name]
        (alone,) = run(make_engine(eos=(EOS,), prefix_caching=False), [(0, "0", prompt, sampling)])["0"]
        if sequence.finish_reason == "abort":
            assert sequence.output_tokens == alone.output_tokens[: sequence.num_output]
        else:
            assert sequence.output_tokens == alone.output_tokens
            assert (sequence.finish_reason, sequence.stop_reason) == (alone.finish_reason, alone.stop_reason)
        assert sequence.stats.num_committed_tokens == sequence.stats.num_target_passes == sequence.num_output
    assert engine.blocks.num_free == num_blocks


def test_plain_decoding_is_one_step_ahead_and_returns_every_token_once():
    engine, launched = ahead_engine()
    engine.add_request("a", prompt_of(0, 5), params(max_tokens=12))
    said = []
    while engine.has_work:
        said.append([output.tokens for output in engine.step()])
    assert [tokens for step in said for tokens in step] == [[token] for token in greedy_alone(prompt_of(0, 5), 12)]
    assert len(launched) == 11, "every step but the first is launched before the one before it is read"
    assert engine.model.num_passes == 12, "the end of the length is foreseen"


def test_who_ends_is_left_out_of_the_step_that_was_launched_with_it():
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
    (newcomer,) = engine.add_request(
        "a", prompt_of(1, 20), params(max_tokens=8)
    )  # the id and the blocks are used again
    while engine.has_work:
        for output in engine.step():
            assert output.sequence.request_id == "b" or output.sequence is newcomer
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


class Resting(ByRequest):
    """Drafts for nobody in three steps of four."""

    def __init__(self, choices):
        super().__init__(choices)
        self.planned = 0

    def plan(self, sequences, other_rows, others_wait):
        self.planned += 1
        return super().plan(sequences, other_rows, others_wait)

    def rests(self, sequences):
        return any(len(sequence.tokens) % 4 for sequence in sequences)


def test_drafters_keep_up_with_steps_taken_ahead_of_them():
    chain, tree, taps = ChainDrafter("chain"), TreeDrafter("tree"), TapDrafter()
    policy = Resting({"a": Choice("chain", 3), "b": Choice("tree", 4), "c": Choice("tapped", 2)})
    engine, launched = ahead_engine(drafters=[chain, tree, taps], policy=policy, num_blocks=128)
    sequences = run(engine, [(i, name, prompt_of(i, 6), params(max_tokens=30)) for i, name in enumerate("abc")])
    for i, name in enumerate("abc"):
        assert sequences[name][0].output_tokens == greedy_alone(prompt_of(i, 6), 30)
        assert sequences[name][0].stats.num_drafts > 0
    assert launched, "some steps were plain"
    assert engine.stats.num_steps > policy.planned
    assert engine.drafters.failures == 0


@pytest.mark.parametrize("why", ["a drafter", "logprobs", "penalties", "min_tokens"])
def test_it_stays_behind_where_the_host_has_to_see_the_tokens_first(why):
    drafters = {"drafters": [ChainDrafter("chain")], "policy": ByRequest({})} if why == "a drafter" else {}
    asked = {"logprobs": {"logprobs": 2}, "penalties": {"repetition_penalty": 1.2}, "min_tokens": {"min_tokens": 2}}
    engine, launched = ahead_engine(**drafters)
    run(engine, [(0, "a", prompt_of(0, 3), params(max_tokens=6, **asked.get(why, {})))])
    assert not launched


def test_it_does_not_run_ahead_of_a_prompt_that_is_to_be_read():
    engine, launched = ahead_engine(max_num_seqs=2, max_num_batched_tokens=4)
    engine.add_request("a", prompt_of(0, 3), params(max_tokens=30))
    engine.step()
    engine.add_request("b", prompt_of(1, 12), params(max_tokens=12))
    engine.step()  # what was under way when b came
    for _ in range(3):  # a and three tokens of b at a time
        before = len(launched)
        engine.step()
        assert len(launched) == before
    while engine.has_work:
        engine.step()
    assert launched[-1] == (1, 1)
    assert (2, 2) in launched


def test_it_takes_no_block_from_anybody():
    """Two sequences whose growth fills the cache: who runs ahead would need a block that only preempting gives."""
    engine, launched = ahead_engine(num_blocks=6, max_num_seqs=2)
    requests = [(0, name, prompt_of(i, 6), params(max_tokens=14)) for i, name in enumerate("ab")]
    sequences = run(engine, requests)
    for _, name, prompt, _ in requests:
        assert sequences[name][0].output_tokens == greedy_alone(prompt, 14)
    assert sequences["b"][0].num_preemptions > 0
    assert sequences["a"][0].num_preemptions == 0
    assert launched


def test_a_step_interrupted_while_it_is_read_loses_no_token():
    engine, launched = ahead_engine()
    engine.add_request("r", prompt_of(0, 5), params(max_tokens=12))
    collect, calls, said = engine.committer.collect, [], []

    def interrupted(flight):
        calls.append(flight)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return collect(flight)

    engine.committer.collect = interrupted
    while engine.has_work:
        try:
            said += [token for output in engine.step() for token in output.tokens]
        except KeyboardInterrupt:
            continue
    assert launched
    assert said == greedy_alone(prompt_of(0, 5), 12)


together_strategy = st.lists(
    st.tuples(
        st.integers(0, 6),  # arrival
        st.integers(0, 2),  # which shared beginning
        st.integers(1, 12),  # prompt length
        st.integers(1, 40),  # max_tokens
        st.sampled_from([None, 5, 9]),  # seed; None is greedy
        st.integers(0, 40),  # cancelled at this step, if under 20
        st.sampled_from([{}, {}, {"stop_token_ids": [7]}, {"stop": ["ab", "ke"]}, {"presence_penalty": 0.5}]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    together_strategy,
    st.integers(14, 60),  # blocks
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 9, 17]),
)
def test_what_a_company_keeps_from_step_to_step_changes_nothing(
    wanted, num_blocks, prefix_caching, speaks, drafts, interrupted
):
    """Every output of every step and all figures but times, against an engine that works them out anew each time."""
    requests, cancel = asked_of([(*one[:6], {} if "stop" in one[6] and not speaks else one[6]) for one in wanted])

    def apart(launch):
        def launch_after(flight, batch, going):
            flight = launch(flight, batch, going)
            flight.stage = batch.stage = None
            return flight

        return launch_after

    def told(keeps):
        drafting = (
            {"drafters": [drafter := Noting("chain")], "policy": Resting({"0": Choice("chain", 3)})} if drafts else {}
        )
        engine, _ = ahead_engine(
            eos=(EOS,), num_blocks=num_blocks, max_num_seqs=4, prefix_caching=prefix_caching, **drafting
        )
        engine.tokenizer = Letters() if speaks else None
        if not keeps:
            engine.runner.launch_after = apart(engine.runner.launch_after)
        step, observe, steps = engine.step, engine.policy.observe, []

        def observing(report):
            if len(steps) == interrupted and "interrupted" not in steps:
                steps.append("interrupted")
                raise KeyboardInterrupt
            observe(report)

        def stepping():
            with suppress(KeyboardInterrupt):
                outputs = [(one.sequence.key, *list(vars_of(one).values())[1:]) for one in step()]
                steps.append((outputs, sorted(engine.blocks._published)))

        engine.step, engine.policy.observe = stepping, observing
        sequences = run(engine, requests, cancel)
        assert engine.blocks.num_free == num_blocks
        assert not engine.committer._watches
        assert engine.committer._expected[0] is None
        ends = {
            name: (one.tokens, one.text, one.finish_reason, one.stop_reason, one.num_computed, one.stats.as_dict())
            for name, (one,) in sequences.items()
        }
        return steps, drafts and drafter.noted, ends, engine.stats.num_committed_tokens, engine.stats.num_steps

    assert told(keeps=True) == told(keeps=False)


class Noting(ChainDrafter):
    """Remembers what it was told."""

    def __init__(self, name):
        super().__init__(name)
        self.noted = []

    def commit(self, commits):
        self.noted.append([(one.sequence.key, one.first, one.count) for one in commits])


def vars_of(output):
    return {name: getattr(output, name) for name in output.__slots__}


def test_a_company_says_its_tokens_without_looking_at_each_sequence():
    engine, _ = ahead_engine(num_blocks=128)
    kept = []
    collect = engine.committer.collect

    def watched(flight):
        kept.append((collected := collect(flight)).stats is not None)
        return collected

    engine.committer.collect = watched
    sequences = run(engine, [(0, name, prompt_of(i, 6), params(max_tokens=20)) for i, name in enumerate("abc")])
    assert {name: sequences[name][0].output_tokens for name in "abc"} == {
        name: greedy_alone(prompt_of(i, 6), 20) for i, name in enumerate("abc")
    }
    assert kept == [False, *[True] * 19], "the first reads prompts"


def test_a_company_that_nobody_samples_in_any_more_is_greedy():
    """What plain steps would have taken is known apart for both."""
    engine, _ = ahead_engine(num_blocks=128)
    asked = []
    engine.policy.plain_seconds = lambda rows, sampled: asked.append((rows, sampled))
    wanted = {"a": params(max_tokens=20), "b": params(max_tokens=8, seed=5, temperature=0.8)}
    run(engine, [(0, name, prompt_of(i, 6), one) for i, (name, one) in enumerate(wanted.items())])
    assert asked == [(2, True)] * 7 + [(1, False)] * 12


class Early:
    """An engine that drafts for everybody, and the order in which passes are asked for, read and told."""

    def __init__(self, tokenizer=None, seats=8, blocks=128, eos=(), most_tokens=32):
        self.drafter = ChainDrafter("chain")
        self.engine = make_engine(
            drafters=[self.drafter],
            policy=Always(Choice("chain", 3)),
            num_blocks=blocks,
            max_num_seqs=seats,
            max_num_batched_tokens=most_tokens,
            eos=eos,
        )
        self.engine.tokenizer, self.engine.runs_ahead = tokenizer, True
        self.events, self.fails = [], {}  # by number of the pass
        forward, collect, tell = self.engine.model.forward, self.engine.committer.collect, self.engine.committer.tell

        def passing(*args):
            self.events.append("pass")
            if self.events.count("pass") in self.fails:
                raise self.fails[self.events.count("pass")]
            return forward(*args)

        def reading(flight):
            self.events.append("read")
            return collect(flight)

        def telling(collected):
            self.events.append("told")
            return tell(collected)

        self.engine.model.forward = passing
        self.engine.committer.collect, self.engine.committer.tell = reading, telling

    @property
    def early(self):
        """Steps that were launched before the one before was told."""
        return " ".join(self.events).count("read pass told")


class Always(LearnsNothing):
    def __init__(self, choice):
        self.choice, self.forgotten = choice, []

    def plan(self, sequences, other_rows, others_wait):
        return [self.choice] * len(sequences)

    def forget(self, sequence):
        self.forgotten.append(sequence.request_id)


def test_with_drafts_the_next_pass_is_asked_for_before_a_step_is_told():
    toy = Early()
    sequences = run(toy.engine, [(0, name, prompt_of(i, 6), params(max_tokens=20)) for i, name in enumerate("ab")])
    for i, name in enumerate("ab"):
        assert sequences[name][0].output_tokens == greedy_alone(prompt_of(i, 6), 20)
    assert toy.events.count("pass") == toy.events.count("told") == toy.engine.stats.num_steps, "none was for nothing"
    assert toy.early >= toy.engine.stats.num_steps - 2, "but the first, and where nobody is left"


def test_who_is_found_to_have_ended_by_its_text_is_left_out_of_the_step_launched_with_it():
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


@pytest.mark.parametrize("problem", [RuntimeError, KeyboardInterrupt])
def test_a_pass_that_fails_when_it_is_launched_early_takes_nothing_from_the_step_before(problem):
    toy = Early(tokenizer=Letters())
    toy.fails = {3: problem, 6: problem}
    (sequence,) = toy.engine.add_request("a", prompt_of(0, 6), params(max_tokens=25, stop=NEVER))
    said, failed = [], 0
    while toy.engine.has_work:
        try:
            said += [token for output in toy.engine.step() for token in output.tokens]
        except problem:
            failed += 1
    assert failed == 2
    assert sequence.output_tokens == greedy_alone(prompt_of(0, 6), 25)
    assert sequence.text == Letters().decode(sequence.output_tokens)
    assert sequence.stats.num_committed_tokens == sequence.num_output
    assert problem is KeyboardInterrupt or said == sequence.output_tokens


def test_a_pass_that_failed_early_is_no_concern_of_whoever_comes_after_a_cancellation():
    toy = Early()
    toy.fails = {3: RuntimeError}
    toy.engine.add_request("a", prompt_of(0, 6), params(max_tokens=25))
    while toy.events.count("pass") < 3:
        toy.engine.step()
    toy.engine.cancel("a")
    sequences = run(toy.engine, [(0, "b", prompt_of(1, 6), params(max_tokens=9))])
    assert sequences["b"][0].output_tokens == greedy_alone(prompt_of(1, 6), 9)


@pytest.mark.parametrize("why", ["logprobs", "somebody waits", "few blocks"])
def test_a_step_is_told_first_where_that_makes_a_difference(why):
    toy = Early(seats=1 if why == "somebody waits" else 8, blocks=8 if why == "few blocks" else 128)
    wanted = params(max_tokens=4, **({"logprobs": 1} if why == "logprobs" else {}))
    names = "abcd" if why == "few blocks" else "ab" if why == "somebody waits" else "a"
    sequences = run(toy.engine, [(0, name, prompt_of(i, 4), wanted) for i, name in enumerate(names)])
    for i, name in enumerate(names):
        assert sequences[name][0].output_tokens == greedy_alone(prompt_of(i, 4), 4)
    if why == "somebody waits":  # whoever ends makes room at once
        last = sequences["a"][0].stats.num_target_passes
        assert toy.early > 0
        assert toy.events[3 * last - 2 : 3 * last + 1] == ["read", "told", "pass"]
    else:
        assert toy.early == 0


def test_nobody_gives_way_to_a_step_launched_before_the_last_one_is_told():
    """A prompt read in two chunks, for the second of which there may be no room: others said something meanwhile."""
    toy = Early(blocks=32, most_tokens=64)
    preempt, preempted = toy.engine.scheduler._preempt, []

    def preempting(sequence, batch):
        preempted.append(toy.events[-1])
        return preempt(sequence, batch)

    toy.engine.scheduler._preempt = preempting
    asked = [(0, "a", prompt_of(0, 4), 40), (2, "b", prompt_of(1, 110), 8)]
    sequences = run(toy.engine, [(at, name, prompt, params(max_tokens=most)) for at, name, prompt, most in asked])
    for _, name, prompt, most in asked:
        assert sequences[name][0].output_tokens == greedy_alone(prompt, most)
    assert "read" not in preempted, "what was said is told first"
    assert toy.early > 0


def test_a_step_interrupted_before_it_is_told_is_told_all_the_same():
    toy = Early(tokenizer=Letters())
    observe, reports = toy.engine.policy.observe, []

    def interrupted(report):
        reports.append(report)
        if len(reports) in (3, 6):
            raise KeyboardInterrupt
        observe(report)

    toy.engine.policy.observe = interrupted
    (sequence,) = toy.engine.add_request("a", prompt_of(0, 6), params(max_tokens=25, stop=NEVER))
    while toy.engine.has_work:
        try:
            toy.engine.step()
        except KeyboardInterrupt:
            continue
    assert len(reports) > 6
    assert sequence.output_tokens == greedy_alone(prompt_of(0, 6), 25)
    assert sequence.text == Letters().decode(sequence.output_tokens)
    assert sequence.stats.num_committed_tokens == sequence.num_output


def test_whoever_ended_in_an_interrupted_step_leaves_nothing_to_the_next_of_its_name():
    toy = Early(tokenizer=Letters())
    tell = toy.engine.committer.tell

    def interrupted(collected):
        if collected.ends:
            raise KeyboardInterrupt
        return tell(collected)

    toy.engine.committer.tell = interrupted
    with pytest.raises(KeyboardInterrupt):
        run(toy.engine, [(0, "a", prompt_of(0, 6), params(max_tokens=9, stop=NEVER))])
    assert toy.engine.step() == []
    toy.engine.committer.tell = tell
    assert "a" in toy.engine.policy.forgotten
    (sequence,) = run(toy.engine, [(0, "a", prompt_of(1, 6), params(max_tokens=9, stop=NEVER))])["a"]
    assert sequence.text == Letters().decode(greedy_alone(prompt_of(1, 6), 9))


@pytest.mark.parametrize("leaves", ["cancelled", "after an interruption"])
def test_whoever_leaves_is_forgotten_although_that_is_interrupted(leaves):
    toy = Early(tokenizer=Letters())
    engine, forget, tell = toy.engine, toy.engine.committer.forget, toy.engine.committer.tell

    def interrupted(*_):
        engine.committer.forget, engine.committer.tell = forget, tell
        raise KeyboardInterrupt

    engine.add_request("a", prompt_of(0, 6), params(max_tokens=3, stop=NEVER))
    engine.step()
    if leaves == "cancelled":
        engine.committer.forget = interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.cancel("a")
        engine.cancel("a")
    else:
        engine.committer.tell = lambda collected: interrupted() if collected.ends else tell(collected)
        with pytest.raises(KeyboardInterrupt):
            run(engine, [])
        engine.committer.forget = interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert engine.step() == []
    assert not engine.committer._watches
    (sequence,) = run(engine, [(0, "a", prompt_of(1, 6), params(max_tokens=9, stop=NEVER))])["a"]
    assert sequence.text == Letters().decode(greedy_alone(prompt_of(1, 6), 9))


early_strategy = st.lists(
    st.tuples(
        st.integers(0, 12),  # arrival
        st.integers(0, 2),  # which shared beginning
        st.integers(1, 30),  # prompt length
        st.integers(1, 25),  # max_tokens
        st.sampled_from([None, 5]),  # seed; None is greedy
        st.integers(0, 60),  # cancelled at this step, if under 20
        st.sampled_from([{}, {}, {"stop": ["ab", "ke", "c"]}, {"stop": ["hi"], "min_tokens": 4}, {"logprobs": 1}]),
        st.sampled_from(["none", "chain", "tree"]),
        st.integers(1, 6),  # budget
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(early_strategy, st.integers(14, 60), st.integers(4, 40), st.integers(1, 4), st.booleans())
def test_launching_early_changes_no_answer_and_no_figure(wanted, num_blocks, step_tokens, seats, prefix_caching):
    drafted = {str(i): Choice(method, budget) for i, (*_, method, budget) in enumerate(wanted) if method != "none"}
    drafters = [ChainDrafter("chain"), TreeDrafter("tree")]
    engine, _ = ahead_engine(
        drafters=drafters,
        policy=ByRequest(drafted),
        num_blocks=num_blocks,
        max_num_seqs=seats,
        max_num_batched_tokens=step_tokens,
        prefix_caching=prefix_caching,
        eos=(EOS,),
    )
    engine.tokenizer = Letters()
    requests, cancel = asked_of(wanted)
    sequences = run(engine, requests, cancel)
    for _, name, prompt, sampling in requests:
        (sequence,) = sequences[name]
        plain = make_engine(eos=(EOS,), prefix_caching=False)
        plain.tokenizer = Letters()
        (alone,) = run(plain, [(0, "0", prompt, sampling)])["0"]
        if sequence.finish_reason == "abort":
            assert sequence.output_tokens == alone.output_tokens[: sequence.num_output]
            assert alone.text.startswith(sequence.text)
        else:
            assert (sequence.output_tokens, sequence.text) == (alone.output_tokens, alone.text)
            assert (sequence.finish_reason, sequence.stop_reason) == (alone.finish_reason, alone.stop_reason)
        assert sequence.stats.num_committed_tokens == sequence.num_output
        assert sequence.logprobs is None or len(sequence.logprobs) == sequence.num_output
    assert engine.drafters.failures == 0
    assert engine.blocks.num_free == num_blocks
    assert not engine.committer._watches
