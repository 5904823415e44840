"""`paceline chat`: a conversation. The whole history goes with every turn; the prefix cache makes that cheap."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from paceline.cli.generate import answer, interrupted, load_llm, messages, refuse_unseen_logprobs
from paceline.cli.options import RunOptions, with_options
from paceline.cli.output import Tally, print_error, print_json, print_note, result_object
from paceline.cli.speculation import speculation_arguments
from paceline.errors import InvalidPrompt, PacelineError

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.sampling_params import SamplingParams

HELP = "/reset forgets the conversation · /exit or Ctrl-D leaves · Ctrl-C stops an answer · /help shows this"


@with_options
def chat(*, options: RunOptions) -> int:
    """Hold a conversation; with piped input every line is a turn."""
    refuse_unseen_logprobs(options)
    params = options.sampling_params()
    drafting = speculation_arguments(options)
    interactive = sys.stdin.isatty()
    try:
        conversation = Conversation(load_llm(options, drafting), params, options)
    except KeyboardInterrupt:
        return interrupted(None, options.json)
    if interactive:
        enable_line_editing()
        print_note(HELP)
    while True:
        try:
            line = read_line(interactive)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            if not interactive:
                return interrupted(None, options.json)
            print_note(f"\n{HELP}")
            continue
        if line.strip() == "/exit":
            return 0
        try:
            stopped = conversation.take(line)
        except PacelineError as error:
            if not interactive:
                raise
            print_error(error)
        else:
            if stopped and not interactive:
                return 130


class Conversation:
    """Owns the history. A turn that fails leaves no trace in it; one that is stopped keeps the text it has."""

    def __init__(self, llm: LLM, params: SamplingParams, options: RunOptions) -> None:
        self.llm = llm
        self.params = params
        self.options = options
        self.history: list[dict[str, Any]] = []

    def take(self, line: str) -> bool:
        """A command or a turn; True when Ctrl-C stopped the answer."""
        command = line.strip()
        if command == "/reset":
            self.history = []
            print_note("a new conversation")
        elif re.fullmatch(r"/\w*", command):
            print_note(HELP if command == "/help" else f"no such command: {command} · {HELP}")
        elif command:
            return self._turn(line)
        return False

    def _turn(self, text: str) -> bool:
        asked = messages(None if self.history else self.options.system, text)
        asked = [*self.history, *asked]
        tally = Tally(self.llm)
        stopped = False
        try:
            with ctrl_c_between_chunks() as check:
                answer(self.llm, asked, self.params, tally, quiet=self.options.json, after_chunk=check)
        except KeyboardInterrupt:
            stopped = True
        except InvalidPrompt as error:
            hint = " (/reset starts a new conversation)" if self.history else ""
            raise InvalidPrompt(f"{error}{hint}") from None
        if tally.text or not stopped:
            self.history = [*asked, {"role": "assistant", "content": tally.text}]
        self._report(tally, stopped)
        return stopped

    def _report(self, tally: Tally, stopped: bool) -> None:
        if stopped:
            interrupted(tally, self.options.json)
        elif self.options.json:
            print_json(result_object(tally, self.options.logprobs))
        else:
            print_note(tally.line())
        if self._context_is_full(tally):
            print_note(f"the context of {self.llm.max_model_len} tokens is full: /reset starts a new conversation")

    def _context_is_full(self, tally: Tally) -> bool:
        output = tally.output
        return output is not None and (len(output.prompt_token_ids) + tally.completion_tokens >= self.llm.max_model_len)


@contextmanager
def ctrl_c_between_chunks() -> Iterator[Callable[[], None]]:
    """Ctrl-C waits for the step in progress, so that the engine is whole for the next turn; a second one leaves."""
    asked = False

    def handler(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise SystemExit(130)
        asked = True

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def enable_line_editing() -> None:
    with suppress(ImportError):  # not on every platform
        import readline  # noqa: F401


def read_line(interactive: bool) -> str:
    """One line without its newline; the prompt goes to stdout only where no answer is being collected from it."""
    if interactive and sys.stdout.isatty():
        return input("> ")
    if interactive:
        print("> ", end="", file=sys.stderr, flush=True)
    raw = sys.stdin.buffer.readline()
    if not raw:
        raise EOFError
    try:
        return raw.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise InvalidPrompt("the prompt is not UTF-8 text") from None
