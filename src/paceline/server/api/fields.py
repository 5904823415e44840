"""Fields of OpenAI, vLLM, llama.cpp and others that a route may lack.

In any field null, an empty list or an empty object asks for nothing, and so do the values below. Such a field is left
out before a body is read; with any other value the request is refused by name. The check of bodies, the OpenAPI
document and the list in docs/guides/requests.md are made from this table.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, get_args

EMPTY: tuple[Any, ...] = (None, [], {})
REFUSED = "is not supported here; leave it out"


@dataclass(frozen=True)
class AbsentField:
    """A field that is refused where a route does not have it."""

    neutral: tuple[Any, ...] = ()  # values that ask for nothing, besides the empty ones
    equal: str = ""  # the field that does the same here


_MAX_TOKENS, _FORM = AbsentField(equal="max_tokens"), AbsentField(equal="structured_outputs")
ABSENT: dict[str, AbsentField] = {
    # OpenAI's routes, each of which lacks fields of another
    "audio": AbsentField(),
    "best_of": AbsentField((1,), "n"),
    "conversation": AbsentField(),
    "echo": AbsentField((False,)),
    "function_call": AbsentField(("none", "auto"), "tool_choice"),
    "functions": AbsentField(equal="tools"),
    "include": AbsentField(),
    "logprobs": AbsentField((False,)),
    "max_completion_tokens": _MAX_TOKENS,
    "max_output_tokens": _MAX_TOKENS,
    "max_tokens": AbsentField(equal="max_output_tokens"),
    "max_tool_calls": AbsentField(),
    "modalities": AbsentField((["text"],)),
    "n": AbsentField((1,)),
    "parallel_tool_calls": AbsentField((True, False)),
    "prediction": AbsentField(),
    "reasoning": AbsentField(),
    "reasoning_effort": AbsentField(equal="reasoning"),
    "response_format": AbsentField(({"type": "text"},), "structured_outputs"),
    "stream_options": AbsentField(({"include_usage": False},)),
    "tool_choice": AbsentField(("none", "auto")),
    "tools": AbsentField(),
    "top_logprobs": AbsentField((0,), "logprobs"),
    "verbosity": AbsentField(("medium",)),
    "web_search_options": AbsentField(),
    # vLLM's
    "add_generation_prompt": AbsentField((True,)),
    "add_special_tokens": AbsentField((False,)),
    "chat_template": AbsentField(),
    "continue_final_message": AbsentField((False,)),
    "detokenize": AbsentField((True,)),
    "documents": AbsentField(),
    "guided_choice": _FORM,
    "guided_decoding_backend": _FORM,
    "guided_grammar": _FORM,
    "guided_json": _FORM,
    "guided_regex": _FORM,
    "guided_whitespace_pattern": _FORM,
    "include_reasoning": AbsentField((True,)),
    "kv_transfer_params": AbsentField(),
    "length_penalty": AbsentField((1.0,)),
    "logits_processors": AbsentField(equal="logit_bias"),
    "mm_processor_kwargs": AbsentField(),
    "priority": AbsentField((0,)),
    "prompt_embeds": AbsentField(),
    "request_id": AbsentField(equal="the header X-Request-Id"),
    "return_tokens_as_token_ids": AbsentField((False,), "return_token_ids"),
    "spaces_between_special_tokens": AbsentField((True,)),
    "truncate_prompt_tokens": AbsentField(),
    "use_beam_search": AbsentField((False,)),
    # llama.cpp's, Ollama's and transformers'
    "cache_prompt": AbsentField((True,), "cache_salt"),
    "do_sample": AbsentField(equal="temperature"),
    "enable_thinking": AbsentField(equal="chat_template_kwargs"),
    "format": AbsentField(equal="response_format"),
    "grammar": _FORM,
    "id_slot": AbsentField((-1,)),
    "json_schema": _FORM,
    "max_new_tokens": _MAX_TOKENS,
    "mirostat": AbsentField((0,)),
    "n_predict": _MAX_TOKENS,
    "n_probs": AbsentField((0,), "logprobs"),
    "no_repeat_ngram_size": AbsentField((0,)),
    "num_beams": AbsentField((1,)),
    "num_predict": _MAX_TOKENS,
    "raw": AbsentField((False,), "/v1/completions"),
    "repeat_penalty": AbsentField((1.0,), "repetition_penalty"),
    "return_full_text": AbsentField((False,), "echo"),
    "stop_sequences": AbsentField(equal="stop"),
    "tfs_z": AbsentField((1.0,)),
    "top_a": AbsentField((0,)),
    "typical_p": AbsentField((1.0,)),
}


def asking(body: dict[str, Any], known: Collection[str], not_null: Collection[str]) -> dict[str, Any]:
    """Return the fields of a body that ask for something. `known`: fields of the route; `not_null`: those of them whose
    default stands for null. An integral float becomes an integer: some clients have no other numbers."""
    kept = {}
    for name, value in body.items():
        if name in known:
            nothing = value is None and name in not_null
        else:
            nothing = value in EMPTY or value in ABSENT.get(name, AbsentField()).neutral
        if not nothing:
            kept[name] = int(value) if isinstance(value, float) and value.is_integer() else value
    return kept


def takes_null(annotation: Any) -> bool:
    return annotation in (Any, None) or type(None) in get_args(annotation)


def refusal(name: str) -> str:
    """Return what is wrong with a field that its route does not have."""
    equal = ABSENT.get(name, AbsentField()).equal
    return f"is not supported here; use {equal}" if equal else REFUSED


def document(schema: dict[str, Any]) -> None:
    """Add the fields that a route lacks to its OpenAPI schema, each with the values that it takes all the same."""
    properties = schema.setdefault("properties", {})
    for name, field in ABSENT.items():
        if name not in properties:
            properties[name] = {"enum": [*EMPTY, *field.neutral], "description": refusal(name)}
