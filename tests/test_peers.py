"""The comparison with peers: workers that misbehave cost only themselves, and the figures follow from the rows.

Fake workers speak the protocol without a model. The real adapters are tried where PACELINE_PEERS names the folder that
benchmarks/peers/environments.sh made.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers import compare
from benchmarks.peers.configurations import REFERENCE, Configuration, configurations, select
from benchmarks.peers.float_gguf import interleave, write_float_gguf
from benchmarks.peers.prompts import Prompt, make_prompts, read_prompts
from benchmarks.peers.quiet import Turns
from benchmarks.peers.report import (
    QUIET,
    agreement,
    beside_the_best,
    cells,
    faster,
    loops,
    rate,
    slices,
    summary,
    table,
)
from benchmarks.peers.rows import Rows
from benchmarks.peers.workers import HERE, OURS, Worker, WorkerFailed, cut, interpreter, surroundings
from paceline.errors import UnsupportedModel
from paceline.gguf_file import GGUFFile
from paceline.machine import usable_cores
from paceline.models.gguf_model import gguf_config, gguf_names, gguf_weight, uninterleave
from paceline.models.loader import load_config, load_weights
from tests.models.tiny import save_tiny

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


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="the system does not say which processes there are")
def test_a_stopped_worker_is_gone_even_if_it_does_not_listen(fake) -> None:
    worker = fake("silence")
    worker.ready()
    worker.ask(REQUEST)
    with pytest.raises(WorkerFailed):
        worker.ask(REQUEST, timeout_s=0.1)
    assert worker.peak_bytes() > 0
    worker.stop()
    assert worker.peak_bytes() == 0


def test_a_missing_environment_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"environments\.sh .* llama_cpp"):
        interpreter("llama_cpp", tmp_path)
    with pytest.raises(WorkerFailed, match="--environments"):
        interpreter("vllm", None)
    assert interpreter(OURS, None) == sys.executable


def test_peers_do_not_see_our_packages_and_all_get_the_same_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")
    assert "PYTHONPATH" not in surroundings("transformers", 2, tmp_path)
    assert surroundings(OURS, 2, tmp_path)["PYTHONPATH"] == "src"
    assert {surroundings(peer, 2, tmp_path)["OMP_NUM_THREADS"] for peer in (OURS, "vllm", "llama_cpp")} == {"2"}


# -- a run


def measured(fake, tmp_path: Path, modes: list[str], prompts: int = 5) -> Rows:
    """A run over fake workers, one per mode; the first is the reference."""
    rows = Rows(tmp_path / "rows.jsonl", {"max_tokens": 4})
    chosen = [Configuration(name=mode, peer="fake", method="plain", plain=mode) for mode in modes]
    asked = [(Prompt(name=f"copy/{at}", workload="copy", text=""), REQUEST) for at in range(prompts)]

    def launch(configuration: Configuration) -> Worker:
        if configuration.name == "missing":
            interpreter("llama_cpp", tmp_path)
        return fake(configuration.name)

    compare.measure(chosen, launch, REQUEST, asked, rows, Turns(None), cores=2)
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


@pytest.mark.usefixtures("impatient")
def test_a_run_without_any_worker_measures_nothing_and_ends(fake, tmp_path: Path) -> None:
    rows = measured(fake, tmp_path, ["dead"])
    assert rows.rows == []
    assert "dead" in rows.failures


def test_a_run_goes_on_where_its_file_ends_and_refuses_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = Rows(path, {"k": 8})
    first.add({"name": "copy/0"})
    first.fail("vllm plain", "crashed")
    first.note("paceline none", {"precision": "fp32"})
    again = Rows(path, {"k": 8})
    assert again.done == {"copy/0"}
    assert again.failures == {"vllm plain": "crashed"}
    assert again.about == {"paceline none": {"precision": "fp32"}}
    with pytest.raises(SystemExit, match=r"other settings \(k\)"):
        Rows(path, {"k": 4})
    path.write_text("{broken\n")
    with pytest.raises(SystemExit, match="not a file of rows"):
        Rows(path, {"k": 8})


def test_turns_hand_the_machine_on_after_a_while(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "lock"
    turns = Turns(path, hold_s=60)
    turns.take()
    with path.open("a") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        turns.close()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


# -- the figures


def row(name: str, foreign: float = 0.0, **answers: tuple[int, float]) -> dict[str, Any]:
    given = {
        key: {"tokens": list(range(tokens)), "seconds": seconds, "first_s": seconds / 10, "overran": 0}
        for key, (tokens, seconds) in answers.items()
    }
    return {"name": name, "workload": "copy", "greedy": True, "foreign": foreign, "answers": given}


def test_rates_and_ratios_are_those_of_all_prompts_together() -> None:
    rows = [row(str(at), plain=(10, 1.0), lookup=(20, 1.0)) for at in range(5)]
    assert rate([entry["answers"]["plain"] for entry in rows]) == pytest.approx(10.0)
    assert faster(rows, "lookup", "plain") == pytest.approx({"ratio": 2.0, "low": 2.0, "high": 2.0, "prompts": 5})


def test_the_interval_spans_what_prompts_differ_in() -> None:
    rows = [row(str(at), plain=(10, 1.0), lookup=(10, 1.0 if at % 2 else 0.25)) for at in range(10)]
    found = faster(rows, "lookup", "plain")
    assert found is not None
    assert found["ratio"] == pytest.approx(10 / 6.25)
    assert found["low"] < found["ratio"] < found["high"]


def test_ratios_come_from_prompts_that_both_answered_and_not_from_too_few() -> None:
    rows = [row(str(at), plain=(10, 1.0)) for at in range(9)] + [row("x", plain=(10, 1.0), lookup=(10, 0.1))]
    assert faster(rows, "lookup", "plain") is None


def test_loops_are_distinguished_from_long_answers() -> None:
    assert not loops(range(64))
    assert loops([*range(20), *range(20)])


def test_disturbed_prompts_are_kept_apart() -> None:
    rows = [row("a", plain=(1, 1.0)), row("b", foreign=0.5, plain=(1, 1.0))]
    assert [entry["name"] for entry in slices(rows, "plain")[QUIET]] == ["a"]


def test_the_table_shows_a_configuration_that_lacks_answers_with_what_it_has() -> None:
    rows = [row(str(at), **{REFERENCE: (10, 1.0), AUTO: (10, 0.5), "vllm plain": (10, 2.0)}) for at in range(4)]
    del rows[0]["answers"]["vllm plain"]
    rows[1]["answers"]["lookup"] = rows[1]["answers"][AUTO] | {"tokens": [7]}
    plain_of = {
        REFERENCE: REFERENCE,
        AUTO: REFERENCE,
        "vllm plain": "vllm plain",
        "lookup": "vllm plain",
        "gone": "gone",
    }
    peers = ["vllm plain", "lookup", "gone"]
    found = cells(rows, plain_of, ours=[REFERENCE, AUTO], peers=peers, reference=REFERENCE)
    text = table(found, {AUTO: "fp32"})
    assert "| paceline auto | fp32 | 20.0 | 20.0 | 50 ms | 2.00x [2.00, 2.00] |" in text
    assert "| vllm plain | ? | 5.0 |" in text
    assert "| 3 of 3 |  |" in text
    assert "| 4 of 4 | 4 of 4 |" in text
    assert "| 0 of 1 | 0 of 1 |" in text
    assert "gone" not in text


def test_each_of_ours_is_compared_with_the_best_peer_of_the_slice() -> None:
    rows = [row(str(at), **{REFERENCE: (10, 1.0), "slow": (10, 2.0), "quick": (10, 0.5)}) for at in range(4)]
    best = beside_the_best(rows, ours=[REFERENCE, "gone"], peers=["slow", "quick", "gone too"], reference=REFERENCE)
    [found] = [entry for entry in best if entry["workload"] == "copy"]
    assert (found["best_peer"], found["soonest_peer"]) == ("quick", "quick")
    assert found["faster"]["ratio"] == pytest.approx(0.5)
    assert found["first_token_over_it"] == pytest.approx(2.0)
    assert "| copy | paceline none | 10.0 | quick | 20.0 | 0.50x [0.50, 0.50] | 2.00 (quick) |" in summary(best)


def test_answers_drawn_at_random_are_not_compared_token_for_token() -> None:
    rows = [row(str(at), one=(3, 1.0), other=(4, 1.0)) | {"greedy": at == 0} for at in range(3)]
    assert agreement(rows, "one", "other") == {"same": 0, "of": 1, "differ_from": 3}


# -- prompts and contenders


def test_the_prompts_alternate_and_keep_their_names_whatever_their_number() -> None:
    few, many = make_prompts(3, [0.0, 0.7]), make_prompts(12, [0.0])
    assert [prompt.workload for prompt in few] == ["copy, T 0", "copy, T 0.7", "chat, T 0", "chat, T 0.7"] * 3
    texts = {prompt.name: prompt.text for prompt in many}
    assert all(texts.get(prompt.name, prompt.text) == prompt.text for prompt in few)
    assert len(texts) == 24


def test_prompts_of_a_file_are_taken_from_all_over_it(tmp_path: Path) -> None:
    path = tmp_path / "mt_bench.jsonl"
    path.write_text("".join(json.dumps({"turns": [str(at)]}) + "\n" for at in range(80)))
    chats = [prompt for prompt in make_prompts(4, [0.7], path) if prompt.workload == "mt_bench, T 0.7"]
    assert [prompt.text for prompt in chats] == ["0", "20", "40", "60"]
    assert {prompt.temperature for prompt in chats} == {0.7}


def test_a_broken_line_of_a_prompts_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"category": "math", "turns": ["1+1?"]}\n\n{"category": "math"}\n')
    with pytest.raises(SystemExit, match="line 3"):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(SystemExit, match="no prompts"):
        read_prompts(path)


def test_every_peer_runs_plain_beside_its_speculation() -> None:
    every = configurations(8, "fp32.gguf", ("own.gguf", "Q4_1"))
    names = [configuration.name for configuration in every]
    assert len(set(names)) == len(names)
    assert all(configuration.plain in names for configuration in every)
    assert {configuration.peer for configuration in every} == {OURS, "transformers", "vllm", "llama_cpp", "openvino"}
    assert all((HERE / f"worker_{configuration.peer}.py").is_file() for configuration in every)
    with pytest.raises(SystemExit, match="no peer is called 'ollama'"):
        select(every, ["ollama"])


def test_the_script_refuses_a_peer_it_does_not_know(tmp_path: Path) -> None:
    script = HERE / "environments.sh"
    done = subprocess.run(["bash", str(script), str(tmp_path / "x"), "ollama"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no peer is called ollama" in done.stderr
    assert not (tmp_path / "x").exists()


def test_the_float_gguf_holds_the_folders_weights_and_shape(tmp_path: Path) -> None:
    save_tiny("llama-tied", tmp_path / "model")
    write_float_gguf(tmp_path / "model", tmp_path / "model.gguf")
    config, file = load_config(tmp_path / "model"), GGUFFile(tmp_path / "model.gguf")
    found, names = gguf_config(file), gguf_names(file)
    assert (found.num_layers, found.num_heads, found.num_kv_heads, found.rope) == (3, 6, 2, config.rope)
    weights = load_weights(tmp_path / "model", config)
    assert names.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(gguf_weight(file, names[name], found).numbers(), weight.numbers()), name


def test_interleaving_is_undone_by_what_reads_gguf() -> None:
    values = np.arange(24 * 5, dtype=np.float32).reshape(24, 5)
    assert not np.array_equal(interleave(values, 3), values)
    assert np.array_equal(uninterleave(interleave(values, 3), 3), values)


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
def test_an_adapter_answers_as_paceline_does(
    peer: str, method: str, smollm2, smollm2_path: Path, tmp_path: Path
) -> None:
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
