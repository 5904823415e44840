"""`paceline train` from a file to a folder that the engine drafts with, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from paceline.cli.app import run
from paceline.drafters.block.checkpoint import read
from paceline.drafters.methods import DSPARK
from tests.helpers.tiny import save_tiny

DEVICE = ["--device", "cpu", "--rows", "2", "--length", "48"]
SIZES = [f"--set={one}" for one in ("layers=1", "block=4", "num_taps=2", "rank=4", "draft_vocab=64", "anchors=4")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny("llama-tied", folder)
    return folder


def command(model, out, *more):
    return run(["train", DSPARK, "--target", str(model), "--out", str(out), *DEVICE, *SIZES, *more])


def test_text_becomes_a_drafter_with_a_card_and_a_curve(model, tmp_path, capsys):
    data, out = texts(tmp_path / "texts.txt"), tmp_path / "out"
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
        (["--mix", "a=inf"], "must be 0 or more and finite, got inf"),
        (["--mix", "a=1,a=2"], "'a' is given twice"),
        (["--data", "x.txt", "--minutes", "inf"], "minutes: must be a finite number"),
        (["--data", "x.txt", "--lr", "inf"], "lr: must be a finite number"),
        (["--data", "x.txt", "--seed", "99999999999"], "seed: must be between 0 and 4294967295"),
        (["--data", "x.txt", "--resume"], "leave --resume out to begin"),
        (["--data", "x.txt", "--optimizer", "sgd"], "must be adamw or muon"),
        (["--data", "missing.txt"], "cannot read missing.txt"),
    ],
)
def test_what_cannot_be_trained_is_refused(model, tmp_path, capsys, given, words):
    refused(capsys, command(model, tmp_path, *given), words)


def test_no_minutes_are_not_ten(model, tmp_path, capsys):
    assert command(model, tmp_path, "--data", "x.txt", "--minutes", "0") == 2
    assert "--minutes" in capsys.readouterr().err


def test_an_out_that_cannot_be_written_is_refused(model, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "out/training").mkdir(parents=True)
    (tmp_path / "out/training/tokens").touch()
    data = texts(tmp_path / "texts.txt")
    for out, words in (
        ("", "out: is empty; name a folder"),
        (tmp_path / "file", f"out: {tmp_path / 'file'} holds something else than a training"),
        (tmp_path / ("x" * 300), "File name too long; name another folder"),
        (tmp_path / "out", "tokens is not a folder"),
    ):
        refused(capsys, command(model, out, "--data", str(data), "--steps", "1"), words)


def texts(path, count=60, shift=0):
    lines = [" ".join(f"w{(7 * i + j * j + shift) % 97}" for j in range(30)) for i in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(lines))
    return path


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """A finished training of 2 steps, and its data."""
    folder = tmp_path_factory.mktemp("trained")
    data = texts(folder / "texts.txt")
    assert command(model, folder / "out", "--data", str(data), "--steps", "2") == 0
    return folder


@pytest.fixture
def copied(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copied")
    return tmp_path / "copied"


def refused(capsys, code, words):
    error = capsys.readouterr().err
    assert code == 1, error
    assert words in error, error
    assert "error: unexpected" not in error
    assert len(error.strip().splitlines()) == 1, error


def test_the_folder_of_the_target_is_never_written_to(model, tmp_path, capsys):
    own = tmp_path / "own"
    shutil.copytree(model, own)
    (own / "training" / "tokens").mkdir(parents=True)
    before, data = tree(own), texts(tmp_path / "texts.txt")
    link = tmp_path / "link"
    link.symlink_to(own)
    for out in (own, link):
        code = command(own, out, "--data", str(data), "--steps", "1")
        refused(capsys, code, "is the target's folder")
    code = command(model, own, "--data", str(data), "--steps", "1")
    refused(capsys, code, "holds something else than a training")
    assert tree(own) == before


def test_a_folder_with_files_of_others_is_refused_and_left_alone(model, tmp_path, capsys):
    project, data = tmp_path / "project", texts(tmp_path / "texts.txt")
    project.mkdir()
    (project / "model.safetensors").write_bytes(b"precious")
    code = command(model, project, "--data", str(data), "--steps", "1")
    refused(capsys, code, "choose a new or empty folder")
    assert tree(project) == {"model.safetensors": b"precious"}


def test_the_drafter_that_a_training_begins_from_is_not_overwritten(model, copied, capsys):
    out, before = copied / "out", tree(copied)
    given = ["--data", str(copied / "texts.txt"), "--steps", "1", "--init-from", str(out)]
    refused(capsys, command(model, out, *given), "is the folder of --init-from")
    assert tree(copied) == before


def test_a_drafter_of_another_method_is_not_overwritten(model, copied, capsys):
    out = copied / "out"
    (out / "training" / "training.pt").unlink()
    given = ["--data", str(copied / "texts.txt"), "--steps", "1", *DEVICE]
    code = run(["train", "medusa", "-t", str(model), "-o", str(out), *given])
    refused(capsys, code, "holds something else than a training")
    assert command(model, out, "--data", str(copied / "texts.txt"), "--steps", "2") == 0


def test_a_refused_resume_leaves_the_training_as_it_was(model, copied, capsys):
    out, before = copied / "out", tree(copied / "out")
    other = texts(copied / "other.txt", shift=3)
    code = command(model, out, "--data", str(other), "--steps", "3", "--resume")
    refused(capsys, code, "the training began with other data")
    assert tree(out) == before
    assert command(model, out, "--steps", "3", "--resume") == 0
    assert json.loads((out / "curve.json").read_text())[-1]["step"] == 3


def test_what_a_training_did_not_ask_for_does_not_count(model, trained, copied):
    out = copied / "out"
    shutil.copy(out / "training/tokens/texts.npz", out / "training/tokens/stray.npz")
    assert command(model, out, "--steps", "3", "--resume") == 0
    sums = [Path(one, "out/README.md").read_text().partition("answer tokens")[2][:20] for one in (trained, copied)]
    assert sums[0] == sums[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["medusa"], "method: the training began with dspark, not medusa"),
        (["--seed", "1"], "seed: the training began with 0, not 1"),
        (["--rows", "3"], "rows: the training began with 2, not 3"),
        (["--length", "64"], "length: the training began with 48, not 64"),
        (["--optimizer", "muon"], "optimizer: the training began with adamw, not muon"),
    ],
)
def test_a_setting_that_a_training_began_with_stays(model, copied, capsys, given, words):
    before, out = tree(copied), copied / "out"
    if given == ["medusa"]:
        code = run(["train", *given, "-t", str(model), "-o", str(out), "--resume", "--steps", "3", *DEVICE])
    else:
        code = command(model, out, "--steps", "3", "--resume", *given)
    refused(capsys, code, words)
    assert tree(copied) == before


def state(change):
    """A training whose stored state is changed."""

    def spoil(folder):
        stored = torch.load(folder / "training.pt", weights_only=True)
        torch.save(change(stored), folder / "training.pt")

    return spoil


def written(name, content):
    """A training of which one file has this content; None: half of its own."""

    def spoil(folder):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2] if content is None else content)

    return spoil


FILES = ("training.pt", "tokens/texts.npz", "tokens/store.json")
STORES = (b"[]", b'{"vocab_size": 97}', b'{"vocab_size": 97, "sources": 3}')
OLDER = "older version, which did not keep method; begin anew"
SPOILT = [
    (state(lambda stored: {key: part for key, part in stored.items() if key != "settings"}), OLDER),
    (state(lambda stored: {**stored, "progress": {"unknown": 1}}), "training.pt is damaged"),
    (
        lambda folder: (folder / FILES[2]).unlink(),
        "texts.npz is damaged (store.json beside it does not name its source)",
    ),
    *((written(FILES[2], content), "store.json is damaged") for content in STORES),
    *(
        (written(name, content), f"{name} is damaged")
        for name in FILES
        for content in (b"", b"PK nothing", b"\x80\x02}q\x00.", None)
    ),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILT)
def test_a_training_whose_files_are_spoilt_is_not_resumed(model, copied, capsys, spoil, words):
    spoil(copied / "out/training")
    refused(capsys, command(model, copied / "out", "--steps", "3", "--resume"), words)


def test_a_training_is_not_continued_for_another_target(model, copied, capsys, tmp_path):
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(model, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"] *= 1.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    code = command(other, copied / "out", "--steps", "3", "--resume")
    refused(capsys, code, "target: the training was begun for another target")


def test_a_lost_shard_is_read_again_from_its_file(model, copied, capsys):
    shard = copied / "out/training/tokens/texts.npz"
    (copied / "out/training/tokens/complete.json").write_bytes(b"\xff")
    shard.unlink()
    code = command(model, copied / "out", "--steps", "3", "--resume")
    refused(capsys, code, "holds no tokens of texts; give its --data")
    assert command(model, copied / "out", "--steps", "3", "--resume", "--data", str(copied / "texts.txt")) == 0
    assert shard.exists()


def test_two_files_of_one_name_are_refused(model, tmp_path, capsys):
    pair = [texts(tmp_path / folder / "texts.txt") for folder in "ab"]
    code = command(model, tmp_path / "out", "--steps", "1", *[one for path in pair for one in ("--data", str(path))])
    refused(capsys, code, f"{pair[1]}: its source would be texts, which is another file's; rename the file")
    assert not (tmp_path / "out").exists()


def test_a_file_that_changed_since_it_was_read_is_refused(model, copied, capsys):
    (copied / "out/training/training.pt").unlink()
    data = texts(copied / "texts.txt", shift=1)
    code = command(model, copied / "out", "--data", str(data), "--steps", "1")
    refused(capsys, code, "holds texts of another file, or of this one as it was before")
