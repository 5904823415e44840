"""The commands of a chat: `/name`, and for some an argument. Anything else is a message."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.cli.flags import parse_k
from paceline.cli.output import chosen_drafting, drafting_words, print_note, rate_words
from paceline.config import AUTO, NONE
from paceline.drafters.method_names import matches_method, unknown_method
from paceline.drafters.methods import METHODS
from paceline.errors import InvalidParameter, PacelineError

if TYPE_CHECKING:
    from paceline.cli.chat.command import Conversation

HINT = "/help lists commands · Ctrl-C stops an answer · Ctrl-D leaves"


class Leave(Exception):
    """The user's wish to end the chat."""


def run_command(conversation: Conversation, text: str) -> bool:
    """Carry out a command; return False for a message, such as `/etc/hosts is what`."""
    name, _, argument = text.strip().partition(" ")
    command = COMMANDS.get(name)
    if command is not None and not (argument and command.argument is None):
        command.run(conversation, argument.strip())
        return True
    if re.fullmatch(r"/\w+", text.strip()):
        raise PacelineError(f"no such command: {name}; /help lists them")
    return False


def _show_help(conversation: Conversation, argument: str) -> None:
    usages = {f"{name} {command.argument or ''}".strip(): command.help for name, command in COMMANDS.items()}
    width = max(map(len, usages))
    for usage, explanation in usages.items():
        print_note(f"{usage:<{width}}  {explanation}")


def _clear(conversation: Conversation, argument: str) -> None:
    conversation.clear()
    print_note("a new conversation")


def _system(conversation: Conversation, argument: str) -> None:
    if argument:
        conversation.system = None if argument == "-" else argument
    print_note("no system message" if conversation.system is None else f"system message: {conversation.system}")


def _method(conversation: Conversation, argument: str) -> None:
    """Show or set the method of later turns. Drafting changes no answer, so the history stays valid."""
    llm, words = conversation.llm, argument.split()
    loaded: list[str] = llm.call(lambda engine: [drafter.name for drafter in engine.drafters.drafters])
    if len(words) > 2:
        raise InvalidParameter("method", "/method takes a name and a k")
    if words:
        method, k = words[0], parse_k(words[1]) if len(words) == 2 else None
        _check(method, loaded)
        if method == NONE and k is not None:
            raise InvalidParameter("k", f"method {NONE} drafts nothing; leave k out")
        speculation = {"method": method, "k": k}
        conversation.params = replace(conversation.params, speculation=speculation)
    method, k = chosen_drafting(llm, conversation.params)
    print_note(f"method {method}, k {AUTO if k is None else k} · loaded: {', '.join((NONE, AUTO, *loaded))}")


def _check(method: str, loaded: list[str]) -> None:
    if method == NONE or (method == AUTO and loaded) or any(matches_method(name, method) for name in loaded):
        return
    if not loaded:
        raise InvalidParameter("method", f"this chat was started with --method {NONE}; start it without, to draft")
    if method in METHODS and METHODS[method].needs:
        flags = " and ".join(f"--{need.replace('_', '-')}" for need in METHODS[method].needs)
        raise InvalidParameter("method", f"{method} is not loaded; start the chat with {flags}")
    raise InvalidParameter("method", unknown_method(method))


def _stats(conversation: Conversation, argument: str) -> None:
    turns = "1 turn" if conversation.turns == 1 else f"{conversation.turns} turns"
    rate = rate_words(conversation.decoded / conversation.decode_s if conversation.decode_s else None)
    drafting = drafting_words(conversation.llm, conversation.speculation, conversation.params)
    print_note(f"{turns} · {conversation.tokens} tokens · {rate} · {drafting}")
    print_note(f"the conversation has {conversation.context} of {conversation.llm.max_model_len} tokens of context")


def _save(conversation: Conversation, argument: str) -> None:
    if not argument:
        raise InvalidParameter("file", "/save needs the name of a file")
    path = Path(argument).expanduser()
    whole = json.dumps(
        {"model": conversation.llm.name, "messages": conversation.messages}, ensure_ascii=False, indent=1
    )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(whole + "\n")
    except FileExistsError:
        raise InvalidParameter("file", f"{path} exists; choose another name") from None
    except OSError as error:
        raise InvalidParameter("file", f"cannot write {path}: {error.strerror}") from None
    print_note(f"{len(conversation.messages)} messages in {path}")


def _leave(conversation: Conversation, argument: str) -> None:
    raise Leave


class ChatCommand(NamedTuple):
    run: Callable[[Conversation, str], None]
    help: str
    argument: str | None = None  # None: the command takes none


COMMANDS = {
    "/help": ChatCommand(_show_help, "show this"),
    "/clear": ChatCommand(_clear, "forget all but the system message"),
    "/system": ChatCommand(_system, "set the system message; - removes it", "[TEXT]"),
    "/method": ChatCommand(_method, "show or choose what drafts", "[NAME [K]]"),
    "/stats": ChatCommand(_stats, "speed, drafting and the context used"),
    "/save": ChatCommand(_save, "write the conversation as JSON", "FILE"),
    "/exit": ChatCommand(_leave, "leave; so does Ctrl-D"),
}
