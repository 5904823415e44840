"""The offline API: a model, prompts in, answers out. Names and shapes as vLLM users know them."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.build import build, load
from paceline.config import AUTO, EngineConfig, SpeculationConfig
from paceline.drafters.methods import check
from paceline.engine.batch import StepOutput
from paceline.errors import InvalidParameter, InvalidPrompt
from paceline.models.hub import Progress
from paceline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamChunk
from paceline.sampling_params import SamplingParams
from paceline.sequence import Sequence as Answer
from paceline.speculative_config import read as read_speculative_config

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    def __init__(
        self,
        model: str = "smollm2",
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        numerics: str = "exact",
        method: str = AUTO,
        k: int | str | None = None,
        draft_model: str | None = None,
        drafter: str | None = None,
        suffix_corpus: Sequence[str] = (),
        suffix_store: str | None = None,
        speculative_config: str | Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        kv_cache_bytes: int | None = None,
        gpu_memory_fraction: float = 0.9,
        prefix_caching: bool = True,
        progress: Progress | None = None,
    ) -> None:
        started = time.perf_counter()
        if isinstance(k, str) and k != AUTO:
            raise InvalidParameter("k", f"must be a whole number or auto, got {k!r}")
        speculation = SpeculationConfig(
            method=method,
            k=None if isinstance(k, str) else k,
            draft_model=draft_model,
            drafter=drafter,
            suffix_corpus=tuple(suffix_corpus),
            suffix_store=suffix_store,
        )
        if speculative_config is not None:
            speculation = read_speculative_config(speculative_config, speculation)
        check(speculation)
        config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_bytes=kv_cache_bytes,
            gpu_memory_fraction=gpu_memory_fraction,
            prefix_caching=prefix_caching,
        )
        self.name, self.method, self.speculation = model, speculation.method, speculation
        target = load(model, dtype=dtype, device=device, threads=threads, numerics=numerics, progress=progress)
        self.note, self.loaded = target.note, target.loaded
        self.tokenizer, self.config = self.loaded.tokenizer, self.loaded.config
        built = build(target, config, speculation)
        self._built, self.engine, self._policy = built, built.engine, built.policy
        self.max_model_len = self.engine.max_model_len
        self.load_s = time.perf_counter() - started
        self._request_ids = map(str, itertools.count())
        self._open: dict[str, _Request] = {}
        self._keep = weakref.finalize(self, built.keep)  # at exit at the latest

    def close(self) -> None:
        """Keep what was learnt for the next run. Happens by itself when the LLM is dropped, or at exit."""
        self._built.keep()

    @property
    def expected_gain(self) -> float | None:
        """What the last step's plan promised over plain decoding; None before there was one."""
        return self._policy.expected_gain

    @property
    def dtype_name(self) -> str:
        return str(self.loaded.dtype).removeprefix("torch.")

    @property
    def device_name(self) -> str:
        return self.loaded.decoder.device.type

    @property
    def kernels_name(self) -> str:
        return self.loaded.decoder.kernels.name

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete raw prompts (text or token ids), all in one batch; answers come in the order of the prompts."""
        each = [prompts] if _is_one_prompt(prompts) else list(prompts)
        return self._run([self._encode(prompt) for prompt in each], _per_prompt(params, len(each)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once, through the model's chat template."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        each: list[Any] = list(messages) if several else [messages]
        return self._run([self._encode_chat(one) for one in each], _per_prompt(params, len(each)))

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> AnswerStream:
        """The answer as it is committed. Text and token ids are raw; messages go through the chat template.

        Bad input raises here, not at the first chunk. Several streams may be open at once. Closing one, or dropping it,
        cancels its request.
        """
        is_chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
        return AnswerStream(self, self._submit(self._encode_chat(prompt) if is_chat else self._encode(prompt), params))

    def _run(self, prompts: list[_Encoded], params: list[SamplingParams | None]) -> list[RequestOutput]:
        requests: list[_Request] = []
        job = f"job-{next(self._request_ids)}"
        try:
            for prompt, param in zip(prompts, params, strict=True):
                requests.append(self._submit(prompt, param, job))
            while not all(request.finished for request in requests):
                self._advance()
        finally:  # an error or Ctrl-C leaves nothing running
            for request in requests:
                self._close(request)
        return [request.output(self) for request in requests]

    def _advance(self) -> None:
        """One step of the engine; whoever asked for it, every request gets what is its own."""
        for output in self.engine.step():
            request = self._open.get(output.sequence.request_id)
            if request is not None:
                request.note(output)

    def _close(self, request: _Request) -> None:
        self.engine.cancel(request.request_id)
        self._open.pop(request.request_id, None)

    def _submit(self, prompt: _Encoded, params: SamplingParams | None, job: str | None = None) -> _Request:
        resolved = (params or SamplingParams()).resolve(self.loaded.generation_defaults)
        request_id = next(self._request_ids)
        answers = self.engine.add_request(request_id, prompt.tokens, resolved, job)
        request = self._open[request_id] = _Request(request_id, prompt, answers)
        return request

    def _encode(self, prompt: Any) -> _Encoded:
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidPrompt("the prompt is empty; give at least one character")
            return _Encoded(prompt, self.tokenizer.encode(prompt))
        if not all(isinstance(token, int) for token in prompt):
            raise InvalidPrompt("a prompt is text or a list of token ids; for messages use chat()")
        return _Encoded(None, list(prompt))

    def _encode_chat(self, messages: Any) -> _Encoded:
        if not messages:
            raise InvalidPrompt("the conversation is empty; give at least one message")
        last = messages[-1]
        if isinstance(last, Mapping) and not last.get("content"):
            raise InvalidPrompt("the last message is empty; give it some content")
        text = self.tokenizer.render_chat(messages)
        return _Encoded(text, self.tokenizer.encode(text, add_special_tokens=False))


class AnswerStream:
    """An answer under way, as chunks. The last chunk of the request carries the whole answer."""

    def __init__(self, llm: LLM, request: _Request) -> None:
        self._llm, self._request = llm, request

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> StreamChunk:
        request = self._request
        try:
            while not request.inbox and not request.finished:
                self._llm._advance()
        except BaseException:
            self.close()
            raise
        if not request.inbox:
            self.close()
            raise StopIteration
        output = request.inbox.popleft()
        is_last = request.finished and not request.inbox
        return StreamChunk(
            index=output.sequence.index,
            text=output.text,
            token_ids=output.tokens,
            finish_reason=output.sequence.finish_reason if output.finished else None,
            output=request.output(self._llm) if is_last else None,
            kinds=output.kinds,
        )

    def close(self) -> None:
        """Cancel what is left of the request; its blocks are free when this returns."""
        self._request.inbox.clear()
        self._llm._close(self._request)

    def __del__(self) -> None:
        self._llm._close(self._request)


class _Encoded:
    def __init__(self, text: str | None, tokens: list[int]) -> None:
        self.text, self.tokens = text, tokens


class _Request:
    """A prompt and its n answers, with the times that matter."""

    def __init__(self, request_id: str, prompt: _Encoded, answers: list[Answer]) -> None:
        self.request_id, self._prompt, self._answers = request_id, prompt, answers
        self.inbox: deque[StepOutput] = deque()  # committed, and not yet handed out by a stream
        self._metrics = RequestMetrics(arrival_time=time.perf_counter())

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self._answers)

    def note(self, output: StepOutput) -> None:
        now = time.perf_counter()
        if self._metrics.first_token_time is None:
            self._metrics.first_token_time = now
        if output.finished:
            self._metrics.finished_time = now
        self.inbox.append(output)

    def output(self, llm: LLM) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.tokens,
            outputs=[_completion(answer, llm) for answer in self._answers],
            finished=self.finished,
            metrics=self._metrics,
            num_cached_tokens=max(answer.num_cached_prompt for answer in self._answers),
        )


def _completion(answer: Answer, llm: LLM) -> CompletionOutput:
    logprobs = None
    if answer.logprobs is not None:
        logprobs = [
            {token: Logprob(value, rank, llm.tokenizer.token_text(token)) for token, (value, rank) in entry.items()}
            for entry in answer.logprobs
        ]
    return CompletionOutput(
        index=answer.index,
        text=answer.text,
        token_ids=answer.output_tokens,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        logprobs=logprobs,
        speculation=answer.stats,
    )


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidParameter("params", f"{len(params)} sampling parameters for {count} prompts; give one or as many")
    return list(params)
