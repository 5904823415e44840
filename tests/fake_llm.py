"""A stand-in for paceline.llm with the same face and no torch behind it: it counts words.

Run as a script it is the real command line over the fake engine: `python tests/fake_llm.py generate hello`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from paceline.config import SpeculationConfig
from paceline.errors import InvalidParameter, InvalidPrompt
from paceline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SpeculationStats, StreamChunk
from paceline.sampling_params import SamplingParams

METHODS = ("none", "ngram", "suffix", "draft-model", "auto")
DELAY_S = float(os.environ.get("FAKE_DELAY_S", "0"))


class FakeLLM:
    """Answers "word0 word1 …", `max_tokens` of them (5 if unset); a prompt costs a token per word."""

    created: ClassVar[list[dict[str, Any]]] = []
    requests: ClassVar[list[tuple[Any, SamplingParams]]] = []
    closed: ClassVar[int] = 0
    error: ClassVar[Exception | None] = None  # raised on the first token
    expected_gain: ClassVar[float | None] = None
    drafted: ClassVar[SpeculationStats | None] = None  # what an answer says of itself unless asked to be plain
    plain_s: ClassVar[float] = 2.0  # how long plain decoding takes; everything else takes two seconds
    plain_says: ClassVar[int | None] = None  # the token plain decoding ends with, where it shall differ

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        if options["method"] not in METHODS:
            raise InvalidParameter("method", f"{options['method']!r} is not one of {', '.join(METHODS)}")
        FakeLLM.created.append({"model": model, **options})
        self.name, self.method, self.load_s, self.note = model, options["method"], 0.5, None
        self.speculation = SpeculationConfig(method=options["method"], k=options["k"])
        self.activations = options.get("activations", "float32")
        self.tokenizer = FakeTokenizer()
        self.max_model_len = options["max_model_len"] or 1000

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[StreamChunk]:
        FakeLLM.requests.append((prompt, params))
        words = prompt.split() if isinstance(prompt, str) else [w for m in prompt for w in m["content"].split()]
        if len(words) >= self.max_model_len:
            raise InvalidPrompt(f"the prompt has {len(words)} tokens, the context holds {self.max_model_len}")
        return self._chunks(words, params)

    def _chunks(self, words: list[str], params: SamplingParams) -> Iterator[StreamChunk]:
        count = min(params.max_tokens or 5, self.max_model_len - len(words))
        seconds = self.plain_s if params.speculation == "none" else 2.0
        metrics = RequestMetrics(arrival_time=10.0, first_token_time=10.25, finished_time=10.25 + seconds)
        outputs = [_answer(index, count, params) for index in range(params.n)]
        whole = RequestOutput("0", None, list(range(len(words))), outputs, True, metrics)
        if started := os.environ.get("FAKE_STARTED"):
            Path(started).touch()
        try:
            for token in range(count):
                for index in reversed(range(params.n)):  # the last answer is the first to be finished
                    if FakeLLM.error is not None:
                        raise FakeLLM.error
                    time.sleep(DELAY_S)
                    last = token == count - 1
                    text = f"word{token}" if token == 0 else f" word{token}"
                    output = whole if last and index == 0 else None
                    kinds = [0 if token % 2 and params.speculation is None else 2]
                    yield StreamChunk(index, text, [token], "length" if last else None, output, kinds)
        finally:
            FakeLLM.closed += 1


def _answer(index: int, count: int, params: SamplingParams) -> CompletionOutput:
    logprobs = None
    if params.logprobs is not None:
        logprobs = [{t: Logprob(-0.5, 2, f"word{t}"), t + 1: Logprob(-0.25, 1, f"word{t + 1}")} for t in range(count)]
    text = " ".join(f"word{token}" for token in range(count))
    speculation, tokens = SpeculationStats(num_target_passes=count, num_committed_tokens=count), list(range(count))
    if params.speculation == "none" and FakeLLM.plain_says is not None:
        tokens[-1] = FakeLLM.plain_says
    elif params.speculation is None and FakeLLM.drafted is not None:
        speculation = FakeLLM.drafted
    return CompletionOutput(index, text, tokens, "length", None, logprobs, speculation)


class FakeTokenizer:
    def incremental_decoder(self, skip_special_tokens: bool) -> FakeTokenizer:
        return self

    def push(self, token: int) -> str:
        return f"word{token} "

    def flush(self) -> str:
        return ""


def module() -> types.ModuleType:
    """What to put in sys.modules in place of paceline.llm."""
    fake = types.ModuleType("paceline.llm")
    fake.LLM = FakeLLM  # type: ignore[attr-defined]
    return fake


if __name__ == "__main__":
    sys.modules["paceline.llm"] = module()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script starts in the background
    from paceline.cli import main

    main()
