"""The input of a chat: prompt_toolkit on a terminal, else plain lines of stdin.

prompt_toolkit takes a paste of many lines as one message and keeps a history across runs. Where it is not installed, a
terminal is read line by line with the platform's editing.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.errors import CacheFolderError, InvalidPrompt

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

PROMPT = "> "


def open_reader(interactive: bool) -> PromptReader | LineReader:
    on_screen = sys.stdout.isatty() or sys.stderr.isatty()
    if interactive and on_screen and os.environ.get("TERM") != "dumb":
        with suppress(ImportError):
            return PromptReader()
    return LineReader(interactive)


class PromptReader:
    hint = "Alt-Enter starts a new line"
    discarded = False  # the last Ctrl-C discarded a text that was being typed

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,  # else a paste of many lines is shown on one
            prompt_continuation=" " * len(PROMPT),
            key_bindings=_enter_sends(),
            history=_open_history(),
            # Answers may be collected from stdout; the prompt is no part of them.
            output=create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr),
        )

    def read(self) -> str:
        """Return the next message or command; raise EOFError at the end and KeyboardInterrupt for Ctrl-C."""
        try:
            return self._session.prompt().rstrip("\n")  # a paste may end with line ends
        except KeyboardInterrupt:
            self.discarded = bool(self._session.default_buffer.text)
            raise


def _enter_sends() -> KeyBindings:
    from prompt_toolkit.filters import is_searching
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter", filter=~is_searching)
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline()

    return bindings


def _open_history() -> History:
    """Open the history in a file that its owner alone may read; in memory where the cache folder cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from paceline.models.load.hub import cache_home

    class KeptHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk costs the history, not the message
                super().store_string(string)

    try:
        path = cache_home() / "chat_history"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except (OSError, CacheFolderError):
        return InMemoryHistory()
    return KeptHistory(str(path))


class LineReader:
    hint = "every line is a message"
    discarded = False

    def __init__(self, interactive: bool) -> None:
        self._interactive = interactive
        if interactive:
            with suppress(ImportError):  # line editing; not on every platform
                import readline  # noqa: F401

    def read(self) -> str:
        """Read a line; the prompt goes to stdout only where that is a terminal."""
        try:
            if self._interactive and sys.stdout.isatty():
                return input(PROMPT)
            if self._interactive:
                print(PROMPT, end="", file=sys.stderr, flush=True)
            raw = sys.stdin.buffer.readline()
        except KeyboardInterrupt:
            if self._interactive:
                print(file=sys.stderr)  # the terminal shows ^C in the line of the prompt
            raise
        if not raw:
            raise EOFError
        try:
            return raw.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise InvalidPrompt("the prompt is not UTF-8 text") from None
