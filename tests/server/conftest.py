"""A server on a tiny random model with smollm2's tokenizer, started once; tests talk to it over HTTP."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (smollm2_path / name).exists():
            shutil.copy(smollm2_path / name, folder / name)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    noise, hidden, inner = torch.Generator().manual_seed(0), CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {"model.embed_tokens": (CONFIG["vocab_size"], hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.{part}_proj": (rows, hidden) for part, rows in zip("qkvo", (32, 16, 16, 32), strict=True)
        }
        shapes |= {f"{at}.mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj": (hidden, inner)}
    weights = {f"{name}.weight": torch.randn(shape, generator=noise) * 0.3 for name, shape in shapes.items()}
    norms = [
        f"model.layers.{layer}.{norm}" for layer in range(2) for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    weights |= {f"{name}.weight": torch.ones(hidden) for name in (*norms, "model.norm")}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: list[str]
    _reader: threading.Thread

    @property
    def worker_pids(self) -> list[int]:
        command = ["pgrep", "-P", str(self.process.pid), "-f", "paceline.server.worker"]
        return [int(pid) for pid in subprocess.check_output(command).split()]

    @property
    def worker_pid(self) -> int:
        (pid,) = self.worker_pids
        return pid

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def metric(self, name: str) -> float:
        """The sum over its labels."""
        pattern = rf"paceline:{name}" + ("" if "{" in name else r"(\{|\s)")
        lines = [line for line in self.get("/metrics").splitlines() if re.match(pattern, line)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(30)
        self._reader.join(10)
        return code


def start_server(model: Path, *flags: str, **environment: str) -> Server:
    command = [sys.executable, "-m", "paceline", "serve", "--model", str(model), "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, **environment})
    lines: list[str] = []
    assert process.stderr is not None
    for raw in process.stderr:
        lines.append(raw.decode())
        found = re.search(r" at (http://\S+?)\"?[,}\s]", lines[-1] + " ")
        if found:
            reader = threading.Thread(target=_read, args=(process.stderr, lines), daemon=True)
            reader.start()
            return Server(process, found.group(1), lines, reader)
    process.stderr.close()
    raise AssertionError(f"the server did not start: {''.join(lines)}")


def _read(stream: IO[bytes], lines: list[str]) -> None:
    with stream:
        lines.extend(line.decode() for line in stream)


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[Server]:
    running = start_server(tiny_model, "--served-model-name", "tiny")
    yield running
    assert running.stop() == 0


def wait_until(condition, seconds: float = 20.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)
