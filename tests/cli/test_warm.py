"""`paceline warm`: filled, continued, shown, removed; and its file damaged, foreign or half written."""

from __future__ import annotations

import json
import os
import signal
import sys

import numpy as np
import pytest
import torch

from paceline.cli.app import run
from paceline.cli.models import warm
from paceline.config import SpeculationConfig
from paceline.drafters import METHODS, DrafterContext, DraftRequest
from paceline.drafters.lookup.successors import ENTRY
from paceline.drafters.lookup.table_file import TableFile, known_table, table_path
from paceline.testing import toy_config
from tests.helpers.toys import sequence_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the native kernels are not built on Windows")
EMBEDDING = torch.arange(600.0).view(100, 6)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    return tmp_path


def printed(capsys, *arguments):
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_table_is_filled_continued_shown_and_removed(tiny_model, home, monkeypatch, capsys):
    monkeypatch.setattr(warm, "LONGEST", 6)
    prompts = home / "prompts.txt"
    prompts.write_text("One.\nTwo two.\nThree three three.\n")
    command = ("warm", "--model", str(tiny_model), "--data", str(prompts))
    monkeypatch.setattr(warm, "ANSWERS", 3)
    first = printed(capsys, *command)
    assert (first["answers"], first["contexts"] > 10) == (3, True)
    monkeypatch.setattr(warm, "ANSWERS", 8)  # as if the first call had been interrupted
    second = printed(capsys, *command)
    assert (second["answers"], second["contexts"] > first["contexts"]) == (8, True)
    assert printed(capsys, *command) == second, "a full table stays"
    (table,) = printed(capsys, "models")["tables"]
    assert (table["model"], table["answers"], table["contexts"]) == (str(tiny_model), 8, second["contexts"])
    assert not printed(capsys, "models", "--remove-table", str(tiny_model))["tables"]
    assert run(["models", "--remove-table", str(tiny_model)]) == 1


def table_of(embedding=EMBEDDING, vocab_size=100):
    entries = np.zeros(1, ENTRY)
    entries[0] = (-1, 5, 1, (7, 8, *[-1] * 6), (200, 40, *[0] * 6))
    return TableFile("toy", table_path(embedding).stem, vocab_size, 3, entries)


def drafted():
    config = toy_config(100)
    speculation = SpeculationConfig(method="recycling")
    drafter = METHODS["recycling"].make(DrafterContext(config, torch.device("cpu"), speculation, embedding=EMBEDDING))
    draft = drafter.propose([DraftRequest(sequence_of([3, 5]), 4)]).arrays
    return draft.tokens[0, : draft.num_nodes[0]].tolist()


def test_the_table_of_a_model_is_drafted_from(home):
    assert drafted() == []
    table_of().write(table_path(EMBEDDING))
    assert drafted() == [7, 8]


@pytest.mark.parametrize("fault", ["cut", "bit", "foreign", "vocabulary", "text", "folder"])
def test_a_table_that_cannot_be_used_is_ignored_with_one_sentence(fault, home, caplog):
    path = table_path(EMBEDDING)
    (table_of(EMBEDDING + 1) if fault == "foreign" else table_of(vocab_size=7 if fault == "vocabulary" else 100)).write(
        path
    )
    body = path.read_bytes()
    if fault == "cut":
        path.write_bytes(body[:-3])
    elif fault == "bit":
        path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    elif fault == "text":
        path.write_text("not a table")
    elif fault == "folder":
        path.unlink()
        path.mkdir()
    assert drafted() == []
    (record,) = caplog.records
    assert "is ignored" in record.getMessage()


def test_a_writer_that_is_killed_leaves_the_old_table(home):
    path = table_path(EMBEDDING)
    table_of().write(path)
    if (child := os.fork()) == 0:
        os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
        TableFile("other", path.stem, 100, 9, np.zeros(1000, ENTRY)).write(path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    table = known_table(EMBEDDING)
    assert table is not None
    assert (table.model, table.answers) == ("toy", 3)
