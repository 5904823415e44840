"""`paceline generate`: one prompt, streamed as it is committed, or a file of prompts."""

from __future__ import annotations

import itertools
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.flags import RunOptions, argument, flag, with_options
from paceline.cli.output import Tally, interrupted, print_json, print_note, result_object, write
from paceline.cli.progress import progress, prompt_progress
from paceline.errors import InvalidPrompt
from paceline.outputs import StreamChunk

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.sampling_params import SamplingParams

Request = str | list[dict[str, Any]]  # raw text, or messages for the chat template


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(RunOptions):
    prompt: str | None = argument(None, "What to ask; - reads it from stdin.", "PROMPT", show_default=False)
    prompts: Path | None = flag(
        None, "Answer all prompts of a file: jsonl (prompt, messages or turns), OpenAI's batch lines, or text.", "FILE"
    )
    out: Path | None = flag(None, "Where answers to --prompts go. Run again, the command continues the file.", "FILE")
    raw: bool = flag(False, "Continue the text itself, without the chat template.")
    n: int = flag(1, "How many answers to the prompt.")


@with_options
def generate(*, options: GenerateOptions) -> int:
    """Answer a prompt, or a file of prompts."""
    if options.raw and options.system is not None:
        raise typer.BadParameter(
            "a system message needs the chat template, which --raw leaves out", param_hint="--system"
        )
    if options.prompts is not None or options.out is not None:
        return answer_file(options)
    if options.prompt is None:
        raise typer.BadParameter("give a PROMPT, or --prompts FILE", param_hint="PROMPT")
    refuse_unseen_logprobs(options)
    text = read_prompt(options.prompt)
    if not options.raw and not text.strip():
        raise InvalidPrompt("the prompt has nothing but white space: give some text, or --raw to continue it as it is")
    params = options.sampling_params(n=options.n)
    drafting = options.speculation_arguments()
    request: Request = text if options.raw else messages(options.system, text)
    tally = None
    try:
        llm = load_llm(options, drafting)
        remark_on_seed(llm, params, options)
        tally = new_tally(llm, params, options)
        answer(llm, request, params, tally, quiet=options.json)
    except KeyboardInterrupt:
        return interrupted(tally.interruption if tally else "interrupted", as_json=options.json)
    if options.json:
        print_json(result_object(tally, options.logprobs))
    else:
        print_note(tally.line())
    return 0


def answer_file(options: GenerateOptions) -> int:
    if options.prompt is not None:
        raise typer.BadParameter("leave it out beside --prompts and --out", param_hint="PROMPT")
    if options.prompts is None or options.out is None:
        raise typer.BadParameter("--prompts FILE and --out FILE belong together", param_hint="--prompts")
    from paceline.cli.batch.run import answer_prompts

    return answer_prompts(options.prompts, options.out, raw=options.raw, n=options.n, options=options)


def refuse_unseen_logprobs(options: RunOptions) -> None:
    if options.logprobs is not None and not options.json:
        raise typer.BadParameter("log-probabilities are shown with --json only", param_hint="--logprobs")


def read_prompt(argument: str) -> str:
    """Return the argument, or stdin without its last newline."""
    if argument == "-" and sys.stdin.isatty():
        print_note("type the prompt; Ctrl-D on a line of its own ends it")
    try:
        text = sys.stdin.buffer.read().decode() if argument == "-" else argument
        text.encode()  # an argument's undecodable bytes arrive as surrogates
    except UnicodeError:
        raise InvalidPrompt("the prompt is not UTF-8 text") from None
    if argument == "-":
        text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise InvalidPrompt("the prompt is empty: give some text, or - to read it from stdin")
    return text


def messages(system: str | None, text: str) -> list[dict[str, Any]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def load_llm(options: RunOptions, more: dict[str, Any]) -> LLM:
    """Load the engine, the first import of torch."""
    with progress(plain=False) as report:
        if report is not None:
            report(f"loading {options.model}", 0, None)
        from paceline.llm import LLM

        llm = LLM(
            options.model,
            **options.load_options,
            max_model_len=options.max_model_len,
            gpu_memory_fraction=options.gpu_memory_fraction,
            progress=report,
            **more,
        )
    if llm.note and sys.stderr.isatty():
        print_note(llm.note)
    return llm


def new_tally(llm: LLM, params: SamplingParams, options: RunOptions) -> Tally:
    return Tally(llm, params, default_limit=options.token_limit if options.max_tokens is None else None)


def remark_on_seed(llm: LLM, params: SamplingParams, options: RunOptions) -> None:
    if params.seed is not None and llm.client.resolve(params).greedy and not options.json:
        print_note("--seed has no effect: decoding is greedy; --temperature above 0 samples")


def answer(
    llm: LLM,
    request: Request,
    params: SamplingParams,
    tally: Tally,
    *,
    quiet: bool,
) -> None:
    """Run one request to its end and fill the tally. A single answer is printed as it streams."""
    printer = None if quiet else AnswerPrinter(params.n)
    try:
        stream = llm.stream(request, params)
        tally.sequences = stream.sequences
        with closing(stream) as chunks:
            with prompt_progress(None if quiet else stream.sequences[0]):
                first = list(itertools.islice(chunks, 1))
            for chunk in itertools.chain(first, chunks):
                tally.add(chunk)
                if printer is not None:
                    printer.add(chunk)
    finally:
        if printer is not None:
            printer.end()


class AnswerPrinter:
    """A printer: one answer streams, several are printed whole and in order."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.pending: dict[int, list[str]] = {}
        self.finished: set[int] = set()
        self.printed = 0
        self.at_line_start = True

    def add(self, chunk: StreamChunk) -> None:
        if self.n == 1:
            self._write(chunk.text)
            return
        self.pending.setdefault(chunk.index, []).append(chunk.text)
        if chunk.finish_reason is not None:
            self.finished.add(chunk.index)
        while self.printed in self.finished:
            self._heading_and_text(self.printed)

    def end(self) -> None:
        """Print answers that an interruption left unfinished, and end the line."""
        for index in sorted(i for i in self.pending if i >= self.printed):
            self._heading_and_text(index)
        if not self.at_line_start:
            self._write("\n")

    def _heading_and_text(self, index: int) -> None:
        if not self.at_line_start:
            self._write("\n")
        self._write(f"── {index + 1} of {self.n} ──\n" + "".join(self.pending.pop(index)))
        self.printed = index + 1

    def _write(self, text: str) -> None:
        if text:
            self.at_line_start = text.endswith("\n")  # first: Ctrl-C may come while it is written
            write(text)
