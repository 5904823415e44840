"""The comparison with peers: workers that misbehave cost only themselves, and the figures follow from the rows.

Fake workers speak the protocol without a model. The real adapters are tried where PACELINE_PEERS names the folder that
benchmarks/peers/environments.sh made.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import compare
from benchmarks.peers.configurations import Configuration, configurations, select
from benchmarks.peers.float_gguf import write_float_gguf
from benchmarks.peers.prompts import Prompt
from benchmarks.peers.report import (
    agreement,
    faster,
    rate,
)
from benchmarks.peers.workers import HERE, OURS, Worker, WorkerFailed, cut, interpreter
from paceline.errors import UnsupportedModel
from paceline.files.gguf import GGUFFile
from paceline.models.load.gguf_model import gguf_config, gguf_names
from paceline.models.load.loader import load_config, load_weights
from paceline.platform.cpu import usable_cores
from tests.helpers.tiny import save_tiny

AUTO = "paceline auto"
EOS = 9
REQUEST = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0.0, "seed": 7, "eos": [EOS]}
FAKE = """
import json, os, sys, time
mode, answers = sys.argv[1], 0
def say(value): print(json.dumps(value), flush=True)
if mode == "no model": say({"error": "RuntimeError: no model"}); sys.exit(1)
if mode == "dead": print("cannot open shared object", file=sys.stderr); sys.exit(3)
say({"ready": {"peer": "fake", "precision": "fp32"}})
for line in sys.stdin:
    json.loads(line); answers += 1
    if answers > 1 and mode == "crash": os.kill(os.getpid(), 9)
    if answers > 1 and mode == "rubbish": print("INFO: loading", flush=True); continue
    if answers > 1 and mode == "silence": time.sleep(60)
    if answers > 1 and mode == "raises": say({"error": "ValueError: out of cache"}); continue
    tokens = {"disagree": [4, 5, 7], "words": ["a"], "empty": [], "overrun": [4, 9, 5, 5, 5, 5]}.get(mode, [4, 5, 6])
    say({"tokens": tokens, "first_s": -1.0 if mode == "liar" else 1e-6})
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """fake(mode) starts a worker that behaves that way from its second answer on; all are stopped at the end."""
    monkeypatch.setattr("benchmarks.peers.workers.GRACE_S", 0.1)
    script, started = tmp_path / "fake.py", []
    script.write_text(FAKE)

    def start(mode: str) -> Worker:
        log = tmp_path / f"{mode.replace(' ', '-')}.log"
        started.append(Worker(mode, [sys.executable, "-S", str(script), mode], os.environ, log))
        return started[-1]

    yield start
    for worker in started:
        worker.stop()


def test_a_worker_answers_what_it_is_asked(fake) -> None:
    worker = fake("good")
    assert worker.ready()["peer"] == "fake"
    reply = worker.ask(REQUEST)
    assert reply.tokens == [4, 5, 6]
    assert reply.overran == 0
    assert 0 < reply.first_s <= reply.seconds


def test_tokens_past_eos_or_the_limit_are_cut_off_and_counted_apart(fake) -> None:
    assert cut([4, EOS, 5, 5], 4, [EOS]) == [4, EOS]
    assert cut([1, 2, 3], 2, [EOS]) == [1, 2]
    worker = fake("overrun")
    worker.ready()
    reply = worker.ask(REQUEST)
    assert (reply.tokens, reply.overran) == ([4, EOS], 4)


@pytest.mark.parametrize(
    ("mode", "answers", "message"),
    [
        ("no model", -1, "RuntimeError: no model"),
        ("dead", -1, "exited with status 3: cannot open shared object"),
        ("words", 0, "without tokens"),
        ("empty", 0, "without tokens"),
        ("liar", 0, "-1.0 s to the first token"),
        ("crash", 1, "was ended by SIGKILL"),
        ("rubbish", 1, "printed what is not an answer: INFO: loading"),
        ("raises", 1, "ValueError: out of cache"),
        ("silence", 1, "said nothing for 0.3 s"),
    ],
)
def test_a_worker_that_fails_says_how_and_where_to_look(fake, mode: str, answers: int, message: str) -> None:
    """At its start (-1), at its first answer or at a later one."""
    worker = fake(mode)
    if answers >= 0:
        worker.ready()
    if answers > 0:
        worker.ask(REQUEST)
    with pytest.raises(WorkerFailed, match=message) as failure:
        worker.ready() if answers < 0 else worker.ask(REQUEST, timeout_s=0.3 if mode == "silence" else 10)
    assert str(worker.log) in str(failure.value)


# -- a run


def measured(fake, tmp_path: Path, modes: list[str], prompts: int = 5) -> compare.Measured:
    """A run over fake workers, one per mode; the first is the reference."""
    rows = compare.Measured()
    chosen = [Configuration(name=mode, peer="fake", method="plain", plain=mode) for mode in modes]
    asked = [(Prompt(name=f"copy/{at}", workload="copy", text=""), REQUEST) for at in range(prompts)]

    def launch(configuration: Configuration) -> Worker:
        if configuration.name == "missing":
            interpreter("llama_cpp", tmp_path)
        return fake(configuration.name)

    compare.measure(chosen, launch, REQUEST, asked, rows, cores=2)
    return rows


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test machine is never quiet."""
    monkeypatch.setattr(compare, "settle", lambda workers, cores: None)


@pytest.mark.usefixtures("impatient")
def test_workers_that_fail_leave_the_others_results_alone(fake, tmp_path: Path, capfd: Any) -> None:
    rows = measured(fake, tmp_path, ["good", "crash", "rubbish", "raises", "dead", "missing"])
    assert [list(row["answers"]) for row in rows.rows] == [["good"]] * 5
    assert set(rows.failures) == {"crash", "rubbish", "raises", "dead", "missing"}
    assert "missing is out: no environment for llama_cpp" in capfd.readouterr().err


@pytest.mark.usefixtures("impatient")
def test_an_answer_with_other_tokens_is_reported_as_disagreement(fake, tmp_path: Path) -> None:
    rows = measured(fake, tmp_path, ["good", "disagree", "overrun"])
    assert agreement(rows.rows, "disagree", "good") == {"same": 0, "of": 5, "differ_from": 2}
    assert agreement(rows.rows, "good", "good") == {"same": 5, "of": 5, "differ_from": None}
    assert rows.rows[0]["answers"]["overrun"]["overran"] == 4


# -- the figures


def row(name: str, foreign: float = 0.0, **answers: tuple[int, float]) -> dict[str, Any]:
    given = {
        key: {"tokens": list(range(tokens)), "seconds": seconds, "first_s": seconds / 10, "overran": 0}
        for key, (tokens, seconds) in answers.items()
    }
    return {"name": name, "workload": "copy", "greedy": True, "foreign": foreign, "answers": given}


def test_rates_and_ratios_are_those_of_all_prompts_together() -> None:
    rows = [row(str(at), plain=(50, 1.0), lookup=(100, 1.0)) for at in range(5)]
    assert rate([entry["answers"]["plain"] for entry in rows]) == pytest.approx(50.0)
    assert faster(rows, "lookup", "plain") == pytest.approx({"ratio": 2.0, "low": 2.0, "high": 2.0, "prompts": 5})


def test_the_interval_spans_what_prompts_differ_in() -> None:
    rows = [row(str(at), plain=(30, 1.0), lookup=(30, 1.0 if at % 2 else 0.25)) for at in range(10)]
    found = faster(rows, "lookup", "plain")
    assert found is not None
    assert found["ratio"] == pytest.approx(10 / 6.25)
    assert found["low"] < found["ratio"] < found["high"]


def test_ratios_come_from_prompts_that_both_answered_and_not_from_too_few() -> None:
    rows = [row(str(at), plain=(50, 1.0)) for at in range(9)] + [row("x", plain=(50, 1.0), lookup=(50, 0.1))]
    assert faster(rows, "lookup", "plain") is None


def test_answers_drawn_at_random_are_not_compared_token_for_token() -> None:
    rows = [row(str(at), one=(3, 1.0), other=(4, 1.0)) | {"greedy": at == 0} for at in range(3)]
    assert agreement(rows, "one", "other") == {"same": 0, "of": 1, "differ_from": 3}


# -- prompts and contenders


def test_every_peer_runs_plain_beside_its_speculation() -> None:
    every = configurations(8, "fp32.gguf", ("own.gguf", "Q4_1"))
    names = [configuration.name for configuration in every]
    assert len(set(names)) == len(names)
    assert all(configuration.plain in names for configuration in every)
    assert {configuration.peer for configuration in every} == {OURS, "transformers", "vllm", "llama_cpp", "openvino"}
    assert all((HERE / f"worker_{configuration.peer}.py").is_file() for configuration in every)
    with pytest.raises(SystemExit, match="no peer is called 'ollama'"):
        select(every, ["ollama"])


def test_the_float_gguf_holds_the_folders_weights_and_shape(tmp_path: Path) -> None:
    save_tiny("llama-tied", tmp_path / "model")
    write_float_gguf(tmp_path / "model", tmp_path / "model.gguf")
    config, file = load_config(tmp_path / "model"), GGUFFile(tmp_path / "model.gguf")
    found, names = gguf_config(file), gguf_names(file)
    assert (found.num_layers, found.layer.heads, found.layer.kv_heads, found.layer.rope) == (3, 6, 2, config.layer.rope)
    weights = load_weights(tmp_path / "model", config)
    assert names.keys() == weights.keys()
    placed = load_weights(tmp_path / "model.gguf", found)
    for name, weight in weights.items():
        assert torch.equal(placed[name].numbers(), weight.numbers()), name


def test_a_model_llama_cpp_would_read_differently_is_not_written(tmp_path: Path) -> None:
    save_tiny("llama3-untied", tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="without RoPE scaling"):
        write_float_gguf(tmp_path / "model", tmp_path / "model.gguf")


# -- the real adapters

PEERS = ("transformers", "llama_cpp", "vllm")


def _environments(peer: str) -> Path | None:
    if peer == OURS:
        return None
    given = os.environ.get("PACELINE_PEERS")
    if not given:
        pytest.skip("PACELINE_PEERS is not set; make peers with benchmarks/peers/environments.sh DIR and set it to DIR")
    if not (Path(given) / peer).is_dir():
        pytest.skip(f"{peer} is not installed under PACELINE_PEERS; make it with environments.sh")
    return Path(given)


REAL = [(OURS, "auto"), *((peer, method) for peer in PEERS for method in ("plain", "lookup"))]


@pytest.mark.parametrize(("peer", "method"), REAL)
def test_an_adapter_answers_as_paceline_does(peer, method, smollm2, smollm2_path, tmp_path) -> None:
    """Greedy, 12 tokens of a quotation, token for token: all multiply in fp32 with the same weights."""
    from paceline import SamplingParams

    args = argparse.Namespace(environments=_environments(peer), threads=min(2, usable_cores()))
    text = "Repeat this text word for word:\n\nThe harbour master keeps two ledgers, and reads both aloud."
    prompt = smollm2.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    [expected] = smollm2.generate(prompt, SamplingParams(temperature=0, max_tokens=12))
    gguf = tmp_path / "fp32.gguf"
    if peer == "llama_cpp":
        write_float_gguf(smollm2_path, gguf)
    configuration = next(one for one in configurations(8, str(gguf)) if (one.peer, one.method) == (peer, method))
    request = REQUEST | {"prompt": prompt, "max_tokens": 12, "eos": list(smollm2.config.eos_token_ids)}
    worker = compare.start(configuration, smollm2_path, tmp_path, args)
    try:
        assert worker.ready()["precision"].startswith("fp32")
        assert worker.ask(request).tokens == expected.outputs[0].token_ids
        sampled = worker.ask(request | {"temperature": 0.7})
        assert 1 <= len(sampled.tokens) <= 12
        assert sampled.overran == 0
        time.sleep(0.5)  # thread pools may spin for a moment after their work
        before = worker.cpu_seconds()
        time.sleep(0.5)
        assert worker.cpu_seconds() - before < 0.1, "computes while it should sleep"
    finally:
        worker.stop()


def test_workers_keep_what_libraries_print_out_of_the_conversation(tmp_path: Path) -> None:
    script = tmp_path / "noisy.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "from protocol import serve\n"
        "def load(job):\n"
        "    print('welcome'); os.write(1, b'from C\\n')\n"
        "    def answer(request, emit):\n"
        "        print('progress'); emit([1]); emit([2, 3])\n"
        "        if request['prompt'] == []: raise ValueError('nothing to read')\n"
        "    return {'peer': job['name']}, answer\n"
        "serve(load)\n"
    )
    worker = Worker("noisy", [sys.executable, str(script), json.dumps({"name": "n"})], os.environ, tmp_path / "log")
    try:
        assert worker.ready() == {"peer": "n"}
        assert worker.ask(REQUEST).tokens == [1, 2, 3]
        with pytest.raises(WorkerFailed, match="ValueError: nothing to read"):
            worker.ask(REQUEST | {"prompt": []})
        assert worker.ask(REQUEST).tokens == [1, 2, 3]
    finally:
        worker.stop()
    assert "from C" in (tmp_path / "log").read_text()
