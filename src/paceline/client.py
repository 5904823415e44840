"""The caller's side of requests to the engine's thread: encode, submit, collect, decode.

All of it runs in the caller's thread or task, except `Job.put`. `LLM` waits for it, `AsyncLLM` awaits it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tqdm import tqdm

from paceline.core.sequence import Owner
from paceline.engine.events import Delta, Ended, Event, Failed, FinishedAnswer, Request
from paceline.errors import InvalidParameter, InvalidPrompt, PacelineError, short_repr
from paceline.inputs import (
    CHAT_OPTIONS,
    chat_options,
    each_conversation,
    each_prompt,
    is_conversation,
    only_params,
    per_prompt,
)
from paceline.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from paceline.sampling_params import SamplingParams, derived_seed
from paceline.text.chat_template import read_messages
from paceline.text.request_text import AnswerText, EncodedPrompt, encode_chats, encode_prompts
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.engine.loop import EngineThread

GROUP = 64  # prompts that are encoded and submitted at a time, while the engine runs


class Client:
    def __init__(
        self,
        thread: EngineThread,
        tokenizer: Tokenizer,
        defaults: Mapping[str, Any],
        rows: int,
        seed: int | None = None,
    ) -> None:
        """`defaults` fill unset sampling parameters; `rows`: sequences that share a step; `seed` gives requests without
        one their seeds."""
        self.thread, self.tokenizer, self._defaults = thread, tokenizer, defaults
        # Requests of a job in the engine at once: enough to fill every row that becomes free.
        self.window = 2 * rows + GROUP
        self._request_ids = map(str, itertools.count())
        self._seed, self._seeded = seed, itertools.count()

    def generate_job(self, prompts: Any, params: Any, use_tqdm: Any, named: Mapping[str, Any]) -> Job:
        params = only_params(params, named, ())
        each = each_prompt(prompts)
        return Job(self, each, per_prompt(params, len(each)), self.encode, use_tqdm)

    def chat_job(self, messages: Any, params: Any, use_tqdm: Any, named: Mapping[str, Any]) -> Job:
        params = only_params(params, named, CHAT_OPTIONS)
        encode = partial(self.encode_chats, options=chat_options(named, self.tokenizer))
        each = each_conversation(messages)
        return Job(self, each, per_prompt(params, len(each)), encode, use_tqdm)

    def next_id(self) -> str:
        return next(self._request_ids)

    def resolve(self, params: SamplingParams | None) -> SamplingParams:
        return (params or SamplingParams()).resolve(self._defaults)

    def seeded(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of the next request."""
        return params if self._seed is None else params.with_seed(derived_seed(self._seed, next(self._seeded)))

    def encode(self, prompts: Sequence[Any]) -> list[EncodedPrompt]:
        return encode_prompts(self.tokenizer, prompts)

    def encode_chats(self, conversations: Sequence[Any], options: Mapping[str, Any]) -> list[EncodedPrompt]:
        for messages in conversations:
            last = read_messages(messages)[-1]
            if not last.get("content") and not last.get("tool_calls"):
                raise InvalidPrompt("the last message is empty; give it some content")
        return encode_chats(self.tokenizer, conversations, options)


class Job:
    """Prompts whose answers the caller waits for together.

    They are encoded and submitted in groups while the engine runs, enough to keep it busy. `wake` is called on the
    engine's thread when `advance` has work to do.
    """

    wake: Callable[[], None]

    def __init__(
        self,
        client: Client,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams | None],
        encode: Callable[[Sequence[Any]], list[EncodedPrompt]],
        use_tqdm: Any = False,
    ) -> None:
        self._progress = AnswerProgress(use_tqdm, len(prompts))
        self._client, self._prompts, self._params, self._encode = client, prompts, params, encode
        self._name = f"job-{client.next_id()}"
        self._resolved: dict[int, SamplingParams] = {}  # key: id of the object; most jobs have one for all prompts
        self._submitted: dict[str, AnswerReader] = {}  # key: request id; in the order of the prompts
        self._ended: list[Ended] = []
        self._outputs: dict[str, RequestOutput] = {}  # answers of ended requests that `advance` has seen
        self._wanted = 0  # number of answers that wakes the caller
        self._num_tokens = 0  # tokens of the outputs
        self._failure: PacelineError | None = None

    def put(self, event: Event, /) -> None:
        """Take an event, on the engine's thread."""
        if isinstance(event, Ended):
            self._ended.append(event)
        elif isinstance(event, Failed):
            self._failure = self._failure or event.error
        if len(self._ended) >= self._wanted or self._failure is not None:
            self._wanted = len(self._prompts) + 1  # wake once, until `advance` has run
            self.wake()

    def advance(self) -> bool:
        """Submit the prompts that the window allows; return True once every answer is there. Raise a failed request's
        error."""
        prompts = len(self._prompts)
        while len(self._ended) < prompts:
            if self._failure is not None:
                raise self._failure
            self._take_ended()  # answers are assembled while the engine steps other requests
            submitted = len(self._submitted)
            if submitted < prompts and submitted - len(self._ended) <= self._client.window - GROUP:
                self._submit(submitted)
                continue
            self._wanted = prompts if submitted == prompts else submitted - self._client.window + GROUP
            if self._progress.shown:
                self._wanted = min(self._wanted, len(self._outputs) + 1)
            if len(self._ended) < self._wanted and self._failure is None:  # else an event came before `_wanted` was set
                return False
        return True

    def cancel(self) -> Future[None]:
        """End the job's requests. The future is done once none of them is left in the engine."""
        ended = {event.request_id for event in self._ended}
        return self._client.thread.cancel([request_id for request_id in self._submitted if request_id not in ended])

    def close(self) -> None:
        """Close the progress bar: the caller waits no longer."""
        self._progress.close()

    def outputs(self) -> list[RequestOutput]:
        self._take_ended()
        return [self._outputs[request_id] for request_id in self._submitted]

    def _take_ended(self) -> None:
        for event in self._ended[len(self._outputs) :]:
            self._outputs[event.request_id] = self._submitted[event.request_id].output(event)
            self._num_tokens += sum(len(answer.tokens) for answer in event.answers)
        self._progress.reached(len(self._outputs), self._num_tokens)

    def _submit(self, start: int) -> None:
        requests, client, end, now = [], self._client, start + GROUP, time.perf_counter()
        for prompt, params in zip(self._encode(self._prompts[start:end]), self._params[start:end], strict=True):
            resolved = client.seeded(self._resolve(params))
            owner = Owner().narrowed(prompt.cache_salt)
            request = Request(client.next_id(), prompt.tokens, resolved, self._name, may_wait=True, owner=owner)
            self._submitted[request.request_id] = AnswerReader(client.tokenizer, prompt, resolved, now)
            requests.append(request)
        client.thread.submit(requests, self)

    def _resolve(self, params: SamplingParams | None) -> SamplingParams:
        resolved = self._resolved.get(id(params))
        if resolved is None:
            resolved = self._resolved[id(params)] = self._client.resolve(params)
        return resolved


class AnswerReader:
    """The events of one request as callers read them: chunks and outputs."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: EncodedPrompt, params: SamplingParams, arrival: float | None = None
    ) -> None:
        """`arrival`: when the request came; None: now."""
        self.prompt, self.params = prompt, params
        self._arrival = time.perf_counter() if arrival is None else arrival
        self._text = AnswerText(tokenizer, params.skip_special_tokens)

    def chunk(self, delta: Delta) -> StreamChunk:
        texts = self._text.push(delta.answer, delta.tokens, delta.finish_reason is not None)
        return StreamChunk(
            index=delta.answer,
            text=delta.text if self.params.stop else "".join(texts),
            token_ids=delta.tokens,
            finish_reason=delta.finish_reason,
            kinds=delta.kinds,
            token_texts=texts,
            logprobs=self._text.logprobs(delta.logprobs),
            draft=delta.draft,
        )

    def whole_chunk(self, answer: CompletionOutput) -> StreamChunk:
        """Return a whole answer as one chunk, with the text of each token."""
        texts = self._text.push(answer.index, answer.token_ids, True)
        text = answer.text if self.params.stop else "".join(texts)
        return StreamChunk(answer.index, text, answer.token_ids, answer.finish_reason, token_texts=texts)

    def output(self, ended: Ended) -> RequestOutput:
        of_prompt = self._text.logprobs(ended.prompt_logprobs)
        return RequestOutput(
            request_id=ended.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.tokens,
            outputs=[self._completion(answer) for answer in ended.answers],
            finished=True,
            metrics=RequestMetrics(self._arrival, ended.first_token_time, ended.finished_time),
            num_cached_tokens=ended.num_cached,
            prompt_logprobs=None if of_prompt is None else [None, *of_prompt],
        )

    def _completion(self, answer: FinishedAnswer) -> CompletionOutput:
        tokens, entries = answer.tokens, answer.logprobs
        total = None if entries is None else sum(e[token][0] for token, e in zip(tokens, entries, strict=True))
        return CompletionOutput(
            index=answer.number,
            text=answer.text if self.params.stop else partial(self._text.whole, tuple(tokens)),
            token_ids=tokens,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            logprobs=self._text.logprobs(entries),
            speculation=answer.stats,
            cumulative_logprob=total,
        )


class StreamedRequest:
    """One request whose events become chunks, in the thread or task that reads them."""

    def __init__(self, client: Client, prompt: Any, params: Any, named: Mapping[str, Any] | None = None) -> None:
        named, is_chat = named or {}, is_conversation(prompt)
        (own,) = per_prompt(only_params(params, named, CHAT_OPTIONS if is_chat else ()), 1)
        options = chat_options(named, client.tokenizer) if is_chat else {}
        (encoded,) = client.encode_chats([prompt], options) if is_chat else client.encode([prompt])
        self.client = client
        self._reader = AnswerReader(client.tokenizer, encoded, client.seeded(client.resolve(own)))
        owner = Owner().narrowed(encoded.cache_salt)
        self.request = Request(client.next_id(), encoded.tokens, self._reader.params, streamed=True, owner=owner)
        self._unfinished = self.request.params.n  # answers
        self._last: StreamChunk | None = None  # kept until the whole answer follows it

    def cancel(self) -> Future[None]:
        return self.client.thread.cancel([self.request.request_id])

    def chunk(self, event: Event) -> StreamChunk | None:
        """Return the chunk that an event completes, if any; raise the error of a failed request."""
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Delta):
            chunk = self._reader.chunk(event)
            self._unfinished -= event.finish_reason is not None
            if self._unfinished:
                return chunk
            self._last = chunk
        elif isinstance(event, Ended) and self._last is not None:
            return replace(self._last, output=self._reader.output(event))
        return None


class TqdmBar(Protocol):
    """The methods of tqdm that are used here."""

    def update(self, n: int) -> Any: ...
    def set_postfix_str(self, s: str) -> Any: ...
    def close(self) -> Any: ...


class AnswerProgress:
    """A bar over the prompts of one call: how many are answered, and tokens per second. False shows none; a caller may
    hand in a tqdm of its own, or a function that makes a bar."""

    def __init__(self, use_tqdm: bool | Callable[..., TqdmBar], prompts: int) -> None:
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            raise InvalidParameter("use_tqdm", f"must be True, False or tqdm itself, got {short_repr(use_tqdm)}")
        make = tqdm if isinstance(use_tqdm, bool) else use_tqdm
        try:
            self._bar: TqdmBar | None = make(total=prompts, desc="answers") if use_tqdm and prompts else None
        except TypeError as error:
            raise InvalidParameter("use_tqdm", f"cannot make a bar as tqdm does: {error}") from error
        self._done = 0
        self._started = time.perf_counter()

    @property
    def shown(self) -> bool:
        return self._bar is not None

    def reached(self, done: int, tokens: int) -> None:
        """Show that `done` prompts are answered, with `tokens` tokens."""
        if self._bar is not None and done > self._done:
            rate = tokens / max(time.perf_counter() - self._started, 1e-9)
            self._bar.set_postfix_str(f"{rate:.0f} tok/s")
            self._bar.update(done - self._done)
            self._done = done

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()
