"""Fields that a route lacks: a value that asks for nothing is accepted, any other is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.server.api.fields import ABSENT, EMPTY
from paceline.server.api.protocol import ChatRequest, CompletionRequest
from paceline.server.api.responses import ResponseRequest
from tests.server.api.test_api import MESSAGES, post
from tests.server.conftest import Server

ROUTES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES}),
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/responses": (ResponseRequest, {"input": "a"}),
}


@pytest.mark.parametrize("path", ROUTES)
def test_a_value_that_asks_for_nothing_is_accepted_in_any_field(path: str) -> None:
    kind, least = ROUTES[path]
    absent = {name: field for name, field in ABSENT.items() if name not in kind.model_fields}
    plain = kind.model_validate(least)
    for empty in EMPTY:
        assert kind.model_validate(least | dict.fromkeys([*list(absent)[:90], "of a later year"], empty)) == plain
    optional = [name for name, field in kind.model_fields.items() if not field.is_required()]
    bare = kind.model_validate(least | dict.fromkeys(optional))
    assert (bare.chat() if kind is ResponseRequest else bare).to_params() is not None
    for name, field in absent.items():
        for value in field.neutral:
            assert kind.model_validate(least | {name: value}) == plain
        with pytest.raises(ValidationError):
            kind.model_validate(least | {name: "something"})


def test_an_integral_float_is_an_integer() -> None:
    asked = ChatRequest.model_validate({"messages": MESSAGES, "max_tokens": 5.0, "temperature": 1.0, "seed": 7.0})
    assert (asked.max_tokens, asked.temperature, asked.seed) == (5, 1.0, 7)
    with pytest.raises(ValidationError):
        ChatRequest.model_validate({"messages": MESSAGES, "max_tokens": 5.5})


@pytest.mark.parametrize("path", ROUTES)
def test_what_asks_for_something_is_refused_with_its_equal(server: Server, path: str) -> None:
    for name, equal in (
        ("guided_json", "use structured_outputs"),
        ("repeat_penalty", "use repetition_penalty"),
        ("use_beam_search", "leave it out"),
    ):
        status, answer = post(server, path, {**ROUTES[path][1], name: 1.5})
        assert (status, answer["error"]["param"]) == (400, name)
        assert answer["error"]["message"].endswith(equal)
    assert post(server, path, {**ROUTES[path][1], "guided_json": None, "reasoning": None, "include": []})[0] == 200


def test_the_document_names_the_fields_and_what_they_take(server: Server) -> None:
    schemas = json.loads(server.get("/openapi.json"))["components"]["schemas"]
    for kind, _ in ROUTES.values():
        properties = schemas[kind.__name__]["properties"]
        assert {*ABSENT, *kind.model_fields} <= {*properties}
        assert properties["use_beam_search"]["enum"] == [None, [], {}, False]
        assert "structured_outputs" in properties["guided_json"]["description"]
