"""Passes of one model on a CPU by number of rows, with weights expanded to fp32, kept as blocks, and with int8
activations.

One sequence of 64 tokens, then passes over n further tokens with logits for every one: the shape of
verification. All decoders are in one process and take turns; minima are compared, since another process can only add
time. The logits of fp32 and blocks must have equal bits.

    python -m benchmarks.cpu_passes [--model FILE.gguf] [--rounds 12] [--one-core]
    python -m benchmarks.cpu_passes distance --prompts FILE          # other targets against float32: top-1, KL
    python -m benchmarks.cpu_passes transformers [--torch-kernels]   # plain decoding in fp32
    python -m benchmarks.cpu_passes where [--model FILE.gguf] [--lengths 200 2000] [--sizes 1 16]    # parts of a pass

`where` also runs the layers kernel by kernel, with the same tensors in the same order, and times each kernel; what the
pass in one native call takes beside them is `rest`: embedding, waiting threads, and, below zero, the calls from Python.
`--one-core` takes one thread's processor time, the only clock worth reading on a machine that others keep busy.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import harness
from benchmarks.harness import expanded_folder, finish, interleaved, ratio, shown, timed
from paceline import LLM, SamplingParams

if TYPE_CHECKING:
    from paceline.models.plan import PassPlan

SIZES, CONTEXT, PROMPT, BLOCK = (1, 4, 8, 16), 64, 256, 16
MODES: dict[str, dict[str, Any]] = {"fp32": {"dtype": "float32"}, "blocks": {}, "int8": {"activations": "int8"}}
TEXT = "A bicycle that leans to the left is steered to the left, and the road pushes its wheels back under the rider. "
TARGETS: dict[str, dict[str, str]] = {  # other than float32 activations and K/V
    "int8 activations": {"activations": "int8"},
    "bfloat16 K/V": {"kv_dtype": "bfloat16"},
    "int8 K/V": {"kv_dtype": "int8"},
}
LENGTHS = {"short": 8, "long": 421}  # tokens of the prompts that transformers answers too


class Passes:
    """A decoder and its cache."""

    def __init__(self, path: Path, threads: int | None, options: dict[str, Any], context: int = CONTEXT) -> None:
        from paceline.models.kv_cache import KVCache
        from paceline.models.load.open_model import load_model

        self.decoder, self.context = load_model(path, device="cpu", threads=threads, **options).decoder, context
        self.num_blocks = (context + PROMPT) // BLOCK + 1
        self.cache = KVCache(
            self.decoder.kv_specs,
            num_blocks=self.num_blocks,
            block_size=BLOCK,
            dtype=self.decoder.cache_dtype,
            device=self.decoder.device,
        )
        self.run(0, context, 1)

    def plan(self, first: int, count: int) -> PassPlan:
        from paceline.models.plan import PassPlan

        positions = torch.arange(first, first + count, dtype=torch.int32)
        blocks = torch.arange(self.num_blocks, dtype=torch.int32)[None]
        return PassPlan.in_order(positions, positions, torch.zeros_like(positions), blocks, BLOCK, first + count)

    @torch.inference_mode()
    def run(self, first: int, count: int, rows: int) -> torch.Tensor:
        tokens = torch.arange(count) * 37 % self.decoder.config.vocab_size
        return self.decoder.forward(tokens, self.plan(first, count), self.cache.layers, torch.arange(rows)).logits

    @torch.inference_mode()
    def parts(self, first: int, count: int) -> dict[str, float]:
        """Run a pass kernel by kernel; return the seconds of each kind of kernel."""
        from paceline.models.backends.cpu.weights import PackedWeight
        from paceline.models.kernels import LayerByLayer

        decoder, kernels, spent = self.decoder, self.decoder.kernels, Counter[str]()

        def on(name: str, kernel: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
            started = time.perf_counter()
            out = kernel(*args)
            spent[name] += time.perf_counter() - started
            return out

        def linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
            head, rounds, at, outs = "head, " if weight is decoder.head else "", bool(weight.view.rounds), 0, []
            for part in weight.parts:
                bias = None if weight.bias is None else weight.bias[at : at + part.shape[0]]
                at += part.shape[0]
                outs.append(on(head + part.kind.name, kernels.linear, x, PackedWeight.of((part,), bias, rounds)))
            return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

        class Timed:
            def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
                part = name if name == "attention" else "norms, rotation, SiLU"
                return linear if name == "linear" else lambda *args: on(part, getattr(kernels, name), *args)

        plan, each = self.plan(first, count), Timed()
        shape = decoder.shape(plan.max_len)
        residual = decoder.embedding[torch.arange(count) * 37 % decoder.config.vocab_size].clone()
        stack = LayerByLayer(each, decoder.layers, self.cache.layers, shape)
        added = stack.run(0, len(decoder.layers), None, residual, plan)
        linear(each.add_rms_norm(added, residual, decoder.final_norm, shape.eps), decoder.head)
        return spent

    def work(self, count: int) -> Callable[[], torch.Tensor]:
        rows = 1 if count == PROMPT else count
        return lambda: self.run(self.context, count, rows)


def passes(args: argparse.Namespace) -> None:
    from paceline.models.load.hub import resolve

    path = resolve(args.model)
    modes = {name: Passes(path, 1 if args.one_core else None, options) for name, options in MODES.items()}
    torch.set_num_threads(1)  # torch's; the kernels have threads of their own
    same = all(torch.equal(modes["fp32"].run(CONTEXT, n, n), modes["blocks"].run(CONTEXT, n, n)) for n in SIZES)
    times = interleaved(
        {f"{name} {n}": each.work(n) for name, each in modes.items() for n in SIZES}, args.rounds, warmup=2
    )
    prompts = interleaved({name: each.work(PROMPT) for name, each in modes.items()}, 3)
    least = {name: {n: 1e3 * min(times[f"{name} {n}"]) for n in SIZES} for name in modes}
    print(f"milliseconds of a pass, the least of {args.rounds}")
    print("rows    " + "".join(f"{n:>8}" for n in (*SIZES, PROMPT)))
    for name in modes:
        print(f"{name:8}" + "".join(f"{ms:8.2f}" for ms in (*least[name].values(), 1e3 * min(prompts[name]))))
    result = {
        "model": args.model,
        "kernels": modes["blocks"].decoder.kernels.name,
        "ms": least,
        "prompt_ms": {name: 1e3 * min(seconds) for name, seconds in prompts.items()},
        "clock": "processor time of one thread" if args.one_core else "wall",
        "blocks_are_fp32_bits": same,
        "rounds": args.rounds,
    }
    finish("cpu_passes", result)


def where(args: argparse.Namespace) -> None:
    """Print the parts of a pass: the median of each kernel's milliseconds."""
    from paceline.models.load.hub import resolve

    table: dict[str, dict[str, float]] = {}
    for activations, length in itertools.product(args.activations, args.lengths):
        threads = 1 if args.one_core else None
        each = Passes(resolve(args.model), threads, {"activations": activations}, length)
        for size in args.sizes:
            runs = [(each.parts(length, size), timed(each.work(size))) for _ in range(args.rounds + 1)][1:]
            ms = {part: 1e3 * statistics.median(parts[part] for parts, _ in runs) for part in runs[0][0]}
            whole = 1e3 * statistics.median(seconds for _, seconds in runs)
            ms |= {"rest": whole - sum(ms.values()), "pass": whole}
            name = f"{activations}, {size} rows behind {length} tokens"
            table[name] = ms
            print(f"{name}: " + ", ".join(f"{part} {value:.2f}" for part, value in ms.items()), flush=True)
    finish("pass_parts", {"model": args.model, "rounds": args.rounds, "ms": table})


def distance(args: argparse.Namespace) -> None:
    """Compare next-token distributions at every position: of prompts, and of greedy answers of float32 activations."""
    from paceline.bench.prompts import from_file
    from paceline.models.load.hub import resolve
    from paceline.models.load.open_model import load_model

    talks = from_file(args.prompts)
    with LLM(args.model, device="cpu") as llm:
        prompts = [llm.tokenizer.apply_chat_template(talk.messages(())) for talk in talks]
        params = SamplingParams(temperature=0, max_tokens=48)
        answers = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    path, result = resolve(args.model), {}
    for name, options in TARGETS.items():
        decoders = [load_model(path, device="cpu", **each).decoder for each in ({}, options)]
        result[name] = compared(name, decoders, prompts, answers)
    finish("target_distance", {"model": args.model, "prompts": args.prompts.name, "targets": result})


def compared(name: str, decoders: list[Any], prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Any]:
    """Compare two decoders' next-token distributions: KL(first || second) and the likeliest token."""
    from paceline.models.quant.distance import Alone

    parts: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"prompts": [], "answers": []}
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *answer]
        p, q = (Alone(each, len(tokens)).logits(tokens).log_softmax(-1).clone() for each in decoders)
        agree, kl = p.argmax(-1) == q.argmax(-1), (p.exp() * (p - q)).sum(-1).clamp(min=0)
        start = len(prompt) - 1
        parts["prompts"].append((agree[:start], kl[:start]))
        parts["answers"].append((agree[start:-1], kl[start:-1]))
    result: dict[str, Any] = {"unchanged": sum(bool(agree.all()) for agree, _ in parts["answers"]), "of": len(prompts)}
    for part, pairs in parts.items():
        agree, kl = (torch.cat(column) for column in zip(*pairs, strict=True))
        result[part] = {
            "positions": len(agree),
            "top1_agreement": float(agree.double().mean()),
            "mean_kl": float(kl.mean()),
            "max_kl": float(kl.max()),
        }
        print(f"{name}, {part}: {result[part]}")
    print(f"{name}: {result['unchanged']} of {result['of']} greedy answers would not change")
    return result


def beside_transformers(args: argparse.Namespace) -> None:
    """Plain greedy decoding in fp32 beside transformers' `generate`."""
    if args.torch_kernels:
        os.environ["PACELINE_KERNELS"] = "torch"  # read when the model is opened
    import transformers

    from paceline.models.load.hub import resolve
    from paceline.models.load.store import cache_home

    options: dict[str, Any] = {"threads": 1} if args.one_core else {}
    llm = LLM(args.model, dtype="float32", device="cpu", method="none", prefix_caching=False, **options)
    folder = expanded_folder(resolve(args.model), cache_home() / "expanded")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, text = 64, llm.tokenizer.encode(TEXT * 40)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    answers: dict[str, list[int]] = {}

    def ours(prompt: list[int]) -> None:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
        answers["paceline"] = output.outputs[0].token_ids

    @torch.inference_mode()
    def theirs(prompt: list[int]) -> None:
        ids = torch.tensor([prompt])
        mask, counts = torch.ones_like(ids), {"max_new_tokens": tokens, "min_new_tokens": tokens}
        answers["transformers"] = oracle.generate(ids, attention_mask=mask, do_sample=False, **counts)[0].tolist()
        answers["transformers"] = answers["transformers"][len(prompt) :]

    result: dict[str, Any] = {"kernels": llm.kernels_name, "tokens": tokens}
    for name, length in LENGTHS.items():
        prompt = text[:length]
        works = {"paceline": lambda p=prompt: ours(p), "transformers": lambda p=prompt: theirs(p)}
        times = interleaved(works, args.rounds)
        result[name] = {
            "over_transformers": ratio(times["transformers"], times["paceline"]),
            "tokens_per_second": tokens / statistics.median(times["paceline"]),
            "same_tokens": answers["paceline"] == answers["transformers"],
        }
        print(f"prompt of {length} tokens, same tokens {result[name]['same_tokens']}:")
        print(f"  {shown(result[name]['over_transformers'])} of transformers' rate")
    finish("beside_transformers", result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="passes", choices=("passes", "distance", "transformers", "where"))
    parser.add_argument("--model", default="smollm2", help="a model whose weights are blocks")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--one-core", action="store_true")
    parser.add_argument("--prompts", type=Path, help="of distance")
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 2000], help="of where: tokens before the pass")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1], help="of where: rows of the pass")
    parser.add_argument("--activations", nargs="+", default=["float32", "int8"], help="of where")
    parser.add_argument("--torch-kernels", action="store_true", help="of transformers: without native kernels")
    args = parser.parse_args()
    if args.one_core:
        harness.clock = time.thread_time
    {"passes": passes, "distance": distance, "transformers": beside_transformers, "where": where}[args.what](args)


if __name__ == "__main__":
    main()
