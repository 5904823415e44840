"""OpenVINO GenAI as a worker: its pipeline on a GGUF file, plain or with its prompt lookup, all else as it ships."""

from __future__ import annotations

from typing import Any

from protocol import Answer, Emit, serve

LONGEST = 5  # n-grams that count as a match, as paceline's ngram


def load(job: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    import numpy as np
    import openvino
    import openvino_genai as genai

    class Listener(genai.StreamerBase):
        def __init__(self, emit: Emit) -> None:
            super().__init__()
            self.emit = emit

        def write(self, tokens: int | list[int]) -> Any:
            self.emit(list(tokens) if isinstance(tokens, list) else [tokens])
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    lookup = job["method"] != "plain"
    options = {"prompt_lookup": True} if lookup else {}
    pipeline = genai.LLMPipeline(job["gguf"], "CPU", INFERENCE_NUM_THREADS=job["threads"], **options)

    def answer(request: dict[str, Any], emit: Emit) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.stop_token_ids = request["max_tokens"], set(request["eos"])
        config.eos_token_id = request["eos"][0]
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = job["k"], LONGEST
        if request["temperature"]:
            config.do_sample, config.temperature, config.rng_seed = True, request["temperature"], request["seed"]
        ids = np.array([request["prompt"]], dtype=np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        pipeline.generate(inputs, config, Listener(emit))

    return {"peer": f"openvino-genai {openvino.__version__}", "precision": job["precision"]}, answer


if __name__ == "__main__":
    serve(load)
