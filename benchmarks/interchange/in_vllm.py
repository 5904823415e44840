"""Answers prompts in vLLM with a drafter, for `interchange.py`, which runs this with vLLM's own interpreter.

    python in_vllm.py TASK.json RESULT.json

The task names model, drafter, method, k, max_tokens and the prompts as token ids. The result holds the answers and how
often each position of a chain was drafted and accepted, or the error that vLLM ended with.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any


def answered(task: dict[str, Any]) -> dict[str, Any]:
    import vllm

    speculative = {"model": task["drafter"], "method": task["method"], "num_speculative_tokens": task["k"]}
    llm = vllm.LLM(
        model=task["model"],
        dtype=task["dtype"],
        max_model_len=task["max_model_len"],
        max_num_seqs=task["rows"],
        speculative_config=speculative,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        seed=0,
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=task["max_tokens"])
    prompts = [{"prompt_token_ids": prompt} for prompt in task["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found: dict[str, Any] = {"version": vllm.__version__, "drafts": 0, "accepted": []}
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            found["drafts"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["accepted"] = list(metric.values)
    return found | {"answers": [list(one.outputs[0].token_ids) for one in outputs]}


if __name__ == "__main__":
    given, result = map(Path, sys.argv[1:])
    try:
        found = answered(json.loads(given.read_text()))
    except Exception as problem:
        traceback.print_exc()
        found = {"error": f"{type(problem).__name__}: {problem}"}
    result.write_text(json.dumps(found))
