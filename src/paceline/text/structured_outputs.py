"""Checks of the form that a request asks of its answer: JSON, a schema, a regex, a choice, a grammar, tags. No torch.

`text.grammar` compiles the form and makes the masks of allowed tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidParameter, short_repr

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
ONE_LINE = "disable_any_whitespace"  # vLLM's name: JSON on one line, ", " and ": " between its parts
_REFUSED = ("disable_additional_properties", "whitespace_pattern")  # vLLM's fields that are refused
WHITESPACE = 16  # characters between two parts of a JSON answer; without a bound an answer may never end
MAX_TEXT = 1 << 20  # characters of a schema, regex or grammar


def check(name: str, value: Any) -> dict[str, Any] | None:
    """Return a request's wish in its plain form: exactly one of KINDS, first, and ONE_LINE if it is set."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        fields = {key: getattr(value, key, None) for key in (*KINDS, ONE_LINE, *_REFUSED)}  # StructuredOutputsParams
        value = {key: item for key, item in fields.items() if item is not None and item is not False}
    unknown = [key for key in value if key not in KINDS and key != ONE_LINE]
    wishes = {key: item for key, item in value.items() if item is not None and item is not False}
    one_line = wishes.pop(ONE_LINE, False)
    if unknown or len(wishes) != 1:
        raise InvalidParameter(name, f"takes exactly one of {', '.join(KINDS)}; got {short_repr(dict(value))}")
    ((kind, item),) = wishes.items()
    if one_line is not False and (one_line is not True or not kind.startswith("json")):
        raise InvalidParameter(name, f"{ONE_LINE} is true or false, and of json and json_object only")
    if kind in ("json", "structural_tag"):
        item = _json(name, "JSON schema" if kind == "json" else kind, item)
    elif kind == "choice":
        if isinstance(item, str) or not item or not all(isinstance(text, str) and text for text in item):
            raise InvalidParameter(name, f"choice must be a list of non-empty strings, got {short_repr(item)}")
        item = list(item)
    elif kind == "json_object":
        if item is not True:
            raise InvalidParameter(name, f"json_object is true or false, got {short_repr(item)}")
    elif not isinstance(item, str) or not item:
        raise InvalidParameter(name, f"{kind} must be text, got {short_repr(item)}")
    if len(item if isinstance(item, str) else json.dumps(item)) > MAX_TEXT:
        raise InvalidParameter(name, f"the {kind} has more than {MAX_TEXT} characters")
    return {kind: item, ONE_LINE: True} if one_line else {kind: item}


def _json(name: str, what: str, value: Any) -> Any:
    if hasattr(value, "model_json_schema"):  # a pydantic class
        value = value.model_json_schema()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(name, f"the {what} is not valid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise InvalidParameter(name, f"a {what} is an object, got {short_repr(value)}")
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameter(name, f"the {what} cannot be written as JSON: {error}") from None
