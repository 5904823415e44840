"""Safetensors files that are cut, rewritten or mutated: an error of the file, never a signal."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from paceline.errors import BrokenModel
from paceline.files.safetensors_reader import SafetensorsFile
from tests.helpers.mutated_files import mutated

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(7.0),
    "codes": torch.arange(16, dtype=torch.int32),
    "fp8": torch.ones(4).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False]),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "m.safetensors", {"format": "pt", "a": "q8_0"})
    return tmp_path / "m.safetensors"


def test_tensors_are_those_that_the_library_reads(path: Path) -> None:
    file = SafetensorsFile(path)
    with safe_open(path, framework="pt") as theirs:
        assert set(file.headers) == set(theirs.keys())
        assert file.metadata == theirs.metadata()
        for name in file.headers:
            assert (file.headers[name].dtype, list(file.headers[name].shape)) == (
                theirs.get_slice(name).get_dtype(),
                theirs.get_slice(name).get_shape(),
            )
            ours = file.read(name)
            assert ours.dtype == theirs.get_tensor(name).dtype
            assert torch.equal(ours.view(torch.uint8) if ours.dim() else ours, _bytes(theirs.get_tensor(name)))


def _bytes(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.uint8) if data.dim() else data


@pytest.mark.parametrize("change", ["cut", "rewritten"])
def test_a_file_that_changes_while_it_is_open_is_refused(change: str, path: Path) -> None:
    file = SafetensorsFile(path)
    assert torch.equal(file.read("a"), TENSORS["a"])
    if change == "cut":
        os.truncate(path, path.stat().st_size - 40)
    else:
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # whatever the file system's clock resolves
    with pytest.raises(BrokenModel):
        file.read("a")


def test_a_file_that_is_cut_while_it_is_loaded_kills_no_process(path: Path) -> None:
    save_file({"w": torch.zeros(1 << 22)}, path)
    program = (
        "import os, sys\n"
        "from paceline.errors import BrokenModel\n"
        "from paceline.files.safetensors_reader import SafetensorsFile\n"
        "from pathlib import Path\n"
        "file = SafetensorsFile(Path(sys.argv[1]))\n"
        "os.truncate(sys.argv[1], 4096)\n"
        "try:\n"
        "    print(float(file.read('w').sum()))\n"
        "except BrokenModel:\n"
        "    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.returncode != -signal.SIGBUS
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_a_mutated_file_is_read_or_refused_in_one_line(path: Path) -> None:
    rng, whole, errors = random.Random(0), path.read_bytes(), list[str]()
    for _ in range(600):
        path.write_bytes(mutated(whole, rng))
        try:
            file = SafetensorsFile(path)
            for name in file.headers:
                file.read(name)
        except BrokenModel as error:
            errors.append(str(error))
    assert 100 < len(errors) < 599
    assert not any("\n" in error or len(error) > 2000 for error in errors)


def _file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
WRONG = {
    "empty": b"",
    "a length behind the file": _file({}, length=1 << 60),
    "a list": _file([]),
    "no JSON": _file(b"{"),
    "deep": _file(b"[" * 100_000),
    "digits": _file(b'{"a":' + b"9" * 5000 + b"}"),
    "not UTF-8": _file(b'{"\xff": 1}'),
    "a tensor twice": _file(b'{"a":%s,"a":%s}' % ((json.dumps(ENTRY).encode(),) * 2), bytes(8)),
    "overlap": _file({"a": ENTRY, "b": ENTRY}, bytes(8)),
    "a hole": _file({"a": {**ENTRY, "data_offsets": [8, 16]}}, bytes(16)),
    "bytes behind the tensors": _file({"a": ENTRY}, bytes(9)),
    "too short": _file({"a": ENTRY}, bytes(7)),
    "another size": _file({"a": {**ENTRY, "shape": [3]}}, bytes(8)),
    "a negative shape": _file({"a": {**ENTRY, "shape": [-2, -1]}}, bytes(8)),
    "a shape of floats": _file({"a": {**ENTRY, "shape": [2.0]}}, bytes(8)),
    "a shape of flags": _file({"a": {**ENTRY, "shape": [True, 2]}}, bytes(8)),
    "offsets turned round": _file({"a": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8)),
    "three offsets": _file({"a": {**ENTRY, "data_offsets": [0, 8, 8]}}, bytes(8)),
    "metadata of numbers": _file({"a": ENTRY, "__metadata__": {"a": 1}}, bytes(8)),
    "a huge shape": _file({"a": {**ENTRY, "shape": [1 << 62, 1 << 62]}}, bytes(8)),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_header_that_contradicts_itself_is_refused(case: str, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(_file({"a": ENTRY}, bytes(8)))
    assert SafetensorsFile(tmp_path / "m.safetensors").read("a").tolist() == [0, 0]
    (tmp_path / "m.safetensors").write_bytes(WRONG[case])
    with pytest.raises(BrokenModel):
        SafetensorsFile(tmp_path / "m.safetensors")
