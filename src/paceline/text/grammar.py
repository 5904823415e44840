"""Structured outputs: a grammar masks p at every node of a draft, so an answer is exact under speculation too.

`Grammars` compiles what requests ask for (structured_outputs.py) with xgrammar, once for each text; a `Matcher` follows
one sequence. The mask of a node is that of its sequence's committed tokens and its own drafted ancestors. A
drafter need not know the grammar: a drafted token that it forbids has p = 0 and is rejected.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

import numpy as np

from paceline.errors import InvalidParameter, PacelineError
from paceline.platform.cpu import usable_cores
from paceline.text.structured_outputs import ONE_LINE, WHITESPACE

FIELD = "structured_outputs"
CACHE_BYTES = 32 << 20  # compiled grammars: mostly 1 MiB each and compiled in milliseconds; large ones ten times that
WORD = 32  # tokens of a word of a mask
# Processor seconds of masks: the allowance of a sequence in each step, and the sum beyond it that ends the sequence.
# A mask takes 0.1 ms; an ambiguous grammar takes longer with each token, and all other sequences wait for it.
USUAL_S, BEYOND_S = 0.02, 1.0


class GrammarTokenizer(Protocol):
    """The part of a tokenizer that a grammar needs."""

    def vocab(self) -> list[str]: ...
    def vocab_kind(self) -> str: ...


class Matched(Protocol):
    """A sequence that a matcher follows."""

    @property
    def matcher(self) -> Matcher | None: ...
    @property
    def output_tokens(self) -> list[int]: ...


class Grammars:
    """The compiler of grammars. Any thread may call it, so that a long compilation does not hold up a step."""

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int, eos_token_ids: SequenceOf[int]) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise PacelineError("structured outputs need xgrammar; pip install 'paceline[serve]'") from error
        if not eos_token_ids:
            raise InvalidParameter(FIELD, "the model has no end-of-sequence token, which ends a structured answer")
        self._xgrammar = xgrammar
        kinds = xgrammar.VocabType
        kind = {"byte_level": kinds.BYTE_LEVEL, "byte_fallback": kinds.BYTE_FALLBACK}.get(
            tokenizer.vocab_kind(), kinds.RAW
        )
        info = xgrammar.TokenizerInfo(
            tokenizer.vocab(), kind, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids)
        )
        threads = max(1, usable_cores() // 2)  # steps go on meanwhile
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=CACHE_BYTES)
        self.words = -(-vocab_size // WORD)

    @property
    def cached_bytes(self) -> int:
        return int(self._compiler.get_cache_size_bytes())

    def compile(self, wanted: Mapping[str, Any]) -> Any:
        """Compile a grammar, or take it from the compiler's cache."""
        (kind, value), compiler = next(iter(wanted.items())), self._compiler
        try:
            if kind in ("json", "json_object"):
                schema = json.dumps(value) if kind == "json" else '{"type": "object"}'
                bound = {"any_whitespace": False} if wanted.get(ONE_LINE) else {"max_whitespace_cnt": WHITESPACE}
                return compiler.compile_json_schema(schema, **bound)
            if kind == "regex":
                return compiler.compile_regex(value)
            if kind == "choice":
                return compiler.compile_grammar("root ::= " + " | ".join(map(_quoted, value)))
            if kind == "structural_tag":
                return compiler.compile_structural_tag(json.dumps(value))
            return compiler.compile_grammar(value)
        except Exception as error:  # the library raises bare RuntimeErrors with file names and line numbers
            reason = re.sub(r"^(\[[\d:]+\] )?\S+:\d+: ", "", str(error).strip().splitlines()[-1])
            part = (self._wrong_tag(value) if kind == "structural_tag" else None) or f"the {kind}"
            raise InvalidParameter(FIELD, f"{part} cannot be compiled: {reason}") from error

    def _wrong_tag(self, value: Any) -> str | None:
        """Return the first tag whose own schema cannot be compiled: the library does not name it."""
        left = [value]
        while left:
            each = left.pop(0)
            if isinstance(each, Mapping):
                content, left = each.get("content"), [*left, *each.values()]
                if isinstance(content, Mapping) and "json_schema" in content:
                    try:
                        self._xgrammar.Grammar.from_json_schema(json.dumps(content["json_schema"]))
                    except Exception:
                        return f"the schema after {each.get('begin')!r}"
            elif isinstance(each, list):
                left += each
        return None

    def matcher(self, compiled: Any) -> Matcher:
        return Matcher(self._xgrammar.GrammarMatcher(compiled), self.words)


class Matcher:
    """A grammar's state after the committed tokens of one sequence."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher, self._words, self._taken = matcher, words, 0
        self._owed_s = 0.0

    @property
    def too_slow(self) -> bool:
        """Return True if the grammar holds other sequences up: the sequence has to end."""
        return self._owed_s > BEYOND_S

    def masks(self, sequence: Matched, tokens: SequenceOf[int], parents: SequenceOf[int]) -> np.ndarray[Any, Any]:
        """Return (1 + N, W) masks of the last committed token and of a draft's nodes, in topological order."""
        bits = np.full((1 + len(tokens), self._words), -1, dtype=np.int32)
        if self.too_slow:
            return bits  # the sequence ends, whatever the step yields
        began, output = time.thread_time(), sequence.output_tokens
        for token in output[self._taken :]:
            self._matcher.accept_token(token)
        self._taken = len(output)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        self._fill(-1, bits, tokens, children)
        self._owed_s = max(self._owed_s + time.thread_time() - began - USUAL_S, 0.0)
        return bits

    def _fill(
        self, node: int, bits: np.ndarray[Any, Any], tokens: SequenceOf[int], children: dict[int, list[int]]
    ) -> None:
        """Fill the masks below a node. A forbidden node is never reached, so its mask allows all."""
        matcher = self._matcher
        if matcher.is_terminated():
            return
        matcher.fill_next_token_bitmask(bits, node + 1)
        for child in children.get(node, ()):
            if matcher.accept_token(tokens[child]):
                self._fill(child, bits, tokens, children)
                matcher.rollback(1)


def masks_of(
    sequences: SequenceOf[Matched], tokens: np.ndarray[Any, Any], parents: np.ndarray[Any, Any], nodes: SequenceOf[int]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return `bits` and `row_of` of `GrammarMasks`, on the host. `nodes`: valid nodes of each row."""
    row_of = np.full((len(sequences), tokens.shape[1] + 1), -1, np.int64)
    bits, rows = [], 0
    for at, sequence in enumerate(sequences):
        if sequence.matcher is None:
            continue
        count = nodes[at]
        bits.append(sequence.matcher.masks(sequence, tokens[at, :count].tolist(), parents[at, :count].tolist()))
        row_of[at, : count + 1] = np.arange(rows, rows + count + 1)
        rows += count + 1
    return np.concatenate(bits), row_of


def _quoted(text: str) -> str:
    """Return a text as a string of xgrammar's EBNF."""
    return json.dumps(text)
