"""Continuous batching: 16 requests at once against one, and the engine's own time per step.

64 tokens each, EOS ignored so that the batch stays full. The engine's own time (everything but the model) is the median
over steps that only decode; speeds include the prompts.

    python benchmarks/batching.py [--rounds 5] [--method ngram --k 4] [--dtype auto --activations int8]
"""

from __future__ import annotations

import argparse
import statistics

from common import finish, interleaved, ratio

from paceline import LLM, SamplingParams

TOKENS = 64
TOPICS = ["rivers", "clocks", "bread", "chess", "violins", "comets", "moss", "trains"]
TOPICS += ["lenses", "salt", "kites", "maps", "bees", "glass", "tides", "ink"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--method", default="none")
    parser.add_argument("--k", type=int)
    parser.add_argument("--dtype", default="float32", help="auto keeps the blocks of the file")
    parser.add_argument("--activations", default="float32")
    args = parser.parse_args()
    rounds = args.rounds

    stored = {"dtype": args.dtype, "activations": args.activations}
    llm = LLM("smollm2", device="cpu", method=args.method, k=args.k, prefix_caching=False, **stored)
    conversations = [[{"role": "user", "content": f"Tell me something about {topic}."}] for topic in TOPICS]
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=TOKENS, ignore_eos=True)
    overhead: dict[str, list[float]] = {}

    def work(name: str, rows: int, params: SamplingParams) -> None:
        engine, stats = llm.engine, llm.engine.stats
        resolved = params.resolve(llm.loaded.generation_defaults)
        for index, messages in enumerate(conversations[:rows]):
            engine.add_request(str(index), llm.tokenizer.apply_chat_template(messages), resolved)
        while engine.has_work:
            decoding = all(sequence.decoding for sequence in engine.scheduler.sequences())
            before = stats.overhead_s
            engine.step()
            if decoding:
                overhead.setdefault(name, []).append(1e3 * (stats.overhead_s - before))

    works = {
        f"{rows} {kind}": (lambda rows=rows, kind=kind, params=params: work(f"{rows} {kind}", rows, params))
        for kind, params in (("greedy", greedy), ("sampled", sampled))
        for rows in (1, 16)
    }
    times = interleaved(works, rounds)
    speed = {name: [int(name.split()[0]) * TOKENS / seconds for seconds in values] for name, values in times.items()}
    gain = ratio(speed["16 greedy"], speed["1 greedy"])
    per_step = {name: statistics.median(values) for name, values in overhead.items()}
    for name in times:
        print(f"{name:12} {statistics.median(speed[name]):7.1f} tok/s   engine {per_step[name]:.2f} ms a step")
    print(f"16 at once against one: {gain['median']:.2f}x [{gain['low']:.2f}, {gain['high']:.2f}]  (goal 5x)")
    print("goals, ms at 1 and 16 rows: plain greedy 0.7 and 2; drafting, greedy 1 and 3, sampled 3 and 12")
    finish(
        "batching",
        {
            "kernels": llm.kernels_name,
            "method": args.method,
            "k": args.k,
            "tokens_per_second": {name: statistics.median(values) for name, values in speed.items()},
            "gain_16_over_1": gain,
            "engine_ms_per_step": per_step,
            "rounds": rounds,
        },
    )


if __name__ == "__main__":
    main()
