"""Plain greedy decoding of smollm2 in fp32, one sequence, 128 tokens: against the memory floor and transformers.

The floor is the time to read every weight once per token at the read bandwidth measured in the same run. Prompt, tokens
and threads are the same for both engines; rounds are interleaved.

    python benchmarks/plain_decoding.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics

import torch
import transformers
from common import finish, interleaved, ratio, read_bandwidth_probe
from expanded import expanded_folder

from paceline import LLM, SamplingParams
from paceline.models.load.hub import cache_home, resolve

TOKENS = 128
PROMPT = [{"role": "user", "content": "Explain how a bicycle stays upright."}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds

    llm = LLM("smollm2", dtype="float32", device="cpu", method="none", prefix_caching=False)
    readable = expanded_folder(resolve("smollm2"), cache_home() / "expanded")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(readable, dtype=torch.float32).eval()
    ids = torch.tensor([llm.tokenizer.apply_chat_template(PROMPT)])
    weight_bytes = 4 * sum(parameter.numel() for parameter in oracle.parameters())
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    decode_s: list[float] = []

    def ours() -> None:
        (output,) = llm.chat(PROMPT, params)
        answers["paceline"] = output.outputs[0].token_ids
        decode_s.append(output.metrics.decode_s or 0.0)

    def theirs() -> None:
        with torch.inference_mode():
            out = oracle.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
            )
        answers["transformers"] = out[0, ids.shape[1] :].tolist()

    probe, probe_bytes = read_bandwidth_probe()
    times = interleaved({"paceline": ours, "transformers": theirs, "read": probe}, rounds)
    decode_s = decode_s[-rounds:]  # the warm-up round aside
    per_token = [seconds / (TOKENS - 1) for seconds in decode_s]
    floor = [seconds * weight_bytes / probe_bytes for seconds in times["read"]]
    share = ratio(floor, per_token)
    speedup = ratio(times["transformers"], times["paceline"])
    tokens_per_second = {name: TOKENS / statistics.median(times[name]) for name in ("paceline", "transformers")}
    gigabytes = probe_bytes / statistics.median(times["read"]) / 1e9

    print(f"read bandwidth          {gigabytes:6.1f} GB/s, floor {1e3 * statistics.median(floor):.2f} ms a token")
    milliseconds = 1e3 * statistics.median(per_token)
    print(f"paceline                {tokens_per_second['paceline']:6.1f} tok/s, {milliseconds:.2f} ms a token")
    print(f"transformers            {tokens_per_second['transformers']:6.1f} tok/s")
    print(f"share of the floor      {share['median']:6.1%}  [{share['low']:.1%}, {share['high']:.1%}]  (goal 75 %)")
    print(
        f"over transformers       {speedup['median']:6.2f}x [{speedup['low']:.2f}, {speedup['high']:.2f}]  (goal 1.35x)"
    )
    print(f"same tokens             {answers['paceline'] == answers['transformers']}")
    finish(
        "plain_decoding",
        {
            "kernels": llm.kernels_name,
            "read_gb_per_s": gigabytes,
            "weight_bytes": weight_bytes,
            "ms_per_token": milliseconds,
            "tokens_per_second": tokens_per_second,
            "share_of_floor": share,
            "speedup_over_transformers": speedup,
            "same_tokens": answers["paceline"] == answers["transformers"],
            "rounds": rounds,
        },
    )


if __name__ == "__main__":
    main()
