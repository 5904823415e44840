"""`ngram` with k = 8 beside transformers' prompt lookup (8), each over its own plain decoding, on copy-heavy prompts.

Greedy, fp32, one sequence; the four runs of a prompt follow each other in an order drawn anew. EOS is respected.

    python benchmarks/prompt_lookup.py [--prompts 12] [--max-tokens 96]
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
import transformers
from common import finish, ratio
from copy_prompts import copy_prompts
from expanded import expanded_folder
from speculation import Configuration

from paceline import SamplingParams
from paceline.models.load.hub import cache_home, resolve
from paceline.models.load.open_model import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()

    loaded = load_model(resolve("smollm2"), dtype="float32", device="cpu")
    readable = expanded_folder(resolve("smollm2"), cache_home() / "expanded")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(readable, dtype=torch.float32).eval()
    engines = {name: Configuration(loaded, name, k) for name, k in (("none", None), ("ngram", 8))}
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens).resolve({})
    answers: dict[str, list[int]] = {}

    def ours(name: str, prompt: list[int]) -> float:
        started = time.perf_counter()
        _, (answers[name],), _ = engines[name].answer([prompt], params)
        return (time.perf_counter() - started) / len(answers[name])

    def theirs(name: str, prompt: list[int], **options: Any) -> float:
        ids = torch.tensor([prompt])
        started = time.perf_counter()
        with torch.inference_mode():
            out = oracle.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=args.max_tokens,
                eos_token_id=list(loaded.config.eos_token_ids),
                **options,
            )
        answers[name] = out[0, ids.shape[1] :].tolist()
        return (time.perf_counter() - started) / len(answers[name])

    works = {
        "paceline plain": lambda p: ours("none", p),
        "paceline ngram": lambda p: ours("ngram", p),
        "transformers plain": lambda p: theirs("plain", p),
        "transformers lookup": lambda p: theirs("lookup", p, prompt_lookup_num_tokens=8),
    }
    every = copy_prompts()
    chosen = every[:: max(len(every) // args.prompts, 1)][: args.prompts]
    seconds: dict[str, list[float]] = {name: [] for name in works}
    order, noise, same = list(works), random.Random(0), []
    for turn, prompt in enumerate([chosen[0], *chosen]):  # the first is answered twice, to warm up
        tokens = loaded.tokenizer.apply_chat_template([{"role": "user", "content": prompt["turns"][0]}])
        noise.shuffle(order)
        for name in order:
            taken = works[name](tokens)
            if turn:
                seconds[name].append(taken)
        same.append(len({tuple(answer) for answer in answers.values()}) == 1)

    gains = {
        "paceline": ratio(seconds["paceline plain"], seconds["paceline ngram"]),
        "transformers": ratio(seconds["transformers plain"], seconds["transformers lookup"]),
    }
    for name, times in seconds.items():
        print(f"{name:20} {len(times) / sum(times):6.1f} tok/s (mean time per token over prompts)")
    for name, gain in gains.items():
        print(f"gain of {name:13} {gain['median']:.2f}x [{gain['low']:.2f}, {gain['high']:.2f}]")
    print(f"all four answered the same in {sum(same)} of {len(same)} answers")
    per_second = {name: len(times) / sum(times) for name, times in seconds.items()}
    finish("prompt_lookup", {"gains": gains, "tokens_per_second": per_second, "same": sum(same), "of": len(same)})


if __name__ == "__main__":
    main()
