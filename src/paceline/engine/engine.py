"""The page to open first: one step of continuous batching, plain or speculative, in one of two orders.

There are no phases: a sequence knows how many of its tokens are computed, and a step gives it some more. Plain
decoding is the empty draft, so the baseline and the fast path are the same code, and comparing them is honest.

The engine has one owner: no method may be called from two threads at once (`engine.loop` sees to that).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from paceline.config import AUTO, NONE, EngineConfig
from paceline.drafters import Drafter
from paceline.drafters.methods import is_called
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.batch import Batch, EngineStats, StepOutputs
from paceline.engine.block_manager import BlockManager
from paceline.engine.commit import Committer
from paceline.engine.drafting import DrafterSet
from paceline.engine.flight import Flight
from paceline.engine.policy import Policy, StepReport, wish
from paceline.engine.runner import Runner
from paceline.engine.sampler import Sampler
from paceline.engine.scheduler import Scheduler
from paceline.engine.text import OutputText, TextDecoder
from paceline.errors import EngineDied, InvalidParameter, InvalidPrompt, PacelineError, QueueFull, shown
from paceline.garbage import NoCollection, expect_objects
from paceline.grammar import Grammars
from paceline.models.decoder import Model
from paceline.models.kv_cache import KVCache
from paceline.models.memory import cache_bytes, memory_advice, out_of_memory_advice
from paceline.models.threads import torch_threads
from paceline.sampling_params import SamplingParams
from paceline.sequence import Sequence, Status

log = logging.getLogger("paceline")
AWAY = 0.1  # share of a step's time between two calls of `step`: with more, the device's time is not known
OBJECTS_A_ROW = 8  # that a step makes and the next one drops, about


class EngineTokenizer(Protocol):
    """What the engine asks of a tokenizer: stop strings need text, bad words need tokens."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...
    def incremental_decoder(self, skip_special_tokens: bool) -> TextDecoder: ...
    def vocab(self) -> list[str]: ...
    def vocab_kind(self) -> str: ...


class Engine:
    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        tokenizer: EngineTokenizer | None = None,
        drafters: SequenceOf[Drafter] = (),
        policy: Policy | None = None,
    ) -> None:
        self.model, self.config, self.tokenizer = model, config, tokenizer
        self._eos = frozenset(model.config.eos_token_ids)
        specs = (*model.kv_specs, *(spec for drafter in drafters for spec in drafter.kv_layers))
        per_block = KVCache.bytes_per_block(specs, config.block_size, model.cache_dtype)
        kv_bytes = config.kv_cache_bytes or cache_bytes(model.device, config.gpu_memory_fraction)
        num_blocks = config.num_blocks or kv_bytes // per_block
        self.max_model_len = _context(config, model.config.max_positions, num_blocks * config.block_size)
        with out_of_memory_advice():
            cache = KVCache(
                specs, num_blocks=num_blocks, block_size=config.block_size, dtype=model.cache_dtype, device=model.device
            )
        self.blocks = BlockManager(num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self.drafters = DrafterSet(drafters, model.config.vocab_size, self.blocks)
        self.drafters.bind(cache, len(model.kv_specs))
        self.policy: Policy = policy or AdaptivePolicy(drafters)
        self.scheduler = Scheduler(
            config,
            self.blocks,
            self.policy,
            recompute_last=self.drafters.pairs,
            rooms=self.drafters.rooms,
            depths=self.drafters.depths,
            context=self.max_model_len,
            on_admit=self._admit,
            on_seated=lambda sequence: self.runner.sampler.admit(sequence),
            on_release=self._release,
        )
        self.runner = Runner(model, cache, self.drafters, Sampler(model.config.vocab_size, self._eos, model.device))
        with out_of_memory_advice():
            self.runner.prepare(config.max_num_seqs, config.max_num_batched_tokens)
        self.committer = Committer(self.scheduler, self.drafters, self._make_text)
        self.stats = EngineStats()
        expect_objects(OBJECTS_A_ROW * config.max_num_seqs)
        self.runs_ahead = model.device.type != "cpu"  # a CPU computes when it is asked: there is nothing to hide
        self._at_work, self._no_collection = False, NoCollection()
        self._requests: dict[str, list[Sequence]] = {}
        self._flight: Flight | None = None  # launched by the step before
        self._lost: tuple[list[Sequence], Exception] | None = None  # a pass that failed, once its step is published
        self._spent_s = self._plain_s = 0.0  # in steps that only decoded, and what they would have taken plainly
        self._read_at = self._returned_at = 0.0  # when the last step had been read, and when it was over

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Torch as steps need it, for all that follow: entering anew for each takes as long as planning a small one."""
        with torch_threads(self.model.torch_threads), torch.inference_mode():
            self._at_work = True
            try:
                yield
            finally:
                self._at_work = False

    def step(self) -> StepOutputs:
        if not self._at_work:
            with self.at_work():
                return self.step()
        # A step leaves nothing behind that refers to itself; looking for it amid hundreds of rows takes milliseconds.
        with self._no_collection:
            started = time.perf_counter()
            following, self._flight = self._flight, None
            flight = following if following is not None and self._is_live(following) else self._launch()
            if flight is None:
                return self._with_failed(StepOutputs())
            if flight is following:
                started = self._since(flight, started)
            following = None
            if self.runs_ahead:  # LAUNCH, THEN READ: the whole next step, or the drafts for it
                following = self._launch_behind(flight)
                if following is None and flight.batch.num_drafted and self.policy.drafts_on():
                    self.drafters.begin(
                        flight.batch, self.scheduler.reserve(flight.batch, self.drafters.begins), flight.unread
                    )
            self.policy.meanwhile()
            try:
                landed = self.committer.read(flight)  # the one wait; sequences ended by a token or by length are known
            except Exception as problem:  # the device failed: neither flight has a result
                lost = flight.sequences if following is None else [*flight.sequences, *following.sequences]
                self._lost = lost, problem
                return self._with_failed(StepOutputs())
            step_s = self._observe(flight, landed.outputs, started)
            if following is None and self.runs_ahead and self.scheduler.roomy:
                following = self._launch()  # READ, THEN LAUNCH; on a CPU the next call of step() launches
                if following is not None:
                    self.scheduler.hold(following.batch)
            self._flight = following
            outputs = self.committer.publish(landed)  # a stop string found here ends a row of the step under way
            if following is not None:
                self.scheduler.let_go(following.batch)
            self.stats.add(flight.batch, committed=outputs.num_tokens, model_s=flight.model_s, step_s=step_s)
            self.stats.captured_late = self.runner.captured_late
            self._returned_at = time.perf_counter()
            return self._with_failed(outputs)

    def _launch(self) -> Flight | None:
        """A step whose tokens are all known: decodes with their drafts, prompt chunks, newcomers."""
        batch = self.scheduler.schedule()
        if not len(batch):
            return None
        try:
            return self.runner.launch(batch, self.drafters.propose(batch, self.policy.least))
        except Exception as problem:
            self._lost = batch.sequences, memory_advice(problem)
            return None

    def _launch_behind(self, flight: Flight) -> Flight | None:
        """The step after a plain one that is not read: its tokens are taken from the verdict where that lies."""
        batch = self.scheduler.schedule_behind(flight.batch)
        try:
            return None if batch is None else self.runner.launch(batch, self.drafters.propose(batch), flight)
        except Exception as problem:  # launched again once the flight is read, and then it fails its own requests
            log.warning("a pass could not be launched ahead: %r", problem)
            return None

    def _with_failed(self, outputs: StepOutputs) -> StepOutputs:
        """The outputs of a step, and the requests of a pass that failed; what ended is forgotten."""
        lost, self._lost = self._lost, None
        sequences, problem = lost if lost is not None else ((), None)
        for sequence in dict.fromkeys(sequences):
            if not sequence.finished:
                self.committer.fail(sequence, f"{type(problem).__name__}: {problem}")
                outputs.add_failed(sequence)
        for index in outputs.ended:
            self._forget(outputs.sequences[index])
        if problem is not None:
            log.error("a pass failed and ends its requests: %r", problem)
            self._check_device(problem)
        return outputs

    def _check_device(self, problem: Exception) -> None:
        if self.model.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.model.device)
            except Exception as lost:
                raise EngineDied(f"the device is lost ({lost}); start again") from problem

    @staticmethod
    def _is_live(flight: Flight) -> bool:
        """Some of its sequences are still there."""
        return any(not sequence.finished for sequence in flight.sequences)

    def _since(self, flight: Flight, now: float) -> float:
        """When the device began a step that was launched by the step before."""
        if flight.over and now - self._returned_at > AWAY * (now - self._read_at):
            flight.warm = False  # when it ended is not known: the caller was away
            return now
        return self._read_at

    def _observe(self, flight: Flight, outputs: StepOutputs, started: float) -> float:
        """A step was read: the policy may learn from it. Returns its seconds."""
        batch = flight.batch
        read_before, self._read_at = self._read_at, time.perf_counter()
        if batch.num_drafted:  # the device may have been drafting since the step before was read
            started = max(started - self.drafters.time_devices(), min(read_before, started))
        report = StepReport(
            len(batch),
            flight.layout.tokens.shape[0],
            self._read_at - started,
            self.drafters.seconds if batch.num_drafted else {},
            outputs,
            self.drafters.retired,
            flight.warm,
            flight.ahead,
        )
        self.policy.observe(report)
        self._account(batch, outputs, report.step_s)
        return report.step_s

    def _account(self, batch: Batch, outputs: StepOutputs, step_s: float) -> None:
        """Timings for the user: what steps that only decode took, and would have taken plainly. A sequence is in every
        step from its admission to its end, so its share is a difference of these sums; drafted tokens are added."""
        plain_s = None
        if batch.only_decodes and not self.drafters.drafters:
            plain_s = step_s
        elif batch.only_decodes:
            plain_s = self.policy.plain_seconds(len(batch), any(sequence.sampled for sequence in outputs.sequences))
        if plain_s:
            self._spent_s += step_s
            self._plain_s += plain_s
            for at in outputs.drafts:
                outputs.sequences[at].stats.plain_s += plain_s * (len(outputs.tokens[at]) - 1)

    def _admit(self, sequence: Sequence) -> None:
        self.drafters.admit(sequence)
        sequence.stats.spent_s -= self._spent_s
        sequence.stats.plain_s -= self._plain_s

    def _release(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            sequence.stats.spent_s += self._spent_s
            sequence.stats.plain_s += self._plain_s
        self.drafters.release(sequence)

    def add_request(
        self,
        request_id: str,
        prompt: SequenceOf[int],
        params: SamplingParams,
        job: str | None = None,
        grammar: Any = None,
    ) -> list[Sequence]:
        """Queue n sequences for one prompt. `params` are resolved: nothing is left to the model's defaults.

        Requests of one `job` are waited for together; that changes when rows draft, never their tokens.
        `grammar`: compiled by `grammars`, or the reason why it cannot be; None: compiled here.
        """
        if request_id in self._requests:
            raise InvalidParameter("request_id", f"{request_id!r} is already running; give every request its own")
        waiting = len(self.scheduler.waiting)
        if waiting and waiting + params.n > self.config.max_waiting:
            raise QueueFull(f"{waiting} requests wait and max_waiting is {self.config.max_waiting}; try again later")
        self._check_prompt(prompt)
        params.check_vocab(self.model.config.vocab_size)
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        bad_words = self._bad_words(params)
        sequences = [
            Sequence(
                request_id, prompt, params, index=index, max_len=limit, bad_words=bad_words, eos=self._eos, job=job
            )
            for index in range(params.n)
        ]
        self._check_speculation(sequences[0])
        if params.structured_outputs is not None:
            if isinstance(grammar, PacelineError):
                raise grammar
            if grammar is None:
                grammar = self.grammars.compile(params.structured_outputs)
            for sequence in sequences:
                sequence.matcher = self.grammars.matcher(grammar)
        self._requests[request_id] = list(sequences)
        for sequence in sequences:
            self.scheduler.add(sequence)
            if params.stop or params.logprobs is not None or sequence.matcher is not None:
                self.committer.watch(sequence)
        return sequences

    def cancel(self, request_id: str) -> list[Sequence]:
        """Stop all answers to a request; their blocks are free when this returns."""
        cancelled = self._requests.pop(request_id, [])
        for sequence in cancelled:
            self._forget(sequence)
            self.committer.forget(sequence)
            self.scheduler.finish(sequence, "abort")
        return cancelled

    def close(self) -> None:
        """Let go of weights, cache and drafters. Parts of an engine refer to each other and to it, so that only the
        garbage collector would free them, at some later time. Called again, it does nothing."""
        if not hasattr(self, "drafters"):
            return
        for drafter in self.drafters.drafters:
            drafter.close()
        self._flight = None
        del self.model, self.drafters, self.policy, self.scheduler, self.runner, self.committer

    def _forget(self, sequence: Sequence) -> None:
        self.policy.forget(sequence)
        left = self._requests.get(sequence.request_id)
        if left is not None:
            left.remove(sequence)
            if not left:
                del self._requests[sequence.request_id]

    @functools.cached_property
    def grammars(self) -> Grammars:
        """The only part that other threads may use: compiled beforehand, a grammar does not hold up a step."""
        if self.tokenizer is None:
            raise InvalidParameter("structured_outputs", "needs a tokenizer, and this engine was made without one")
        return Grammars(self.tokenizer, self.model.config.vocab_size, sorted(self._eos))

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def _check_speculation(self, sequence: Sequence) -> None:
        """What a request asks for must exist here and make sense; what the engine was made with, it has checked."""
        names = [drafter.name for drafter in self.drafters.drafters]
        own = sequence.params.speculation
        method, k = wish(sequence, names[0] if names else NONE, None)
        if own is None or (method == NONE and k is None):
            return
        if not names:
            raise InvalidParameter("speculation", "this engine was made with method none; make it with method auto")
        if method == NONE:
            raise InvalidParameter("speculation", "method none drafts nothing; leave k out or choose a method")
        if method != AUTO and not any(is_called(name, method) for name in names):
            available = ", ".join((NONE, AUTO, *names))
            raise InvalidParameter("speculation", f"{shown(method)} is not available here; choose from {available}")

    def _check_prompt(self, prompt: SequenceOf[int]) -> None:
        if not prompt:
            raise InvalidPrompt("the prompt is empty; give at least one token of text")
        if len(prompt) >= self.max_model_len:
            raise InvalidPrompt(
                f"the prompt has {len(prompt)} tokens and the context holds {self.max_model_len}, the answer included; "
                "shorten the prompt, or raise max_model_len or kv_cache_bytes if the model allows more"
            )
        vocab = self.model.config.vocab_size
        bad = next((token for token in prompt if not 0 <= token < vocab), None)
        if bad is not None:
            raise InvalidPrompt(f"token id {shown(bad)} is outside the model's vocabulary of {vocab}")

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word as it is spelt at the start of a text and after a space: the tokens differ."""
        if not params.bad_words:
            return []
        if self.tokenizer is None:
            raise InvalidParameter("bad_words", "needs a tokenizer, and this engine was made without one")
        spelt = [form for word in params.bad_words for form in (word, " " + word.lstrip())]
        words = [tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in spelt]
        return [list(word) for word in dict.fromkeys(words) if word]

    def _make_text(self, sequence: Sequence) -> OutputText | None:
        """Text is decoded here where a stop string may end it; else by the reader of the tokens."""
        params = sequence.params
        if self.tokenizer is None or not params.stop:
            return None
        decoder = self.tokenizer.incremental_decoder(params.skip_special_tokens)
        return OutputText(decoder, params.stops, include_stop=params.include_stop_str_in_output)


def _context(config: EngineConfig, model_len: int, capacity: int) -> int:
    """Tokens a sequence may have: what the model was made for, what was asked for, and what the cache can hold."""
    wanted = config.max_model_len
    if wanted is not None and wanted > model_len:
        raise InvalidParameter("max_model_len", f"the model's context is {model_len} tokens, got {wanted}")
    if wanted is not None and wanted > capacity:
        raise InvalidParameter(
            "max_model_len", f"the cache holds {capacity} tokens, got {wanted}; raise kv_cache_bytes or lower it"
        )
    if capacity < 2 * config.block_size:
        raise InvalidParameter("kv_cache_bytes", f"holds only {capacity} tokens; give it room for at least two blocks")
    return min(wanted or model_len, capacity)
