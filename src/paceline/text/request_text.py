"""Text of requests: prompts become tokens, with checks, and tokens of answers become text and log-probabilities.

`LLM`, `AsyncLLM` and the server encode and decode here. The text of requests with stop strings is the one exception:
the engine decodes it, since a stop string ends the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.core.sequence import TokenLogprobs
from paceline.errors import InvalidParameter, RequestFailed, short_repr
from paceline.inputs import read_prompt, read_salt
from paceline.outputs import Logprob
from paceline.text.stop_strings import TextDecoder
from paceline.text.tokenizer import Tokenizer


class EncodedPrompt(NamedTuple):
    text: str | None  # None: the caller gave tokens
    tokens: list[int]
    cache_salt: str | None = None  # narrows the requests with which caches are shared


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[Any], add_special_tokens: bool = True
) -> list[EncodedPrompt]:
    """Encode prompts of any form that `inputs` names; refuse all else."""
    forms = [read_prompt(prompt) for prompt in prompts]
    texts = [form for form in forms if isinstance(form, str)]
    encoded = iter(tokenizer.encode_each(texts, add_special_tokens) if texts else ())
    return [
        EncodedPrompt(form, next(encoded), salt) if isinstance(form, str) else EncodedPrompt(None, form, salt)
        for form, salt in zip(forms, map(read_salt, prompts), strict=True)
    ]


def encode_chats(tokenizer: Tokenizer, conversations: Sequence[Any], options: Mapping[str, Any]) -> list[EncodedPrompt]:
    """Render conversations and encode them; the template writes the special tokens. `options`: of `render_chat`."""
    texts = [tokenizer.render_chat(messages, **options) for messages in conversations]
    return encode_prompts(tokenizer, texts, add_special_tokens=False)


def check_token_ids(field: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids that the model does not have."""
    unknown = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if unknown is not None:
        raise InvalidParameter(field, f"token id {short_repr(unknown)} is outside the vocabulary of {vocab_size}")


class AnswerText:
    """The text of the answers to one request, as their tokens arrive or as a whole."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._decoders: dict[int, TextDecoder] = {}  # key: index of the answer

    def push(self, answer: int, tokens: Sequence[int], is_last: bool) -> list[str]:
        """Return the text that each token completes: a character of several tokens belongs to its last."""
        decoder = self._decoders.get(answer)
        if decoder is None:
            decoder = self._decoders[answer] = self._tokenizer.incremental_decoder(self._skip_special_tokens)
        try:
            texts = [decoder.push(token) for token in tokens]
            if is_last and (rest := decoder.flush()):
                texts[-1:] = ["".join(texts[-1:]) + rest]
        except Exception as problem:
            reason = f"{type(problem).__name__}: {problem}"
            raise RequestFailed(f"the text of the answer could not be decoded: {reason}") from problem
        return texts

    def whole(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.incremental_decoder(self._skip_special_tokens).decode(tokens)

    def logprobs(self, entries: Sequence[TokenLogprobs] | None) -> list[dict[int, Logprob]] | None:
        if entries is None:
            return None
        text_of = self._tokenizer.token_text
        return [
            {token: Logprob(value, rank, text_of(token)) for token, (value, rank) in entry.items()} for entry in entries
        ]
