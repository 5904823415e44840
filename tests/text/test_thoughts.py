"""Thoughts are told from the text behind them, wherever the text is cut; grammars begin behind them."""

from __future__ import annotations

import json
import random

import pytest

from paceline import LLM
from paceline.errors import InvalidParameter
from paceline.sampling_params import SamplingParams
from paceline.text.grammar import Grammars
from paceline.text.thoughts import (
    FAMILIES,
    Beginning,
    Thought,
    ThoughtReader,
    ThoughtTags,
    effort_variables,
    tags_in,
    thought_after,
)

QWEN = FAMILIES[0]
FREE, OPEN, CLOSED = Beginning.FREE, Beginning.OPEN, Beginning.CLOSED


def read(text: str, tags: ThoughtTags, start: Beginning, rng: random.Random | None = None) -> tuple[str, str]:
    reader, parts, at = ThoughtReader(Thought(tags, start)), [("", "")], 0
    while at < len(text):
        size = len(text) if rng is None else rng.randint(1, 5)
        parts.append(reader.push(text[at : at + size]))
        at += size
    parts.append(reader.finish())
    return "".join(thought for thought, _ in parts), "".join(text for _, text in parts)


@pytest.mark.parametrize(
    ("text", "start", "expected"),
    [
        ("{}\nOne < two.\n\n{}\n\nThree. \n", FREE, ("One < two.", "Three. \n")),
        (" \n{}One{}Two", FREE, ("One", "Two")),
        ("One\n two{}\nThree", OPEN, ("One\n two", "Three")),
        ("{}One{}Two", OPEN, ("One", "Two")),  # the model opens it once more
        ("\n{}One", FREE, ("One", "")),  # the answer ends within it
        ("One \n", OPEN, ("One", "")),
        ("{}{}Two", FREE, ("", "Two")),
        (" One {}Two{}\n", CLOSED, ("", " One {}Two{}\n")),
        (" One {}Two{} ", FREE, ("", " One {}Two{} ")),
        ("", FREE, ("", "")),
        (" ", OPEN, ("", "")),
    ],
)
@pytest.mark.parametrize("tags", FAMILIES, ids=lambda tags: tags.opening.strip())
def test_thought_and_text_are_told_apart_wherever_the_text_is_cut(
    text: str, start: Beginning, expected: tuple[str, str], tags: ThoughtTags
) -> None:
    order = (tags.closing,) if text.count("{}") == 1 and start is OPEN else tags
    text, expected = text.format(*order), (expected[0], expected[1].format(*order))
    assert read(text, tags, start) == expected
    rng = random.Random(0)
    assert all(read(text, tags, start, rng) == expected for _ in range(20))


@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_part_of_a_tag_is_text_once_the_answer_has_ended(left: int) -> None:
    assert read("<think>One</thi"[: 15 - left], QWEN, FREE)[0] == "One</thi"[: 8 - left]
    assert read("<thin"[: 5 - left], QWEN, FREE) == ("", "<thin"[: 5 - left])


def test_the_tokens_of_a_thought_are_counted_with_its_tags() -> None:
    reader = ThoughtReader(Thought(QWEN, FREE))
    assert [reader.count(each) for each in (["\n", "<th"], ["ink>", " One"], ["</think>", "\n", "Two"], ["!"])] == [
        *(0, 4, 1, 0),
    ]
    assert ThoughtReader(Thought(QWEN, FREE)).count(["One", "<think>"]) == 0
    assert ThoughtReader(Thought(QWEN, OPEN)).count(["One", " two", "</think>", "Three"]) == 3


def test_a_template_names_its_family_and_a_prompt_where_the_thought_begins() -> None:
    for tags in FAMILIES:
        assert tags_in([f"...{tags.closing}..."]) == tags
        assert thought_after(tags, f"User: {tags.opening}{tags.closing} ?\nAnswer:").start is FREE
        assert thought_after(tags, f"Answer: {tags.opening}\n").start is OPEN
        assert thought_after(tags, f"Answer: {tags.opening}\n\n{tags.closing}\n\n").start is CLOSED
    assert tags_in(["{{ messages }}"]) is None


def test_the_effort_is_a_variable_of_the_template() -> None:
    assert effort_variables("low", {"reasoning_effort", "enable_thinking"}) == {"reasoning_effort": "low"}
    assert effort_variables("none", {"enable_thinking"}) == {"enable_thinking": False}
    assert effort_variables("high", {"enable_thinking"}) == {"enable_thinking": True}
    assert effort_variables(None, ()) == effort_variables("medium", ()) == effort_variables("none", ()) == {}
    with pytest.raises(InvalidParameter):
        effort_variables("high", ())


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
CALL = {"type": "tag", "begin": "<call>", "content": {"type": "regex", "pattern": "[a-z]+"}, "end": "</call>"}


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        ({"json": SCHEMA}, '{"n":\n 1}', "[1]"),
        ({"json": SCHEMA, "disable_any_whitespace": True}, '{"n": 1}', '{"n":\n1}'),
        ({"json_object": True}, '{"a": [1]}', "1"),
        ({"regex": "[0-9]+"}, "123", "x"),
        ({"choice": ["red", "blue"]}, "red", "green"),
        ({"grammar": 'root ::= "(" root? ")"'}, "(())", "()()"),
        ({"structural_tag": {"format": CALL}}, "<call>a</call>", "<call>1</call>"),
    ],
)
def test_a_grammar_begins_behind_the_thought(smollm2: LLM, wanted: dict, right: str, wrong: str) -> None:
    grammars = Grammars(smollm2.tokenizer, smollm2.config.vocab_size, smollm2.config.eos_token_ids)
    (end,) = smollm2.config.eos_token_ids
    params = SamplingParams(structured_outputs=wanted)
    thought, rest = '<think>\nx {"n": </thin ', "</think>\n\n"

    def allowed(text: str, start: Beginning) -> bool:
        form = Thought(QWEN, start).frees(params).structured_outputs
        assert form is not None
        tokens = [*smollm2.tokenizer.encode(text), end]
        return int(grammars.compile(json.loads(json.dumps(form))).deep_copy().validate_tokens(tokens)) == len(tokens)

    for answer, passes in ((right, True), (wrong, False)):
        assert allowed(thought + rest + answer, FREE) == passes
        assert allowed(answer, FREE) == passes  # the model need not think
        assert allowed("Hm." + rest + answer, OPEN) == passes
        assert allowed(answer, CLOSED) == passes
    assert not allowed(thought, FREE)
    assert not allowed(right, OPEN)
    assert not allowed(thought + rest + right, CLOSED)
