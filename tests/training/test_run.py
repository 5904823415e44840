"""`paceline train` from a file to a folder that the engine drafts with, and what it refuses."""

from __future__ import annotations

import json

import pytest

from paceline.cli.app import run
from paceline.drafters.dspark_checkpoint import read
from paceline.drafters.methods import DSPARK
from tests.models.tiny import save_tiny

SIZES = [f"--set={one}" for one in ("layers=1", "block=4", "num_taps=2", "rank=4", "draft_vocab=64", "anchors=4")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny("llama-tied", folder)
    return folder


def command(model, out, *more):
    common = ["--target", str(model), "--out", str(out), "--device", "cpu", "--rows", "2", "--length", "48"]
    return run(["train", DSPARK, *common, *SIZES, *more])


def test_text_becomes_a_drafter_with_a_card_and_a_curve(model, tmp_path, capsys):
    data = tmp_path / "texts.txt"
    data.write_text("\n\n".join(" ".join(f"w{(7 * i + j * j) % 97}" for j in range(30)) for i in range(60)))
    out = tmp_path / "out"
    assert command(model, out, "--data", str(data), "--steps", "3", "--json") == 0, capsys.readouterr().err
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 3
    config, _ = read(out)
    assert (config.method, config.draft_vocab_size, config.block_size) == (DSPARK, 64, 4)
    card = (out / "README.md").read_text()
    assert "texts" in card
    assert "--drafter THIS_FOLDER" in card
    assert "steps: 3" in card
    assert len(json.loads((out / "curve.json").read_text())) >= 1
    assert command(model, out, "--data", str(data), "--steps", "3") == 1
    assert "continue it with --resume" in capsys.readouterr().err
    assert command(model, out, "--data", str(data), "--steps", "4", "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--synthesise", "4"], "no chat template"),
        ([], "nothing to train on"),
        (["--regenerate"], "needs --data FILE"),
        (["--steps", "1", "--minutes", "1"], "either steps or minutes"),
        (["--mix", "a"], "NAME=VALUE"),
        (["--data", "x.txt", "--optimizer", "sgd"], "must be adamw or muon"),
        (["--data", "missing.txt"], "cannot read missing.txt"),
    ],
)
def test_what_cannot_be_trained_is_refused(model, tmp_path, capsys, given, words):
    assert command(model, tmp_path, *given) == 1
    assert words in capsys.readouterr().err


def test_an_out_that_is_a_file_is_refused(model, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert command(model, tmp_path / "file", "--data", "x.txt") == 1
    assert f"out: cannot write to {tmp_path / 'file'}: Not a directory" in capsys.readouterr().err


def test_no_minutes_are_not_ten(model, tmp_path, capsys):
    assert command(model, tmp_path, "--data", "x.txt", "--minutes", "0") == 2
    assert "--minutes" in capsys.readouterr().err
