"""Thoughts of reasoning models: text between two tags at the beginning of an answer.

A model's family is found by the tags in its chat template. The template may open the thought itself (DeepSeek-R1),
close it at once (Qwen3 without thinking), or leave both to the model. Tags are text for detokenizers and grammars,
also where a tokenizer declares them special. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

from paceline.errors import InvalidParameter
from paceline.sampling_params import SamplingParams
from paceline.text.grammar_source.structural_tags import format_of
from paceline.text.structured_outputs import KINDS, ONE_LINE

EFFORT, THINKING = "reasoning_effort", "enable_thinking"  # variables of chat templates
MOST_BLANKS = 8  # blanks and line ends between a thought and an answer with a grammar
_BLANKS = rf"[ \t\r\n]{{1,{MOST_BLANKS}}}"


class ThoughtTags(NamedTuple):
    opening: str
    closing: str


FAMILIES = (
    ThoughtTags("<think>", "</think>"),  # Qwen3, QwQ, DeepSeek-R1, SmolLM3, GLM-4.5, EXAONE 4, Hunyuan, ERNIE
    ThoughtTags("<thought>", "</thought>"),  # EXAONE Deep
    ThoughtTags("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ThoughtTags("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThoughtTags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ThoughtTags("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ThoughtTags("◁think▷", "◁/think▷"),  # Kimi
)


class Beginning(Enum):
    """The state in which a prompt leaves the answer's thought."""

    FREE = "free"  # the model may open one
    OPEN = "open"
    CLOSED = "closed"


def tags_in(templates: Collection[str]) -> ThoughtTags | None:
    """Return the tags of the first family whose closing tag is in one of the chat templates."""
    return next((tags for tags in FAMILIES if any(tags.closing in each for each in templates)), None)


class Thought(NamedTuple):
    """The thought of the answers to one prompt."""

    tags: ThoughtTags
    start: Beginning

    def frees(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters whose grammar begins behind the thought."""
        wanted = params.structured_outputs
        return params if wanted is None else replace(params, structured_outputs=behind_thought(wanted, self))


def thought_after(tags: ThoughtTags, prompt: str) -> Thought:
    """Return the thought that follows a rendered conversation."""
    end = prompt.rstrip()
    if end.endswith(tags.opening.rstrip()):
        return Thought(tags, Beginning.OPEN)
    return Thought(tags, Beginning.CLOSED if end.endswith(tags.closing) else Beginning.FREE)


class ThoughtReader:
    """The thought and the text of one answer, which comes in pieces. What may belong to a tag is held back, and so is
    white space at the edges of a thought, which belongs to neither."""

    def __init__(self, thought: Thought) -> None:
        self._tags, self._held = thought.tags, ""
        self._undecided = thought.start is not Beginning.CLOSED  # the opening tag may come
        self._is_open = thought.start is Beginning.OPEN
        self._at_edge = self._is_open  # white space that comes is left out
        self._num_undecided = 0  # tokens given to `count` that may be those of the opening tag

    def push(self, piece: str) -> tuple[str, str]:
        """Return the thought, and the text behind it, that a piece completes."""
        self._held += piece
        if self._undecided and not self._decide():
            return "", ""
        thought = self._take_thought() if self._is_open else ""
        if self._is_open:
            return thought, ""
        text, self._held = self._held, ""
        return thought, self._without_edge(text)

    def finish(self) -> tuple[str, str]:
        """End the answer: return what was held back."""
        held, self._held = self._without_edge(self._held), ""
        return (held.rstrip(), "") if self._is_open else ("", held)

    def count(self, token_texts: Collection[str]) -> int:
        """Push tokens by their text; return how many more belong to the thought, tags included."""
        count = 0
        for text in token_texts:
            if not (self._undecided or self._is_open):
                break
            was_open = self._is_open
            self.push(text)
            self._num_undecided += 1
            if was_open or self._is_open:
                count, self._num_undecided = count + self._num_undecided, 0
        return count

    def _decide(self) -> bool:
        """Look for the opening tag; return whether it has come or cannot come any more."""
        body, opening = self._held.lstrip(), self._tags.opening
        if body.startswith(opening):
            self._held = body[len(opening) :]
            self._is_open = self._at_edge = True
        elif opening.startswith(body):
            return False
        self._undecided = False
        return True

    def _take_thought(self) -> str:
        closing = self._tags.closing
        end = self._held.find(closing)
        if end < 0:
            certain = next(at for at in range(len(self._held) + 1) if closing.startswith(self._held[at:]))
            certain = len(self._held[:certain].rstrip())
            thought, self._held = self._held[:certain], self._held[certain:]
            return self._without_edge(thought)
        thought, self._held = self._without_edge(self._held[:end]).rstrip(), self._held[end + len(closing) :]
        self._is_open, self._at_edge = False, True
        return thought

    def _without_edge(self, text: str) -> str:
        if self._at_edge:
            text = text.lstrip()
            self._at_edge = not text
        return text


def effort_variables(effort: str | None, known: Collection[str]) -> dict[str, Any]:
    """Return the variables of a chat template, which reads `known` ones, for OpenAI's effort of reasoning."""
    if effort is None:
        return {}
    if EFFORT in known:
        return {EFFORT: effort}
    if THINKING in known:
        return {THINKING: effort != "none"}
    if effort not in ("none", "medium"):  # OpenAI's default for models without and with thoughts
        raise InvalidParameter(EFFORT, "the model's chat template reads no effort; leave it out")
    return {}


def behind_thought(wanted: Mapping[str, Any], thought: Thought) -> Mapping[str, Any]:
    """Return structured outputs that begin behind the thought, which is free."""
    tags, start = thought
    if start is Beginning.CLOSED:
        return wanted
    opening = "" if start is Beginning.OPEN else tags.opening
    tag = {"type": "tag", "begin": opening, "content": {"type": "any_text"}, "end": tags.closing}
    first = in_sequence(tag, maybe({"type": "regex", "pattern": _BLANKS}))
    form = in_sequence(first if start is Beginning.OPEN else maybe(first), form_of(wanted))
    return {"structural_tag": {"format": form}}


def in_sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def maybe(element: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [element], "separator": "", "stop_after_first": True}


def form_of(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return structured outputs as a format of a structural tag."""
    kind, value = next((kind, wanted[kind]) for kind in KINDS if kind in wanted)
    match kind:
        case "json" | "json_object":
            schema = value if kind == "json" else {"type": "object"}
            return {"type": "json_schema", "json_schema": schema, ONE_LINE: bool(wanted.get(ONE_LINE))}
        case "regex":
            return {"type": "regex", "pattern": value}
        case "grammar":
            return {"type": "grammar", "grammar": value}
        case "choice":
            return {"type": "or", "elements": [{"type": "const_string", "value": each} for each in value]}
    form: dict[str, Any] = format_of(value)
    return form
