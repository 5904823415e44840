"""The offline API: a model, prompts in, answers out. Names and shapes as vLLM users know them.

An `LLM` owns an engine and the thread that steps it. Any thread may call it: it encodes, submits and waits for its own
answers; the requests of all callers share the engine's batches, and each answer is what it would be alone.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from paceline.build import build, load
from paceline.config import AUTO, EngineConfig, SpeculationConfig
from paceline.drafters.methods import check
from paceline.engine.engine import Engine
from paceline.engine.loop import Delta, Ended, EngineThread, Event, Failed, Request
from paceline.engine.text import TextDecoder
from paceline.errors import InvalidParameter, InvalidPrompt, PacelineError
from paceline.models.hub import Progress
from paceline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamChunk
from paceline.sampling_params import SamplingParams
from paceline.sequence import Sequence as Answer
from paceline.speculative_config import read as read_speculative_config
from paceline.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
T = TypeVar("T")
GROUP = 64  # prompts that are encoded and submitted at a time, while the engine runs


class Encoded(NamedTuple):
    text: str | None
    tokens: list[int]


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
        max_waiting: int = EngineConfig.max_waiting,
        kv_cache_bytes: int | None = None,
        gpu_memory_fraction: float = 0.9,
        prefix_caching: bool = True,
        progress: Progress | None = None,
    ) -> None:
        started = time.perf_counter()
        if isinstance(k, str) and k != AUTO:
            raise InvalidParameter("k", f"must be a whole number or {AUTO}, got {k!r}")
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
            max_waiting=max_waiting,
            kv_cache_bytes=kv_cache_bytes,
            gpu_memory_fraction=gpu_memory_fraction,
            prefix_caching=prefix_caching,
        )
        self.name, self.method, self.speculation = model, speculation.method, speculation
        target = load(model, dtype=dtype, device=device, threads=threads, numerics=numerics, progress=progress)
        self.note, self.loaded = target.note, target.loaded
        self.tokenizer, self.config = self.loaded.tokenizer, self.loaded.config
        built = build(target, config, speculation)
        self.engine: Engine = built.engine  # the thread's own: others read it, or send it a `call`
        self._policy = built.policy
        self.max_model_len = self.engine.max_model_len
        self._request_ids = map(str, itertools.count())
        self.thread = EngineThread(self.engine, at_end=built.keep)
        self._close = weakref.finalize(self, self.thread.close)  # when it is dropped, and at exit at the latest
        self.load_s = time.perf_counter() - started

    def close(self) -> None:
        """Stop the engine and keep what was learnt for the next run; open requests fail, later ones are refused."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def call(self, function: Callable[[Engine], T]) -> T:
        """`function(engine)` on the thread that owns the engine, between two steps."""
        return self.thread.call(function).result()

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

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[RequestOutput]:
        """Complete raw prompts (text or token ids), all in one batch; answers come in the order of the prompts."""
        return self._run(self.generate_job(prompts, params))

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: Params = None
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once, through the model's chat template."""
        return self._run(self.chat_job(messages, params))

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> AnswerStream:
        """The answer as it is committed. Text and token ids are raw; messages go through the chat template.

        Bad input raises here, not at the first chunk. Several streams may be open at once. Closing one, or dropping it,
        cancels its request.
        """
        return AnswerStream(StreamedRequest(self, prompt, params))

    def _run(self, job: Job) -> list[RequestOutput]:
        woken: SimpleQueue[None] = SimpleQueue()
        job.wake = lambda: woken.put(None)
        try:
            while not job.advance():
                woken.get()
        except BaseException:  # an error or Ctrl-C leaves nothing running
            job.cancel().result()
            raise
        return job.outputs()

    def generate_job(self, prompts: Prompt | Sequence[Prompt], params: Params) -> Job:
        each = [prompts] if _is_one_prompt(prompts) else list(prompts)
        return Job(self, each, _per_prompt(params, len(each)), self.encode)

    def chat_job(self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: Params) -> Job:
        several = bool(messages) and not isinstance(messages[0], Mapping)
        each: list[Any] = list(messages) if several else [messages]
        return Job(self, each, _per_prompt(params, len(each)), self.encode_chats)

    def next_id(self) -> str:
        return next(self._request_ids)

    def encode(self, prompts: Sequence[Any]) -> list[Encoded]:
        if all(isinstance(prompt, str) for prompt in prompts):
            if not all(prompts):
                raise InvalidPrompt("the prompt is empty; give at least one character")
            return [*map(Encoded, prompts, self.tokenizer.encode_each(prompts))]
        return [self.encode([prompt])[0] if isinstance(prompt, str) else _token_ids(prompt) for prompt in prompts]

    def encode_chats(self, conversations: Sequence[Any]) -> list[Encoded]:
        texts = []
        for messages in conversations:
            if not messages:
                raise InvalidPrompt("the conversation is empty; give at least one message")
            last = messages[-1]
            if isinstance(last, Mapping) and not last.get("content"):
                raise InvalidPrompt("the last message is empty; give it some content")
            texts.append(self.tokenizer.render_chat(messages))
        return [*map(Encoded, texts, self.tokenizer.encode_each(texts, add_special_tokens=False))]


class Job:
    """Prompts whose answers are waited for together.

    They are encoded and submitted in groups while the engine runs, as many as keep it busy. `wake` is called, on the
    engine's thread, when there is something to do for `advance`.
    """

    wake: Callable[[], None]

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams | None],
        encode: Callable[[Sequence[Any]], list[Encoded]],
    ) -> None:
        self._llm, self._prompts, self._params, self._encode = llm, prompts, params, encode
        self._window = 2 * llm.engine.config.max_num_seqs + GROUP
        self._name = f"job-{llm.next_id()}"
        self._resolved: dict[int, SamplingParams] = {}  # by identity: most jobs have one object for all prompts
        self._submitted: dict[str, tuple[Encoded, float]] = {}  # by request id, in order: the prompt, when it arrived
        self._ended: list[Ended] = []
        self._outputs: dict[str, RequestOutput] = {}  # of those that ended and were seen by `advance`
        self._wanted = 0  # answers that wake the caller
        self._failure: PacelineError | None = None

    def put(self, event: Event, /) -> None:
        """Of the engine's thread."""
        if isinstance(event, Ended):
            self._ended.append(event)
        elif isinstance(event, Failed):
            self._failure = self._failure or event.error
        if len(self._ended) >= self._wanted or self._failure is not None:
            self._wanted = len(self._prompts) + 1  # once, until `advance` has looked
            self.wake()

    def advance(self) -> bool:
        """Submit what there is room for; True: every answer is there. Raises what became of a request that failed."""
        prompts = len(self._prompts)
        while len(self._ended) < prompts:
            if self._failure is not None:
                raise self._failure
            self._take_ended()  # answers are put together while the engine goes on with others
            submitted = len(self._submitted)
            if submitted < prompts and submitted - len(self._ended) <= self._window - GROUP:
                self._submit(submitted)
                continue
            self._wanted = prompts if submitted == prompts else submitted - self._window + GROUP
            if len(self._ended) < self._wanted and self._failure is None:  # else it came before it was wanted
                return False
        return True

    def cancel(self) -> Any:
        """A future that is done once nothing of the job is left in the engine."""
        ended = {event.request_id for event in self._ended}
        return self._llm.thread.cancel([one for one in self._submitted if one not in ended])

    def outputs(self) -> list[RequestOutput]:
        self._take_ended()
        return [self._outputs[request_id] for request_id in self._submitted]

    def _take_ended(self) -> None:
        for event in self._ended[len(self._outputs) :]:
            prompt, arrival = self._submitted[event.request_id]
            self._outputs[event.request_id] = request_output(self._llm, prompt, arrival, event)

    def _submit(self, at: int) -> None:
        requests = []
        end, now = at + GROUP, time.perf_counter()
        for prompt, params in zip(self._encode(self._prompts[at:end]), self._params[at:end], strict=True):
            request = Request(self._llm.next_id(), prompt.tokens, self._resolve(params), self._name, patient=True)
            self._submitted[request.request_id] = prompt, now
            requests.append(request)
        self._llm.thread.submit(requests, self)

    def _resolve(self, params: SamplingParams | None) -> SamplingParams:
        resolved = self._resolved.get(id(params))
        if resolved is None:
            resolved = self._resolved[id(params)] = resolve(self._llm, params)
        return resolved


class StreamedRequest:
    """One request whose deltas become chunks, in the thread or task that reads them."""

    def __init__(self, llm: LLM, prompt: Any, params: SamplingParams | None) -> None:
        is_chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
        (self._prompt,) = llm.encode_chats([prompt]) if is_chat else llm.encode([prompt])
        self.llm, self._params, self._arrival = llm, resolve(llm, params), time.perf_counter()
        self.request = Request(llm.next_id(), self._prompt.tokens, self._params, streamed=True)
        self._decoders: dict[int, TextDecoder] = {}  # by answer

    def cancel(self) -> Any:
        return self.llm.thread.cancel([self.request.request_id])

    def chunk(self, delta: Delta) -> StreamChunk:
        output = None
        if delta.ended is not None:
            output = request_output(self.llm, self._prompt, self._arrival, delta.ended)
        return StreamChunk(
            index=delta.answer,
            text=delta.text if self._params.stop else self._decoded(delta),
            token_ids=delta.tokens,
            finish_reason=delta.finish_reason,
            output=output,
            kinds=delta.kinds,
        )

    def _decoded(self, delta: Delta) -> str:
        decoder = self._decoders.get(delta.answer)
        if decoder is None:
            decoder = self.llm.tokenizer.incremental_decoder(self._params.skip_special_tokens)
            self._decoders[delta.answer] = decoder
        text = "".join([decoder.push(token) for token in delta.tokens])
        return text if delta.finish_reason is None else text + decoder.flush()


class AnswerStream:
    """An answer under way, as chunks. The last chunk of the request carries the whole answer."""

    def __init__(self, request: StreamedRequest) -> None:
        self._request = request
        self._events: SimpleQueue[Event | None] = SimpleQueue()  # None: closed
        self._over = False
        request.llm.thread.submit([request.request], self._events)
        self._take()  # accepted, or refused

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> StreamChunk:
        event = None if self._over else self._take()
        if not isinstance(event, Delta):
            raise StopIteration
        self._over = self._over or event.ended is not None
        return self._request.chunk(event)

    def _take(self) -> Event | None:
        try:
            event = self._events.get()
            if isinstance(event, Failed):
                raise event.error
            return event
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel what is left of the request; its blocks are free when this returns."""
        if not self._over:
            self._over = True
            self._events.put(None)  # for another thread that waits for a chunk
            self._request.cancel().result()

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self._request.cancel()


def resolve(llm: LLM, params: SamplingParams | None) -> SamplingParams:
    return (params or SamplingParams()).resolve(llm.loaded.generation_defaults)


def request_output(llm: LLM, prompt: Encoded, arrival: float, ended: Ended) -> RequestOutput:
    return RequestOutput(
        request_id=ended.request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt.tokens,
        outputs=[_completion(answer, llm) for answer in ended.answers],
        finished=True,
        metrics=RequestMetrics(arrival, ended.first_token_time, ended.finished_time),
        num_cached_tokens=max(answer.num_cached_prompt for answer in ended.answers),
    )


def _completion(answer: Answer, llm: LLM) -> CompletionOutput:
    logprobs = None
    if answer.logprobs is not None:
        logprobs = [
            {token: Logprob(value, rank, llm.tokenizer.token_text(token)) for token, (value, rank) in entry.items()}
            for entry in answer.logprobs
        ]
    tokens, params = answer.output_tokens, answer.params
    fields: dict[str, Any] = {
        "index": answer.index,
        "token_ids": tokens,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "logprobs": logprobs,
        "speculation": answer.stats,
    }
    if params.stop:  # the engine has decoded it
        return CompletionOutput(text=answer.text, **fields)
    decode = partial(_decoded, llm.tokenizer, params.skip_special_tokens, tuple(tokens))
    return CompletionOutput.undecoded(decode, **fields)


def _decoded(tokenizer: Tokenizer, skip_special_tokens: bool, tokens: Sequence[int]) -> str:
    return tokenizer.incremental_decoder(skip_special_tokens).decode(tokens)


def _token_ids(prompt: Any) -> Encoded:
    if not all(isinstance(token, int) for token in prompt):
        raise InvalidPrompt("a prompt is text or a list of token ids; for messages use chat()")
    return Encoded(None, list(prompt))


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _per_prompt(params: Params, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidParameter("params", f"{len(params)} sampling parameters for {count} prompts; give one or as many")
    return list(params)
