"""transformers as a worker: `generate`, plain or with prompt lookup, in fp32 with its default attention."""

from __future__ import annotations

from typing import Any

from protocol import Answer, Emit, serve


class Listener:
    """A streamer of `generate`; its first call hands over the prompt."""

    def __init__(self, emit: Emit) -> None:
        self.emit, self.prompt_seen = emit, False

    def put(self, value: Any) -> None:
        if self.prompt_seen:
            self.emit(value.reshape(-1).tolist())
        self.prompt_seen = True

    def end(self) -> None:
        pass


def load(job: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    lookup = {} if job["method"] == "plain" else {"prompt_lookup_num_tokens": job["k"]}

    def answer(request: dict[str, Any], emit: Emit) -> None:
        ids = torch.tensor([request["prompt"]])
        options: dict[str, Any] = {"do_sample": False}
        if request["temperature"]:
            torch.manual_seed(request["seed"])
            options = {"do_sample": True, "temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request["max_tokens"],
                eos_token_id=request["eos"],
                pad_token_id=request["eos"][0],
                streamer=Listener(emit),
                **lookup,
                **options,
            )

    about = {"peer": f"transformers {transformers.__version__}, torch {torch.__version__}", "precision": "fp32"}
    return about, answer


if __name__ == "__main__":
    serve(load)
