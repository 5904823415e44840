"""llama.cpp through llama-cpp-python as a worker: `Llama.generate`, plain or with its prompt lookup.

With a draft model llama-cpp-python computes the logits of every prompt token; that is its own doing and is timed.
"""

from __future__ import annotations

import itertools
from typing import Any

from protocol import Answer, Emit, serve


def load(job: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = None if job["method"] == "plain" else LlamaPromptLookupDecoding(num_pred_tokens=job["k"])
    model = llama_cpp.Llama(
        job["gguf"],
        n_ctx=job["max_context"],
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        use_mmap=False,  # pages of a mapped file may be dropped while the other workers compute
        draft_model=lookup,
        verbose=False,
    )

    def answer(request: dict[str, Any], emit: Emit) -> None:
        model.reset()  # else it would keep the part of the cache that the last prompt shares with this one
        model.set_seed(request["seed"])
        stream = model.generate(request["prompt"], top_k=0, top_p=1.0, min_p=0.0, temp=request["temperature"])
        for token in itertools.islice(stream, request["max_tokens"]):
            emit([token])
            if token in request["eos"]:
                break

    return {"peer": f"llama-cpp-python {llama_cpp.__version__}", "precision": job["precision"]}, answer


if __name__ == "__main__":
    serve(load)
