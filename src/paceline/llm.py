"""The offline API: a model, prompts in, answers out. Names and shapes are vLLM's.

An `LLM` owns an engine and the thread that steps it. Any thread may call it: the caller encodes, submits and waits for
its own answers; the requests of all callers share the engine's batches, and no answer depends on the others.
"""

from __future__ import annotations

import gc
import inspect
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch

from paceline.build import EngineBundle, LoadedTarget, build, load
from paceline.client import Client, Job, StreamedRequest, TqdmBar
from paceline.config import AUTO, EngineConfig, SpeculationConfig, path_or_name, truth, whole_number
from paceline.core.sequence import Sequence as Answer
from paceline.drafters.speculative_config import SpeculativeConfig, check
from paceline.drafters.speculative_config import read as read_speculative_config
from paceline.engine.engine import Engine
from paceline.engine.events import Accepted, Ended, Event
from paceline.engine.loop import CLOSED, EngineThread
from paceline.errors import EngineClosed, InvalidParameter, short_repr
from paceline.inputs import Message, Params, Prompt
from paceline.models.load.hub import PullProgress
from paceline.models.load.open_model import LoadedModel, choose_device
from paceline.outputs import RequestOutput, StreamChunk
from paceline.sampling_params import SEED_LIMIT, SamplingParams
from paceline.text.tokenizer import Tokenizer
from paceline.vllm_compat import ENGINE, refuse, renamed, split

T = TypeVar("T")


class _OpenModel(NamedTuple):
    """Weights and engine, until `close` drops them."""

    loaded: LoadedModel
    bundle: EngineBundle


class LLM:
    """A model, ready to answer.

        with LLM("smollm2") as llm:
            (output,) = llm.chat([{"role": "user", "content": "Name three fruits."}], SamplingParams(max_tokens=60))
            print(output.outputs[0].text)

    One object serves any number of threads: their requests share the engine's batches, and each answer is what it would
    be alone. `close`, or leaving `with`, ends the engine; later calls are refused. `AsyncLLM` is the same for asyncio.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        activations: str = "float32",
        kv_dtype: str = "auto",
        seed: int | None = None,
        method: str = AUTO,
        k: int | str | None = None,
        draft_model: str | Sequence[str] | None = None,
        drafter: str | Sequence[str] | None = None,
        suffix_corpus: Sequence[str] = (),
        suffix_store: str | None = None,
        suffix_answers: bool = True,
        speculative_config: SpeculativeConfig | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_waiting: int = EngineConfig.max_waiting,
        kv_cache_bytes: int | None = None,
        gpu_memory_fraction: float = 0.9,
        prefix_caching: bool = True,
        enforce_eager: bool = False,
        progress: PullProgress | None = None,
        **vllm_arguments: Any,
    ) -> None:
        """Load `model`: an alias, a folder, a .gguf file or a hub id.

        `method`, `k`, `draft_model`, `drafter` and `suffix_*` say how tokens are drafted, or `speculative_config` as
        vLLM has it, or a list of such; none of them changes an answer. Of several models and drafters the one that pays
        drafts, chosen for each sequence and step. With `seed`, requests without a seed of their own get one each, in
        the order in which they are submitted, so that a program repeats its answers. `tokenizer` names another
        model whose tokenizer is used. Other arguments of vLLM are accepted where they mean the same
        (`gpu_memory_utilization`), and otherwise refused by name.
        """
        started = time.perf_counter()
        vllm_arguments, older = split(vllm_arguments)
        speculation = _speculation(
            older,
            speculative_config,
            method=method,
            k=k,
            draft_model=draft_model,
            drafter=drafter,
            suffix_corpus=suffix_corpus,
            suffix_store=suffix_store,
            suffix_answers=suffix_answers,
        )
        config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting=max_waiting,
            kv_cache_bytes=kv_cache_bytes,
            gpu_memory_fraction=renamed(vllm_arguments, "gpu_memory_utilization", gpu_memory_fraction, 0.9),
            prefix_caching=renamed(vllm_arguments, "enable_prefix_caching", prefix_caching, True),
        )
        kv_dtype = renamed(vllm_arguments, "kv_cache_dtype", kv_dtype, "auto")
        refuse(vllm_arguments, ENGINE, inspect.signature(LLM).parameters, "LLM")
        self.name = path_or_name("model", model)
        device = _word("device", str(device) if isinstance(device, torch.device) else device)
        seed = None if seed is None else whole_number("seed", seed, 0, SEED_LIMIT - 1)
        if truth("enforce_eager", enforce_eager) and choose_device(device).type != "cpu":
            raise InvalidParameter("enforce_eager", "passes are always captured on a GPU; leave it out")
        target = load(
            self.name,
            dtype=_dtype_name(dtype),
            device=device,
            threads=None if threads is None else whole_number("threads", threads, 1),
            activations=_word("activations", activations),
            kv_dtype=_word("kv_dtype", kv_dtype),
            tokenizer=None if tokenizer is None else path_or_name("tokenizer", tokenizer),
            progress=progress,
        )
        self._open_engine(target, config, speculation, seed)
        self.load_s = time.perf_counter() - started

    def _open_engine(
        self, target: LoadedTarget, config: EngineConfig, speculation: SpeculationConfig, seed: int | None
    ) -> None:
        loaded, decoder = target.loaded, target.loaded.decoder
        self.method, self.speculation = speculation.method, speculation
        self.note, self.tokenizer, self.config = target.note, loaded.tokenizer, loaded.config
        self.dtype_name = loaded.kind.label  # how the weights are stored
        self.activations = decoder.kernels.activations  # into products: float32, or int8 (another model's outputs)
        self.kv_dtype = loaded.kv_dtype  # auto: as the computation; others are another model's outputs
        self.device_name, self.kernels_name = decoder.device.type, decoder.kernels.name
        bundle = build(target, config, speculation)
        self._open: _OpenModel | None = _OpenModel(loaded, bundle)
        self.max_model_len = bundle.engine.max_model_len
        self.thread = EngineThread(bundle.engine, at_end=bundle.close)
        self.client = Client(self.thread, self.tokenizer, loaded.generation_defaults, config.max_num_seqs, seed)
        # Runs when the LLM is garbage, and at exit at the latest.
        self._close = weakref.finalize(self, self.thread.close)

    def close(self) -> None:
        """Stop the engine, store its learned state for the next run and free its memory: weights, cache and captured
        passes. Open requests fail, later ones are refused."""
        self._close()
        self._open = None
        if self.device_name != "cpu":
            gc.collect()  # captured passes and their decoder refer to each other
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function(engine)` on the thread that owns the engine, between two steps."""
        return self.thread.call(function).result()

    @property
    def expected_gain(self) -> float | None:
        """Return the gain over plain decoding that the last step's plan expected; None before the first plan."""
        return self._opened.bundle.policy.expected_gain

    @property
    def shared_mass(self) -> float | None:
        """Return the probability that a draft model of another vocabulary gives to tokens of the target; None: there is
        none, or it has not drafted."""
        masses = [drafter.shared_mass for drafter in self._opened.bundle.engine.drafters.drafters]
        return next((mass for mass in masses if mass is not None), None)

    @property
    def engine(self) -> Engine:
        """Return the engine, which its thread owns: other threads only read it, or use `call`."""
        return self._opened.bundle.engine

    @property
    def loaded(self) -> LoadedModel:
        """Return the weights in memory."""
        return self._opened.loaded

    @property
    def _opened(self) -> _OpenModel:
        if self._open is None:
            raise EngineClosed(CLOSED)
        return self._open

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer: `encode`, `decode`, `apply_chat_template`."""
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        params: Params = None,
        use_tqdm: bool | Callable[..., TqdmBar] = False,
        **more: Any,
    ) -> list[RequestOutput]:
        """Complete raw prompts, all in one batch; answers come in the order of the prompts.

        A prompt is text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. `params`, also called
        `sampling_params`, are for all prompts, or a list with one for each. `use_tqdm` shows a progress bar.
        """
        return self._run(self.client.generate_job(prompts, params, use_tqdm, more))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
        params: Params = None,
        use_tqdm: bool | Callable[..., TqdmBar] = False,
        **more: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once, through the model's chat template.

        Further arguments: `tools` and `chat_template_kwargs` (a dict) are handed to the template, `chat_template` is
        used in place of the model's own, `continue_final_message` has the model go on with the last message, and
        `add_generation_prompt` (true unless that is so) says whether the template begins the answer.
        """
        return self._run(self.client.chat_job(messages, params, use_tqdm, more))

    def stream(
        self,
        prompt: Prompt | Sequence[Message] | None = None,
        params: SamplingParams | Mapping[str, Any] | None = None,
        **more: Any,
    ) -> AnswerStream:
        """Return the answer in chunks, as it is committed. Prompts are raw; messages go through the chat template, with
        the further arguments of `chat`.

        Bad input raises here, not at the first chunk. Several streams may be open at once. Closing one, or dropping it,
        cancels its request.
        """
        return AnswerStream(self, StreamedRequest(self.client, prompt, params, more))

    def _run(self, job: Job) -> list[RequestOutput]:
        woken: SimpleQueue[None] = SimpleQueue()
        job.wake = lambda: woken.put(None)
        try:
            while not job.advance():
                woken.get()
            return job.outputs()
        except BaseException:  # after an error or Ctrl-C no request stays running
            job.cancel().result()
            raise
        finally:
            job.close()


def _speculation(older: dict[str, Any], config: SpeculativeConfig | None, k: Any, **options: Any) -> SpeculationConfig:
    """Return the options, or vLLM's `speculative_config` in their place; `older`: its settings as flat arguments."""
    if older and config is not None:
        raise InvalidParameter(next(iter(older)), "give it inside speculative_config")
    speculation = SpeculationConfig(k=None if isinstance(k, str) and k == AUTO else k, **options)
    if older or config is not None:
        speculation = read_speculative_config(older if config is None else config, speculation)
    check(speculation)
    return speculation


def _dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, however torch and vLLM spell it."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else _word("dtype", dtype)
    return {"float": "float32", "half": "float16"}.get(name, name)


def _word(field: str, value: Any) -> str:
    """Return a short text; its user checks that it is known."""
    if not isinstance(value, str) or len(value) > 40:
        raise InvalidParameter(field, f"must be one of a few words, got {short_repr(value)}")
    return value


class AnswerStream:
    """An answer under way, as chunks. The last chunk of the request carries the whole answer."""

    def __init__(self, llm: LLM, request: StreamedRequest) -> None:
        self._llm, self._request = llm, request  # the LLM stays alive while the stream is open
        self._events: SimpleQueue[Event | None] = SimpleQueue()  # None: closed
        self._over = False
        llm.thread.submit([request.request], self._events)
        # Under way, so only to be read: how far the prompt is, and once the stream is over the figures of drafting,
        # also of an answer that was cut short.
        self.sequences = self._accepted()

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> StreamChunk:
        try:
            while not self._over and (event := self._events.get()) is not None:
                chunk = self._request.chunk(event)
                self._over = self._over or isinstance(event, Ended)
                if chunk is not None:
                    return chunk
        except BaseException:  # the request failed, or its text cannot be decoded
            self.close()
            raise
        raise StopIteration

    def _accepted(self) -> Sequence[Answer]:
        """Wait until the engine accepts the request; raise why it does not."""
        try:
            event = self._events.get()
            if event is not None:
                self._request.chunk(event)
        except BaseException:
            self.close()
            raise
        return event.sequences if isinstance(event, Accepted) else ()

    def close(self) -> None:
        """Cancel the request if it is still running; its blocks are free when this returns."""
        if not self._over:
            self._over = True
            self._events.put(None)  # for another thread that waits for a chunk
            self._request.cancel().result()

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self._request.cancel()
