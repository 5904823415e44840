"""The output of a command: the last line, the JSON object, errors. Answers go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import NONE
from paceline.errors import InvalidParameter
from paceline.outputs import CompletionOutput, Logprob, RequestOutput, SpeculationStats, StreamChunk

if TYPE_CHECKING:
    from paceline.core.sequence import Sequence
    from paceline.llm import LLM
    from paceline.sampling_params import SamplingParams

SHORT = 3  # tokens, the prompt's pass included; shorter answers never draft, since their steps are first timings
PAYS = 1.2  # expected gain from which no margin of the policy keeps a step plain
WIDTH = 80  # columns; of a terminal whose width is not known
ITEM = " · "
JOINT = "\xa0"  # a space at which no line ends


class Interrupted(Exception):
    """An interruption by Ctrl-C; the name is in the JSON error object."""


def interrupted(what: str, *, as_json: bool) -> int:
    """Report an interruption and return its exit code."""
    if as_json:
        print_json_error(Interrupted(what))
    else:
        print_note(what)
    return 130


@dataclass
class Tally:
    """Progress of one request, from which the last line is made, also after an interruption."""

    llm: LLM
    params: SamplingParams | None = None  # None: the request cannot choose its own method
    default_limit: int | None = None  # tokens of an answer, where the user set no limit
    sequences: SequenceOf[Sequence] = ()  # the engine's, one for each answer; final once the stream is over
    arrival: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    tokens: dict[int, int] = field(default_factory=dict)  # key: index of the answer
    text: str = ""  # text of the first answer
    output: RequestOutput | None = None  # None: the request is not finished

    def add(self, chunk: StreamChunk) -> None:
        self.last = time.monotonic()
        if self.first is None:
            self.first = self.last
        self.tokens[chunk.index] = self.tokens.get(chunk.index, 0) + len(chunk.token_ids)
        self.text += chunk.text if chunk.index == 0 else ""
        if chunk.output is not None:
            self.output = chunk.output
            self.tokens = {answer.index: len(answer.token_ids) for answer in chunk.output.outputs}

    @property
    def completion_tokens(self) -> int:
        return sum(self.tokens.values())

    @property
    def ttft_s(self) -> float | None:
        if self.output is not None:
            return self.output.metrics.ttft_s
        return None if self.first is None else self.first - self.arrival

    @property
    def decode_s(self) -> float | None:
        if self.output is not None:
            return self.output.metrics.decode_s
        return None if self.first is None or self.last is None else self.last - self.first

    @property
    def tokens_per_second(self) -> float | None:
        """Rate without each answer's first token, which the prompt's pass gives; None for one token."""
        decoded = sum(max(0, count - 1) for count in self.tokens.values())
        return decoded / self.decode_s if decoded and self.decode_s else None

    @property
    def speculation(self) -> SpeculationStats:
        """Statistics of all answers together, once the stream is over; answers cut short included."""
        merged = SpeculationStats()
        if self.output is None:
            for sequence in self.sequences:
                merged.merge(sequence.stats)
        else:
            for answer in self.output.outputs:
                merged.merge(answer.speculation)
        return merged

    def line(self) -> str:
        tokens = "1 token" if self.completion_tokens == 1 else f"{self.completion_tokens} tokens"
        drafting = drafting_words(self.llm, self.speculation, self.params)
        first = "" if self.ttft_s is None else f" · first after {self.ttft_s:.2f} s"
        rate = rate_words(self.tokens_per_second)
        return f"{tokens}{self._end_words()} · {rate} · {drafting}{first}{target_words(self.llm)}"

    @property
    def interruption(self) -> str:
        return f"interrupted after {self.line()}"

    def _end_words(self) -> str:
        """Name the limit that ended an answer, unless the user set it."""
        if self.output is None:
            return ""
        cut = [answer for answer in self.output.outputs if answer.finish_reason == "length"]
        if any(len(answer.token_ids) == self.default_limit for answer in cut):
            return f" (stopped at {self.default_limit}: --max-tokens allows more)"
        full = self.llm.max_model_len - len(self.output.prompt_token_ids)
        return " (the context is full)" if any(len(answer.token_ids) >= full for answer in cut) else ""


def target_words(llm: LLM) -> str:
    """Name the settings under which the target is not the checkpoint as stored."""
    activations = "" if llm.activations == "float32" else f" · {llm.activations} activations"
    return activations + ("" if llm.kv_dtype == "auto" else f" · {llm.kv_dtype} cache")


def rate_words(tokens_per_second: float | None) -> str:
    if tokens_per_second is None:
        return "n/a tok/s"
    return f"{tokens_per_second:.{0 if tokens_per_second >= 10 else 1}f} tok/s"


def drafting_words(llm: LLM, stats: SpeculationStats, params: SamplingParams | None = None) -> str:
    """Return `suffix k≈4 · τ 2.4 · est. 1.7x`, or the reason why nothing was drafted. `shared`: what a draft model of
    another vocabulary expects of the tokens that the target has too."""
    if not stats.num_drafts:
        return f"no drafts: {why_no_draft(llm, stats, params)}"
    speedup = stats.estimated_speedup
    gain = "too short to time" if speedup is None else f"est. {speedup:.1f}x"
    mass = "" if llm.shared_mass is None else f" · {100 * llm.shared_mass:.0f} % shared"
    drafted, length = stats.mean_draft_length, stats.mean_acceptance_length
    return f"{method_words(stats)} k≈{drafted:.0f} · τ {length:.1f}{mass} · {gain}"


def why_no_draft(llm: LLM, stats: SpeculationStats, params: SamplingParams | None = None) -> str:
    method, k = chosen_drafting(llm, params)
    if method == NONE:
        return f"method {NONE}"
    if stats.num_committed_tokens < SHORT:
        return "too short"
    if k is not None or llm.expected_gain is None:
        return "nothing to draft from"
    if llm.expected_gain > PAYS:  # its account holds too little
        return "earlier ones did not pay"
    return f"expected {llm.expected_gain:.1f}x"


def chosen_drafting(llm: LLM, params: SamplingParams | None) -> tuple[str, int | None]:
    """Return method and k of a request: its own, or those the model was loaded with."""
    own = None if params is None else params.speculation
    if own is None:
        return llm.method, llm.speculation.k
    if isinstance(own, str):
        return own, llm.speculation.k
    return own.get("method", llm.method), own.get("k", llm.speculation.k)


def method_words(stats: SpeculationStats) -> str:
    """Name the methods that made at least a tenth of the drafts, the busiest first."""
    ranked = sorted(stats.drafts_by_method.items(), key=lambda item: -item[1])
    return "+".join(method for method, drafts in ranked if 10 * drafts >= stats.num_drafts)


def result_object(tally: Tally, top: int | None) -> dict[str, Any]:
    """Return the object that `--json` prints; its keys are part of the interface. `top`: logprobs requested."""
    llm, output, stats = tally.llm, tally.output, tally.speculation
    assert output is not None, "the request is not finished"
    return {
        "model": llm.name,
        "method": llm.method,
        "weights": llm.dtype_name,
        "activations": llm.activations,
        "kv_dtype": llm.kv_dtype,
        "choices": [{**choice_object(answer, top), "token_ids": list(answer.token_ids)} for answer in output.outputs],
        "usage": {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": tally.completion_tokens},
        "timing": {
            "load_s": llm.load_s,
            "ttft_s": tally.ttft_s,
            "decode_s": tally.decode_s,
            "tokens_per_second": tally.tokens_per_second,
        },
        "speculation": {
            **stats.as_dict(),
            "drafts_by_method": dict(stats.drafts_by_method),
            "estimated_speedup": stats.estimated_speedup if stats.num_drafts else None,
            "why_no_draft": None if stats.num_drafts else why_no_draft(llm, stats, tally.params),
        },
    }


def choice_object(answer: CompletionOutput, top: int | None) -> dict[str, Any]:
    logprobs = None
    if answer.logprobs is not None:
        positions = zip(answer.token_ids, answer.logprobs, strict=True)
        logprobs = [_position(token, seen, top or 0) for token, seen in positions]
    return {
        "index": answer.index,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "logprobs": logprobs,
    }


def _position(token: int, seen: dict[int, Logprob], top: int) -> dict[str, Any]:
    """Describe the chosen token and the `top` likeliest."""
    ranked = sorted(seen.items(), key=lambda item: item[1].rank)[:top]
    return {**_logprob(token, seen[token]), "top_logprobs": [_logprob(*item) for item in ranked]}


def _logprob(token: int, entry: Logprob) -> dict[str, Any]:
    return {"token_id": token, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}


# -- stdout and stderr


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)  # ASCII: valid whatever stdout's encoding is


def print_and_save(folder: Path, show: Callable[[], None], save: Callable[[Path], SequenceOf[Path]]) -> None:
    """Print first: the figures must be seen even if the disk is full."""
    show()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = save(folder)
    except OSError as error:
        raise InvalidParameter("out", f"the results could not be written to {folder}: {error.strerror}") from error
    print_note(f"written to {folder}: {', '.join(file.name for file in files)}")


def exit_code(stopped: BaseException | None, note: str) -> int:
    """Return 0 for a whole run and 130 after Ctrl-C, with a note; raise any other reason to stop."""
    if isinstance(stopped, KeyboardInterrupt):
        print_note(note)
        return 130
    if stopped is not None:
        raise stopped
    return 0


def print_note(text: str) -> None:
    """Write to stderr; on a terminal lines end between words."""
    with suppress(OSError):  # an answer counts, also where stderr cannot be written
        print(wrapped(text, _columns()) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def wrapped(text: str, columns: int) -> str:
    """Break lines between words, and lists between short items: a figure stays beside its unit. A word longer than a
    line is not broken: it may be a path to copy."""
    from rich.cells import cell_len  # a wide character takes two columns

    lines: list[str] = []
    for paragraph in text.split("\n"):
        first, *more = paragraph.split(ITEM)
        items = [first, *(f"{ITEM.strip()} {item}" for item in more)]
        whole = [item.replace(" ", JOINT) if more and cell_len(item) <= columns // 2 else item for item in items]
        line, *words = " ".join(whole).split(" ")
        for word in words:
            if line.strip() and cell_len(line) + 1 + cell_len(word) > columns:
                lines.append(line)
                line = word
            else:
                line += f" {word}"
        lines.append(line)
    return "\n".join(lines).replace(JOINT, " ")


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or WIDTH
    except (OSError, ValueError):  # not a real terminal
        return WIDTH


def print_error(error: BaseException) -> None:
    print_note(f"error: {one_line(error)}")


def print_json_error(error: BaseException) -> None:
    print_json({"error": error_object(error)})


def error_object(error: BaseException) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": type(error).__name__, "message": one_line(error)}
    if isinstance(named := getattr(error, "field", None), str):
        entry["field"] = named
    return entry


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def write(text: str) -> None:
    """Write to stdout at once; characters that its encoding lacks become question marks."""
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def human_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
