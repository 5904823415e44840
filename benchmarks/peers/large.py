"""A made-up model of 1.5 billion random weights in Q4_K: tokens a second and memory, beside llama.cpp on the same file.

The file is written once, under --work, with the vocabulary of another GGUF file. What the model says means nothing;
what it costs does. Workers take turns, prompt after prompt.

    python -m benchmarks.peers.large --environments DIR --vocabulary FILE.gguf --work WORK [--prompts 3]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import finish, settle
from benchmarks.peers.configurations import Configuration
from benchmarks.peers.workers import HERE, OURS, Worker, WorkerFailed, first_cores, interpreter, surroundings
from paceline.files.gguf import GGUFFile, import_gguf

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 30, 1536, 8960, 12, 2, 128
CONTEXT = 1024
Q4_K_BYTES, Q4_K_WEIGHTS = 144, 256
STEP, LEAST = np.float16(3e-5), np.float16(2.2e-4)  # scales of 6 bits and codes of 4: weights of about 0.02 either side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, help="what environments.sh made; without it only paceline runs")
    parser.add_argument("--vocabulary", type=Path, required=True, help="a GGUF file to take the vocabulary from")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    file = args.work / "random-1.5b-q4_k.gguf"
    if not file.exists():
        write_random(file, GGUFFile(args.vocabulary))
    found, failures = measure(file, args)
    for name, figures in found.items():
        print(
            f"{name}: {figures['tokens_per_s']:.2f} tokens/s after the first, {figures['first_s']:.2f} s to the first "
            f"of {args.prompt_tokens} tokens, {figures['held_bytes'] / 1e9:.2f} GB held, "
            f"{figures['peak_bytes'] / 1e9:.2f} GB at most with the file's pages"
        )
    for name, why in failures.items():
        print(f"{name} is out: {why}")
    weights = {"parameters": parameters(GGUFFile(file)), "file_bytes": file.stat().st_size}
    asked = {name: getattr(args, name) for name in ("prompts", "prompt_tokens", "max_tokens", "threads")}
    finish("large", weights | asked | {"found": found, "failures": failures})


def contenders(file: Path) -> list[Configuration]:
    plain: dict[str, Any] = {"gguf": str(file), "precision": "Q4_K"}
    return [
        Configuration(name="paceline", peer=OURS, method="none", plain="paceline", **plain),
        Configuration(name="paceline int8", peer=OURS, method="none", plain="paceline", activations="int8", **plain),
        Configuration(name="llama.cpp", peer="llama_cpp", method="plain", plain="llama.cpp", **plain),
    ]


def measure(file: Path, args: argparse.Namespace) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    workers: dict[str, Worker] = {}
    failures: dict[str, str] = {}
    answers: dict[str, list[tuple[float, float]]] = {}  # seconds to the first token, tokens a second after it
    requests = [request(at, args) for at in range(args.prompts + 1)]  # the first warms up
    try:
        for configuration in contenders(file):
            try:
                workers[configuration.name] = start(configuration, args)
                workers[configuration.name].ready()
            except WorkerFailed as error:
                failures[configuration.name] = str(error)
        for at, asked in enumerate(requests):
            for name in [name for name in workers if name not in failures]:
                settle(list(workers.values()), args.threads)
                try:
                    reply = workers[name].ask(asked)
                except WorkerFailed as error:
                    failures[name] = str(error)
                    continue
                if at:
                    rate = (len(reply.tokens) - 1) / (reply.seconds - reply.first_s)
                    answers.setdefault(name, []).append((reply.first_s, rate))
        return {
            name: {
                "first_s": statistics.median(first for first, _ in given),
                "tokens_per_s": statistics.median(rate for _, rate in given),
                "held_bytes": workers[name].held_bytes(),
                "peak_bytes": workers[name].peak_bytes(),
            }
            for name, given in answers.items()
        }, failures
    finally:
        for worker in workers.values():
            worker.stop()


def start(configuration: Configuration, args: argparse.Namespace) -> Worker:
    job = asdict(configuration) | {"model": configuration.gguf, "threads": args.threads, "max_context": CONTEXT}
    command = [interpreter(configuration.peer, args.environments), str(HERE / f"worker_{configuration.peer}.py")]
    log = args.work / f"{configuration.name.replace(' ', '-')}.log"
    environment = surroundings(configuration.peer, args.threads, args.work / "home", args.environments)
    return Worker(configuration.name, [*command, json.dumps(job)], environment, log, first_cores(args.threads))


def request(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(seed)
    prompt = [draw.randrange(100, 40000) for _ in range(args.prompt_tokens)]
    return {"prompt": prompt, "max_tokens": args.max_tokens, "temperature": 0.0, "seed": 7, "eos": []}


# -- the file


def write_random(path: Path, vocabulary: GGUFFile) -> None:
    gguf = import_gguf()
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    for add, value in (
        (writer.add_block_count, LAYERS),
        (writer.add_context_length, 2 * CONTEXT),
        (writer.add_embedding_length, HIDDEN),
        (writer.add_feed_forward_length, INNER),
        (writer.add_head_count, HEADS),
        (writer.add_head_count_kv, KV_HEADS),
        (writer.add_key_length, HEAD),
        (writer.add_value_length, HEAD),
        (writer.add_rope_dimension_count, HEAD),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    tokens = _copy_vocabulary(writer, vocabulary)
    for name, shape in shapes(tokens).items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, dtype=np.float32))
        else:
            writer.add_tensor(name, random_blocks(name, *shape), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def _copy_vocabulary(writer: Any, file: GGUFFile) -> int:
    """Returns its size."""
    prefix, found = "tokenizer.ggml.", file.metadata
    writer.add_tokenizer_model(found[prefix + "model"])
    writer.add_tokenizer_pre(found[prefix + "pre"])
    writer.add_token_list(found[prefix + "tokens"])
    writer.add_token_types(found[prefix + "token_type"])
    writer.add_token_merges(found[prefix + "merges"])
    writer.add_bos_token_id(found[prefix + "bos_token_id"])
    writer.add_eos_token_id(found[prefix + "eos_token_id"])
    return len(found[prefix + "tokens"])


def shapes(tokens: int) -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HEADS * HEAD, HIDDEN),
        "attn_k": (KV_HEADS * HEAD, HIDDEN),
        "attn_v": (KV_HEADS * HEAD, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (tokens, HIDDEN), "output_norm.weight": (HIDDEN,)}
    return found | {f"blk.{at}.{name}.weight": shape for at in range(LAYERS) for name, shape in layer.items()}


def random_blocks(name: str, rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Any scales, minima and codes; the two halves in front keep the weights small."""
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    blocks = draw.integers(0, 256, (rows * columns // Q4_K_WEIGHTS, Q4_K_BYTES), dtype=np.uint8)
    blocks[:, :4] = np.array([STEP, LEAST]).view(np.uint8)
    return blocks.reshape(rows, -1)


def parameters(file: GGUFFile) -> int:
    return sum(int(np.prod(tensor.shape)) for tensor in file.tensors.values())


if __name__ == "__main__":
    main()
