"""A stand-in for paceline.llm with the same face and no torch behind it: it counts words.

Run as a script it is the real command line over the fake engine: `python tests/fake_llm.py generate hello`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from paceline.cli.flags import DEFAULT_MAX_TOKENS
from paceline.config import SpeculationConfig
from paceline.errors import EngineClosed, InvalidParameter, InvalidPrompt
from paceline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SpeculationStats, StreamChunk
from paceline.sampling_params import SamplingParams

METHODS = ("none", "ngram", "suffix", "draft-model", "auto")
DELAY_S = float(os.environ.get("FAKE_DELAY_S", "0"))


class FakeLLM:
    """Answers "word0 word1 …", as many as were asked for, else 5; a prompt costs a token per word."""

    created: ClassVar[list[dict[str, Any]]] = []
    requests: ClassVar[list[tuple[Any, SamplingParams]]] = []
    closed: ClassVar[int] = 0
    error: ClassVar[Exception | None] = None  # raised on the first token
    expected_gain: ClassVar[float | None] = None
    shared_mass: float | None = None
    drafted: ClassVar[SpeculationStats | None] = None  # what an answer says of itself unless asked to be plain
    default_limit: ClassVar[int | None] = DEFAULT_MAX_TOKENS  # None: an answer is as long as the limit
    plain_s: ClassVar[float] = 2.0  # how long plain decoding takes; everything else takes two seconds
    plain_says: ClassVar[int | None] = None  # the token plain decoding ends with, where it shall differ

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        if options["method"] not in METHODS:
            raise InvalidParameter("method", f"{options['method']!r} is not one of {', '.join(METHODS)}")
        FakeLLM.created.append({"model": model, **options})
        self.name, self.method, self.load_s, self.note = model, options["method"], 0.5, None
        self.speculation = SpeculationConfig(method=options["method"], k=options["k"])
        self.activations, self.kv_dtype = options.get("activations", "float32"), options.get("kv_dtype", "auto")
        self.dtype_name = "q4_1"
        self.tokenizer, self.client, self.open = FakeTokenizer(), FakeClient(), True
        self.max_model_len = options["max_model_len"] or 1000

    def call(self, function: Callable[[Any], Any]) -> Any:
        return function(FakeEngine(self.method))

    def generate(self, prompt: Any, params: SamplingParams) -> list[RequestOutput]:
        chunks = list(self.stream(prompt, params))
        assert chunks[-1].output is not None
        return [chunks[-1].output]

    chat = generate

    def close(self) -> None:
        self.open = False

    def stream(self, prompt: Any, params: SamplingParams) -> FakeStream:
        FakeLLM.requests.append((prompt, params))
        words = prompt.split() if isinstance(prompt, str) else [w for m in prompt for w in m["content"].split()]
        if len(words) >= self.max_model_len:
            raise InvalidPrompt(f"the prompt has {len(words)} tokens, the context holds {self.max_model_len}")
        return FakeStream(self._chunks(words, params), len(words), params.n)

    def _chunks(self, words: list[str], params: SamplingParams) -> Iterator[StreamChunk]:
        asked = params.max_tokens
        count = min(5 if asked in (None, self.default_limit) else asked, self.max_model_len - len(words))
        seconds = self.plain_s if params.speculation == "none" else 2.0
        metrics = RequestMetrics(arrival_time=10.0, first_token_time=10.25, finished_time=10.25 + seconds)
        reason = "stop" if asked == self.default_limit and count == 5 else "length"
        outputs = [_answer(index, count, params, reason) for index in range(params.n)]
        whole = RequestOutput("0", None, list(range(len(words))), outputs, True, metrics)
        if started := os.environ.get("FAKE_STARTED"):
            Path(started).touch()
        time.sleep(float(os.environ.get("FAKE_PROMPT_S", "0")))
        try:
            for token in range(count):
                for index in reversed(range(params.n)):  # the last answer is the first to be finished
                    if FakeLLM.error is not None:
                        raise FakeLLM.error
                    if not self.open:
                        raise EngineClosed("closed")
                    time.sleep(DELAY_S)
                    last = token == count - 1
                    text = f"word{token}" if token == 0 else f" word{token}"
                    output = whole if last and index == 0 else None
                    kinds = [0 if token % 2 and params.speculation is None else 2]
                    yield StreamChunk(index, text, [token], reason if last else None, output, kinds)
        finally:
            FakeLLM.closed += 1


def _answer(index: int, count: int, params: SamplingParams, reason: str) -> CompletionOutput:
    logprobs = None
    if params.logprobs is not None:
        logprobs = [{t: Logprob(-0.5, 2, f"word{t}"), t + 1: Logprob(-0.25, 1, f"word{t + 1}")} for t in range(count)]
    text = " ".join(f"word{token}" for token in range(count))
    speculation, tokens = SpeculationStats(num_target_passes=count, num_committed_tokens=count), list(range(count))
    if params.speculation == "none" and FakeLLM.plain_says is not None:
        tokens[-1] = FakeLLM.plain_says
    elif params.speculation is None and FakeLLM.drafted is not None:
        speculation = FakeLLM.drafted
    return CompletionOutput(index, text, tokens, reason, None, logprobs, speculation)


class FakeStream:
    """The result of LLM.stream: chunks, and the sequences under way, which have made one draft of two each."""

    def __init__(self, chunks: Iterator[StreamChunk], prompt: int, answers: int) -> None:
        self._chunks = chunks
        self.sequences = [
            types.SimpleNamespace(num_prompt=prompt, num_computed=prompt // 2, stats=_cut_short(), tokens=[0] * prompt)
            for _ in range(answers)
        ]

    def __iter__(self) -> FakeStream:
        return self

    def __next__(self) -> StreamChunk:
        chunk = next(self._chunks)
        self.sequences[chunk.index].tokens.extend(chunk.token_ids)
        return chunk

    def close(self) -> None:
        self._chunks.close()  # type: ignore[attr-defined]


def _cut_short() -> SpeculationStats:
    return SpeculationStats(
        num_drafts=2,
        num_draft_tokens=4,
        num_accepted_tokens=3,
        num_target_passes=4,
        num_committed_tokens=7,
        drafts_by_method={"suffix": 2},
        spent_s=1.0,
        plain_s=1.5,
    )


class FakeEngine:
    def __init__(self, method: str) -> None:
        names = () if method == "none" else ("ngram", "suffix")
        self.drafters = types.SimpleNamespace(drafters=[types.SimpleNamespace(name=name) for name in names])


class FakeClient:
    """Greedy unless told otherwise, like a model whose generation config says nothing."""

    def resolve(self, params: SamplingParams) -> SamplingParams:
        return params.resolve({})


class FakeTokenizer:
    def incremental_decoder(self, skip_special_tokens: bool) -> FakeTokenizer:
        return self

    def push(self, token: int) -> str:
        return f"word{token} "

    def flush(self) -> str:
        return ""


def module() -> types.ModuleType:
    """Return a module for sys.modules in place of paceline.llm."""
    fake = types.ModuleType("paceline.llm")
    fake.LLM = FakeLLM  # type: ignore[attr-defined]
    return fake


class Result:
    """The exit status and output of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        """Exactly one object, on one line, and nothing else."""
        assert self.out.count("\n") == 1, self.out
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


def environment(delay_s: float = 0.0) -> dict[str, str]:
    source = str(Path(sys.modules["paceline"].__file__ or "").parents[1])
    return {**os.environ, "FAKE_DELAY_S": str(delay_s), "PYTHONPATH": source}


def start(*arguments: str, delay_s: float = 0.05, **more: Any) -> subprocess.Popen[str]:
    """The command line over the fake engine, in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8", **more}
    return subprocess.Popen([sys.executable, __file__, *arguments], **{"env": environment(delay_s), **pipes})


class Screen:
    """The text that a pseudo-terminal shows, consumed piece by piece."""

    def __init__(self, terminal: int) -> None:
        self.terminal, self.unread = terminal, ""

    def wait_for(self, expected: str, after: Callable[[], None] = lambda: None) -> None:
        """`after` is done first, and again after each second of silence."""
        after()
        silent_s = 0
        while expected not in self.unread:
            ready, _, _ = select.select([self.terminal], [], [], 1)
            if ready:
                self.unread += os.read(self.terminal, 1024).decode(errors="replace")
                silent_s = 0
                continue
            silent_s += 1
            assert silent_s < 60, f"{expected!r} never came after {self.unread!r}"
            after()
        self.unread = self.unread.partition(expected)[2]


if __name__ == "__main__":
    sys.modules["paceline.llm"] = module()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script starts in the background
    from paceline.cli import main

    main()
