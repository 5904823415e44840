"""`paceline chat`: a conversation. The whole history goes with every turn; the prefix cache makes that cheap."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from paceline.cli.chat.commands import HINT, Leave, run_command
from paceline.cli.chat.input import open_reader
from paceline.cli.flags import RunOptions, with_options
from paceline.cli.generate import answer, load_llm, new_tally, refuse_unseen_logprobs, remark_on_seed
from paceline.cli.output import Tally, interrupted, print_error, print_json, print_note, result_object
from paceline.errors import InvalidPrompt, PacelineError
from paceline.outputs import SpeculationStats

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.sampling_params import SamplingParams


@with_options
def chat(*, options: RunOptions) -> int:
    """Hold a conversation; /help lists its commands. With piped input every line is a turn."""
    refuse_unseen_logprobs(options)
    params = options.sampling_params()
    drafting = options.speculation_arguments()
    interactive = sys.stdin.isatty()
    try:
        conversation = Conversation(load_llm(options, drafting), params, options)
        reader = open_reader(interactive)
    except KeyboardInterrupt:
        return interrupted("interrupted", as_json=options.json)
    remark_on_seed(conversation.llm, params, options)
    if interactive:
        print_note(f"{HINT} · {reader.hint}")
    while True:
        try:
            text = reader.read()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            if not interactive:
                return interrupted("interrupted", as_json=options.json)
            if not reader.discarded:
                print_note("/exit or Ctrl-D leaves")
            continue
        try:
            if not run_command(conversation, text) and text.strip():
                stopped = conversation.turn(text)
                if stopped and not interactive:
                    return 130
        except Leave:
            return 0
        except PacelineError as error:
            if not interactive:
                raise
            print_error(error)


class Conversation:
    """The history of a chat. A turn that fails leaves no trace in it; a stopped one keeps its text so far."""

    def __init__(self, llm: LLM, params: SamplingParams, options: RunOptions) -> None:
        self.llm, self.params, self.options = llm, params, options
        self.system = options.system
        self.history: list[dict[str, Any]] = []  # without the system message
        self.turns = self.tokens = self.context = 0  # context: tokens of the conversation so far
        self.decoded, self.decode_s = 0, 0.0  # tokens after each answer's first, and their time
        self.speculation = SpeculationStats()

    @property
    def messages(self) -> list[dict[str, Any]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.history]

    def clear(self) -> None:
        self.history, self.context = [], 0

    def turn(self, text: str) -> bool:
        """Answer a message; return True when Ctrl-C stopped the answer."""
        asked = {"role": "user", "content": text}
        tally = new_tally(self.llm, self.params, self.options)
        stopped = False
        try:
            answer(self.llm, [*self.messages, asked], self.params, tally, quiet=self.options.json)
        except KeyboardInterrupt:
            stopped = True
        except InvalidPrompt as error:
            hint = " (/clear starts a new conversation)" if self.history else ""
            raise InvalidPrompt(f"{error}{hint}") from None
        if tally.text or not stopped:
            self.history += [asked, {"role": "assistant", "content": tally.text}]
        self._count(tally)
        self._report(tally, stopped)
        return stopped

    def _count(self, tally: Tally) -> None:
        self.turns += 1
        self.tokens += tally.completion_tokens
        self.decoded += max(tally.completion_tokens - 1, 0)
        self.decode_s += tally.decode_s or 0.0
        self.context = sum(len(sequence.tokens) for sequence in tally.sequences)
        self.speculation.merge(tally.speculation)

    def _report(self, tally: Tally, stopped: bool) -> None:
        if stopped:
            interrupted(tally.interruption, as_json=self.options.json)
        elif self.options.json:
            print_json(result_object(tally, self.options.logprobs))
        else:
            print_note(tally.line())
        if self.context >= self.llm.max_model_len:
            print_note(f"the context of {self.llm.max_model_len} tokens is full: /clear starts a new conversation")
