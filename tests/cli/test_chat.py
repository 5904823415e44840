"""`paceline chat` over a fake engine: piped lines, its commands, and a real pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.cli.output import wrapped
from tests.cli.test_cli import RESULT_KEYS
from tests.helpers.fake_llm import FakeLLM, Result, Screen, environment, start

needs_prompt_toolkit = pytest.mark.skipif(find_spec("prompt_toolkit") is None, reason="prompt_toolkit is not installed")
PASTE = "\x1b[200~{}\x1b[201~"  # as terminals bracket it
LISTENS = "\x1b[?2004h"  # prompt_toolkit turns bracketed paste on once every key is its own


def test_chat_sends_the_history_with_every_turn(paceline: Callable[..., Result]) -> None:
    result = paceline("chat", "--system", "be brief", "--max-tokens", "2", stdin=b"first\n\nsecond\n")
    assert (result.code, result.out) == (0, "word0 word1\nword0 word1\n")
    assert result.err.count("tok/s") == 2
    assert FakeLLM.requests[1][0] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "word0 word1"},
        {"role": "user", "content": "second"},
    ]
    assert len(FakeLLM.created) == 1


def test_chat_commands_reset_explain_and_leave(paceline: Callable[..., Result]) -> None:
    result = paceline("chat", stdin=b"first\n/clear\n/help\n/etc/hosts is what\n/exit\nnever\n")
    assert result.code == 0
    asked = [request[-1]["content"] for request, _ in FakeLLM.requests]
    assert asked == ["first", "/etc/hosts is what"]
    assert len(FakeLLM.requests[1][0]) == 1
    assert "a new conversation" in result.err
    assert "/save FILE" in result.err
    result = paceline("chat", stdin=b"/wat\n")
    assert (result.code, result.err) == (1, "error: no such command: /wat; /help lists them\n")


def test_chat_says_when_the_context_is_full(paceline: Callable[..., Result]) -> None:
    result = paceline("chat", "--max-model-len", "8", stdin=b"one two three\nand more\n")
    assert "the context of 8 tokens is full: /clear" in result.err
    assert result.code == 1
    assert result.err.splitlines()[-1].endswith("the context holds 8 (/clear starts a new conversation)")


def test_chat_with_json_prints_one_object_per_turn(paceline: Callable[..., Result]) -> None:
    result = paceline("chat", "--json", stdin=b"first\nsecond\n")
    assert [set(json.loads(line)) for line in result.out.splitlines()] == [RESULT_KEYS, RESULT_KEYS]
    assert result.err == ""


def test_the_system_message_can_be_set_shown_and_removed(paceline: Callable[..., Result]) -> None:
    result = paceline("chat", stdin=b"/system\n/system be brief\nfirst\n/clear\nsecond\n/system -\nthird\n")
    asked = [[message["role"] for message in request] for request, _ in FakeLLM.requests]
    assert asked == [["system", "user"], ["system", "user"], ["user", "assistant", "user"]]
    assert FakeLLM.requests[0][0][0]["content"] == "be brief"
    assert result.err.startswith("no system message\nsystem message: be brief\n")


def test_the_method_of_later_turns_can_be_chosen(paceline: Callable[..., Result]) -> None:
    result = paceline("chat", stdin=b"/method\n/method ngram 4\nfirst\n/method none\nsecond\n")
    assert "method auto, k auto · loaded: none, auto, ngram, suffix" in result.err
    asked = [params.speculation for _, params in FakeLLM.requests]
    assert asked == [{"method": "ngram", "k": 4}, {"method": "none", "k": None}]
    assert "no drafts: method none" in result.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "started_with", "reason"),
    [
        ("/method draft-model", "auto", "start the chat with --draft-model"),
        ("/method ngram", "none", "started with --method none"),
        ("/method what", "auto", "'what' is not one of"),
        ("/method ngram many", "auto", "must be a whole number"),
        ("/method none 4", "auto", "drafts nothing"),
        ("/save", "auto", "needs the name of a file"),
        ("/save /no/such/folder/file", "auto", "cannot write /no/such/folder/file"),
        ("/save {exists}", "auto", "choose another name"),
    ],
)
def test_a_wrong_command_says_what_to_do(command, started_with, reason, tmp_path, paceline) -> None:
    (tmp_path / "exists").touch()
    line = command.format(exists=tmp_path / "exists")
    result = paceline("chat", "--method", started_with, stdin=line.encode())
    assert (result.code, reason in result.err, result.err.count("\n")) == (1, True, 1)


def test_stats_and_save_tell_of_the_whole_conversation(tmp_path: Path, paceline: Callable[..., Result]) -> None:
    file = tmp_path / "talk.json"
    lines = f"/system be brief\none two\nthree\n/stats\n/save {file}\n"
    result = paceline("chat", "--max-tokens", "3", stdin=lines.encode())
    assert "2 turns · 6 tokens · 1.0 tok/s · no drafts: nothing to draft from" in result.err
    assert "the conversation has 11 of 1000 tokens of context" in result.err  # 2 + 2, 3, 1 and 3
    saved = json.loads(file.read_text())
    assert saved["model"] == "smollm2"
    assert [message["role"] for message in saved["messages"]] == ["system", *["user", "assistant"] * 2]


def test_notes_end_their_lines_between_words() -> None:
    assert wrapped("no word is broken here", 10) == "no word is\nbroken\nhere"
    assert wrapped("漢字 漢字 漢字", 9) == "漢字 漢字\n漢字"  # two columns each
    assert wrapped("a /path/longer/than/a/line b", 8) == "a\n/path/longer/than/a/line\nb"
    assert wrapped("two\n  lines, the second indented", 80) == "two\n  lines, the second indented"
    closing = "6 tokens · 48 tok/s · τ 1.5 · first after 0.16 s"
    assert wrapped(closing, 47) == "6 tokens · 48 tok/s · τ 1.5\n· first after 0.16 s"
    assert wrapped(f"{closing} ago", 24) == "6 tokens · 48 tok/s\n· τ 1.5 · first after\n0.16 s ago"


# -- on a terminal


class Terminal(Screen):
    """A chat in a pseudo-terminal."""

    def __init__(self, terminal: int, process: subprocess.Popen[str]) -> None:
        super().__init__(terminal)
        self.process = process

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def wait_for_prompt(self) -> None:
        self.wait_for("> ")


@contextmanager
def chat(home: Path, *arguments: str, columns: int = 60, **variables: str) -> Iterator[Terminal]:
    terminal, inside = pty.openpty()
    subprocess.run(["stty", "cols", str(columns), "rows", "24"], stdin=inside, check=True)
    extra = {"TERM": "xterm", "PACELINE_HOME": str(home), "PROMPT_TOOLKIT_NO_CPR": "1", **variables}
    process = start(
        "chat", *arguments, stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
        env={**environment(0.02), **extra},
    )  # fmt: skip
    os.close(inside)
    try:
        yield Terminal(terminal, process)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@needs_prompt_toolkit
def test_a_pasted_text_of_many_lines_is_one_message_and_wide_characters_stay_whole(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    with chat(tmp_path, "--max-tokens", "2") as screen:
        screen.wait_for("Alt-Enter")
        screen.wait_for(LISTENS)
        screen.type(PASTE.format("/etc/hosts has\n\nthree lines of 漢字\n") + "\r")
        screen.wait_for("word0 word1")
        screen.wait_for("tok/s")
        screen.wait_for(LISTENS)
        screen.type("one\x1b\rtwo\r")  # Alt-Enter
        screen.wait_for("word0 word1")
        screen.wait_for("tok/s")
        screen.wait_for(LISTENS)
        screen.type(f"/save {file}\r")
        screen.wait_for("4 messages")
    asked = [message["content"] for message in json.loads(file.read_text())["messages"][::2]]
    assert asked == ["/etc/hosts has\n\nthree lines of 漢字", "one\ntwo"]


@needs_prompt_toolkit
def test_the_history_lasts_across_runs_and_is_private(tmp_path: Path) -> None:
    for keys in ("a memorable question\r", "\x1b[A\r"):  # typed, then found with the up arrow
        with chat(tmp_path, "--max-tokens", "2") as screen:
            screen.wait_for(LISTENS)
            screen.type(keys)
            screen.wait_for("memorable")
            screen.wait_for("word0 word1")
            screen.wait_for("tok/s")
            screen.wait_for(LISTENS)
            screen.type("\x04")
            assert screen.process.wait(timeout=60) == 0
    history = tmp_path / "chat_history"
    assert history.read_text().count("a memorable question") >= 1
    assert history.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("term", ["xterm", "dumb"])  # prompt_toolkit where it is installed, and the plain reader
def test_ctrl_c_stops_an_answer_and_clears_a_line_and_ctrl_d_leaves(term: str, tmp_path: Path) -> None:
    prompt = LISTENS if term == "xterm" and find_spec("prompt_toolkit") else ">"
    with chat(tmp_path, "--max-tokens", "900", TERM=term) as screen:
        screen.wait_for("Ctrl-D")
        screen.wait_for(prompt)
        screen.type("hello\r")
        screen.wait_for("word1")
        screen.process.send_signal(signal.SIGINT)
        screen.wait_for("interrupted after")
        screen.wait_for("τ")  # whether drafting helped is said all the same
        screen.wait_for(prompt)
        # At an empty prompt it only explains itself. The prompt is shown a moment before signals are listened to.
        screen.wait_for("/exit or Ctrl-D leaves", after=lambda: screen.process.send_signal(signal.SIGINT))
        screen.wait_for(prompt)
        screen.type("\x04")
        assert screen.process.wait(timeout=60) == 0


def test_without_prompt_toolkit_a_terminal_is_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "prompt_toolkit.py").write_text("raise ImportError('not installed')\n")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    with chat(tmp_path, "--max-tokens", "2", PYTHONPATH=path) as screen:
        screen.wait_for("every line is a message")
        screen.wait_for_prompt()
        screen.type("hello\n")
        screen.wait_for("word0 word1")
        screen.wait_for_prompt()
        screen.type("\x04")
        assert screen.process.wait(timeout=60) == 0


@needs_prompt_toolkit
def test_an_answer_may_be_collected_from_stdout_while_the_prompt_is_on_the_terminal(tmp_path: Path) -> None:
    terminal, inside = pty.openpty()
    extra = {"TERM": "xterm", "PACELINE_HOME": str(tmp_path), "PROMPT_TOOLKIT_NO_CPR": "1"}
    process = start("chat", "--max-tokens", "2", stdin=inside, stderr=inside, env={**environment(), **extra})
    os.close(inside)
    try:
        screen = Screen(terminal)
        screen.wait_for(LISTENS)
        os.write(terminal, b"hello\r")
        screen.wait_for("tok/s")
        screen.wait_for(LISTENS)
        os.write(terminal, b"/exit\r")
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "word0 word1\n")
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
