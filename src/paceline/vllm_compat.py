"""Arguments that users of vLLM, and of articles about it, type: their name here, or a sentence that says what to do.

Where the meaning is the same they are honoured; a value that says what is always so here is accepted; everything else
is refused by name. No torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from paceline.errors import InvalidParameter, short_repr

T = TypeVar("T")


class Theirs(NamedTuple):
    """An argument without a counterpart of its own."""

    instead: str  # what to do
    same: tuple[Any, ...] = ()  # values, beside None, that ask for what is always so here


ONE_DEVICE = Theirs("a model runs on one device here; leave it out", (1,))
NO_PLUGINS = Theirs("adapters are not there; merge the adapter into the model first", (False,))
LOSSY = Theirs("would change the model's output, and paceline is always lossless; leave it out")
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
    "numerics": Theirs("is gone: answers are always the exact ones; leave it out", ("exact",)),
    "tensor_parallel_size": ONE_DEVICE,
    "pipeline_parallel_size": ONE_DEVICE,
    "data_parallel_size": ONE_DEVICE,
    "speculative_draft_tensor_parallel_size": ONE_DEVICE,
    "distributed_executor_backend": ONE_DEVICE,
    "revision": Theirs(
        "a hub id is always taken from its main branch; download the revision and name its folder", ("main",)
    ),
    "tokenizer_revision": Theirs("download the revision and name its folder with tokenizer", ("main",)),
    "tokenizer_mode": Theirs("there is one kind of tokenizer, the fast one; leave it out", ("auto", "hf")),
    "skip_tokenizer_init": Theirs("the tokenizer is always loaded; leave it out", (False,)),
    "trust_remote_code": Theirs("code that comes with a model is never run; leave it out", (False,)),
    "quantization": Theirs("is read from the model's own files; leave it out"),
    "load_format": Theirs("is found out from the model's files; leave it out", ("auto", "safetensors")),
    "download_dir": Theirs("set the environment variable PACELINE_HOME to the folder for downloads"),
    "hf_overrides": Theirs("change config.json in a copy of the model's folder instead"),
    "generation_config": Theirs("set what should differ from the model's own in SamplingParams", ("auto",)),
    "block_size": Theirs("blocks of the cache hold 16 tokens; leave it out", (16,)),
    "max_logprobs": Theirs("at most 20 log-probabilities are returned per token; leave it out", (20,)),
    "swap_space": Theirs("the cache is never moved to the host; leave it out", (0,)),
    "cpu_offload_gb": Theirs("weights are never moved to the host; use a smaller model or dtype", (0,)),
    "enable_chunked_prefill": Theirs("prompts are always read in chunks; leave it out", (True,)),
    "use_v2_block_manager": Theirs("there is one block manager; leave it out", (True,)),
    "disable_log_stats": Theirs("nothing is logged; figures are in each answer's speculation", (True,)),
    "disable_log_requests": Theirs("nothing is logged; leave it out", (True,)),
    "enable_lora": NO_PLUGINS,
    "task": Theirs("models generate text here, nothing else", ("generate", "auto")),
    "runner": Theirs("models generate text here, nothing else", ("generate", "auto")),
    "speculative_K": Theirs("is called k here"),
    "speculative_k": Theirs("is called k here"),
    "acceptance_threshold": LOSSY,
    "spec_decoding_acceptance_method": Theirs(LOSSY.instead, ("rejection_sampler",)),
    "typical_acceptance_sampler_posterior_threshold": LOSSY,
    "typical_acceptance_sampler_posterior_alpha": LOSSY,
    "speculative_max_model_len": Theirs("is max_model_len here, for the target and its draft model"),
    "speculative_disable_by_batch_size": Theirs("drafting rests by itself where it does not pay; leave it out"),
}
SAMPLING = {
    "best_of": Theirs("is not there; ask for n answers and choose one by its cumulative_logprob", (1,)),
    "logits_processors": Theirs(
        "functions of the caller are not there; logit_bias, allowed_token_ids and bad_words are", ((), [])
    ),
    "use_beam_search": Theirs("beam search is not there; sample n answers instead", (False,)),
    "length_penalty": Theirs("beam search is not there; leave it out", (1.0,)),
    "early_stopping": Theirs("beam search is not there; leave it out", (False,)),
    "guided_decoding": Theirs("is called structured_outputs here"),
    "response_format": Theirs("is structured_outputs here: {'json_object': True}, or {'json': the schema}"),
    "truncate_prompt_tokens": Theirs("prompts are never shortened; give the tokens that should be read"),
    "spaces_between_special_tokens": Theirs("text is decoded as the tokenizer does it; leave it out", (True,)),
    "detokenize": Theirs("text is decoded when it is read, and costs nothing before; leave it out", (True,)),
    "output_kind": Theirs("generate() returns whole answers, stream() pieces; leave it out"),
    "extra_args": Theirs("there are none; leave it out", ({},)),
    "max_new_tokens": Theirs("is called max_tokens here"),
    "max_completion_tokens": Theirs("is called max_tokens here"),
    "n_predict": Theirs("is called max_tokens here"),
    "repeat_penalty": Theirs("is called repetition_penalty here"),
    "top_logprobs": Theirs("is called logprobs here"),
    "stop_sequences": Theirs("is called stop here"),
    "do_sample": Theirs("temperature decides: 0 is greedy, above 0 samples"),
    "num_beams": Theirs("beam search is not there; sample n answers instead", (1,)),
    "acceptance_threshold": LOSSY,
}
CALL = {
    "lora_request": NO_PLUGINS,
    "priority": Theirs("requests are served in the order of their arrival; leave it out", (0,)),
    "prompt_token_ids": Theirs("give token ids in place of the prompt, as a list of them or {'prompt_token_ids': ids}"),
    "request_id": Theirs("requests are numbered here; leave it out"),
    "use_tqdm": Theirs("a stream shows its own progress; leave it out", (False,)),
    "stream": Theirs("use the method stream()", (False,)),
    "chat_template_content_format": Theirs(
        "content is handed to the template as text; leave it out", ("auto", "string")
    ),
    "mm_processor_kwargs": Theirs("models read text here, nothing else", ({},)),
    "documents": Theirs("pass them in chat_template_kwargs"),
}


def refuse(given: Mapping[str, Any], table: Mapping[str, Theirs], known: Iterable[str], where: str) -> None:
    """Raise at the first argument that does not ask for what is so anyway. `known`: the arguments of `where`."""
    for name, value in given.items():
        theirs = table.get(name)
        if theirs is None:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            advice = f"did you mean {close[0]}?" if close else "see help()"
            raise InvalidParameter(name, f"{where} has no such argument; {advice}")
        if value is not None and not any(type(value) is type(same) and value == same for same in theirs.same):
            raise InvalidParameter(name, f"{theirs.instead} (got {short_repr(value)})")


def split(theirs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of vLLM's `LLM`, and apart from them the older ones about speculation, by their newer names."""
    older = {SPECULATIVE[name]: value for name, value in theirs.items() if name in SPECULATIVE and value is not None}
    return {name: value for name, value in theirs.items() if name not in SPECULATIVE}, older


def renamed(theirs: dict[str, Any], name: str, ours: T, default: T) -> T:
    """The value of an argument that may be given under vLLM's name."""
    value = theirs.pop(name, None)
    if value is not None and ours != default:
        raise InvalidParameter(name, f"is another name of {RENAMED[name]}; give one of the two")
    return ours if value is None else value
