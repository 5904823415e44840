"""`paceline`: the table of commands, and the handling of errors.

A PacelineError is one line on stderr and exit code 1, a usage error one line and 2, an interruption 130; with --json an
error is an object on stdout instead. A traceback is shown only when PACELINE_DEBUG is set.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from paceline import __version__
from paceline.cli.advise.command import advise
from paceline.cli.bench.command import bench
from paceline.cli.chat.command import chat
from paceline.cli.demo import demo
from paceline.cli.doctor import doctor
from paceline.cli.export import export
from paceline.cli.generate import generate
from paceline.cli.models.command import models, pull
from paceline.cli.models.warm import warm
from paceline.cli.output import Interrupted, print_error, print_json_error
from paceline.cli.prove import prove
from paceline.cli.quantize import quantize
from paceline.cli.serve import serve
from paceline.cli.theory.command import theory
from paceline.cli.train import train
from paceline.errors import DeviceError, PacelineError

PANELS = 80  # columns; a narrower terminal gets help without panels
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _PlainSwitches:
    """A command or group whose help shows a switch without a type: `--raw`, not `--raw <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class PacelineCommand(_PlainSwitches, TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write help, without panels in a narrow terminal, where they cut long flags short."""
        if shutil.get_terminal_size().columns < PANELS:
            self.rich_markup_mode = None
        super().format_help(ctx, formatter)


class PacelineGroup(_PlainSwitches, TyperGroup):
    pass


app = typer.Typer(
    cls=PacelineGroup,
    help="Speculative decoding: language models that answer sooner without changing their output.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    *(generate, chat, serve, demo, prove, bench, advise, train, export),
    *(theory, quantize, pull, models, warm, doctor),
)
for command in COMMANDS:
    app.command(cls=PacelineCommand)(command)


# What libraries say where an allocation, a mapping or a thread failed.
NO_MEMORY = ("annot allocate memory", "can't start new thread", "failed to map segment", "not enough memory")
OUT_OF_MEMORY = (
    "the memory does not suffice; raise the limit of the process (ulimit -v, the container's), lower kv_cache_bytes, "
    "or take a smaller model"
)


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
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the process was started with it closed
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (to the end of the process)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
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
        if isinstance(error, OSError) and error.errno in CANNOT_WRITE and error.filename is None:
            return _report(OutputError(f"cannot write the output: {error.strerror}"), as_json, 1)
        if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
            return _report(DeviceError(OUT_OF_MEMORY), as_json, 1)
        what = f"{type(error).__name__}: {error}"
        return _report(RuntimeError(f"unexpected {what} (set PACELINE_DEBUG=1 for the traceback)"), as_json, 1)


def wants_json(arguments: Sequence[str]) -> bool:
    """Return whether --json is given; this is asked before parsing, which can fail."""
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in flags


def _report(error: Exception, as_json: bool, code: int) -> int:
    try:
        (print_json_error if as_json else print_error)(error)
    except OSError:  # stdout is what failed
        print_error(error)
    return code


def _usage_error(error: Exception, as_json: bool) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # the message is the help itself
        print(getattr(error, "message", ""), file=sys.stderr)
        return 2
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    if "unexpected extra argument" in message and context is not None and "prompt" in context.params:
        message += "; put a prompt of several words in quotes"
    return _report(UsageError(f"{message}{hint}"), as_json, getattr(error, "exit_code", 2))


class OutputError(Exception):
    """Stdout is a file on a full disk, or fails otherwise."""


class UsageError(Exception):
    """The command line itself is wrong; named so in the JSON error object."""
