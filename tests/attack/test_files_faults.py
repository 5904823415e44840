"""Faults of the disk and of the memory: records are whole or absent, and the error is advice."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.errors import InvalidParameter
from paceline.server.capture import Capture
from paceline.training.data.examples import read_examples

WHOLE = '{"text": "one two"}\n'


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Make every file end at this size, as on a disk that is full: a write is cut short, and the next one fails."""
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_record_that_a_full_disk_cuts_short_is_absent(tmp_path: Path) -> None:
    path = tmp_path / "captured.jsonl"
    capture = Capture(path)
    capture.text("one ", "two", "")
    with disk_of(len(WHOLE) + 30):
        capture.text("a prompt ", "and an answer that does not fit in what is left of the disk", "")
        capture.text("one ", "two", "")  # nothing more is written
    capture.close()
    assert path.read_text() == WHOLE
    assert [example.text for example in read_examples(path)] == ["one two"]


@pytest.mark.parametrize("length", range(1, len(WHOLE)))
def test_a_record_that_a_kill_cut_short_is_cut_off_before_the_next_one(length: int, tmp_path: Path) -> None:
    path = tmp_path / "captured.jsonl"
    path.write_text(WHOLE + WHOLE[:length])
    capture = Capture(path)
    capture.text("three ", "four", "")
    capture.close()
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    complete = length == len(WHOLE) - 1  # all but its line end
    assert texts == ["one two", *["one two"] * complete, "three four"]


def test_text_that_the_server_did_not_write_stays(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("my own line")
    capture = Capture(path)
    capture.text("three ", "four", "")
    capture.close()
    assert path.read_text() == 'my own line\n{"text": "three four"}\n'


def test_a_reader_leaves_a_torn_last_record_out_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "captured.jsonl"
    path.write_text(WHOLE * 3 + WHOLE[:9])
    with caplog.at_level(logging.WARNING):
        assert len(read_examples(path)) == 3
    assert "1 record" in caplog.text
    path.write_text(WHOLE + WHOLE[:9] + "\n" + WHOLE)  # in the middle it is a mistake of the file
    with pytest.raises(InvalidParameter):
        read_examples(path)
    path.write_text(WHOLE[:9])
    with pytest.raises(InvalidParameter):
        read_examples(path)


@pytest.mark.parametrize("gib", [1.2, 1.6, 2.0, 3.0])
def test_little_address_space_gives_advice(gib: float) -> None:
    command = [sys.executable, "-m", "paceline", "generate", "--model", "smollm2", "Hi", "--max-tokens", "2"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (int(gib * 2**30),) * 2)

    done = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=limit, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0 or ("memory" in done.stderr and done.stderr.startswith("error: ")), done.stderr
    assert "unexpected" not in done.stderr
    assert "Traceback" not in done.stderr
