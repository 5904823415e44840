"""The policy that changes its mind must leave plain answers plain, or the proof compares drafts with drafts."""

from paceline.engine.policy import Choice
from paceline.prove.restless import Restless
from paceline.sampling_params import SamplingParams
from paceline.sequence import Sequence


def sequence(speculation, length):
    made = Sequence("s", [5], SamplingParams(max_tokens=99, speculation=speculation).resolve({}), max_len=100)
    made.tokens += [1] * length
    return made


def test_plain_answers_stay_plain_and_others_see_every_method_and_many_lengths():
    policy = Restless(("ngram", "suffix"))
    assert policy.plan([sequence("none", length) for length in range(40)], 0, False) == [Choice()] * 40
    drawn = policy.plan([sequence("auto", length) for length in range(90)], 0, False)
    assert {choice.method for choice in drawn} == {"none", "ngram", "suffix"}
    assert {choice.budget for choice in drawn} == set(range(9))
    assert policy.plan([sequence("auto", 98)], 0, False) == [Choice()], "the last token is the target's own"
