"""Does an exported drafter do in vLLM what it does here? Acceptance by position of the same chains, both greedy.

    python -m benchmarks.interchange.interchange --drafter DIR --vllm-python VENV/bin/python --prompts mt_bench.jsonl
    python -m benchmarks.interchange.interchange --speculators-python VENV/bin/python         # the reverse

The folder is exported (`--format`); the export is loaded here and in vLLM; both answer the same prompts in fp32 with
chains of k tokens. Where vLLM's build cannot run a method its error is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.harness import Answers, finish, prompts_of
from paceline import build
from paceline.config import EngineConfig, SpeculationConfig
from paceline.core.sequence import Sequence
from paceline.drafters.base import DraftRequest
from paceline.drafters.block import checkpoint as dspark_checkpoint
from paceline.drafters.block.drafter import DSparkDrafter, draft_ids
from paceline.drafters.eagle.checkpoint import read
from paceline.drafters.eagle.layer import EagleLayer
from paceline.drafters.hidden_states import TapBatch
from paceline.drafters.methods import METHODS
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan, FixedPolicy
from paceline.models.backends.torch import TorchKernels
from paceline.models.kv_cache import KVCache
from paceline.models.plan import PassPlan
from paceline.sampling_params import SamplingParams
from paceline.training.export import export, target_of

HERE = Path(__file__).parent
BLOCK = 16
# Widths of a product that this processor may compute in bf16 tiles are kept out of the comparison.
ENVIRONMENT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


class Chains(FixedPolicy):
    def __init__(self, choice: DraftPlan) -> None:
        self.choice = choice

    def plan(self, sequences: Any, *_: object) -> list[DraftPlan]:
        return [self.choice for _ in sequences]


def first_turns(path: Path, count: int, loaded: Any) -> list[list[int]]:
    """Return the first turns, as chats."""
    texts = [prompt["turns"][0] for prompt in prompts_of([str(path)])[:count]]
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts]
    return [loaded.tokenizer.encode(chat)[:256] for chat in chats]


def ours(loaded: Any, folder: Path, method: str, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    speculation = SpeculationConfig(method=method, drafter=str(folder))
    context = replace(build.drafter_context(loaded, speculation), dtype="float32")
    drafter: Any = METHODS[method].make(context)
    for chains in ("top_k", "_beam"):  # one child of each node
        if hasattr(drafter, chains):
            setattr(drafter, chains, 1)
    policy = Chains(DraftPlan(method, args.k))
    engine = Engine(loaded.decoder, EngineConfig(max_num_seqs=args.rows), drafters=[drafter], policy=policy)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens).resolve({})
    answers = Answers(engine, prompts, params).finished()
    assert engine.drafters.failures == 0
    stats = answers.stats()
    counts = {"drafted": stats.drafted_per_position, "accepted": stats.accepted_per_position}
    return {"answers": answers.tokens, **{name: [*each, *[0] * args.k][: args.k] for name, each in counts.items()}}


def theirs(folder: Path, method: str, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    task = {
        "model": str(build.resolve(args.model)),
        "drafter": str(folder),
        "method": method,
        "k": args.k,
        "dtype": "float32",
        "max_model_len": 1024,
        "rows": args.rows,
        "max_tokens": args.max_tokens,
        "prompts": prompts,
    }
    with tempfile.TemporaryDirectory() as work:
        given, result = Path(work) / "task.json", Path(work) / "result.json"
        given.write_text(json.dumps(task))
        command = [args.vllm_python, str(HERE / "in_vllm.py"), str(given), str(result)]
        ended = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, stdout=sys.stderr, check=False)
        if not result.exists():
            return {"error": f"vLLM ended with exit code {ended.returncode}"}
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def compare(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / f"exported-{args.format}"
        method = export(args.drafter, args.format, out, target_of(args.model))
        loaded = build.load(args.model, dtype="float32").loaded
        prompts = first_turns(args.prompts, args.count, loaded)
        here = ours(loaded, out, method, prompts, args)
        found: dict[str, Any] = {"method": method, "format": args.format, "k": args.k, "prompts": len(prompts)}
        found["ours"] = rates(here["accepted"], here["drafted"])
        if args.vllm_python is None:
            return found
        there = theirs(out, method, prompts, args)
        if "error" in there:
            return found | {"vllm_error": there["error"]}
        found |= {"vllm_version": there["version"], "vllm": rates(there["accepted"], [there["drafts"]] * args.k)}
        found["drafts"] = {"ours": here["drafted"][0], "vllm": there["drafts"]}
        found["same_answers"] = sum(a == b for a, b in zip(here["answers"], there["answers"], strict=True))
        found["largest_difference"] = max(abs(a - b) for a, b in zip(found["ours"], found["vllm"], strict=True))
        return found


def rates(accepted: list[int], drafted: list[int]) -> list[float]:
    return [round(a / max(b, 1), 4) for a, b in zip(accepted, drafted, strict=True)]


def reverse(python: str) -> dict[str, Any]:
    """Heads written by the speculators library's own classes, loaded here: the largest difference of the EAGLE-3 head's
    logits, and how many of the DSpark head's chains are the same."""
    with tempfile.TemporaryDirectory() as work:
        command = [python, str(HERE / "by_speculators.py"), work]
        subprocess.run(command, stdout=sys.stderr, check=True)
        return reverse_eagle3(Path(work) / "eagle3") | reverse_dspark(Path(work) / "dspark")


@torch.inference_mode()
def reverse_eagle3(folder: Path) -> dict[str, Any]:
    expected = load_file(folder / "expected.bin")
    config, tensors = read(folder)
    target = config.body.of_depth(6)
    layer = EagleLayer(config, tensors, target, TorchKernels(), device=torch.device("cpu"))
    size = len(expected["tokens"])
    layer.bind(size)
    cache = KVCache([layer.kv_spec], num_blocks=size, block_size=1, dtype=torch.float32, device=layer.device)
    at = torch.arange(size)
    plan = PassPlan.in_order(at, at, torch.zeros_like(at), at[None].int(), 1, size)
    features = layer.fuse(expected["taps"].view(size, config.num_taps, -1))
    logits = layer.read(layer.run(expected["tokens"], features, plan, cache.layers[0]))[0]
    worst = float((logits - expected["logits"]).abs().max())
    return {"eagle3_largest_difference": worst, "eagle3_largest_logit": float(expected["logits"].abs().max())}


@torch.inference_mode()
def reverse_dspark(folder: Path) -> dict[str, Any]:
    expected = load_file(folder / "expected.bin")
    config, tensors = dspark_checkpoint.read(folder)
    head = expected["embedding"][draft_ids(config, tensors)]
    drafter: Any = DSparkDrafter(config, tensors, embedding=expected["embedding"], head=head, beam=1)
    cache = KVCache(drafter.kv_layers, num_blocks=8, block_size=BLOCK, dtype=torch.float32, device=drafter.device)
    drafter.bind(cache.layers, BLOCK)
    size, same = len(expected["tokens"]), 0
    at = torch.arange(size)
    for anchor, chain in zip(expected["anchors"].tolist(), expected["chains"].tolist(), strict=True):
        sequence = Sequence("x", expected["tokens"][: anchor + 1].tolist(), SamplingParams().resolve({}), max_len=99)
        sequence.blocks = list(range(8))
        drafter.admit(sequence, 0, anchor)
        drafter.last_tokens = lambda req_indices, lengths, anchor=anchor: expected["tokens"][anchor : anchor + 1]
        drafter.write_context_kv(
            TapBatch(expected["taps"].view(size, len(config.taps), -1), expected["tokens"], at, at, size)
        )
        nothing = torch.zeros(1, dtype=torch.int64)
        draft = drafter.draft([DraftRequest(sequence, len(chain))], nothing, nothing + anchor + 1)
        same += draft.tokens[0].tolist() == chain
    return {"dspark_chains": len(expected["chains"]), "dspark_same": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", type=Path, help="folder to export and compare")
    parser.add_argument("--format", default="speculators", help="to export it in")
    parser.add_argument("--vllm-python", help="interpreter that has vLLM; without it only ours is measured")
    parser.add_argument("--prompts", type=Path, help="jsonl with turns")
    parser.add_argument("--speculators-python", help="interpreter that has speculators: load a head that it writes")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--rows", type=int, default=8, help="sequences at once")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("-k", type=int, default=4)
    args = parser.parse_args()
    if args.speculators_python is not None:
        finish("interchange", reverse(args.speculators_python))
    elif args.drafter is None or args.prompts is None:
        parser.error("give --drafter and --prompts, or --speculators-python")
    else:
        finish("interchange", compare(args))


if __name__ == "__main__":
    main()
