"""The caller's side of requests to the engine's thread: encode, submit, collect, decode.

Everything here runs in the caller's thread or task, except `Job.put`. `LLM` waits for it, `AsyncLLM` awaits it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from paceline.arguments import CHAT_OPTIONS, chat_options, only_params, per_prompt
from paceline.core.sequence import Sequence as Answer
from paceline.core.sequence import TokenLogprobs
from paceline.engine.loop import Delta, Ended, EngineThread, Event, Failed, Request
from paceline.errors import InvalidPrompt, PacelineError, RequestFailed
from paceline.inputs import each_conversation, each_prompt, is_conversation, read_prompt
from paceline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamChunk
from paceline.progress_bar import AnswerProgress
from paceline.sampling_params import SamplingParams, derived_seed
from paceline.text.chat_template import read_messages
from paceline.text.stop_strings import TextDecoder
from paceline.text.tokenizer import Tokenizer

GROUP = 64  # prompts that are encoded and submitted at a time, while the engine runs


class Encoded(NamedTuple):
    text: str | None
    tokens: list[int]


class Client:
    def __init__(
        self,
        thread: EngineThread,
        tokenizer: Tokenizer,
        defaults: Mapping[str, Any],
        rows: int,
        seed: int | None = None,
    ) -> None:
        """`defaults` fill unset sampling parameters; `rows` is how many sequences share a step; of `seed` follow the
        seeds of requests that have none."""
        self.thread, self.tokenizer, self._defaults = thread, tokenizer, defaults
        # Requests of a job in the engine at once: enough to fill every row that becomes free.
        self.window = 2 * rows + GROUP
        self._request_ids = map(str, itertools.count())
        self._seed, self._seeded = seed, itertools.count()

    def generate_job(self, prompts: Any, params: Any, use_tqdm: Any, given: Mapping[str, Any]) -> Job:
        params = only_params(params, given, ())
        each = each_prompt(prompts)
        return Job(self, each, per_prompt(params, len(each)), self.encode, use_tqdm)

    def chat_job(self, messages: Any, params: Any, use_tqdm: Any, given: Mapping[str, Any]) -> Job:
        params = only_params(params, given, CHAT_OPTIONS)
        encode = partial(self.encode_chats, **chat_options(given, self.tokenizer))
        each = each_conversation(messages)
        return Job(self, each, per_prompt(params, len(each)), encode, use_tqdm)

    def next_id(self) -> str:
        return next(self._request_ids)

    def resolve(self, params: SamplingParams | None) -> SamplingParams:
        return (params or SamplingParams()).resolve(self._defaults)

    def seeded(self, params: SamplingParams) -> SamplingParams:
        """Of the next request."""
        return params if self._seed is None else params.with_seed(derived_seed(self._seed, next(self._seeded)))

    def encode(self, prompts: Sequence[Any]) -> list[Encoded]:
        read = [read_prompt(prompt) for prompt in prompts]
        texts = [prompt for prompt in read if isinstance(prompt, str)]
        encoded = iter(self.tokenizer.encode_each(texts) if texts else ())
        return [Encoded(one, next(encoded)) if isinstance(one, str) else Encoded(None, one) for one in read]

    def encode_chats(self, conversations: Sequence[Any], **options: Any) -> list[Encoded]:
        texts = []
        for messages in conversations:
            last = read_messages(messages)[-1]
            if not last.get("content") and not last.get("tool_calls"):
                raise InvalidPrompt("the last message is empty; give it some content")
            texts.append(self.tokenizer.render_chat(messages, **options))
        return [*map(Encoded, texts, self.tokenizer.encode_each(texts, add_special_tokens=False))]


class Job:
    """Prompts whose answers the caller waits for together.

    They are encoded and submitted in groups while the engine runs, as many as keep it busy. `wake` is called, on the
    engine's thread, when `advance` has work to do.
    """

    wake: Callable[[], None]

    def __init__(
        self,
        client: Client,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams | None],
        encode: Callable[[Sequence[Any]], list[Encoded]],
        use_tqdm: Any = False,
    ) -> None:
        self._progress = AnswerProgress(use_tqdm, len(prompts))
        self._client, self._prompts, self._params, self._encode = client, prompts, params, encode
        self._name = f"job-{client.next_id()}"
        self._resolved: dict[int, SamplingParams] = {}  # by identity: most jobs have one object for all prompts
        self._submitted: dict[str, tuple[Encoded, float]] = {}  # by request id, in order: the prompt, when it arrived
        self._ended: list[Ended] = []
        self._outputs: dict[str, RequestOutput] = {}  # of those that ended and were seen by `advance`
        self._wanted = 0  # answers that wake the caller
        self._num_tokens = 0  # of the outputs
        self._failure: PacelineError | None = None

    def put(self, event: Event, /) -> None:
        """Called on the engine's thread."""
        if isinstance(event, Ended):
            self._ended.append(event)
        elif isinstance(event, Failed):
            self._failure = self._failure or event.error
        if len(self._ended) >= self._wanted or self._failure is not None:
            self._wanted = len(self._prompts) + 1  # wake once, until `advance` has run
            self.wake()

    def advance(self) -> bool:
        """Submit as many prompts as the window allows; True: every answer is there. Raises a failed request's error."""
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
        """A future that is done once no request of the job is left in the engine."""
        ended = {event.request_id for event in self._ended}
        return self._client.thread.cancel([one for one in self._submitted if one not in ended])

    def close(self) -> None:
        """The caller waits no longer."""
        self._progress.close()

    def outputs(self) -> list[RequestOutput]:
        self._take_ended()
        return [self._outputs[request_id] for request_id in self._submitted]

    def _take_ended(self) -> None:
        for event in self._ended[len(self._outputs) :]:
            prompt, arrival = self._submitted[event.request_id]
            self._outputs[event.request_id] = request_output(self._client.tokenizer, prompt, arrival, event)
            self._num_tokens += sum(answer.num_output for answer in event.answers)
        self._progress.reached(len(self._outputs), self._num_tokens)

    def _submit(self, at: int) -> None:
        requests = []
        end, now = at + GROUP, time.perf_counter()
        for prompt, params in zip(self._encode(self._prompts[at:end]), self._params[at:end], strict=True):
            resolved = self._client.seeded(self._resolve(params))
            request = Request(self._client.next_id(), prompt.tokens, resolved, self._name, patient=True)
            self._submitted[request.request_id] = prompt, now
            requests.append(request)
        self._client.thread.submit(requests, self)

    def _resolve(self, params: SamplingParams | None) -> SamplingParams:
        resolved = self._resolved.get(id(params))
        if resolved is None:
            resolved = self._resolved[id(params)] = self._client.resolve(params)
        return resolved


class StreamedRequest:
    """One request whose deltas become chunks, in the thread or task that reads them."""

    def __init__(self, client: Client, prompt: Any, params: Any, given: Mapping[str, Any] | None = None) -> None:
        given, is_chat = given or {}, is_conversation(prompt)
        (one,) = per_prompt(only_params(params, given, CHAT_OPTIONS if is_chat else ()), 1)
        options = chat_options(given, client.tokenizer) if is_chat else {}
        (self._prompt,) = client.encode_chats([prompt], **options) if is_chat else client.encode([prompt])
        self.client, self._arrival = client, time.perf_counter()
        self._params = client.seeded(client.resolve(one))
        self.request = Request(client.next_id(), self._prompt.tokens, self._params, streamed=True)
        self._decoders: dict[int, TextDecoder] = {}  # by answer

    def cancel(self) -> Future[None]:
        return self.client.thread.cancel([self.request.request_id])

    def chunk(self, delta: Delta) -> StreamChunk:
        output = None
        if delta.ended is not None:
            output = request_output(self.client.tokenizer, self._prompt, self._arrival, delta.ended)
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
            decoder = self.client.tokenizer.incremental_decoder(self._params.skip_special_tokens)
            self._decoders[delta.answer] = decoder
        try:
            text = "".join([decoder.push(token) for token in delta.tokens])
            return text if delta.finish_reason is None else text + decoder.flush()
        except Exception as problem:
            reason = f"{type(problem).__name__}: {problem}"
            raise RequestFailed(f"the text of the answer could not be decoded: {reason}") from problem


def request_output(tokenizer: Tokenizer, prompt: Encoded, arrival: float, ended: Ended) -> RequestOutput:
    of_prompt = ended.answers[0].prompt_logprobs
    return RequestOutput(
        request_id=ended.request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt.tokens,
        outputs=[_completion(answer, tokenizer) for answer in ended.answers],
        finished=True,
        metrics=RequestMetrics(arrival, ended.first_token_time, ended.finished_time),
        num_cached_tokens=max(answer.num_cached_prompt for answer in ended.answers),
        prompt_logprobs=None if of_prompt is None else [None, *_logprobs(of_prompt, tokenizer)],
    )


def _completion(answer: Answer, tokenizer: Tokenizer) -> CompletionOutput:
    tokens, params, found = answer.output_tokens, answer.params, answer.logprobs
    fields: dict[str, Any] = {
        "index": answer.index,
        "token_ids": tokens,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "logprobs": None if found is None else _logprobs(found, tokenizer),
        "cumulative_logprob": None if found is None else sum(e[t][0] for t, e in zip(tokens, found, strict=True)),
        "speculation": answer.stats,
    }
    if params.stop:  # the engine has decoded it
        return CompletionOutput(text=answer.text, **fields)
    decode = partial(_decoded, tokenizer, params.skip_special_tokens, tuple(tokens))
    return CompletionOutput.undecoded(decode, **fields)


def _logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[int, Logprob]]:
    return [
        {token: Logprob(value, rank, tokenizer.token_text(token)) for token, (value, rank) in entry.items()}
        for entry in entries
    ]


def _decoded(tokenizer: Tokenizer, skip_special_tokens: bool, tokens: Sequence[int]) -> str:
    return tokenizer.incremental_decoder(skip_special_tokens).decode(tokens)
