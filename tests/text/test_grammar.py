"""Structured outputs: masks at every node, the same answers under any drafter, and refusals that say what is wrong."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.core.sequence import Sequence
from paceline.text.grammar import Grammars, masks_of
from paceline.text.structured_outputs import ONE_LINE, WHITESPACE
from paceline.verify import GrammarMasks, Nodes, SamplingMetadata, edit
from tests.helpers.errors import refused

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ENUM = {"type": "json_schema", "json_schema": {"enum": ["yes", "no"]}}
TAG = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": ENUM, "end": "</a>"}}
ASK = [[{"role": "user", "content": f"Describe person {number} as JSON."}] for number in range(3)]


@pytest.fixture(scope="module")
def grammars(smollm2: LLM) -> Grammars:
    return Grammars(smollm2.tokenizer, smollm2.config.vocab_size, smollm2.config.eos_token_ids)


def sequence(grammars: Grammars, wanted: dict[str, Any], output: list[int]) -> Sequence:
    found = Sequence("r", [1], SamplingParams(structured_outputs=wanted), max_len=100)
    found.tokens += output
    (found.matcher,) = grammars.matchers(grammars.compile(wanted), 1)
    return found


def test_a_node_has_the_mask_of_its_path(smollm2: LLM, grammars: Grammars) -> None:
    """A tree of nodes against one-token calls, one of whose nodes the grammar forbids."""
    encode = smollm2.tokenizer.encode
    digits, letter = [encode(digit)[0] for digit in "1234"], encode("x")[0]
    wanted = {"regex": "[0-9]{2}-[a-z]"}
    tokens, parents = [digits[0], digits[1], letter, encode("-")[0], digits[2]], [-1, 0, 0, 1, -1]
    (tree, _) = masks_of([sequence(grammars, wanted, [])], np.array([tokens]), np.array([parents]), [len(tokens)])
    paths = {0: [], 1: tokens[:1], 2: tokens[:2], 4: [*tokens[:2], tokens[3]], 5: [tokens[4]]}  # by slot
    for slot, path in paths.items():
        (alone, _) = masks_of([sequence(grammars, wanted, path)], np.zeros((1, 0), int), np.zeros((1, 0), int), [0])
        assert (tree[slot] == alone[0]).all()
    assert (tree[3] == -1).all()  # forbidden, so never reached


def test_a_sequence_whose_masks_need_too_much_work_is_to_end(smollm2: LLM, grammars: Grammars) -> None:
    def has_problem(wanted: dict[str, Any], output: list[int]) -> bool:
        found = sequence(grammars, wanted, [])
        assert found.matcher is not None
        for token in output:
            found.matcher.masks(found, [], [])
            found.tokens.append(token)
        return found.matcher.problem is not None

    assert has_problem({"regex": "(((a|b){1,300}c?){1,300}c?){1,300}"}, smollm2.tokenizer.encode("a") * 60)
    assert not has_problem({"json": SCHEMA}, smollm2.tokenizer.encode('{"name": "Ada", "age": 36}'))


def test_a_grammar_that_is_too_slow_ends_its_own_request_only(smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SamplingParams(max_tokens=8, structured_outputs={"regex": "[a-z]+"})
    with monkeypatch.context() as patched:
        patched.setattr("paceline.text.grammar.BEYOND_S", -1.0)
        beside = smollm2.stream("Count: 1, 2, 3,", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        next(beside)
        with refused("structured_outputs"):
            smollm2.generate("Go on", slow)
        list(beside)
    assert smollm2.generate("Go on", slow)[0].outputs[0].text.isalpha()


def test_a_mask_forbids_tokens_at_its_node_only() -> None:
    bits = torch.tensor([[0b0110], [0b1000]], dtype=torch.int32)
    masks = GrammarMasks(bits=bits, row_of=torch.tensor([[0, 1], [-1, -1]]))
    seq, node = torch.tensor([0, 0, 1]), torch.tensor([-1, 0, -1])
    nodes = Nodes(seq=seq, node=node, depth=node + 1, path=torch.empty(3, 0, dtype=torch.int64))
    edited = edit(torch.zeros(3, 4), SamplingMetadata(grammar=masks), nodes)
    forbidden = torch.tensor([[1, 0, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    assert (edited.isinf() == forbidden).all()


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}])
def test_answers_are_valid_and_do_not_depend_on_the_drafter(smollm2: LLM, sampling: dict[str, Any]) -> None:
    answers = []
    for speculation in ("none", {"method": "ngram", "k": 4}, {"method": "suffix", "k": 6}, "grammar"):
        params = SamplingParams(max_tokens=60, structured_outputs={"json": SCHEMA}, speculation=speculation, **sampling)
        answers.append([output.outputs[0] for output in smollm2.chat(ASK, params)])
    assert len({tuple(tuple(answer.token_ids) for answer in each) for each in answers}) == 1
    ended = [answer for answer in answers[0] if answer.finish_reason == "stop"]
    assert ended
    for answer in ended:
        assert set(json.loads(answer.text)) == {"name", "age"}
    assert sum(answer.speculation.num_accepted_tokens for answer in answers[2]) > 0


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[0-9]{3}-[0-9]{4}"}, "[0-9]{3}-[0-9]{4}"),
        ({"choice": ["yes", 'a "b"']}, 'yes|a "b"'),
        ({"structural_tag": TAG}, '<a>"(yes|no)"</a>'),
        ({"grammar": "root ::= pair (\"+\" pair)?\npair ::= [0-9] 'x\\x41' # a comment"}, r"\dxA(\+\dxA)?"),
        ({"grammar": 'root ::= "[" root? "]"'}, r"\[+\]*"),
    ],
)
def test_regex_choice_grammar_and_tags(smollm2: LLM, wanted: dict[str, Any], pattern: str) -> None:
    params = SamplingParams(temperature=1.0, n=4, structured_outputs=wanted, max_tokens=20)
    for answer in smollm2.generate("The answer:", params)[0].outputs:
        assert re.fullmatch(pattern, answer.text)


def accepts(grammars: Grammars, wanted: dict[str, Any], text: str, encode: Any) -> bool:
    tokens = encode(text)
    found = sequence(grammars, wanted, [])
    masks = found.matcher.masks(found, tokens, list(range(-1, len(tokens) - 1)))  # type: ignore[union-attr]
    (end,) = encode("<|im_end|>")
    return all(mask[token // 32] >> token % 32 & 1 for mask, token in zip(masks, [*tokens, end], strict=True))


def _tag(content: Any, begin: str = "<a>", end: str = "</a>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY, WORD = {"type": "any_text"}, {"type": "regex", "pattern": "[a-z/]+"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [_tag(WORD, "<f=x>"), _tag(ENUM, "<f=y>")]}


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (_tag(ANY), ["<a></a>", "<a>b</ a</a>"], ["<a>b", "a", "<a>b</a>c"]),
        (_tag(WORD, end="</b>"), ["<a>x/</b>"], ["<a></b>", "<a>X</b>"]),
        (TRIGGERED, ["", "a < b", 'a <f=y>"no"</a> b<f=x>c</a>'], ["<f=z>", "a<f=x>", '<f=y>"maybe"</a>']),
        ({**TRIGGERED, "at_least_one": True}, ["<f=x>c</a>", "<f=x>c</a><f=x>d</a>"], ["", "a<f=x>c</a>"]),
        ({**TRIGGERED, "stop_after_first": True}, ["a", "a<f=x>c</a>"], ["<f=x>c</a>b", "<f=x>c</a><f=x>c</a>"]),
        (
            {
                "type": "sequence",
                "elements": [{"type": "const_string", "value": 'a"/'}, {"type": "or", "elements": [WORD, ENUM]}],
            },
            ['a"/xy', 'a"/"yes"'],
            ['a"/', "xy"],
        ),
    ],
)
def test_the_formats_of_a_structural_tag(
    smollm2: LLM, grammars: Grammars, form: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    wanted = {"structural_tag": {"type": "structural_tag", "format": form}}
    for text in right:
        assert accepts(grammars, wanted, text, smollm2.tokenizer.encode), text
    for text in wrong:
        assert not accepts(grammars, wanted, text, smollm2.tokenizer.encode), text


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= "a" | lst\nlst ::= "[" (root ("," root)*)? "]"', ["a", "[]", "[a,[a,a]]"], ["", "[a", "[a,]"]),
        ("root ::= [^a-c\\n]{2,3} .?", ["xyz1", "xy", "xy\n"], ["x", "xa", "xyz12"]),
        ('root ::= "" | "\\u00e9" root # two\n# three', ["", "éé"], ["e"]),
        ("root ::= a a\na ::= b b\nb ::= [0-9]+", ["1234"], ["123", "a"]),
    ],
)
def test_a_grammar_in_ebnf_allows_its_texts_only(
    smollm2: LLM, grammars: Grammars, grammar: str, right: list[str], wrong: list[str]
) -> None:
    for text in right:
        assert accepts(grammars, {"grammar": grammar}, text, smollm2.tokenizer.encode), text
    for text in wrong:
        assert not accepts(grammars, {"grammar": grammar}, text, smollm2.tokenizer.encode), text


def test_an_object_has_other_properties_only_if_its_schema_says_so(smollm2: LLM, grammars: Grammars) -> None:
    closed = {"type": "object", "properties": {"a": {"type": "integer"}}}
    encode, text = smollm2.tokenizer.encode, '{"a": 1, "b": 2}'
    assert not accepts(grammars, {"json": closed}, text, encode)
    assert accepts(grammars, {"json": {**closed, "additionalProperties": True}}, text, encode)


@pytest.mark.parametrize(
    "wanted",
    [
        *(
            {},
            {"json": "{"},
            {"json": 1},
            {"regex": "("},
            {"grammar": "root ::= x"},
            {"grammar": "root ::= (a"},
            {"choice": []},
            {"x": 1},
            5,
        ),
        *({"structural_tag": "{"}, {"structural_tag": {}}, {"structural_tag": {"format": {"type": "tag"}}}),
        *({"grammar": each} for each in ("a ::= b", "root ::= [", "root ::= *", "root ::= [b-a]", 'x "a"')),
        *({"json": {"uniqueItems": True}}, {"json": {"type": "integer", "multipleOf": 10**7}}),
        *({"structural_tag": {"format": each}} for each in ({"type": "x"}, {"type": "any_text", "excludes": ["a"]})),
        {"json": {}, "regex": "a"},
    ],
)
def test_nonsense_is_refused_by_name(smollm2: LLM, wanted: Any) -> None:
    with refused("structured_outputs") as caught:
        smollm2.generate("a", SamplingParams(structured_outputs=wanted))
    assert "/project" not in str(caught.value)


@pytest.mark.parametrize("wanted", [{"json": SCHEMA}, {"json_object": True}, {"json": SCHEMA, ONE_LINE: True}])
@pytest.mark.parametrize("speculation", ["none", {"method": "suffix", "k": 6}])
def test_whitespace_inside_json_is_bounded(smollm2: LLM, wanted: dict[str, Any], speculation: Any) -> None:
    """A model that prefers a line's end to all else writes as many as it may, and then goes on."""
    (line,) = smollm2.tokenizer.encode("\n")
    params = SamplingParams(
        temperature=0, max_tokens=160, logit_bias={line: 50.0}, structured_outputs=wanted, speculation=speculation
    )
    (answer,) = smollm2.chat(ASK[0], params)[0].outputs
    assert answer.finish_reason == "stop"
    longest = max(map(len, re.findall(r"\n*", answer.text)))
    assert longest == (0 if ONE_LINE in wanted else WHITESPACE)
    assert isinstance(json.loads(answer.text), dict)


def test_fields_of_vllms_object_are_honoured_or_refused() -> None:
    def theirs(**fields: Any) -> SamplingParams:
        return SamplingParams(structured_outputs=SimpleNamespace(json="{}", **fields))

    assert theirs(disable_any_whitespace=False).structured_outputs == {"json": {}}
    assert theirs(disable_any_whitespace=True).structured_outputs == {"json": {}, ONE_LINE: True}
    tag = SamplingParams(structured_outputs=SimpleNamespace(structural_tag=json.dumps(TAG)))
    assert tag.structured_outputs == {"structural_tag": TAG}
    for fields in ({"whitespace_pattern": " "}, {"structural_tag": "x"}, {"disable_any_whitespace": 2}):
        with refused("structured_outputs"):
            theirs(**fields)


@pytest.mark.parametrize("wrong", [{"json": "[" * 100_000}, {"json_object": "yes"}, {"json_object": 1}])
def test_what_is_no_schema_is_refused(wrong) -> None:
    with refused("structured_outputs"):
        SamplingParams(structured_outputs=wrong)


def test_a_structured_answer_must_be_able_to_end() -> None:
    with refused("ignore_eos"):
        SamplingParams(structured_outputs={"json_object": True}, ignore_eos=True)
