"""paceline as a worker: `LLM.stream`, which also turns the tokens into text."""

from __future__ import annotations

from typing import Any

from protocol import Answer, Emit, serve

KV_CACHE_BYTES = 1 << 29  # mapped as it is used


def load(job: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    from paceline import LLM, SamplingParams, __version__

    llm = LLM(
        job["model"],
        device="cpu",
        threads=job["threads"],
        activations=job["activations"],
        method=job["method"],
        k=job["k"],
        max_model_len=job["max_context"],
        kv_cache_bytes=KV_CACHE_BYTES,
        prefix_caching=False,  # the chat template's first lines are the same in every prompt
    )

    def answer(request: dict[str, Any], emit: Emit) -> None:
        temperature = request["temperature"]
        params = SamplingParams(
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            seed=request["seed"] if temperature else None,
            max_tokens=request["max_tokens"],
            stop_token_ids=request["eos"],
        )
        for chunk in llm.stream(request["prompt"], params):
            emit(chunk.token_ids)

    # The weights stay as the folder has them; what differs is how their products are computed.
    precision = {"float32": "fp32", "int8": "int8 activations"}[job["activations"]]
    about = {"peer": f"paceline {__version__}", "precision": precision, "kernels": llm.kernels_name}
    return about, answer


if __name__ == "__main__":
    serve(load)
