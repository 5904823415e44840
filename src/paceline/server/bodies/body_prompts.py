"""Prompts of request bodies: rendered by the model's chat template, and encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.errors import InvalidParameter, ModelNotFound, short_repr
from paceline.server.api import anthropic, ollama, responses
from paceline.server.api.anthropic import MessagesRequest
from paceline.server.api.as_chat import renamed
from paceline.server.api.ollama import OllamaChatRequest, OllamaGenerateRequest
from paceline.server.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    Whole,
    plain_message,
)
from paceline.server.api.responses import ResponseRequest
from paceline.text.request_text import EncodedPrompt, check_token_ids, encode_prompts
from paceline.text.thoughts import effort_variables
from paceline.text.tokenizer import Tokenizer

ChatForm = ResponseRequest | MessagesRequest | OllamaChatRequest | OllamaGenerateRequest  # that become chat requests
NAMES: dict[type[ChatForm], dict[str, str]] = {
    ResponseRequest: responses.NAMES,
    MessagesRequest: anthropic.NAMES,
    OllamaChatRequest: ollama.NAMES,
    OllamaGenerateRequest: ollama.NAMES,
}


def check_model(name: str | None, names: Sequence[str]) -> None:
    """Refuse a name that is not one of the served model's."""
    if name is not None and name not in names:
        raise ModelNotFound(f"model {short_repr(name)} is not served here; {names[0]!r} is")


class BodyPrompts:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer, self._vocab_size, self._max_model_len = tokenizer, vocab_size, max_model_len

    def prompts(self, body: Whole) -> list[EncodedPrompt]:
        """Return the prompts of a body that asks for answers."""
        match body:
            case CompletionRequest():
                for each in body.prompts():
                    if isinstance(each, list):  # checked before they are sent: a message holds no larger numbers
                        check_token_ids("prompt", each, self._vocab_size)
                return encode_prompts(self.tokenizer, body.prompts(), body.add_special_tokens)
            case ChatRequest():
                return [self._chat(body.conversation(), self._variables(body))]
            case ResponseRequest() | MessagesRequest() | OllamaChatRequest() | OllamaGenerateRequest():
                with renamed(NAMES[type(body)]):
                    return self.prompts(body.chat())
        raise TypeError(f"a {type(body).__name__} has no prompts")

    def tokenized(self, body: TokenizeRequest) -> dict[str, Any]:
        """Return the answer of /tokenize."""
        if (body.prompt is None) == (body.messages is None):
            raise InvalidParameter("prompt", "give either prompt or messages")
        if body.messages is not None:
            prompt = self._chat([plain_message(message) for message in body.messages], {})
        else:
            (prompt,) = encode_prompts(self.tokenizer, [body.prompt], body.add_special_tokens)
        return {"tokens": prompt.tokens, "count": len(prompt.tokens), "max_model_len": self._max_model_len}

    def detokenized(self, body: DetokenizeRequest) -> dict[str, Any]:
        """Return the answer of /detokenize."""
        check_token_ids("tokens", body.tokens, self._vocab_size)
        return {"prompt": self.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    def _variables(self, body: ChatRequest) -> dict[str, Any]:
        variables = body.template_variables()
        if body.reasoning_effort is None:
            return variables
        template = self.tokenizer.chat_template(with_tools="tools" in variables)
        return effort_variables(body.reasoning_effort, template.variables) | variables

    def _chat(self, conversation: list[dict[str, Any]], variables: dict[str, Any]) -> EncodedPrompt:
        text = self.tokenizer.render_chat(conversation, **variables)
        (prompt,) = encode_prompts(self.tokenizer, [text], add_special_tokens=False)
        return prompt
