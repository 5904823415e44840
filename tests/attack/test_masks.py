"""Grammars of hostile clients: the work of each mask is bounded, and other requests go on."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.text.grammar import Grammars
from tests.helpers.errors import refused
from tests.helpers.hostile_grammars import NAMED, follow, hostile_grammars

STUCK = {"regex": "(((.{1,50}){1,50}){1,50}){1,50}"}
MASK_S, COMPILE_S = 0.2, 1.0  # processor seconds; the longest seen are 0.06 and 0.3


@pytest.fixture(scope="module")
def grammars(smollm2: LLM) -> Grammars:
    return Grammars(smollm2.tokenizer, smollm2.config.vocab_size, smollm2.config.eos_token_ids)


def test_no_grammar_takes_long_to_compile_or_for_a_mask(grammars: Grammars) -> None:
    rng = random.Random(0)
    for wanted in hostile_grammars(100):
        followed = follow(grammars, wanted, rng, 20)
        assert followed.compile_s < COMPILE_S, wanted
        assert followed.mask_s < MASK_S, wanted


def test_a_matcher_of_a_hostile_regex_says_what_is_wrong(smollm2: LLM, grammars: Grammars) -> None:
    for wanted in (STUCK, {"json": {"type": "string", "pattern": STUCK["regex"]}}):
        (matcher,) = grammars.matchers(grammars.compile(wanted), 1)
        sequence: Any = SimpleNamespace(output_tokens=[], matcher=matcher)
        matcher.masks(sequence, [], [])
        sequence.output_tokens += smollm2.tokenizer.encode('"aaaa')
        matcher.masks(sequence, [], [])
        assert matcher.problem is not None


def test_a_hostile_regex_ends_its_own_request_and_others_go_on(smollm2: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    alone = smollm2.generate("Count: 1, 2, 3,", plain)[0].outputs[0].token_ids
    beside = smollm2.stream("Count: 1, 2, 3,", plain)
    tokens = list(next(beside).token_ids)
    with refused("structured_outputs"):
        smollm2.generate("Go on", SamplingParams(structured_outputs=STUCK, max_tokens=20))
    for chunk in beside:
        tokens += chunk.token_ids
    assert tokens == list(alone)


def test_answers_to_one_request_share_its_allowance(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.text.grammar.USUAL_S", 0.0)
    monkeypatch.setattr("paceline.text.grammar.BEYOND_S", 0.0)
    compiled = grammars.compile({"regex": "[a-z]+"})
    first, *others = grammars.matchers(compiled, 3)
    (of_another_request,) = grammars.matchers(compiled, 1)
    first.masks(SimpleNamespace(output_tokens=[], matcher=first), [], [])
    assert all(matcher.problem is not None for matcher in others)
    assert of_another_request.problem is None


def test_a_schema_whose_multiples_take_minutes_is_refused(smollm2: LLM) -> None:
    (wanted,) = (each for each in NAMED if "multipleOf" in str(each))
    with refused("structured_outputs"):
        smollm2.generate("a", SamplingParams(structured_outputs=wanted))
