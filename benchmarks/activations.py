"""How far int8 activations move a model: top-1 agreement and KL with float32, on prompts and on float32's own answers.

Answers are greedy, by float32 activations; both then read prompt and answer in one pass, and their next-token
distributions are compared at every position: of the prompt, and of the answer, where the model speaks itself.

    python benchmarks/activations.py --prompts mt_bench.jsonl [--max-tokens 48] [--every 1]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import finish

from paceline import LLM, SamplingParams
from paceline.bench.prompts import from_file
from paceline.models.load.hub import resolve
from paceline.models.load.open_model import load_model
from paceline.models.quant.distance import Alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model whose weights are blocks")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    talks = from_file(args.prompts)[:: args.every]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    with LLM(args.model, device="cpu", threads=args.threads) as llm:
        prompts = [llm.tokenizer.apply_chat_template(talk.messages(())) for talk in talks]
        answers = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    decoders = [
        load_model(resolve(args.model), device="cpu", threads=args.threads, activations=activations).decoder
        for activations in ("float32", "int8")
    ]
    same: dict[str, list[torch.Tensor]] = {"prompts": [], "answers": []}
    kl: dict[str, list[torch.Tensor]] = {"prompts": [], "answers": []}
    unchanged = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *answer]
        p, q = (Alone(one, len(tokens)).logits(tokens).log_softmax(-1).clone() for one in decoders)
        agree, divergence = p.argmax(-1) == q.argmax(-1), (p.exp() * (p - q)).sum(-1).clamp(min=0)
        speaks = slice(len(prompt) - 1, len(tokens) - 1)  # positions whose next token is one of the answer
        for name, part in (("prompts", slice(0, len(prompt) - 1)), ("answers", speaks)):
            same[name].append(agree[part])
            kl[name].append(divergence[part])
        unchanged += bool(agree[speaks].all())
    found = {
        name: {
            "positions": sum(map(len, same[name])),
            "top1_agreement": float(torch.cat(same[name]).double().mean()),
            "mean_kl": float(torch.cat(kl[name]).mean()),
            "max_kl": float(torch.cat(kl[name]).max()),
        }
        for name in same
    }
    for name, figures in found.items():
        print(
            f"{name}: the same likeliest token at {figures['top1_agreement']:.2%} of {figures['positions']} positions, "
            f"KL {figures['mean_kl']:.4f} on average, {figures['max_kl']:.3f} at most"
        )
    print(f"{unchanged} of {len(prompts)} greedy answers would not change")
    about = {"model": args.model, "prompts": args.prompts.name, "max_tokens": args.max_tokens}
    finish("activations", about | {"answers_unchanged": unchanged, "answers": len(prompts), "distance": found})


if __name__ == "__main__":
    main()
