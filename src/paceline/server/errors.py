"""Errors in OpenAI's form: the status and the body of each."""

from __future__ import annotations

import re
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from paceline.errors import (
    EngineClosed,
    EngineDied,
    InvalidParameter,
    ModelNotFound,
    PacelineError,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    short_repr,
)
from paceline.server.api.fields import REFUSED, refusal
from paceline.server.api.generation import TimeLimit

RETRY_AFTER_S = 1
MAX_NAME = 80  # characters of a field's name in an error
_FORM = re.compile(
    r"(str|int|float|bool|list|dict|literal|constrained|function-)\b.*|[A-Z]\w*"
)  # pydantic's names of types
_NO_OBJECT = ("missing", "model_attributes_type")  # a body of another content type is not read as JSON


class Unauthorised(PacelineError):
    pass


class Forbidden(PacelineError):
    pass


class BodyTooLarge(PacelineError):
    pass


class ClientGone(PacelineError):
    """The client has closed its connection: nobody reads the answer."""


_STATUS: tuple[tuple[type[PacelineError], int, str], ...] = (
    (Unauthorised, 401, "authentication_error"),
    (Forbidden, 403, "permission_error"),
    (ModelNotFound, 404, "not_found_error"),
    (BodyTooLarge, 413, "invalid_request_error"),
    (QueueFull, 429, "rate_limit_error"),
    (ClientGone, 499, "client_closed_request"),
    (EngineDied, 503, "service_unavailable_error"),
    (EngineClosed, 503, "service_unavailable_error"),
    (TimeLimit, 504, "timeout_error"),
    (RequestFailed, 500, "server_error"),
    (PacelineError, 400, "invalid_request_error"),
)


# Codes that clients of OpenAI act on.
_CODES: dict[type[PacelineError], str] = {PromptTooLong: "context_length_exceeded"}


def status_of(error: PacelineError) -> int:
    return next(status for kind, status, _ in _STATUS if isinstance(error, kind))


def body_of(error: PacelineError) -> dict[str, Any]:
    kind = next(name for each, _, name in _STATUS if isinstance(error, each))
    param = _utf8(error.field) if isinstance(error, InvalidParameter) else None
    code = _CODES.get(type(error), type(error).__name__)
    return {"error": {"message": _utf8(str(error)), "type": kind, "param": param, "code": code}}


def in_form_of(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return an error in the form that clients of a path know: Anthropic's has a type, Ollama's is a text."""
    if path.startswith("/v1/messages"):
        return {"type": "error", **body}
    return {"error": body["error"]["message"]} if path.startswith("/api/") else body


def _utf8(text: str) -> str:
    """Escape lone surrogates, which a request may hold and its error quote."""
    return text.encode(errors="backslashreplace").decode()


def headers_of(error: PacelineError) -> dict[str, str]:
    return {"Retry-After": str(RETRY_AFTER_S)} if status_of(error) in (429, 503) else {}


def from_validation(error: RequestValidationError | ValidationError) -> InvalidParameter:
    """Return the error of the first wrong field, with the path to the wrong value in it. If a field may have several
    forms, the error is that of the closest form: its problem lies deepest, or is not the type."""
    problems = [(tuple(part for part in each["loc"] if part != "body"), each) for each in error.errors()]
    field = problems[0][0][:1]
    path, problem = max(
        (each for each in problems if each[0][:1] == field),
        key=lambda each: (not each[1]["type"].endswith("_type"), len(each[0])),
    )
    unknown = problem["type"] == "extra_forbidden"
    last = len(path) - 1 if unknown else len(path)
    named = [str(part) for at, part in enumerate(path) if at in (0, last) or not _FORM.fullmatch(str(part))]
    if unknown:
        return InvalidParameter(_short(".".join(named)), refusal(named[0]) if len(named) == 1 else REFUSED)
    if problem["type"] == "json_invalid":
        return InvalidParameter("body", f"is not valid JSON: {problem.get('ctx', {}).get('error', problem['msg'])}")
    if not named and problem["type"] in _NO_OBJECT:
        return InvalidParameter("body", "must be a JSON object, sent with Content-Type: application/json")
    return InvalidParameter(_short(".".join(named)) or "body", problem["msg"].removeprefix("Value error, "))


def from_http(error: HTTPException, method: str, path: str) -> dict[str, Any]:
    """Return the body of an error that the framework raised itself."""
    kind = next((name for _, status, name in _STATUS if status == error.status_code), "invalid_request_error")
    match error.status_code:
        case 400:
            message = "the body is not valid JSON in UTF-8"
        case 404:
            message = f"there is no {short_repr(path)} here; /openapi.json lists what there is"
        case 405:
            message = f"{short_repr(path)} does not take {method}; it takes {(error.headers or {}).get('Allow')}"
        case _:
            message = str(error.detail).lower()
    return {"error": {"message": _utf8(message), "type": kind, "param": None, "code": None}}


def _short(name: str) -> str:
    """Shorten the name of a field: a client may fill a whole body with it."""
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"
