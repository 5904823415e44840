"""Prompts: what ships is there and whole, what a user gives is read or refused by its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench.prompts import QUICK_WORKLOADS, WORKLOADS, from_file, shipped
from tests.helpers.errors import refused


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_ships_at_least_eight_different_prompts(workload: str) -> None:
    found = shipped([workload])
    assert len({prompt.turns for prompt in found}) == len(found) >= 8
    assert {prompt.workload for prompt in found} == {workload}
    assert all(len(turn) > 30 for prompt in found for turn in prompt.turns[:1])
    assert (workload == "multi-turn") == any(len(prompt.turns) > 1 for prompt in found)


def test_no_workload_is_forgotten_and_all_are_packaged() -> None:
    import paceline.bench

    folder = Path(paceline.bench.__file__).parent / "workloads"
    assert {file.name for file in folder.iterdir()} == {f"{name}.jsonl" for name in WORKLOADS}
    assert '"bench/workloads/*.jsonl"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert set(QUICK_WORKLOADS) <= set(WORKLOADS)
    assert len(shipped()) == len({prompt.turns for prompt in shipped()})


def test_prompts_of_a_workload_can_be_limited_and_unknown_workloads_are_refused() -> None:
    assert len(shipped(["chat", "code"], per_workload=3)) == 6
    with refused("workloads"):
        shipped(["poetry"])


def write(folder: Path, name: str, *lines: object) -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_a_jsonl_file_may_hold_prompts_messages_and_turns(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    path = write(
        tmp_path,
        "mine.jsonl",
        {"prompt": "Hello", "category": "greeting"},
        "",
        {"messages": [system, {"role": "user", "content": "Hi"}], "workload": "greeting"},
        {"turns": ["One", "Two"], "schema": {"type": "object"}},
    )
    prompt, talk, turns = from_file(path)
    assert (prompt.schema, turns.schema) == (None, {"type": "object"})
    assert (prompt.workload, prompt.turns, prompt.origin) == ("greeting", ("Hello",), f"line 1 of {path}")
    assert talk.messages([]) == [system, {"role": "user", "content": "Hi"}]
    assert turns.workload == "prompts"
    assert [message["content"] for message in turns.messages(["first"])] == ["One", "first", "Two"]
    assert turns.origin == f"line 4 of {path}"


def test_a_text_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    found = from_file(write(tmp_path, "mine.txt", "\ufeffWhy?", "", "  How?  "))
    assert [prompt.turns for prompt in found] == [("Why?",), ("How?",)]
    assert found[1].origin.startswith("line 3 of")


def test_a_file_can_be_narrowed_to_some_of_its_workloads(tmp_path: Path) -> None:
    lines = [{"prompt": f"{name} {n}", "workload": name} for name in "abc" for n in range(4)]
    path = write(tmp_path, "mine.jsonl", *lines)
    assert [prompt.workload for prompt in from_file(path, ["c", "a"], per_workload=2)] == ["c", "c", "a", "a"]
    with refused("workloads"):
        from_file(path, ["d"])


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "x"',
        '["prompt"]',
        '"prompt"',
        "17",
        '{"text": "x"}',
        '{"prompt": "x", "turns": ["y"]}',
        pytest.param("[" * 100_000, id="nested"),
        '{"prompt": ""}',
        '{"prompt": null}',
        '{"prompt": "\\ud800"}',
        '{"turns": []}',
        '{"turns": "x"}',
        '{"turns": ["x", 5]}',
        '{"messages": []}',
        '{"messages": ["x"]}',
        '{"messages": [{"role": "wizard", "content": "x"}]}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
        '{"prompt": "x", "category": 5}',
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, "mine.jsonl", {"prompt": "fine"}, line, {"prompt": "fine too"})
    with refused("prompts") as caught:
        from_file(path)
    assert "line 2 of" in str(caught.value)


def test_missing_empty_and_undecodable_files_are_refused(tmp_path: Path) -> None:
    with refused("prompts"):
        from_file(tmp_path / "nothing.jsonl")
    with refused("prompts"):
        from_file(tmp_path)
    with refused("prompts"):
        from_file(write(tmp_path, "empty.txt", "", "  "))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with refused("prompts"):
        from_file(tmp_path / "latin.txt")
