"""`paceline`: the table of commands, and the handling of errors.

A PacelineError is one line on stderr and exit code 1, a usage error one line and 2, an interruption 130; with --json an
error is an object on stdout instead. A traceback is shown only when PACELINE_DEBUG is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli.advise import advise
from paceline.cli.bench import bench
from paceline.cli.chat import chat
from paceline.cli.demo import demo
from paceline.cli.doctor import doctor
from paceline.cli.generate import generate
from paceline.cli.models import models, pull
from paceline.cli.output import Interrupted, print_error, print_json_error
from paceline.cli.prove import prove
from paceline.cli.serve import serve
from paceline.cli.theory import theory
from paceline.errors import PacelineError

app = typer.Typer(
    help="Language models that answer several times sooner without changing their output.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, chat, serve, demo, prove, bench, advise, theory, pull, models, doctor):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    as_json = wants_json(arguments)
    try:
        result = app(list(arguments), prog_name="paceline", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _report(Interrupted("interrupted"), as_json, 130)
    except PacelineError as error:
        return _report(error, as_json, 1)
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own: a wrong flag, a missing argument
            return _usage_error(error, as_json)
        if os.environ.get("PACELINE_DEBUG"):
            raise
        what = f"{type(error).__name__}: {error}"
        return _report(RuntimeError(f"unexpected {what} (set PACELINE_DEBUG=1 for the traceback)"), as_json, 1)


def wants_json(arguments: Sequence[str]) -> bool:
    """Found before parsing, since parsing itself can fail."""
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in flags


def _report(error: Exception, as_json: bool, code: int) -> int:
    (print_json_error if as_json else print_error)(error)
    return code


def _usage_error(error: Exception, as_json: bool) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # the message is the help itself
        print(getattr(error, "message", ""), file=sys.stderr)
        return 2
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    message = error.format_message()  # type: ignore[attr-defined]
    return _report(UsageError(f"{message.rstrip('.')}{hint}"), as_json, getattr(error, "exit_code", 2))


class UsageError(Exception):
    """The command line itself is wrong; named so in the JSON error object."""
