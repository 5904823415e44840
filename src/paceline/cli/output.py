"""The output of a command: the last line, the JSON object, errors. Answers go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.config import AUTO, NONE
from paceline.outputs import CompletionOutput, Logprob, RequestOutput, SpeculationStats, StreamChunk

if TYPE_CHECKING:
    from paceline.llm import LLM


class Interrupted(Exception):
    """Ctrl-C, as the JSON error object names it."""


@dataclass
class Tally:
    """The progress of one request: enough for the last line even when it is interrupted."""

    llm: LLM
    arrival: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    tokens: dict[int, int] = field(default_factory=dict)  # by answer
    text: str = ""  # of the first answer
    output: RequestOutput | None = None  # the engine's result, once the request is finished

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
        """Each answer's first token belongs to the prompt's pass, so one token alone has no rate."""
        decoded = sum(max(0, count - 1) for count in self.tokens.values())
        return decoded / self.decode_s if decoded and self.decode_s else None

    @property
    def speculation(self) -> SpeculationStats:
        """Of all answers together; empty until the request is finished."""
        merged = SpeculationStats()
        for answer in self.output.outputs if self.output is not None else ():
            merged.merge(answer.speculation)
        return merged

    def line(self) -> str:
        tokens = "1 token" if self.completion_tokens == 1 else f"{self.completion_tokens} tokens"
        drafting = self.llm.method if self.output is None else drafting_words(self.llm, self.speculation)
        first = "" if self.ttft_s is None else f" · first after {self.ttft_s:.2f} s"
        target = "" if self.llm.activations == "float32" else f" · {self.llm.activations} activations"
        return f"{tokens} · {rate_words(self.tokens_per_second)} · {drafting}{first}{target}"


def rate_words(tokens_per_second: float | None) -> str:
    if tokens_per_second is None:
        return "n/a tok/s"
    return f"{tokens_per_second:.{0 if tokens_per_second >= 10 else 1}f} tok/s"


def drafting_words(llm: LLM, stats: SpeculationStats) -> str:
    """`suffix k≈4 · τ 2.4 · est. 1.7x`, or the reason why there was no draft."""
    if llm.method == NONE:
        return NONE
    if not stats.num_drafts:
        if llm.method != AUTO and llm.speculation.k is not None:
            return f"{llm.method}, nothing to draft from"
        expected = "" if llm.expected_gain is None else f": expected {llm.expected_gain:.1f}x"
        return f"speculation off{expected}"
    words = [f"{method_words(stats)} k≈{stats.mean_draft_length:.0f}", f"τ {stats.mean_acceptance_length:.1f}"]
    if stats.estimated_speedup is not None:
        words.append(f"est. {stats.estimated_speedup:.1f}x")
    return " · ".join(words)


def method_words(stats: SpeculationStats) -> str:
    """The methods that drafted, the busiest first, without those that made less than a tenth of the drafts."""
    ranked = sorted(stats.drafts_by_method.items(), key=lambda item: -item[1])
    return "+".join(method for method, drafts in ranked if 10 * drafts >= stats.num_drafts)


def result_object(tally: Tally, top: int | None) -> dict[str, Any]:
    """The object `--json` prints; its keys are part of the interface. `top` is the number of logprobs requested."""
    llm, output = tally.llm, tally.output
    assert output is not None, "the request is not finished"
    return {
        "model": llm.name,
        "method": llm.method,
        "activations": llm.activations,
        "choices": [_choice(answer, top or 0) for answer in output.outputs],
        "usage": {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": tally.completion_tokens},
        "timing": {
            "load_s": llm.load_s,
            "ttft_s": tally.ttft_s,
            "decode_s": tally.decode_s,
            "tokens_per_second": tally.tokens_per_second,
        },
        "speculation": tally.speculation.as_dict(),
    }


def _choice(answer: CompletionOutput, top: int) -> dict[str, Any]:
    logprobs = None
    if answer.logprobs is not None:
        logprobs = [_position(token, seen, top) for token, seen in zip(answer.token_ids, answer.logprobs, strict=True)]
    return {
        "index": answer.index,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "logprobs": logprobs,
    }


def _position(token: int, seen: dict[int, Logprob], top: int) -> dict[str, Any]:
    """The chosen token, and the `top` likeliest."""
    ranked = sorted(seen.items(), key=lambda item: item[1].rank)[:top]
    return {**_logprob(token, seen[token]), "top_logprobs": [_logprob(*item) for item in ranked]}


def _logprob(token: int, entry: Logprob) -> dict[str, Any]:
    return {"token_id": token, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}


# -- stdout and stderr


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)  # ASCII: valid whatever stdout's encoding is


def print_note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    """Onto stdout at once; characters its encoding lacks become question marks rather than a crash."""
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
