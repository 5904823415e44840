"""A folder or file is whole or absent, whatever ends its writer; leftovers go, what belongs to a user stays."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import InvalidParameter
from paceline.files import folders
from paceline.files.folders import MARKER, PREFIX, build_folder, new_folder, replace_file

KILLED = """
import os, signal, sys
from pathlib import Path
from paceline.files.folders import new_folder
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="locks are needed")
def test_the_next_writer_removes_what_a_killed_one_left_and_no_folder_of_a_user(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a")], env=os.environ)
    assert killed.returncode == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    (tmp_path / "a.partial").mkdir()
    (tmp_path / f"{PREFIX}mine").mkdir()
    with new_folder(tmp_path / "b") as other, new_folder(tmp_path / "a") as folder:
        assert not leftover.exists()
        assert (other / MARKER).exists(), "another writer is still at work"
        (folder / "whole").write_text("")
    assert names(tmp_path) == ["a", "a.partial", "b", f"{PREFIX}mine"]
    assert names(tmp_path / "a") == ["whole"]


def test_without_locks_a_leftover_goes_when_it_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "lock_file", lambda file: folders.Lock.UNAVAILABLE)
    for name, age in (("fresh", 0.0), ("stale", 2.0 * folders.STALE_SECONDS)):
        leftover = tmp_path / f"{PREFIX}{name}"
        leftover.mkdir()
        (leftover / MARKER).touch()
        os.utime(leftover, (time.time() - age,) * 2)
    with build_folder(tmp_path / "a"):
        pass
    assert names(tmp_path) == ["a", f"{PREFIX}fresh"]


def test_a_folder_whose_writer_raises_is_absent(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "a"):
        raise KeyboardInterrupt
    with pytest.raises(InvalidParameter) as caught, new_folder(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.field == "out"
    with pytest.raises(BrokenPipeError), new_folder(tmp_path / "a"):
        raise BrokenPipeError
    assert names(tmp_path) == []


def test_a_target_that_another_writer_completed_stays(tmp_path: Path) -> None:
    target = tmp_path / "a"
    for is_complete in (False, True):
        try:
            with build_folder(target, lambda folder, complete=is_complete: complete):
                target.mkdir(exist_ok=True)
                (target / "theirs").touch()
        except OSError:
            assert not is_complete
        else:
            assert is_complete
        assert names(tmp_path) == ["a"]
        assert names(target) == ["theirs"]


def test_a_name_that_is_taken_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidParameter) as caught, new_folder(tmp_path / "link"):
        raise AssertionError
    assert caught.value.field == "out"
    assert names(tmp_path) == ["link"]


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for text in ("one", "two"):
        with replace_file(path) as staging:
            staging.write_text(text)
        assert path.read_text() == text
    with contextlib.suppress(KeyboardInterrupt), replace_file(path) as staging:
        staging.write_text("half")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["state.json"]
    assert path.read_text() == "two"
