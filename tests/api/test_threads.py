"""One LLM, many callers: threads, asyncio tasks, interruptions, failures. Each answer is what it is alone."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.errors import EngineClosed, EngineDied, InvalidPrompt, QueueFull, RequestFailed
from tests.helpers.errors import refused
from tests.helpers.tiny import save_tiny

CALLERS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny("llama-tied", path)
    return path


def make(folder: Path, **options) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "threads": 1, "kv_cache_bytes": 4 << 20, **options})


@pytest.fixture(scope="module")
def llm(folder: Path):
    with make(folder) as llm:
        yield llm


def prompt_of(i: int) -> list[int]:
    return [1 + (i * 7 + j * j) % 90 for j in range(3 + i)]


def params_of(i: int) -> SamplingParams:
    """Greedy and seeded, some with a stop string."""
    stop = ("w5",) if i % 3 == 0 else ()
    if i % 2:
        return SamplingParams(temperature=0, max_tokens=20 + i, stop=stop, ignore_eos=True)
    return SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=20 + i, stop=stop, ignore_eos=True)


def facts(output):
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs]


@pytest.fixture(scope="module")
def alone(llm: LLM):
    return [facts(llm.generate(prompt_of(i), params_of(i))[0]) for i in range(CALLERS)]


def is_idle(llm: LLM) -> bool:
    return llm.call(lambda e: not e.has_work and e.blocks.num_free == e.blocks.num_blocks)


def endless(i: int = 0) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=i, max_tokens=240, ignore_eos=True)


def test_a_tokenizer_that_cannot_decode_ends_its_own_request_only(folder: Path, alone, monkeypatch) -> None:
    """The engine decodes where there are stop strings; elsewhere the reader does, and has the error to itself."""
    broken = SamplingParams(temperature=0, max_tokens=50, stop="never", ignore_eos=True)
    with make(folder) as llm:
        make_decoder, failing = llm.tokenizer.incremental_decoder, []

        def decoder(skip):
            made = make_decoder(skip)
            if threading.current_thread() in failing:
                failing.clear()
                monkeypatch.setattr(made, "push", lambda token: [][0])
            return made

        monkeypatch.setattr(llm.tokenizer, "incremental_decoder", decoder)
        others = [llm.stream(prompt_of(i), params_of(i)) for i in (3, 4, 6, 7)]
        for other in others:
            next(other)
        failing.append(llm.call(lambda engine: threading.current_thread()))
        with pytest.raises(RequestFailed, match="could not be decoded: IndexError"):
            llm.generate(prompt_of(2), broken)
        assert [facts(list(other)[-1].output) for other in others] == [alone[i] for i in (3, 4, 6, 7)]
        failing.append(threading.current_thread())
        stream = llm.stream(prompt_of(1), endless())
        with pytest.raises(RequestFailed, match="could not be decoded"):
            list(stream)
        assert is_idle(llm)


def pace(llm: LLM, seconds: float) -> None:
    """Each pass takes at least so long from now on, so that requests are not answered before a test goes on."""

    def set_pace(engine) -> None:
        vars(engine.model).pop("forward", None)
        if not seconds:
            return
        forward = engine.model.forward

        def slowly(*args, **kwargs):
            time.sleep(seconds)
            return forward(*args, **kwargs)

        engine.model.forward = slowly

    llm.call(set_pace)


@contextmanager
def passes(llm: LLM, replaced):
    """`replaced(forward)` takes the place of the target's pass. Enter it before requests are sent: the engine waits for
    no other thread, so it may have answered them before a fault is planted."""
    model = llm.engine.model
    forward = model.forward
    llm.call(lambda engine: setattr(model, "forward", replaced(forward)))
    try:
        yield
    finally:
        llm.call(lambda engine: setattr(model, "forward", forward))


def failing_pass(llm: LLM, problem: Exception, *, after: int = 0):
    """Raise in one pass of the target, behind `after` passes that succeed."""
    number = itertools.count()

    def breaking(forward):
        def broken(*args, **kwargs):
            if next(number) == after:
                raise problem
            return forward(*args, **kwargs)

        return broken

    return passes(llm, breaking)


# -- answers


def test_sixteen_threads_get_what_each_gets_alone(llm: LLM, alone) -> None:
    start = threading.Barrier(CALLERS)

    def ask(i: int):
        start.wait()
        if i % 4 == 3:
            chunks = list(llm.stream(prompt_of(i), params_of(i)))
            assert "".join(chunk.text for chunk in chunks) == chunks[-1].output.outputs[0].text
            return facts(chunks[-1].output)
        return facts(llm.generate([prompt_of(i)] * 2, params_of(i))[i % 2])

    steps = llm.call(lambda engine: engine.stats.num_steps)
    with ThreadPoolExecutor(CALLERS) as pool:
        assert list(pool.map(ask, range(CALLERS))) == alone
    assert is_idle(llm)
    together = llm.call(lambda engine: engine.stats.num_steps) - steps
    tokens = sum(len(one) for answers in alone for one, *_ in answers)
    assert together < tokens / 2, "they shared passes"


def test_sixteen_tasks_get_what_each_gets_alone(llm: LLM, alone) -> None:
    async def ask(asynchronous: AsyncLLM, i: int):
        if i % 4 == 3:
            chunks = [chunk async for chunk in asynchronous.stream(prompt_of(i), params_of(i))]
            assert "".join(chunk.text for chunk in chunks) == chunks[-1].output.outputs[0].text
            return facts(chunks[-1].output)
        return facts((await asynchronous.generate(prompt_of(i), params_of(i)))[0])

    async def all_of_them():
        asynchronous = AsyncLLM(llm)
        return await asyncio.gather(*(ask(asynchronous, i) for i in range(CALLERS)))

    for _ in range(2):  # an event loop each
        assert asyncio.run(all_of_them()) == alone
    assert is_idle(llm)


def test_more_prompts_than_may_wait_are_fed_gradually(folder: Path, alone) -> None:
    with make(folder, max_num_seqs=4, max_num_batched_tokens=64, max_waiting=6) as llm:
        most = 0

        def waiting(engine) -> int:
            return len(engine.scheduler.waiting)

        with ThreadPoolExecutor(1) as pool:
            params = [params_of(i % CALLERS) for i in range(200)]
            answers = pool.submit(llm.generate, [prompt_of(i % CALLERS) for i in range(200)], params)
            while not answers.done():
                most = max(most, llm.call(waiting))
            for i, output in enumerate(answers.result()):
                assert facts(output) == alone[i % CALLERS]
        assert 0 < most <= 6


def test_a_stream_is_refused_where_the_queue_is_full(folder: Path) -> None:
    with make(folder, max_num_seqs=1, max_waiting=1) as llm:
        pace(llm, 0.05)
        streams = [llm.stream(prompt_of(i), endless(i)) for i in range(2)]
        next(streams[0])  # runs; the other waits
        with pytest.raises(QueueFull):
            llm.stream(prompt_of(2), endless())
        pace(llm, 0)
        assert llm.generate(prompt_of(3), params_of(3))[0].finished, "a whole answer waits for its turn"
        for stream in streams:
            stream.close()
        assert is_idle(llm)


# -- leaving early


def test_closing_a_stream_frees_its_blocks_and_ends_a_reader_in_another_thread(llm: LLM) -> None:
    stream, other = llm.stream(prompt_of(0), endless()), llm.stream(prompt_of(1), endless(1))
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(list, stream)
        stream.close()
        assert all(chunk.output is None for chunk in rest.result(timeout=60))
    assert llm.call(lambda engine: len(engine.scheduler.running)) <= 1, "the other stream's"
    with pytest.raises(StopIteration):
        next(stream)
    other.close()
    assert is_idle(llm)


def test_a_dropped_stream_frees_its_blocks(llm: LLM) -> None:
    streams = [llm.stream(prompt_of(i), endless(i)) for i in range(4)]
    next(streams[0])
    del streams
    gc.collect()
    assert is_idle(llm)


def test_leaving_an_async_loop_cancels_the_request(llm: LLM) -> None:
    async def leave():
        asynchronous = AsyncLLM(llm)
        async for _ in asynchronous.stream(prompt_of(0), endless()):
            break
        gc.collect()
        assert await asynchronous.call(lambda engine: not engine.has_work)
        task = asyncio.ensure_future(asynchronous.generate([prompt_of(1)] * 3, endless()))
        await asyncio.sleep(0.01)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert await asynchronous.call(lambda engine: not engine.has_work)
        stream = asynchronous.stream(prompt_of(2), endless())
        await anext(stream)
        await stream.aclose()
        assert not llm.engine.has_work

    asyncio.run(leave())
    assert is_idle(llm)


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_ctrl_c_reaches_the_waiting_caller_and_leaves_nothing_running(folder: Path, how: str, request) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with make(folder) as llm:
        pace(llm, 0.05)
        ask = llm.generate if how == "generate" else lambda *asked: list(llm.stream(*asked))
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ask(prompt_of(0), endless())
        timer.join()
        assert is_idle(llm)


def test_bad_input_raises_in_its_own_call(llm: LLM, alone) -> None:
    with pytest.raises(InvalidPrompt):
        llm.generate([prompt_of(0), [10_000]], params_of(1))
    with refused("speculation"):
        llm.stream(prompt_of(0), SamplingParams(speculation="warp"))

    async def ask():
        with pytest.raises(InvalidPrompt):
            AsyncLLM(llm).stream("")
        with pytest.raises(InvalidPrompt):
            await anext(AsyncLLM(llm).stream([10_000]))

    asyncio.run(ask())
    assert is_idle(llm)
    assert facts(llm.generate(prompt_of(1), params_of(1))[0]) == alone[1]


def test_the_largest_numbers_are_served(llm: LLM) -> None:
    most = 2**31 - 1
    wide = SamplingParams(temperature=1.0, top_k=most, seed=2**63 - 1, max_tokens=most, min_tokens=0)
    same = SamplingParams(temperature=1.0, seed=2**63 - 1)
    assert facts(llm.generate(prompt_of(0), wide)[0]) == facts(llm.generate(prompt_of(0), same)[0])
    long = SamplingParams(temperature=0, min_tokens=most, max_tokens=most)
    assert llm.generate(prompt_of(0), long)[0].outputs[0].finish_reason == "length"


# -- failures


def test_a_failing_pass_ends_its_own_requests_and_no_others(folder: Path, alone) -> None:
    with make(folder, max_num_seqs=1) as llm:
        with failing_pass(llm, ValueError("a bad pass"), after=2):
            failing, waiting = (llm.stream(prompt_of(i), params_of(i)) for i in (3, 7))
            next(failing)
            with pytest.raises(RequestFailed, match="a bad pass"):
                list(failing)
            assert facts(list(waiting)[-1].output) == alone[7], "it was not in the pass that failed"
        with pytest.raises(StopIteration):
            next(failing)
        with failing_pass(llm, ValueError("another")), pytest.raises(RequestFailed, match="another"):
            llm.generate([prompt_of(0)] * 3, params_of(0))
        assert is_idle(llm)
        assert facts(llm.generate(prompt_of(5), params_of(5))[0]) == alone[5]


def test_of_many_callers_only_those_in_the_pass_fail(folder: Path, alone) -> None:
    with make(folder, max_num_seqs=2) as llm, ThreadPoolExecutor(CALLERS) as pool:
        with failing_pass(llm, ValueError("a bad pass"), after=20):
            asked = [pool.submit(llm.generate, prompt_of(i), params_of(i)) for i in range(CALLERS)]
            failed = 0
            for i, answer in enumerate(asked):
                try:
                    assert facts(answer.result(timeout=60)[0]) == alone[i]
                except RequestFailed:
                    failed += 1
        assert failed in (1, 2)
        assert is_idle(llm)


def logits_that_are_no_numbers(llm: LLM, row: int, least: int):
    """In one row of each pass with at least so many rows of logits."""

    def spoiling(forward):
        def broken(*args, **kwargs):
            output = forward(*args, **kwargs)
            if len(output.logits) >= least:
                output.logits[row] = math.nan
            return output

        return broken

    return passes(llm, spoiling)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_no_numbers_end_the_request_of_their_row(folder: Path, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=30, ignore_eos=True)
    with make(folder, method="suffix", k=4) as llm, ThreadPoolExecutor(2) as pool:
        (alone,) = llm.generate(prompt_of(1), params)
        plainly = dataclasses.replace(params, speculation="none")
        pace(llm, 0.02)
        with logits_that_are_no_numbers(llm, row=0, least=2):
            older = llm.stream(prompt_of(0), dataclasses.replace(plainly, max_tokens=200))
            next(older)
            younger = pool.submit(llm.generate, prompt_of(1), plainly)
            with pytest.raises(RequestFailed, match="not finite"):
                list(older)
            assert facts(younger.result(timeout=60)[0]) == facts(alone), "its rows were numbers"
        pace(llm, 0)
        behind_a_draft = logits_that_are_no_numbers(llm, row=-1, least=2)  # which the answers before have taught
        with behind_a_draft, pytest.raises(RequestFailed, match="not finite"):
            llm.generate(prompt_of(1), params)
        assert is_idle(llm)
        assert facts(llm.generate(prompt_of(1), params)[0]) == facts(alone)


@pytest.mark.parametrize("part", ["plan", "observe", "schedule"])
def test_a_step_that_raises_outside_its_pass_ends_its_requests_too(folder: Path, alone, part: str) -> None:
    """Planning, learning, scheduling a request that is the first: a fault of ours, and no request is left behind."""
    with make(folder, max_num_seqs=1) as llm:
        owner = llm.engine.scheduler if part == "schedule" else llm.engine.policy
        method = getattr(owner, part)

        def broken(*args, **kwargs):
            setattr(owner, part, method)
            raise ValueError("a fault of ours")

        llm.call(lambda engine: setattr(owner, part, broken))
        with pytest.raises(RequestFailed, match="a fault of ours"):
            llm.generate(prompt_of(3), params_of(3))
        assert is_idle(llm)
        assert facts(llm.generate(prompt_of(7), params_of(7))[0]) == alone[7]


def test_a_lost_device_ends_all_requests_and_refuses_new_ones(folder: Path) -> None:
    with make(folder) as llm:
        pace(llm, 0.05)
        stream = llm.stream(prompt_of(0), endless())

        def step():
            raise EngineDied("the device is lost; load the model again")

        llm.call(lambda engine: setattr(engine, "step", step))
        with pytest.raises(EngineDied):
            list(stream)
        with pytest.raises(EngineDied):
            llm.generate(prompt_of(0))
        assert is_idle(llm)


def test_an_exception_of_a_call_is_the_callers(llm: LLM) -> None:
    assert llm.call(lambda engine: threading.current_thread().name) == "paceline-engine"
    with pytest.raises(ZeroDivisionError):
        llm.call(lambda engine: 1 // 0)
    assert llm.generate(prompt_of(1), params_of(1))[0].finished


# -- the end


def test_a_closed_llm_refuses_and_its_open_requests_fail(folder: Path) -> None:
    llm = make(folder)
    pace(llm, 0.05)
    stream = llm.stream(prompt_of(0), endless())
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed):
        list(stream)
    for ask in (llm.generate, llm.stream):
        with pytest.raises(EngineClosed):
            ask(prompt_of(0))
    with pytest.raises(EngineClosed):
        llm.call(lambda engine: None)


@pytest.fixture
def no_collector():
    """Memory must be free by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def memory_of(llm: LLM) -> dict[str, weakref.ref]:
    decoder, (cache, *_) = llm.loaded.decoder, llm.engine.runner.cache.layers
    parts = {"keys": cache.k, "values": cache.v, "weights": decoder.final_norm}
    parts |= {"decoder": decoder, "engine": llm.engine}
    return {name: weakref.ref(part) for name, part in parts.items()}


def still_there(memory: dict[str, weakref.ref]) -> list[str]:
    return [name for name, of in memory.items() if of() is not None]


def test_a_closed_llm_holds_no_memory(folder: Path, no_collector) -> None:
    llm = make(folder)
    llm.generate([prompt_of(i) for i in range(4)], [params_of(i) for i in range(4)])
    memory = memory_of(llm)
    assert len(still_there(memory)) == 5
    llm.close()
    assert still_there(memory) == []
    for read in (lambda: llm.engine, lambda: llm.loaded, lambda: llm.expected_gain):
        with pytest.raises(EngineClosed):
            read()
    assert (llm.device_name, llm.activations, llm.kv_dtype, llm.config.num_layers) == ("cpu", "float32", "auto", 3)
    assert llm.tokenizer.decode([5])


def test_leaving_with_frees_the_memory_of_a_model_whose_requests_are_open(folder: Path, no_collector) -> None:
    with make(folder) as llm:
        stream, memory = llm.stream(prompt_of(0), endless()), memory_of(llm)
        next(stream)
    assert still_there(memory) == []
    stream.close()


def test_a_closed_async_llm_holds_no_memory(folder: Path, no_collector) -> None:
    async def main() -> None:
        async with AsyncLLM(make(folder)) as llm:
            await llm.generate(prompt_of(0), params_of(0))
            memory = memory_of(llm.llm)
        assert still_there(memory) == []
        with pytest.raises(EngineClosed):
            await llm.generate(prompt_of(0), params_of(0))

    asyncio.run(main())


def test_a_model_closed_by_its_own_thread_holds_no_memory(folder: Path, no_collector) -> None:
    llm = make(folder)
    memory, thread = memory_of(llm), llm.call(lambda engine: threading.current_thread())
    llm.call(lambda engine: llm.close())
    thread.join()
    assert still_there(memory) == []


def test_a_dropped_llm_takes_its_thread_along(folder: Path) -> None:
    llm = make(folder)
    llm.generate(prompt_of(0), params_of(0))
    thread, gone = llm.call(lambda engine: threading.current_thread()), weakref.ref(llm.engine)
    assert thread.is_alive()
    del llm
    gc.collect()
    assert not thread.is_alive()
    assert gone() is None


def test_a_forked_process_is_refused_instead_of_waiting_for_ever(folder: Path) -> None:
    program = f"""
import os
from paceline import LLM, PacelineError
llm = LLM({str(folder)!r}, device="cpu", threads=1)
if not (child := os.fork()):
    try:
        llm.generate([1, 2, 3])
    except PacelineError as refused:
        os.write(1, str(refused).encode())
    os._exit(0)
os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60)
    assert "another process" in done.stdout, done.stderr


def test_a_process_ends_with_requests_open(folder: Path) -> None:
    program = f"""
from paceline import LLM, SamplingParams
llm = LLM({str(folder)!r}, device="cpu", threads=1)
stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
next(stream)
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
