"""The worker's side of the conversation: one JSON object per line, requests on stdin, answers on stdout.

A worker loads its model once, reports ready and answers one request at a time until stdin ends. Libraries like to
print, so what they write to stdout goes to stderr and the conversation has a file descriptor of its own. Standard
library only: this file is imported in every peer's environment.

    job (argv)  {"model", "gguf", "method", "k", "threads", "max_context"}
    ready       {"ready": {"peer", "precision", ...}}
    request     {"prompt", "max_tokens", "temperature", "seed", "eos"}
    answer      {"tokens", "first_s"}     or     {"error"}
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

Emit = Callable[[list[int]], None]  # called with every token once, in order, as soon as it is certain
Answer = Callable[[dict[str, Any], Emit], None]
Load = Callable[[dict[str, Any]], tuple[dict[str, Any], Answer]]  # job -> (what it is, how it answers)


def serve(load: Load) -> None:
    out = _private_stdout()
    try:
        about, answer = load(json.loads(sys.argv[1]))
    except Exception as error:
        _fail(out, error)
        sys.exit(1)
    _say(out, {"ready": about})
    for line in sys.stdin:
        try:
            _say(out, _timed(answer, json.loads(line)))
        except Exception as error:
            _fail(out, error)


def _timed(answer: Answer, request: dict[str, Any]) -> dict[str, Any]:
    tokens: list[int] = []
    first: list[float] = []

    def emit(new: list[int]) -> None:
        if new and not first:
            first.append(time.perf_counter())
        tokens.extend(new)

    started = time.perf_counter()
    answer(request, emit)
    return {"tokens": tokens, "first_s": first[0] - started if first else None}


def _private_stdout() -> TextIO:
    """The real stdout under another number; number 1 becomes stderr, for C++ libraries as well."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _fail(out: TextIO, error: Exception) -> None:
    traceback.print_exc()  # the whole story is in the worker's log
    _say(out, {"error": f"{type(error).__name__}: {error}"})


def _say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
