"""Structured outputs: a grammar masks p at every node of a draft, so an answer is exact under speculation too.

`Grammars` compiles what requests ask for (structured_outputs.py) with llguidance; a `Matcher` follows one sequence. The
mask of a node is that of its sequence's committed tokens and its own drafted ancestors. A drafter need not know the
grammar: a drafted token that it forbids has p = 0 and is rejected.

The work of each mask is bounded by the library, which counts it: a mask beyond the bounds ends its own request. Time
below the bounds adds up, for all answers to a request, to an allowance.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from paceline.errors import InvalidParameter, PacelineError
from paceline.text.forced import WORD, ForcedText
from paceline.text.grammar_source.ebnf import ebnf
from paceline.text.grammar_source.grammar_parts import Rules, json_options, literal, one_of, plain_schema, whitespace_of
from paceline.text.grammar_source.structural_tags import tag_source
from paceline.text.spacing import Spacing

FIELD = "structured_outputs"
# Processor seconds of masks: the allowance of a sequence in each step, and the sum beyond it that ends its request.
# A mask takes 0.02 to 0.5 ms; an ambiguous grammar takes more, and all other sequences wait for it.
USUAL_S, BEYOND_S = 0.01, 0.5
# The library's bounds: items of a place of the text, work on the regexes of a grammar and of one mask, items of one
# mask, states kept (1 to 2 kB each) and symbols. The longest mask of benchmarks/attack.py took 85 ms with them.
LIMITS = {
    "max_items_in_row": 4_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
MOST_SHOWN = 200  # characters of the library's reason
TOO_SLOW = "the grammar takes too long at each token; make it less ambiguous"
TOO_LARGE = "the grammar needs too much work for one token; make it simpler"
NO_TEXT = "the grammar allows no text that goes on here"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class GrammarTokenizer(Protocol):
    """The part of a tokenizer that a grammar needs."""

    def vocab(self) -> list[str]: ...
    def vocab_kind(self) -> str: ...
    def special_token_ids(self) -> list[int]: ...
    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...


class Matched(Protocol):
    """A sequence that a matcher follows."""

    @property
    def matcher(self) -> Matcher | None: ...
    @property
    def output_tokens(self) -> list[int]: ...


class _Vocabulary:
    """The tokens in bytes, in the form that the library reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int, eos: int) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, eos
        self.special_token_ids = [token for token in tokenizer.special_token_ids() if token < vocab_size]
        to_bytes, specials = _bytes_of(tokenizer.vocab_kind()), set(self.special_token_ids)
        spelt = tokenizer.vocab()[:vocab_size]
        self.tokens = [text.encode() if at in specials else to_bytes(text) for at, text in enumerate(spelt)]
        self.tokens += [b""] * (vocab_size - len(self.tokens))  # numbers without a token

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _bytes_of(kind: str) -> Any:
    """Return the function that turns a token's spelling into its bytes."""
    if kind == "byte_level":
        letters = {letter: byte for byte, letter in enumerate(_byte_letters())}
        return lambda text: (
            bytes(letters[char] for char in text) if all(char in letters for char in text) else text.encode()
        )
    if kind == "byte_fallback":

        def fallback(text: str) -> bytes:
            found = BYTE.fullmatch(text)
            return bytes([int(found[1], 16)]) if found else text.replace("\u2581", " ").encode(errors="replace")

        return fallback
    return lambda text: text.encode(errors="replace")


def _byte_letters() -> str:
    """Return GPT-2's letter of each byte: printable Latin letters as they are, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in shown else next(others)) for byte in range(256))


def can_compile() -> bool:
    """Return whether the library of structured outputs is installed."""
    return find_spec("llguidance") is not None


class Grammars:
    """The compiler of grammars. Any thread may call it, so that a long compilation does not hold up a step."""

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int, eos_token_ids: SequenceOf[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise PacelineError("structured outputs need llguidance; pip install 'paceline[serve]'") from error
        if not eos_token_ids:
            raise InvalidParameter(FIELD, "the model has no end-of-sequence token, which ends a structured answer")
        self._library, self._eos = llguidance, frozenset(eos_token_ids)
        vocabulary = _Vocabulary(tokenizer, vocab_size, min(eos_token_ids))
        wrapped: Any = llguidance.TokenizerWrapper(vocabulary)
        self._tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        # Of several tokens that end an answer, the one that ends a turn has the highest number.
        self._forced = ForcedText(vocabulary.tokens, max(eos_token_ids), vocabulary, self._tokenizer.tokenize_bytes)
        self._limits: Any = llguidance.LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        self.words = -(-vocab_size // WORD)

    def compile(self, wanted: Mapping[str, Any]) -> Any:
        """Compile a grammar, which `matcher` takes."""
        kind, value = next(iter(wanted.items()))
        try:
            compiled = self._library.LLMatcher(
                self._tokenizer, self._source(kind, value, wanted), log_level=0, limits=self._limits
            )
            reason = compiled.get_error() if compiled.is_error() else ""
        except (ValueError, RecursionError, OverflowError) as error:
            reason = str(error) or type(error).__name__
        if reason:
            first = next(line for line in reason.strip().splitlines() if line.strip())
            raise InvalidParameter(FIELD, f"the {kind} cannot be compiled: {first[:MOST_SHOWN]}")
        return compiled

    def _source(self, kind: str, value: Any, wanted: Mapping[str, Any]) -> str:
        library = self._library.LLMatcher
        if kind in ("json", "json_object"):
            schema = plain_schema(value if kind == "json" else {"type": "object"})
            options: Any = json_options(whitespace_of(wanted))
            return library.grammar_from_json_schema(json.dumps(schema), overrides=options)
        if kind == "regex":
            return library.grammar_from_regex(value)
        if kind == "structural_tag":
            return tag_source(value, lambda regex: self._library.regex_to_lark(regex, use_ascii=""))
        rules = Rules()
        return rules.source(one_of([literal(text) for text in value]) if kind == "choice" else ebnf(value, rules))

    def matchers(self, compiled: Any, count: int) -> list[Matcher]:
        """Return the matchers of the answers to a request, which share its allowance."""
        owed = Owed()
        return [Matcher(compiled.deep_copy(), self.words, self._eos, owed, self._forced) for _ in range(count)]


class Owed:
    """The processor seconds that the masks of a request have taken beyond the usual."""

    def __init__(self) -> None:
        self.seconds = 0.0


class _Stopwatch:
    """The seconds that a request owes at this moment of a step."""

    def __init__(self, owed: Owed) -> None:
        self._before, self._began = owed.seconds, time.thread_time()

    @property
    def owed(self) -> float:
        return self._before + max(time.thread_time() - self._began - USUAL_S, 0.0)


class Matcher:
    """A grammar's state after the committed tokens of one sequence."""

    def __init__(
        self, matcher: Any, words: int, eos: frozenset[int], owed: Owed, forced: ForcedText | None = None
    ) -> None:
        self._matcher, self._words, self._eos, self._owed, self._forced = matcher, words, eos, owed, forced
        self._taken, self._ended = 0, False
        self._spacing, self._spaced = Spacing(), 0
        self._drafting = Owed()  # of forced text: beyond the bound there is no more of it

    @property
    def problem(self) -> str | None:
        """Return the reason why the sequence has to end, if there is one."""
        if self._owed.seconds > BEYOND_S:
            return TOO_SLOW
        if not self._matcher.is_error():
            return None
        what = NO_TEXT if self._matcher.stop_reason().startswith("NoExtension") else TOO_LARGE
        return f"{what} ({self._matcher.get_error().strip().splitlines()[0][:MOST_SHOWN]})"

    def masks(self, sequence: Matched, tokens: SequenceOf[int], parents: SequenceOf[int]) -> np.ndarray[Any, Any]:
        """Return (1 + N, W) masks of the last committed token and of a draft's nodes, in topological order."""
        bits = np.full((1 + len(tokens), self._words), -1, dtype=np.int32)
        if self._ended or self.problem is not None:
            return bits  # the sequence ends, whatever the step yields
        stopwatch = _Stopwatch(self._owed)
        self._follow(sequence.output_tokens)
        if self._ended:
            return bits
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        self._fill(-1, bits, tokens, children, stopwatch)
        self._owed.seconds = stopwatch.owed
        return bits

    def forced(self, sequence: Matched) -> list[int]:
        """Return the tokens that the grammar forces behind the committed ones, as far as they can be guessed."""
        if self._forced is None or self._ended or self.problem is not None or self._drafting.seconds > BEYOND_S:
            return []
        output, stopwatch = sequence.output_tokens, _Stopwatch(self._drafting)
        self._follow(output)
        if self._ended or self.problem is not None:
            return []
        self._spacing.read(self._forced.bytes_of(output[self._spaced :]))
        self._spaced = len(output)
        tokens = self._forced.behind(self._matcher, output, self._spacing)
        self._drafting.seconds = stopwatch.owed
        return tokens

    def _follow(self, output: SequenceOf[int]) -> None:
        """Bring the state up to the committed tokens."""
        for token in output[self._taken :]:
            if token in self._eos:
                self._ended = True
                return
            self._matcher.consume_token(token)
        self._taken = len(output)

    def _fill(
        self,
        node: int,
        bits: np.ndarray[Any, Any],
        tokens: SequenceOf[int],
        children: dict[int, list[int]],
        stopwatch: _Stopwatch,
    ) -> None:
        """Fill the masks below a node. A forbidden node is never reached, so its mask allows all."""
        row = bits[node + 1]
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        for child in children.get(node, ()):
            token = tokens[child]
            is_allowed = row[token // WORD] >> token % WORD & 1
            if stopwatch.owed > BEYOND_S:
                return  # the sequence ends, whatever the other masks are
            if is_allowed and token not in self._eos and self._matcher.consume_token(token):
                self._fill(child, bits, tokens, children, stopwatch)
                self._matcher.rollback(1)


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
