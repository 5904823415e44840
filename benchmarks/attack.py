"""Hostile inputs in numbers that tests have no time for: mutated files, chat templates, grammars.

    python -m benchmarks.attack [--files 10000] [--grammars 500] [--seed 0] [files | templates | grammars ...]

Each part reports how many inputs were refused, and the longest times. A part fails, with exit status 1, where an input
ends the process, raises anything but a PacelineError, or takes longer than its bound. Mutated files are read in
processes of their own, so that a crash is seen and counted.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import ROOT, finish
from paceline.errors import PacelineError
from paceline.models.load.hub import resolve
from paceline.models.load.loader import load_config
from paceline.text import chat_template
from paceline.text.chat_template import ChatTemplate
from paceline.text.grammar import Grammars
from paceline.text.tokenizer import Tokenizer
from tests.helpers.hostile_grammars import follow, hostile_grammars
from tests.helpers.hostile_templates import HOSTILE_TEMPLATES
from tests.helpers.mutated_files import mutated

PARTS = ("files", "templates", "grammars")
BATCH = 500  # files of one process
FILE_S, TEMPLATE_S, MASK_S, COMPILE_S = 5.0, 20.0, 0.2, 1.0  # bounds, of processor time but for templates
STEPS = 40  # tokens of a random text of a grammar


def grammars(count: int, seed: int) -> dict[str, Any]:
    """Follow a random text of each grammar; a mask is that of one token."""
    path, rng = resolve("smollm2"), random.Random(seed)
    tokenizer, config = Tokenizer.from_path(path), load_config(path)
    compiler = Grammars(tokenizer, config.vocab_size, config.eos_token_ids)
    outcomes, compile_s, mask_s = Counter[str](), 0.0, 0.0
    for wanted in hostile_grammars(count, seed):
        followed = follow(compiler, wanted, rng, STEPS)
        outcomes[followed.outcome] += 1
        compile_s, mask_s = max(compile_s, followed.compile_s), max(mask_s, followed.mask_s)
    print(f"grammars: {dict(outcomes)}, longest mask {mask_s:.3f} s, longest compilation {compile_s:.3f} s")
    fits = mask_s < MASK_S and compile_s < COMPILE_S
    return {**outcomes, "mask_s": round(mask_s, 4), "compile_s": round(compile_s, 4), "fits": fits}


def templates() -> dict[str, Any]:
    longest, rendered = 0.0, 0
    for source in HOSTILE_TEMPLATES.values():
        began = time.monotonic()
        try:
            ChatTemplate(source).render([{"role": "user", "content": "Hi"}])
            rendered += 1
        except PacelineError:
            pass
        longest = max(longest, time.monotonic() - began)
    count = len(HOSTILE_TEMPLATES)
    print(
        f"templates: {count - rendered} of {count} refused, longest {longest:.1f} s (bound {chat_template.CPU_S:g} s)"
    )
    return {"templates": count, "rendered": rendered, "longest_s": round(longest, 2), "fits": longest < TEMPLATE_S}


def files(count: int, seed: int) -> dict[str, Any]:
    """Read mutated files, half of each format, in processes of their own."""
    result = {"read": 0, "refused": 0, "wrong": 0, "crashes": 0, "longest_s": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, count, BATCH):
            command = [sys.executable, "-m", "benchmarks.attack", "--batch", str(first), "--seed", str(seed)]
            command += ["--files", str(min(BATCH, count - first)), "--folder", folder]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode or not done.stdout:
                result["crashes"] += 1
                print(f"files {first} to {first + BATCH}: exit status {done.returncode}\n{done.stderr[-2000:]}")
                continue
            read, refused, wrong, longest = done.stdout.split()[-4:]
            result["read"] += int(read)
            result["refused"] += int(refused)
            result["wrong"] += int(wrong)
            result["longest_s"] = max(result["longest_s"], float(longest))
            if int(wrong):
                print(done.stderr[-2000:])
    print(f"files: {result}")
    fits = not result["wrong"] and not result["crashes"] and result["longest_s"] < FILE_S
    return {**result, "fits": fits}


def batch(first: int, count: int, seed: int, folder: Path) -> None:
    """Read some mutated files; print the numbers of those read, refused and failed otherwise, and the longest time."""
    whole = {".safetensors": written_safetensors(folder), ".gguf": written_gguf(folder)}
    for kind in whole:
        read_whole(folder / f"whole{kind}")
    read = refused = wrong = 0
    longest = 0.0
    for at in range(first, first + count):
        rng, kind = random.Random(f"{seed}-{at}"), (".safetensors", ".gguf")[at % 2]
        path = folder / f"m{os.getpid()}{kind}"
        path.write_bytes(mutated(whole[kind], rng))
        began = time.thread_time()
        try:
            read_whole(path)
            read += 1
        except PacelineError:
            refused += 1
        except Exception as error:
            wrong += 1
            print(f"{kind} {at}: {type(error).__name__}: {error}", file=sys.stderr)
        longest = max(longest, time.thread_time() - began)
    print(read, refused, wrong, longest)


def read_whole(path: Path) -> None:
    """Read all that a load reads of a file, but for the names and shapes of a model's tensors."""
    from paceline.files.gguf import GGUFFile
    from paceline.files.safetensors_reader import SafetensorsFile
    from paceline.models.load.gguf_model import gguf_config

    if path.suffix == ".gguf":
        file = GGUFFile(path)
        for name in file.tensors:
            file.read(name)
        gguf_config(file)
        Tokenizer.from_path(path)
    else:
        tensors = SafetensorsFile(path)
        for name in tensors.headers:
            tensors.read(name)


def written_safetensors(folder: Path) -> bytes:
    import torch
    from safetensors.torch import save_file

    path = folder / "whole.safetensors"
    made = {f"model.layers.{at}.weight": torch.randn(3, at + 1).to(torch.bfloat16) for at in range(6)}
    save_file(made | {"scalar": torch.tensor(1.0), "codes": torch.arange(9)}, path, {"format": "pt", "a": "q8_0"})
    return path.read_bytes()


def written_gguf(folder: Path) -> bytes:
    import gguf

    path = folder / "whole.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([b"a", b"b", b"ab", b"<end>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges([b"a b"])
    writer.add_eos_token_id(3)
    for name in ("token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight"):
        writer.add_tensor(name, np.ones((4, 32), np.float32))
    blocks = np.zeros((4, 34), np.uint8)
    writer.add_tensor("blk.0.attn_k.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="files, templates, grammars; default: all")
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--grammars", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.batch is not None:
        batch(options.batch, options.files, options.seed, options.folder)
        return
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part is called {min(unknown)}")
    made = {
        "files": lambda: files(options.files, options.seed),
        "templates": templates,
        "grammars": lambda: grammars(options.grammars, options.seed),
    }
    results = {part: made[part]() for part in options.parts or PARTS}
    finish("attack", results)
    sys.exit(0 if all(result["fits"] for result in results.values()) else 1)


if __name__ == "__main__":
    main()
