"""Tokens per second of `LLM.generate` with many short answers, against the same engine in bare steps.

    python benchmarks/throughput.py --model smollm2 --device cuda
    python benchmarks/throughput.py --requests 48 --rows 8 --budget 256 --bare-steps 8        # a CPU, to try the script

Requests stop at EOS, a few dozen tokens each; `rows` run at once. Bare steps: so many sequences that do not end, in
`Engine.step` alone, timed in the same process. Both with greedy decoding, then with a seed and top-p for each request.
Counted besides: what was compiled or captured after start-up, which should be nothing, and the time of the start.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from common import finish

from paceline import LLM, SamplingParams
from paceline.engine.engine import Engine

FORMS = (
    "In two sentences: what is {}?",
    "Name two facts about {}.",
    "Say in two or three sentences why {} matters.",
    "Write the first two sentences of a story about {}.",
)
NOUNS = (
    *("bread", "rain", "chess", "the moon", "coffee", "a lighthouse", "jazz", "a bicycle", "glass", "salt", "a map"),
    *(
        "honey",
        "a clock",
        "snow",
        "paper",
        "a bridge",
        "tea",
        "a violin",
        "wool",
        "a river",
        "ink",
        "a volcano",
        "rice",
    ),
)
MOST_TOKENS = 128


def sampling(kind: str, count: int) -> list[SamplingParams]:
    if kind == "greedy":
        return [SamplingParams(temperature=0, max_tokens=MOST_TOKENS)] * count
    return [SamplingParams(temperature=0.7, top_p=0.9, seed=i, max_tokens=MOST_TOKENS) for i in range(count)]


def bare_rate(llm: LLM, prompts: list[list[int]], kind: str, steps: int) -> float:
    """Tokens per second of `Engine.step` alone, all rows decoding."""
    params = [
        SamplingParams(
            temperature=one.temperature, top_p=one.top_p, seed=one.seed, ignore_eos=True, max_tokens=4 * steps + 64
        ).resolve({})
        for one in sampling(kind, len(prompts))
    ]

    def run(engine: Engine) -> float:
        sequences = [
            engine.add_request(f"bare-{i}", prompt, wanted)[0]
            for i, (prompt, wanted) in enumerate(zip(prompts, params, strict=True))
        ]
        while any(sequence.num_output == 0 for sequence in sequences):
            engine.step()
        for _ in range(4):
            engine.step()
        rates = []
        for _ in range(3):
            before, started = sum(sequence.num_output for sequence in sequences), time.perf_counter()
            for _ in range(steps):
                engine.step()
            tokens = sum(sequence.num_output for sequence in sequences) - before
            rates.append(tokens / (time.perf_counter() - started))
        for sequence in sequences:
            engine.cancel(sequence.request_id)
        return statistics.median(rates)

    return llm.call(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a pass")
    parser.add_argument("--bare-steps", type=int, default=60)
    parser.add_argument("--method", default="none")
    parser.add_argument("--kinds", nargs="+", default=["greedy", "seeded"])
    args = parser.parse_args()
    llm = LLM(
        args.model,
        device=args.device,
        method=args.method,
        max_num_seqs=args.rows,
        max_num_batched_tokens=args.max_nodes,
        max_model_len=1024,
    )
    print(f"start-up {llm.load_s:.1f} s", flush=True)
    texts = [FORMS[i % len(FORMS)].format(NOUNS[i % len(NOUNS)]) + " " * (i // 92 % 3) for i in range(args.requests)]
    prompts = [llm.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    result: dict[str, Any] = {"startup_s": llm.load_s, "requests": args.requests, "rows": args.rows}
    for kind in args.kinds:
        bare = bare_rate(llm, prompts[: args.rows], kind, args.bare_steps)
        before = llm.call(lambda engine: engine.stats.late_captures)
        rates = []
        for _ in range(2):
            steps = llm.call(lambda engine: engine.stats.num_steps)
            started = time.perf_counter()
            answers = llm.generate(prompts, sampling(kind, len(prompts)))
            seconds = time.perf_counter() - started
            tokens = sum(len(one.outputs[0].token_ids) for one in answers)
            rates.append(tokens / seconds)
            steps = llm.call(lambda engine: engine.stats.num_steps) - steps
            print(
                f"   {kind}: {steps} steps of {1e3 * seconds / steps:.2f} ms, {tokens / steps:.0f} tokens each",
                flush=True,
            )
        ended = sum(one.outputs[0].finish_reason == "stop" for one in answers)
        late = llm.call(lambda engine: engine.stats.late_captures) - before
        result[kind] = {
            "bare": bare,
            "generate": max(rates),
            "first": rates[0],
            "share": max(rates) / bare,
            "tokens": tokens / len(answers),
            "stopped": ended / len(answers),
            "captured_late": late,
        }
        print(
            f"{kind}: bare {bare:,.0f} tok/s, generate {rates[0]:,.0f} then {rates[1]:,.0f} "
            f"({max(rates) / bare:.2f}x), {tokens / len(answers):.0f} tokens each, "
            f"{ended / len(answers):.0%} stopped, {late} captured or compiled meanwhile",
            flush=True,
        )
    finish("throughput", result)


if __name__ == "__main__":
    main()
