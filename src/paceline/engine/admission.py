"""Admission of requests: the checks of an engine, and the sequences made of a request that passes them."""

from __future__ import annotations

import functools
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from paceline.config import AUTO, NONE, EngineConfig
from paceline.core.sequence import Owner, Sequence
from paceline.drafters.method_names import matches_method
from paceline.engine.policy import wish
from paceline.errors import InvalidParameter, InvalidPrompt, PacelineError, PromptTooLong, short_repr
from paceline.models.spec import ModelConfig
from paceline.sampling_params import SamplingParams
from paceline.text.grammar import Grammars
from paceline.text.stop_strings import OutputText, TextDecoder


class EngineTokenizer(Protocol):
    """The part of a tokenizer that an engine uses: stop strings need text, bad words need tokens."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...
    def incremental_decoder(self, skip_special_tokens: bool) -> TextDecoder: ...
    def vocab(self) -> list[str]: ...
    def vocab_kind(self) -> str: ...
    def special_token_ids(self) -> list[int]: ...


class Admission:
    """`methods`: names of the engine's drafters."""

    def __init__(
        self, model: ModelConfig, max_model_len: int, methods: SequenceOf[str], tokenizer: EngineTokenizer | None
    ) -> None:
        self._vocab_size, self.eos = model.vocab_size, frozenset(model.eos_token_ids)
        self.max_model_len, self._methods, self.tokenizer = max_model_len, tuple(methods), tokenizer

    def sequences(
        self,
        request_id: str,
        prompt: SequenceOf[int],
        params: SamplingParams,
        wait_group: str | None,
        grammar: Any,
        owner: Owner,
    ) -> list[Sequence]:
        """Return the n sequences of a request, or refuse it. `grammar`: as in `Engine.add_request`."""
        self._check_prompt(prompt)
        params.check_vocab(self._vocab_size)
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        make = functools.partial(Sequence, request_id, prompt, params, max_len=limit, eos=self.eos, owner=owner)
        bad_words = self._bad_words(params)
        sequences = [make(index=at, bad_words=bad_words, wait_group=wait_group) for at in range(params.n)]
        self._check_speculation(sequences[0])
        if params.structured_outputs is not None:
            if isinstance(grammar, PacelineError):
                raise grammar
            compiled = self.grammars.compile(params.structured_outputs) if grammar is None else grammar
            for sequence, matcher in zip(sequences, self.grammars.matchers(compiled, params.n), strict=True):
                sequence.matcher = matcher
        return sequences

    @functools.cached_property
    def grammars(self) -> Grammars:
        """The only part of an engine that other threads may use: a grammar compiled beforehand delays no step."""
        if self.tokenizer is None:
            raise InvalidParameter("structured_outputs", "needs a tokenizer, and this engine was made without one")
        return Grammars(self.tokenizer, self._vocab_size, sorted(self.eos))

    def output_text(self, sequence: Sequence) -> OutputText | None:
        """Return a decoder for an answer that a stop string may end; other answers are decoded by their reader."""
        params = sequence.params
        if self.tokenizer is None or not params.stop:
            return None
        decoder = self.tokenizer.incremental_decoder(params.skip_special_tokens)
        return OutputText(decoder, params.stops, include_stop=params.include_stop_str_in_output)

    def _check_speculation(self, sequence: Sequence) -> None:
        """Refuse a method or k that this engine has no drafter for; the engine's own settings are checked before."""
        if sequence.params.speculation is None:
            return
        method, k = wish(sequence, self._methods[0] if self._methods else NONE, None)
        if method == NONE and k is None:
            return
        if not self._methods:
            raise InvalidParameter("speculation", "this engine was made with method none; make it with method auto")
        if method == NONE:
            raise InvalidParameter("speculation", "method none drafts nothing; leave k out or choose a method")
        if method != AUTO and not any(matches_method(name, method) for name in self._methods):
            available = ", ".join((NONE, AUTO, *self._methods))
            raise InvalidParameter(
                "speculation", f"{short_repr(method)} is not available here; choose from {available}"
            )

    def _check_prompt(self, prompt: SequenceOf[int]) -> None:
        if not prompt:
            raise InvalidPrompt("the prompt is empty; give at least one token of text")
        if len(prompt) >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, and the maximum context length is {self.max_model_len}, the "
                "answer included; shorten the prompt, or raise max_model_len (--max-model-len) or kv_cache_bytes "
                "(--kv-cache-bytes) if the model allows more"
            )
        bad = next((token for token in prompt if not 0 <= token < self._vocab_size), None)
        if bad is not None:
            raise InvalidPrompt(f"token id {short_repr(bad)} is outside the model's vocabulary of {self._vocab_size}")

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Return each word as it is spelt at the start of a text and after a space: the tokens differ."""
        if not params.bad_words:
            return []
        if self.tokenizer is None:
            raise InvalidParameter("bad_words", "needs a tokenizer, and this engine was made without one")
        spelt = [form for word in params.bad_words for form in (word, " " + word.lstrip())]
        words = [tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in spelt]
        return [list(word) for word in dict.fromkeys(words) if word]


def context_length(config: EngineConfig, model_len: int, capacity: int) -> int:
    """Return the most tokens of a sequence: bounded by the model, by `max_model_len` and by the cache's capacity."""
    wanted = config.max_model_len
    if wanted is not None and wanted > model_len:
        raise InvalidParameter("max_model_len", f"the model's context is {model_len} tokens, got {wanted}")
    if wanted is not None and wanted > capacity:
        raise InvalidParameter(
            "max_model_len", f"the cache holds {capacity} tokens, got {wanted}; raise kv_cache_bytes or lower it"
        )
    if capacity < 2 * config.block_size:
        raise InvalidParameter("kv_cache_bytes", f"holds only {capacity} tokens; give it room for at least two blocks")
    return min(wanted or model_len, capacity)
