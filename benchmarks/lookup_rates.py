"""How often lookups are right, by their evidence: plain answers to the workloads `paceline bench` ships, and to a
file of prompts, read again token by token.

The policy's first guesses (`engine/acceptance.py`) are from here, so that they know nothing of the prompts it is
measured on.

    python benchmarks/lookup_rates.py --prompts gsm8k_train.jsonl --count 12
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator

from common import finish
from speculation import Configuration, index_prompts

from paceline import SamplingParams
from paceline.bench.prompts import shipped
from paceline.config import SpeculationConfig
from paceline.core.sequence import Sequence
from paceline.drafters import METHODS, Drafter, DrafterContext, DraftRequest
from paceline.engine.policy import DEEPEST
from paceline.engine.policy.survival import bucket, first_guess
from paceline.models.load.hub import resolve
from paceline.models.load.open_model import LoadedModel, load_model

PER_WORKLOAD, TOGETHER, DEPTH = 6, 16, 8
SHOWN = (0, 1, 2, 3, 5, 7)  # positions

Cell = tuple[str, int, int]  # method, bucket of evidence, position


def asked(loaded: LoadedModel, path: str | None, count: int) -> Iterator[list[int]]:
    for prompt in shipped(per_workload=PER_WORKLOAD):
        yield loaded.tokenizer.apply_chat_template(prompt.messages([])[:1])
    for line in index_prompts([path], None)[:count] if path else ():
        yield loaded.tokenizer.apply_chat_template([{"role": "user", "content": line["turns"][0]}])


def likeliest(drafter: Drafter, sequence: Sequence) -> list[int]:
    """The tokens of a draft along the first child of the first child, and so on: siblings stand in order."""
    draft = drafter.propose([DraftRequest(sequence, DEPTH)])
    tokens, parents, path, node = draft.tokens[0].tolist(), draft.parents[0].tolist()[: int(draft.num_nodes[0])], [], -1
    while node in parents:
        node = parents.index(node)
        path.append(tokens[node])
    return path


def verify_rows(
    drafters: list[Drafter], sequence: Sequence, answer: list[int], tried: Counter[Cell], hit: Counter[Cell]
):
    """The proposal of each before every token, and how far it would have been right."""
    for at, token in enumerate(answer[:-1], start=1):
        sequence.tokens.append(token)
        for drafter in drafters:
            level, guess = bucket(drafter.level(sequence)), likeliest(drafter, sequence)
            for position, (proposed, true) in enumerate(zip(guess, answer[at:], strict=False)):
                tried[drafter.name, level, position] += 1
                if proposed != true:
                    break
                hit[drafter.name, level, position] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", help="a file as speculation.py takes it, beside the workloads")
    parser.add_argument("--count", type=int, default=12, help="of its prompts")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    args = parser.parse_args()
    loaded = load_model(resolve("smollm2"), dtype="float32", device="cpu")
    context = DrafterContext(loaded.config, loaded.decoder.device, SpeculationConfig(method="auto"))
    prompts, found = list(asked(loaded, args.prompts, args.count)), {}
    for temperature in args.temperatures:
        seed = {"seed": 11} if temperature else {}
        params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, **seed).resolve({})
        plain, drafters = (
            Configuration(loaded, "none", None),
            [METHODS[name].make(context) for name in ("ngram", "suffix")],
        )
        tried, hit = Counter[Cell](), Counter[Cell]()
        for start in range(0, len(prompts), TOGETHER):
            group = prompts[start : start + TOGETHER]
            for index, (prompt, answer) in enumerate(zip(group, plain.answer(group, params)[1], strict=True)):
                one = Sequence(f"{start + index}", prompt, params, max_len=len(prompt) + args.max_tokens)
                verify_rows(drafters, one, answer, tried, hit)
                for drafter in drafters:
                    drafter.release(one)  # unfinished, so that nothing is learned from it
        print(f"temperature {temperature}: right / tried at positions {', '.join(str(at + 1) for at in SHOWN)}")
        for method, level in sorted({key[:2] for key in tried}):
            cells = [(method, level, at) for at in SHOWN]
            rates = "  ".join(f"{hit[cell] / max(tried[cell], 1):.2f}/{tried[cell]:<4}" for cell in cells)
            print(f"  {method:<7} bucket {level} (first guess {first_guess(level)[0]:.2f}): {rates}", flush=True)
            keys = [(method, level, at) for at in range(DEEPEST) if tried[method, level, at]]
            found[f"{temperature} {method} {level}"] = [[hit[key], tried[key]] for key in keys]
    finish("lookup_rates", {"answers": len(prompts), "rates": found})


if __name__ == "__main__":
    main()
