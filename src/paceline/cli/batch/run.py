"""`paceline generate --prompts FILE --out FILE`: many prompts in one continuous batch.

Every answer is written when it is complete. The same command continues a run that was stopped or killed: prompts whose
answers are in the file are not asked again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.batch.lines import RequestLine, read_lines
from paceline.cli.batch.result_file import ResultFile
from paceline.cli.generate import load_llm, remark_on_seed
from paceline.cli.output import drafting_words, interrupted, print_json, print_note, rate_words
from paceline.cli.progress import live
from paceline.config import EngineConfig
from paceline.errors import EngineClosed, EngineDied, PacelineError
from paceline.outputs import RequestOutput, SpeculationStats

if TYPE_CHECKING:
    from paceline.cli.flags import RunOptions
    from paceline.llm import LLM

# Half more than the engine has rows: a request waits for every row that becomes free.
REQUESTS_AT_ONCE = EngineConfig.max_num_seqs + EngineConfig.max_num_seqs // 2


@dataclass
class Summary:
    total: int
    earlier: int  # answers that were in the file
    failed: int = 0
    cut: int = 0  # ended by a limit of tokens
    tokens: int = 0
    seconds: float = 0.0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def add(self, outputs: Sequence[RequestOutput] | None) -> None:
        """`outputs`: of one line; None: it could not be answered."""
        self.failed += outputs is None
        for answer in [answer for output in outputs or () for answer in output.outputs]:
            self.cut += answer.finish_reason == "length"
            self.tokens += len(answer.token_ids)
            self.speculation.merge(answer.speculation)


def answer_prompts(prompts: Path, out: Path, *, raw: bool, n: int, options: RunOptions) -> int:
    params = options.sampling_params(n=n)
    drafting = options.speculation_arguments()
    lines = read_lines(prompts, target=options.target, system=options.system, raw=raw, params=params)
    with ResultFile(out, [line.id for line in lines]) as results:
        left = [line for line in lines if line.id not in results.done]
        summary = Summary(len(lines), earlier=len(lines) - len(left))
        llm = None
        try:
            if left:
                llm = load_llm(options, drafting)
                remark_on_seed(llm, params, options)
                _answer(llm, left, results, summary, quiet=options.json)
            results.sort()
        except KeyboardInterrupt:
            what = f"interrupted: {len(results.done)} of {summary.total} answers are in {results.path}"
            return interrupted(f"{what}; the same command goes on from there", as_json=options.json)
    if options.json:
        print_json(_summary_object(summary, out))
    else:
        print_note(_summary_words(summary, out, llm))
    return 0


def _answer(llm: LLM, lines: Sequence[RequestLine], results: ResultFile, summary: Summary, *, quiet: bool) -> None:
    started = time.monotonic()
    pool = ThreadPoolExecutor(min(len(lines), REQUESTS_AT_ONCE), thread_name_prefix="paceline-batch")
    try:
        with nullcontext() if quiet else live() as display:
            for future in as_completed([pool.submit(_result, llm, line) for line in lines]):
                result, outputs = future.result()
                results.append(result)
                summary.add(outputs)
                if display is not None:
                    display.work(len(results.done), summary.total, "answering")
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        llm.close()  # requests that run fail, and their threads end
        raise
    pool.shutdown()
    summary.seconds = time.monotonic() - started


def _result(llm: LLM, line: RequestLine) -> tuple[dict[str, Any], Sequence[RequestOutput] | None]:
    """Return the line's result and its outputs; None: it could not be answered, and the result has the reason."""
    try:
        outputs = line.ask(llm)
    except (EngineClosed, EngineDied):
        raise
    except PacelineError as error:
        return line.failure(error), None
    return line.result(llm.name, outputs), outputs


def _summary_words(summary: Summary, out: Path, llm: LLM | None) -> str:
    words = [f"{summary.total} answers in {out}"]
    if summary.earlier:
        words.append(f"{summary.earlier} of them from an earlier run")
    if summary.failed:
        words.append(f"{summary.failed} could not be answered: see their error in the file")
    if summary.cut:
        words.append(f"{summary.cut} cut off by --max-tokens or the context")
    if llm is not None:
        rate = rate_words(summary.tokens / summary.seconds if summary.seconds and summary.tokens else None)
        words += [f"{summary.tokens} tokens", f"{rate} together", drafting_words(llm, summary.speculation)]
    return " · ".join(words)


def _summary_object(summary: Summary, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "answers": summary.total,
        "earlier": summary.earlier,
        "failed": summary.failed,
        "cut": summary.cut,
        "completion_tokens": summary.tokens,
        "seconds": summary.seconds,
        "tokens_per_second": summary.tokens / summary.seconds if summary.seconds else None,
        "speculation": summary.speculation.as_dict(),
    }
