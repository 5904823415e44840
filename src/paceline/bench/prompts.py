"""Prompts of a benchmark: the packaged workloads, or a file of the user's. No torch.

A file is jsonl, one object a line: `{"prompt": text}`, `{"messages": [...]}` or `{"turns": [text, ...]}`, with an
optional "workload" (or "category") and "schema", the JSON schema of its answers; or plain text with one prompt a line.
In a conversation of several turns every engine continues from plain decoding's answer, so that all have equal prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.errors import InvalidParameter, short_repr
from paceline.files.prompt_files import numbered_lines, read_file, read_object, some_text

WORKLOADS = (
    *("chat", "code", "math", "summarise", "quote", "extraction", "sql"),
    *("factual", "translation", "support", "creative", "multi-turn", "reasoning", "thoughts", "json"),
)
USUAL_WORKLOADS = WORKLOADS[:-1]  # json needs the library of structured outputs
QUICK_WORKLOADS = ("chat", "code", "math", "summarise", "extraction")
UNNAMED = "prompts"  # the workload of prompts that name none
ROLES = ("system", "user", "assistant", "tool", "developer")

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A conversation so far (`before`), which may be a system message, and turns that are answered in order."""

    workload: str
    turns: tuple[str, ...]
    before: tuple[Message, ...] = ()
    origin: str  # for error messages: "line 3 of prompts.jsonl"
    schema: Mapping[str, Any] | None = None  # JSON schema of the answers

    def messages(self, answers: Sequence[str]) -> list[Message]:
        """Return the conversation up to the first turn without an answer."""
        talk = list(self.before)
        for turn, answer in zip(self.turns, answers, strict=False):
            talk += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*talk, {"role": "user", "content": self.turns[len(answers)]}]


def shipped(workloads: Sequence[str] = WORKLOADS, per_workload: int | None = None) -> list[Prompt]:
    """Return the package's prompts, in the order of the workloads."""
    prompts: list[Prompt] = []
    for name in _chosen(workloads, WORKLOADS):
        text = (resources.files("paceline.bench") / "workloads" / f"{name}.jsonl").read_text(encoding="utf-8")
        prompts += _read(text, f"the workload {name}", name, read_json)[:per_workload]
    return prompts


def from_file(path: Path, workloads: Sequence[str] | None = None, per_workload: int | None = None) -> list[Prompt]:
    """Return the user's prompts; `workloads` and `per_workload` choose among them."""
    text, jsonl = read_file(path, "prompts")
    prompts = _read(text, str(path), UNNAMED, read_json if jsonl else read_text)
    if not prompts:
        raise InvalidParameter("prompts", f"{path} is empty; give it at least one prompt")
    names = list(dict.fromkeys(prompt.workload for prompt in prompts))
    chosen: list[Prompt] = []
    for name in names if workloads is None else _chosen(workloads, names):
        chosen += [prompt for prompt in prompts if prompt.workload == name][:per_workload]
    return chosen


def _chosen(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in wanted:
        if name not in known:
            raise InvalidParameter("workloads", f"{name!r} is not one of {', '.join(known)}")
    return list(dict.fromkeys(wanted))


def _read(text: str, where: str, workload: str, read: Callable[[str, str, str], Prompt]) -> list[Prompt]:
    return [read(line, f"line {number} of {where}", workload) for number, line in numbered_lines(text)]


def read_text(line: str, origin: str, workload: str) -> Prompt:
    return Prompt(workload=workload, turns=(line.strip(),), origin=origin)


def read_json(line: str, origin: str, workload: str) -> Prompt:
    form, fields = read_object(line, FORMS, "prompts", origin)
    name = fields.get("workload", fields.get("category", workload))
    if not isinstance(name, str) or not name.strip():
        raise InvalidParameter("prompts", f"{origin}: workload must be a name, got {name!r}")
    schema = fields.get("schema")
    if schema is not None and not isinstance(schema, dict):
        raise InvalidParameter("prompts", f"{origin}: schema must be a JSON schema, got {short_repr(schema)}")
    before, turns = FORMS[form](fields[form], origin)
    return Prompt(workload=name.strip(), turns=turns, before=before, origin=origin, schema=schema)


_Talk = tuple[tuple[Message, ...], tuple[str, ...]]  # the conversation so far, and the turns to answer


def _from_prompt(value: Any, origin: str) -> _Talk:
    return (), (some_text(value, "prompt", "prompts", origin),)


def _from_turns(value: Any, origin: str) -> _Talk:
    if not isinstance(value, list) or not value:
        raise InvalidParameter("prompts", f"{origin}: turns must be a list of texts with at least one")
    return (), tuple(some_text(turn, "a turn", "prompts", origin) for turn in value)


def _from_messages(value: Any, origin: str) -> _Talk:
    if not isinstance(value, list) or not value:
        raise InvalidParameter("prompts", f"{origin}: messages must be a list with at least one message")
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            problem = f"{origin}: a message is an object with role ({', '.join(ROLES)}) and content"
            raise InvalidParameter("prompts", problem)
        some_text(message.get("content"), "content", "prompts", origin)
    if value[-1]["role"] != "user":
        raise InvalidParameter("prompts", f"{origin}: the last message must be the user's, for it is to be answered")
    return tuple(value[:-1]), (value[-1]["content"],)


FORMS = {"prompt": _from_prompt, "messages": _from_messages, "turns": _from_turns}
