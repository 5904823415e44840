"""The torch kernels, which serve where no native kernels load, against transformers: smollm2 in fp32, greedy.

Two prompts, one of a few tokens and one of 421, in turn with transformers' `generate`, the same threads for both. CPU
seconds of the process and seconds on the clock are both given: on a machine with other work only the first hold still.

    python benchmarks/torch_fallback.py [--rounds 5] [--tokens 32] [--threads 1]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["PACELINE_KERNELS"] = "torch"  # read when the model is opened

import torch
import transformers
from common import clock, finish, ratio
from expanded import expanded_folder

from paceline import LLM, SamplingParams
from paceline.models.load.hub import cache_home, resolve

GOAL = 0.7
LENGTHS = {"short": 8, "long": 421}  # tokens of the prompt
TEXT = "A bicycle that leans to the left is steered to the left, and the road pushes its wheels back under the rider. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    llm = LLM("smollm2", dtype="float32", device="cpu", method="none", prefix_caching=False, threads=options.threads)
    readable = expanded_folder(resolve("smollm2"), cache_home() / "expanded")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(readable, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0, max_tokens=options.tokens, min_tokens=options.tokens)
    text = llm.tokenizer.encode(TEXT * 40)
    compared = {name: against(llm, oracle, text[:length], params, options.rounds) for name, length in LENGTHS.items()}
    for name, found in compared.items():
        for unit in ("cpu", "wall"):
            over = found[unit]
            figure = f"{over['median']:.2f}x [{over['low']:.2f}, {over['high']:.2f}]"
            print(
                f"prompt of {LENGTHS[name]:3} tokens, {unit:4} seconds: {figure} of transformers' rate (goal {GOAL}x)"
            )
        print(f"prompt of {LENGTHS[name]:3} tokens, same tokens: {found['same_tokens']}")
    finish("torch_fallback", {"kernels": llm.kernels_name, "tokens": options.tokens, **compared})


def against(llm: LLM, oracle: Any, prompt: list[int], params: SamplingParams, rounds: int) -> dict[str, Any]:
    ids = torch.tensor([prompt])
    answers: dict[str, list[int]] = {}

    def ours() -> None:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
        answers["paceline"] = output.outputs[0].token_ids

    def theirs() -> None:
        with torch.inference_mode():
            out = oracle.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=params.max_tokens,
                min_new_tokens=params.max_tokens,
            )
        answers["transformers"] = out[0, len(prompt) :].tolist()

    seconds: dict[str, list[tuple[float, float]]] = {"paceline": [], "transformers": []}
    works = {"paceline": ours, "transformers": theirs}
    for turn in range(rounds + 1):  # the first warms both up
        for name in sorted(works, reverse=turn % 2 == 1):
            used = measured(works[name])
            if turn:
                seconds[name].append(used)
    found: dict[str, Any] = {"same_tokens": answers["paceline"] == answers["transformers"]}
    for place, unit in enumerate(("cpu", "wall")):
        mine, other = ([used[place] for used in seconds[name]] for name in ("paceline", "transformers"))
        found[unit] = {**ratio(other, mine), "paceline_s": statistics.median(mine)}
    return found


def measured(work: Callable[[], None]) -> tuple[float, float]:
    """CPU seconds of all threads, and seconds on the clock."""
    cpu, wall = time.process_time(), clock()
    work()
    return time.process_time() - cpu, clock() - wall


if __name__ == "__main__":
    main()
