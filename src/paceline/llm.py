"""The offline API: a model, prompts in, answers out. Names and shapes as in vLLM.

An `LLM` owns an engine and the thread that steps it. Any thread may call it: the caller encodes, submits and waits for
its own answers; the requests of all callers share the engine's batches, and no answer depends on the others.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from paceline.build import build, load
from paceline.client import Client, Job, Message, Params, Prompt, StreamedRequest
from paceline.config import AUTO, EngineConfig, SpeculationConfig
from paceline.drafters.methods import check
from paceline.engine.engine import Engine
from paceline.engine.loop import Delta, EngineThread, Event, Failed
from paceline.errors import InvalidParameter
from paceline.models.hub import Progress
from paceline.outputs import RequestOutput, StreamChunk
from paceline.sampling_params import SamplingParams
from paceline.speculative_config import read as read_speculative_config

T = TypeVar("T")


class LLM:
    def __init__(
        self,
        model: str = "smollm2",
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        numerics: str = "exact",
        activations: str = "float32",
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
        target = load(
            model,
            dtype=dtype,
            device=device,
            threads=threads,
            numerics=numerics,
            activations=activations,
            progress=progress,
        )
        self.note, self.loaded = target.note, target.loaded
        self.tokenizer, self.config = self.loaded.tokenizer, self.loaded.config
        built = build(target, config, speculation)
        self.engine: Engine = built.engine  # owned by the thread: other threads only read it, or use `call`
        self._policy = built.policy
        self.max_model_len = self.engine.max_model_len
        self.thread = EngineThread(self.engine, at_end=built.keep)
        self.client = Client(self.thread, self.tokenizer, self.loaded.generation_defaults, config.max_num_seqs)
        self._close = weakref.finalize(
            self, self.thread.close
        )  # runs when the LLM is garbage, and at exit at the latest
        self.load_s = time.perf_counter() - started

    def close(self) -> None:
        """Stop the engine and store its learned state for the next run; open requests fail, later ones are refused."""
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
        """The gain over plain decoding that the last step's plan expected; None before the first plan."""
        return self._policy.expected_gain

    @property
    def dtype_name(self) -> str:
        return self.loaded.kind.label

    @property
    def activations(self) -> str:
        """What enters products with weights: float32, or int8 (another model, with outputs of its own)."""
        return self.loaded.decoder.kernels.activations

    @property
    def device_name(self) -> str:
        return self.loaded.decoder.device.type

    @property
    def kernels_name(self) -> str:
        return self.loaded.decoder.kernels.name

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[RequestOutput]:
        """Complete raw prompts (text or token ids), all in one batch; answers come in the order of the prompts."""
        return self._run(self.client.generate_job(prompts, params))

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: Params = None
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once, through the model's chat template."""
        return self._run(self.client.chat_job(messages, params))

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> AnswerStream:
        """The answer as it is committed. Text and token ids are raw; messages go through the chat template.

        Bad input raises here, not at the first chunk. Several streams may be open at once. Closing one, or dropping it,
        cancels its request.
        """
        return AnswerStream(self, StreamedRequest(self.client, prompt, params))

    def _run(self, job: Job) -> list[RequestOutput]:
        woken: SimpleQueue[None] = SimpleQueue()
        job.wake = lambda: woken.put(None)
        try:
            while not job.advance():
                woken.get()
        except BaseException:  # after an error or Ctrl-C no request stays running
            job.cancel().result()
            raise
        return job.outputs()


class AnswerStream:
    """An answer under way, as chunks. The last chunk of the request carries the whole answer."""

    def __init__(self, llm: LLM, request: StreamedRequest) -> None:
        self._llm, self._request = llm, request  # keeps the LLM alive while the stream is open
        self._events: SimpleQueue[Event | None] = SimpleQueue()  # None: closed
        self._over = False
        llm.thread.submit([request.request], self._events)
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
        """Cancel the request if it is still running; its blocks are free when this returns."""
        if not self._over:
            self._over = True
            self._events.put(None)  # for another thread that waits for a chunk
            self._request.cancel().result()

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self._request.cancel()
