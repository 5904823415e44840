"""`LLM` for asyncio: the same engine thread, with answers delivered to the event loop of the task that waits for them.

Leaving `async for` (break, an exception, a cancelled task) cancels the request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from paceline.client import Job, StreamedRequest, TqdmBar
from paceline.engine.engine import Engine
from paceline.engine.events import Ended, Event
from paceline.errors import InvalidParameter
from paceline.inputs import Message, Params, Prompt
from paceline.llm import LLM
from paceline.outputs import RequestOutput, StreamChunk
from paceline.sampling_params import SamplingParams
from paceline.text.tokenizer import Tokenizer

T = TypeVar("T")


class AsyncLLM:
    """`LLM` for asyncio. Any number of tasks share the engine's batches, and each answer is what it would be alone.

        import asyncio
        from paceline import AsyncLLM, SamplingParams

        async def ask(llm, question):
            messages = [{"role": "user", "content": question}]
            async for chunk in llm.stream(messages, SamplingParams(max_tokens=40)):
                print(chunk.text, end="", flush=True)

        async def main():
            async with AsyncLLM("smollm2") as llm:
                await asyncio.gather(ask(llm, "Name a colour."), ask(llm, "Count to five."))

        asyncio.run(main())

    Leaving `async for` early, or cancelling the task, cancels the request and frees its place.
    """

    def __init__(self, model: str | LLM = "smollm2", **options: Any) -> None:
        """Load a model with the options of `LLM`, or share an existing `LLM`."""
        if isinstance(model, LLM) and options:
            raise InvalidParameter(next(iter(options)), "the model is loaded already; give options to LLM")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._mail: dict[asyncio.AbstractEventLoop, _Mail] = {}

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        params: Params = None,
        use_tqdm: bool | Callable[..., TqdmBar] = False,
        **more: Any,
    ) -> list[RequestOutput]:
        """Complete prompts, as `LLM.generate` does. Cancelling the task cancels its requests."""
        return await self._run(self.llm.client.generate_job(prompts, params, use_tqdm, more))

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
        params: Params = None,
        use_tqdm: bool | Callable[..., TqdmBar] = False,
        **more: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, as `LLM.chat` does. Cancelling the task cancels its requests."""
        return await self._run(self.llm.client.chat_job(messages, params, use_tqdm, more))

    def stream(
        self,
        prompt: Prompt | Sequence[Message] | None = None,
        params: SamplingParams | Mapping[str, Any] | None = None,
        **more: Any,
    ) -> AsyncAnswerStream:
        """Return the chunks of `LLM.stream`, for `async for`. A refused request raises at the first one."""
        return AsyncAnswerStream(self.llm, StreamedRequest(self.llm.client, prompt, params, more), self._mail_here())

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self.llm.tokenizer

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function(engine)` on the thread that owns the engine, between two steps."""
        return await asyncio.wrap_future(self.llm.thread.call(function))

    async def close(self) -> None:
        """Stop the engine; open requests fail, later ones are refused."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, job: Job) -> list[RequestOutput]:
        woken, mail = asyncio.Event(), self._mail_here()
        job.wake = lambda: mail.post(woken.set)
        try:
            while not job.advance():
                await woken.wait()
                woken.clear()
            return job.outputs()
        except BaseException:
            job.cancel()
            raise
        finally:
            job.close()

    def _mail_here(self) -> _Mail:
        loop = asyncio.get_running_loop()
        for closed in [each for each in self._mail if each.is_closed()]:
            del self._mail[closed]
        return self._mail.setdefault(loop, _Mail(loop))


class _Mail:
    """Events from the engine's thread to one event loop: a step wakes the loop once, however many streams it serves."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[Callable[[], None]] = deque()
        self._awake = False  # a delivery is due

    def post(self, delivery: Callable[[], None]) -> None:
        self._posted.append(delivery)
        if not self._awake:
            self._awake = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._awake = False  # first: an event posted from here on wakes the loop again
        while self._posted:
            self._posted.popleft()()


class AsyncAnswerStream:
    """An answer under way, as chunks. The last chunk of the request carries the whole answer."""

    def __init__(self, llm: LLM, request: StreamedRequest, mail: _Mail) -> None:
        self._llm, self._request = llm, request  # the LLM stays alive while the stream is open
        self._inbox = _AsyncInbox(mail)  # a separate object: the engine's thread must not keep a dropped stream alive
        self._over = False
        llm.thread.submit([request.request], self._inbox)

    def __aiter__(self) -> AsyncAnswerStream:
        return self

    async def __anext__(self) -> StreamChunk:
        try:
            while not self._over:
                event = await self._inbox.get()
                chunk = self._request.chunk(event)
                self._over = self._over or isinstance(event, Ended)
                if chunk is not None:
                    return chunk
        except BaseException:
            self._cancel()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request if it is still running; its blocks are free when this returns."""
        done = self._cancel()
        if done is not None:
            await asyncio.wrap_future(done)

    def _cancel(self) -> Future[None] | None:
        if self._over:
            return None
        self._over = True
        return self._request.cancel()

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self._request.cancel()


class _AsyncInbox:
    def __init__(self, mail: _Mail) -> None:
        self._mail = mail
        self._events: deque[Event] = deque()
        self._woken = asyncio.Event()

    def put(self, event: Event, /) -> None:
        """Take an event, on the engine's thread."""
        self._events.append(event)
        self._mail.post(self._woken.set)

    async def get(self) -> Event:
        while not self._events:
            self._woken.clear()
            await self._woken.wait()
        return self._events.popleft()
