"""Arguments that users of vLLM, and of articles about it, type: their name here, or a sentence about what to do.

An argument with an equal meaning is honoured, a value that asks for what always holds here is accepted, and everything
else is refused by name. No torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from paceline.errors import InvalidParameter, short_repr

T = TypeVar("T")


class VllmArgument(NamedTuple):
    """An argument without a counterpart."""

    advice: str
    accepted: tuple[Any, ...] = ()  # values, beside None, that ask for what always holds here


ONE_DEVICE = VllmArgument("a model runs on one device here; leave it out", (1,))
NO_PLUGINS = VllmArgument("adapters are not there; merge the adapter into the model first", (False,))
LOSSY = VllmArgument("would change the model's output, and paceline is always lossless; leave it out")
RENAMED = {
    "gpu_memory_utilization": "gpu_memory_fraction",
    "enable_prefix_caching": "prefix_caching",
    "kv_cache_dtype": "kv_dtype",
}
# The flat settings of older versions, by their name in `speculative_config`.
SPECULATIVE = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}
ENGINE = {
    "numerics": VllmArgument("is gone: answers are always the exact ones; leave it out", ("exact",)),
    "tensor_parallel_size": ONE_DEVICE,
    "pipeline_parallel_size": ONE_DEVICE,
    "data_parallel_size": ONE_DEVICE,
    "speculative_draft_tensor_parallel_size": ONE_DEVICE,
    "distributed_executor_backend": ONE_DEVICE,
    "revision": VllmArgument(
        "a hub id is always taken from its main branch; download the revision and name its folder", ("main",)
    ),
    "tokenizer_revision": VllmArgument("download the revision and name its folder with tokenizer", ("main",)),
    "tokenizer_mode": VllmArgument("there is one kind of tokenizer, the fast one; leave it out", ("auto", "hf")),
    "skip_tokenizer_init": VllmArgument("the tokenizer is always loaded; leave it out", (False,)),
    "trust_remote_code": VllmArgument("code that comes with a model is never run; leave it out", (False,)),
    "quantization": VllmArgument("is read from the model's own files; leave it out"),
    "load_format": VllmArgument("is found out from the model's files; leave it out", ("auto", "safetensors")),
    "download_dir": VllmArgument("set the environment variable PACELINE_HOME to the folder for downloads"),
    "hf_overrides": VllmArgument("change config.json in a copy of the model's folder instead"),
    "generation_config": VllmArgument("set what should differ from the model's own in SamplingParams", ("auto",)),
    "block_size": VllmArgument("blocks of the cache hold 16 tokens; leave it out", (16,)),
    "max_logprobs": VllmArgument("at most 20 log-probabilities are returned per token; leave it out", (20,)),
    "swap_space": VllmArgument("the cache is never moved to the host; leave it out", (0,)),
    "cpu_offload_gb": VllmArgument("weights are never moved to the host; use a smaller model or dtype", (0,)),
    "enable_chunked_prefill": VllmArgument("prompts are always read in chunks; leave it out", (True,)),
    "use_v2_block_manager": VllmArgument("there is one block manager; leave it out", (True,)),
    "disable_log_stats": VllmArgument("nothing is logged; figures are in each answer's speculation", (True,)),
    "disable_log_requests": VllmArgument("nothing is logged; leave it out", (True,)),
    "enable_lora": NO_PLUGINS,
    "task": VllmArgument("models generate text here, nothing else", ("generate", "auto")),
    "runner": VllmArgument("models generate text here, nothing else", ("generate", "auto")),
    "speculative_K": VllmArgument("is called k here"),
    "speculative_k": VllmArgument("is called k here"),
    "acceptance_threshold": LOSSY,
    "spec_decoding_acceptance_method": VllmArgument(LOSSY.advice, ("rejection_sampler",)),
    "typical_acceptance_sampler_posterior_threshold": LOSSY,
    "typical_acceptance_sampler_posterior_alpha": LOSSY,
    "speculative_max_model_len": VllmArgument("is max_model_len here, for the target and its draft model"),
    "speculative_disable_by_batch_size": VllmArgument("drafting pauses by itself where it does not pay; leave it out"),
}
SAMPLING = {
    "best_of": VllmArgument("is not there; ask for n answers and choose one by its cumulative_logprob", (1,)),
    "logits_processors": VllmArgument(
        "functions of the caller are not there; logit_bias, allowed_token_ids and bad_words are", ((), [])
    ),
    "use_beam_search": VllmArgument("beam search is not there; sample n answers instead", (False,)),
    "length_penalty": VllmArgument("beam search is not there; leave it out", (1.0,)),
    "early_stopping": VllmArgument("beam search is not there; leave it out", (False,)),
    "guided_decoding": VllmArgument("is called structured_outputs here"),
    "response_format": VllmArgument("is structured_outputs here: {'json_object': True}, or {'json': the schema}"),
    "truncate_prompt_tokens": VllmArgument("prompts are never shortened; give the tokens that should be read"),
    "spaces_between_special_tokens": VllmArgument("text is decoded as the tokenizer does it; leave it out", (True,)),
    "detokenize": VllmArgument("text is decoded when it is read, and costs nothing before; leave it out", (True,)),
    "output_kind": VllmArgument("generate() returns whole answers, stream() pieces; leave it out"),
    "extra_args": VllmArgument("there are none; leave it out", ({},)),
    "max_new_tokens": VllmArgument("is called max_tokens here"),
    "max_completion_tokens": VllmArgument("is called max_tokens here"),
    "n_predict": VllmArgument("is called max_tokens here"),
    "repeat_penalty": VllmArgument("is called repetition_penalty here"),
    "top_logprobs": VllmArgument("is called logprobs here"),
    "stop_sequences": VllmArgument("is called stop here"),
    "do_sample": VllmArgument("temperature decides: 0 is greedy, above 0 samples"),
    "num_beams": VllmArgument("beam search is not there; sample n answers instead", (1,)),
    "acceptance_threshold": LOSSY,
}
CALL = {
    "lora_request": NO_PLUGINS,
    "priority": VllmArgument("requests are served in the order of their arrival; leave it out", (0,)),
    "prompt_token_ids": VllmArgument(
        "give token ids in place of the prompt, as a list of them or {'prompt_token_ids': ids}"
    ),
    "request_id": VllmArgument("requests are numbered here; leave it out"),
    "use_tqdm": VllmArgument("a stream shows its own progress; leave it out", (False,)),
    "stream": VllmArgument("use the method stream()", (False,)),
    "chat_template_content_format": VllmArgument(
        "content is handed to the template as text; leave it out", ("auto", "string")
    ),
    "mm_processor_kwargs": VllmArgument("models read text here, nothing else", ({},)),
    "documents": VllmArgument("pass them in chat_template_kwargs"),
}


def refuse(arguments: Mapping[str, Any], table: Mapping[str, VllmArgument], known: Iterable[str], where: str) -> None:
    """Raise at the first argument that is not accepted. `known`: the arguments of `where`."""
    for name, value in arguments.items():
        argument = table.get(name)
        if argument is None:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            advice = f"did you mean {close[0]}?" if close else "see help()"
            raise InvalidParameter(name, f"{where} has no such argument; {advice}")
        if value is not None and not any(type(value) is type(each) and value == each for each in argument.accepted):
            raise InvalidParameter(name, f"{argument.advice} (got {short_repr(value)})")


def split(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split off the older arguments about speculation, and return them under their newer names."""
    older = {SPECULATIVE[name]: value for name, value in arguments.items() if name in SPECULATIVE and value is not None}
    return {name: value for name, value in arguments.items() if name not in SPECULATIVE}, older


def renamed(arguments: dict[str, Any], name: str, own: T, default: T) -> T:
    """Return the value of an argument that a caller may give under vLLM's name."""
    value = arguments.pop(name, None)
    if value is not None and own != default:
        raise InvalidParameter(name, f"is another name of {RENAMED[name]}; give one of the two")
    return own if value is None else value
