"""Plain answers of a model, and where a draft model beside it would be right: the recordings that `replay` reads.

Greedy and seeded answers have equal tokens under any draft, so a recording decides what each draft would have gained.
Of a draft model the rank of the answer's token among its choices is kept for each position, one character each: 0 the
likeliest (of a seeded answer: the token drawn with the request's own noise), a to z the ranks from 10, '.' beyond.
Token ids are renumbered in order of appearance, so a recording holds no text.

    python -m benchmarks.policy.record smollm2.json --prompts mt_bench.jsonl gsm8k.jsonl --copying
    python -m benchmarks.policy.record pair.json --model FILE --draft FILE --activations int8 --tokens 224 --first 8 \\
        --categories code qa math_reasoning summarization --prompts spec_bench.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import COPYING, finish, prompts_of
from benchmarks.speculation import Configuration
from paceline import SamplingParams
from paceline.core.sequence import Sequence
from paceline.models.kv_cache import KVCache, slots_of
from paceline.models.load.hub import resolve
from paceline.models.load.open_model import LoadedModel, load_model
from paceline.models.plan import PassPlan
from paceline.verify import Nodes, propose
from paceline.verify.metadata import SamplingMetadataBuilder

TOGETHER = 16  # prompts answered in one batch
RANKS = "0123456789abcdefghijklmnopqrstuvwxyz"
BLOCK = 16  # slots of a block in the draft model's cache


def conversations(paths: Iterable[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return prompts, each with the name of its file."""
    prompts = []
    for path in (*paths, *([str(COPYING)] if args.copying else [])):
        each = [{**one, "file": Path(path).stem} for one in prompts_of([path], args.first)]
        prompts += [one for one in each if not args.categories or one["category"] in args.categories]
    return prompts


def answers(loaded: LoadedModel, prompts: list[dict[str, Any]], params: SamplingParams) -> list[dict[str, Any]]:
    """Return records of plain answers, of every turn of the conversations."""
    plain, tokenizer, records = Configuration(loaded, "none", None), loaded.tokenizer, list[dict[str, Any]]()
    for start in range(0, len(prompts), TOGETHER):
        group = prompts[start : start + TOGETHER]
        talks: list[list[dict[str, str]]] = [[] for _ in group]
        for turn in range(max(len(prompt["turns"]) for prompt in group)):
            going = [at for at, prompt in enumerate(group) if turn < len(prompt["turns"])]
            for at in going:
                talks[at].append({"role": "user", "content": group[at]["turns"][turn]})
            asked = [tokenizer.apply_chat_template(talks[at]) for at in going]
            for at, prompt, answer in zip(going, asked, plain.answer(asked, params), strict=True):
                talks[at].append({"role": "assistant", "content": tokenizer.decode(answer)})
                names = {name: group[at][name] for name in ("file", "category")}
                records.append({**names, "sampled": not params.greedy, "prompt": prompt, "answer": answer})
            print(f"{len(records)} answers", flush=True)
    return records


@torch.inference_mode()
def ranks(draft: LoadedModel, one: dict[str, Any], params: SamplingParams) -> str:
    """Return the rank of each answer token among the draft model's choices behind the tokens before it."""
    tokens, first = [*one["prompt"], *one["answer"]], len(one["prompt"])
    model, rows = draft.decoder, len(one["answer"])
    blocks = -(-len(tokens) // BLOCK)
    cache = KVCache(
        model.kv_specs, num_blocks=blocks, block_size=BLOCK, dtype=model.cache_dtype, device=torch.device("cpu")
    )
    positions, tables = torch.arange(len(tokens) - 1), torch.arange(blocks)[None].to(torch.int32)
    owners = torch.zeros_like(positions)
    slots = slots_of(tables, owners, positions, BLOCK)
    plan = PassPlan.in_order(positions, slots, owners, tables, BLOCK, len(tokens))
    logits = model.forward(torch.tensor(tokens[:-1]), plan, cache.layers, positions[first - 1 :]).logits
    if params.greedy:
        answer = torch.tensor(one["answer"])[:, None]
        above = (logits > logits.gather(1, answer)).sum(1).tolist()
        return "".join(RANKS[rank] if rank < len(RANKS) else "." for rank in above)
    prefixes = [Sequence(str(at), tokens[: first + at], params, max_len=len(tokens) + 1) for at in range(rows)]
    for prefix in prefixes:
        prefix.num_prompt = first
    builder = SamplingMetadataBuilder(draft.config.vocab_size, frozenset(), torch.device("cpu"))
    metadata, draws = builder.build(builder.params(prefixes))
    roots = torch.full((rows,), -1)
    nodes = Nodes(seq=torch.arange(rows), node=roots, depth=roots + 1, path=torch.empty(rows, 0, dtype=torch.long))
    drawn, _ = propose(logits, metadata, draws, nodes)
    return "".join("0" if token == target else "." for token, target in zip(drawn.tolist(), one["answer"], strict=True))


def renumbered(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number the token ids of all records in order of appearance."""
    number: dict[int, int] = {}

    def shorter(tokens: list[int]) -> list[int]:
        return [number.setdefault(token, len(number)) for token in tokens]

    return [{**one, "prompt": shorter(one["prompt"]), "answer": shorter(one["answer"])} for one in records]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", nargs="*", default=[])
    parser.add_argument("--copying", action="store_true", help="the copying prompts of this folder too")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", help="a draft model of the model's vocabulary")
    parser.add_argument("--activations", default="float32")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer, at most")
    parser.add_argument("--first", type=int, help="prompts of each category")
    parser.add_argument("--categories", nargs="*")
    args = parser.parse_args()
    prompts = conversations(args.prompts, args)
    if not prompts:
        parser.error("no prompt is left; name files of prompts, or --copying")
    kind = "int8" if args.activations == "int8" else "float32"
    loaded = load_model(resolve(args.model), dtype="auto", device="cpu", activations=kind)
    draft = load_model(resolve(args.draft), device="cpu", activations="int8") if args.draft else None
    records: list[dict[str, Any]] = []
    for temperature in args.temperature:
        params = SamplingParams(temperature=temperature, max_tokens=args.tokens)
        params = (replace(params, seed=args.seed) if temperature else params).resolve({})
        for one in answers(loaded, prompts, params):
            records.append(one if draft is None else {**one, "ranks": ranks(draft, one, params)})
    lines = (json.dumps(one, separators=(",", ":")) for one in renumbered(records))
    args.out.write_text("\n".join(itertools.chain(lines, [""])))
    finish("policy_record", {"records": len(records), "bytes": args.out.stat().st_size})


if __name__ == "__main__":
    main()
