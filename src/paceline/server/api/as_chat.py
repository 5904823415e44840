"""Requests of other routes as chat requests, with the names of their own fields in errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from paceline.errors import InvalidParameter
from paceline.server.api.protocol import ChatRequest, Sampling
from paceline.server.errors import from_validation


def as_chat(body: Sampling | Mapping[str, Any], **fields: Any) -> ChatRequest:
    """Return the chat request of a body: the fields that it shares with chat, and `fields` that are not None."""
    if isinstance(body, Sampling):
        body = {name: getattr(body, name) for name in body.model_fields_set & {*ChatRequest.model_fields}}
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatRequest.model_validate({**body, **dict.fromkeys(fields), **given})
    except ValidationError as error:
        raise from_validation(error) from error


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors. A name is a regular expression of the whole field, or of its beginning up to a dot."""
    try:
        yield
    except InvalidParameter as error:
        for pattern, name in names.items():
            field, count = re.subn(rf"\A(?:{pattern})(?=\.|\Z)", name, error.field)
            if count:
                raise InvalidParameter(field, str(error).removeprefix(f"{error.field}: ")) from None
        raise
