"""The grammar of a structural tag (vLLM's and xgrammar's form): free text, and tags whose contents have a form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.errors import short_repr
from paceline.text.grammar_source.ebnf import ebnf
from paceline.text.grammar_source.grammar_parts import (
    ANY_TEXT,
    MOST_DEPTH,
    GrammarPart,
    Json,
    Rules,
    WrongGrammar,
    in_order,
    literal,
    one_of,
    repeated,
)
from paceline.text.structured_outputs import ONE_LINE, WHITESPACE


def tag_source(tag: Json, user_regex: Callable[[str], str]) -> str:
    """Return the grammar of a structural tag. `user_regex`: writes a request's regex as the library takes it."""
    rules, tags = Rules(), _Tags(user_regex)
    return rules.source(tags.format(rules, format_of(tag), 0))


def format_of(tag: Json) -> Any:
    """Return the format of a structural tag. vLLM's older form lists structures and triggers."""
    if "format" in tag:
        return tag["format"]
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise WrongGrammar("a structural_tag has a format")
    tags = [
        {
            "type": "tag",
            "begin": _field(each, "begin", str),
            "content": {"type": "json_schema", "json_schema": _field(each, "schema", dict)},
            "end": _field(each, "end", str),
        }
        for each in structures
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _field(value: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get(name), kind):
        raise WrongGrammar(f"{name} of {short_repr(value)} is missing or of another type")
    return value[name]


class _Tags:
    """The formats of a structural tag, by type. A field that a format does not know is refused."""

    def __init__(self, user_regex: Callable[[str], str]) -> None:
        self._regex = user_regex
        self._known = {
            "const_string": (self._const, {"value"}),
            "json_schema": (self._json, {"json_schema", "max_whitespace_cnt", ONE_LINE}),
            "any_text": (lambda rules, of, depth: GrammarPart(ANY_TEXT), set()),
            "regex": (
                lambda rules, of, depth: GrammarPart(f"(?:{self._regex(_field(of, 'pattern', str))})"),
                {"pattern"},
            ),
            "grammar": (lambda rules, of, depth: ebnf(_field(of, "grammar", str), rules), {"grammar"}),
            "sequence": (lambda rules, of, depth: in_order(self._each(rules, of, "elements", depth)), {"elements"}),
            "or": (lambda rules, of, depth: one_of(self._each(rules, of, "elements", depth)), {"elements"}),
            "tag": (self._tag, {"begin", "content", "end"}),
            "triggered_tags": (self._triggered, {"triggers", "tags", "at_least_one", "stop_after_first"}),
            "tags_with_separator": (self._separated, {"tags", "separator", "at_least_one", "stop_after_first"}),
        }

    def format(self, rules: Rules, of: Any, depth: int) -> GrammarPart:
        kind = _field(of, "type", str)
        if depth > MOST_DEPTH:
            raise WrongGrammar(f"formats are nested more than {MOST_DEPTH} deep")
        if kind not in self._known:
            raise WrongGrammar(f"the format {short_repr(kind)} is not one of {', '.join(self._known)}")
        make, fields = self._known[kind]
        unknown = [name for name, value in of.items() if name not in (*fields, "type") and value]
        if unknown:
            raise WrongGrammar(f"the format {kind} has no field {short_repr(unknown[0])} here")
        return make(rules, of, depth)

    def _each(self, rules: Rules, of: Json, name: str, depth: int) -> list[GrammarPart]:
        parts = [self.format(rules, each, depth + 1) for each in _field(of, name, list)]
        if not parts:
            raise WrongGrammar(f"{name} is an empty list")
        return parts

    @staticmethod
    def _const(rules: Rules, of: Json, depth: int) -> GrammarPart:
        return literal(_field(of, "value", str))

    @staticmethod
    def _json(rules: Rules, of: Json, depth: int) -> GrammarPart:
        count = of.get("max_whitespace_cnt")
        if count is not None and (type(count) is not int or not 1 <= count <= 1000):
            raise WrongGrammar(f"max_whitespace_cnt is between 1 and 1000, got {short_repr(count)}")
        whitespace = None if of.get(ONE_LINE) else WHITESPACE if count is None else count
        return rules.json(_field(of, "json_schema", (dict, bool)), whitespace)

    def _tag(self, rules: Rules, of: Json, depth: int) -> GrammarPart:
        return in_order([literal(_field(of, "begin", str)), self._inside(rules, of, depth)])

    def _inside(self, rules: Rules, of: Json, depth: int) -> GrammarPart:
        """Return what follows the beginning of a tag."""
        content, ends = _field(of, "content", dict), _field(of, "end", (str, list))
        ends = [ends] if isinstance(ends, str) else ends
        if not ends or not all(isinstance(text, str) for text in ends):
            raise WrongGrammar("end of a tag is a text or a list of texts")
        end = one_of([literal(text) for text in ends])
        inner = self.format(rules, content, depth + 1)
        if content.get("type") == "any_text" and "" not in ends:
            return rules.add(f"/{ANY_TEXT}{end.text}/", "[lazy]")  # the first end that comes
        return in_order([inner, end])

    def _separated(self, rules: Rules, of: Json, depth: int) -> GrammarPart:
        one = one_of(self._each(rules, of, "tags", depth))
        if not of.get("stop_after_first"):
            more = in_order([literal(_field(of, "separator", str)), one])
            one = in_order([one, repeated(more, 0, None)])
        return one if of.get("at_least_one") else repeated(one, 0, 1)

    def _triggered(self, rules: Rules, of: Json, depth: int) -> GrammarPart:
        """Return text in which each trigger begins one of the tags."""
        triggers, made = _field(of, "triggers", list), []
        at_once = bool(of.get("at_least_one"))  # no text before the tags
        for tag in _field(of, "tags", list):
            begin = _field(tag, "begin", str)
            trigger = next(
                (each for each in triggers if isinstance(each, str) and each and begin.startswith(each)), None
            )
            if trigger is None:
                raise WrongGrammar(f"no trigger begins the tag {short_repr(begin)}")
            text = literal(trigger) if at_once else rules.add(f"/{ANY_TEXT}{literal(trigger).text}/", "[lazy]")
            made.append(in_order([text, literal(begin[len(trigger) :]), self._inside(rules, tag, depth)]))
        if not made:
            raise WrongGrammar("tags is an empty list")
        if of.get("stop_after_first"):
            return one_of(made if at_once else [*made, GrammarPart(ANY_TEXT)])
        first = one_of(made)
        return repeated(first, 1, None) if at_once else in_order([repeated(first, 0, None), GrammarPart(ANY_TEXT)])
