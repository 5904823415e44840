"""The page to open first: one step of continuous batching, plain or speculative, in one of two orders.

There are no phases: a sequence knows how many of its tokens are computed, and a step gives it some more. Plain
decoding is the empty draft, so the baseline and the fast path are the same code, and comparing them is honest.

The engine has one owner: no method may be called from two threads at once (`engine.loop` sees to that).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any

import torch

from paceline.config import EngineConfig
from paceline.core.sequence import Owner, Sequence
from paceline.drafters import Drafter
from paceline.engine.admission import Admission, EngineTokenizer, context_length
from paceline.engine.batch import EngineStats, StepResult
from paceline.engine.block_manager import NONE_RESERVED, BlockManager
from paceline.engine.commit import Committer
from paceline.engine.drafter_set import DrafterSet
from paceline.engine.in_flight import InFlightStep
from paceline.engine.policy import Policy, any_sampled
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.engine.runner import Runner
from paceline.engine.sampler import Sampler
from paceline.engine.scheduler import Scheduler
from paceline.engine.step_clock import StepClock
from paceline.errors import EngineDied, InvalidParameter, QueueFull
from paceline.models.decoder import Model
from paceline.models.kv_cache import KVCache
from paceline.platform.garbage import NoCollection, expect_objects
from paceline.platform.memory import cache_bytes, memory_advice, out_of_memory_advice
from paceline.platform.threads import torch_threads
from paceline.sampling_params import SamplingParams

log = logging.getLogger("paceline")
RESERVE, SMALL_REQUEST = 4, 16  # parts of `max_waiting`: the room kept for small requests, and the size of these
FULL_QUEUES = 16  # clients whose queues may be full at a time, which bounds memory
OBJECTS_A_ROW = 8  # objects, about; those of a row that a step makes and the next step drops


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
        self.model, self.config = model, config
        specs = (*model.kv_specs, *(spec for drafter in drafters for spec in drafter.kv_layers))
        per_block = KVCache.bytes_per_block(specs, config.block_size, model.cache_dtype)
        kv_bytes = config.kv_cache_bytes or cache_bytes(model.device, config.gpu_memory_fraction)
        num_blocks = config.num_blocks or kv_bytes // per_block
        self.max_model_len = context_length(config, model.config.max_positions, num_blocks * config.block_size)
        with out_of_memory_advice():
            cache = KVCache(
                specs, num_blocks=num_blocks, block_size=config.block_size, dtype=model.cache_dtype, device=model.device
            )
        self.blocks = BlockManager(num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self.drafters = DrafterSet(drafters, model.config.vocab_size, self.blocks, model.pass_bytes)
        self.drafters.bind(cache, len(model.kv_specs))
        self.policy: Policy = policy or AdaptivePolicy()
        self.clock = StepClock()
        sampler = Sampler(model.config.vocab_size, frozenset(model.config.eos_token_ids), model.device)
        listeners, context = (self.drafters, self.clock, sampler), self.max_model_len
        self.scheduler = Scheduler(
            config, self.blocks, self.policy, self.drafters, context=context, listeners=listeners
        )
        self.runner = Runner(model, cache, self.drafters, sampler)
        with out_of_memory_advice():
            self.runner.prepare(config.max_num_seqs, config.max_num_batched_tokens)
        self.admission = Admission(model.config, self.max_model_len, self.drafters.names, tokenizer)
        self.committer = Committer(self.scheduler, self.drafters, self.admission.output_text)
        self.stats = EngineStats()
        expect_objects(OBJECTS_A_ROW * config.max_num_seqs)
        self.runs_ahead = model.device.type != "cpu"  # a CPU computes in the call: there is no wait to hide
        self._at_work, self._no_collection = False, NoCollection()
        self._requests: dict[str, list[Sequence]] = {}
        self._in_flight: InFlightStep | None = None  # launched by the last call of `step`
        self._reserved = NONE_RESERVED  # slots that drafts begun behind the step under way write
        self._lost: tuple[list[Sequence], Exception | None] = [], None  # a failed pass's, until a step is published

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Set torch up for all steps inside: to do so for each takes as long as planning a small step."""
        with torch_threads(self.model.torch_threads), torch.inference_mode():
            self._at_work = True
            try:
                yield
            finally:
                self._at_work = False

    def step(self) -> StepResult:
        if not self._at_work:
            with self.at_work():
                return self.step()
        # A step leaves no reference cycles; searching for some among hundreds of rows takes milliseconds.
        with self._no_collection:
            self.clock.start()
            flight = self._take_in_flight() or self._launch()
            if flight is None:
                return self._with_failed(StepResult())
            ahead = self._launch_ahead(flight) if self.runs_ahead else None  # launch, then read
            self.policy.learn()  # behind the pass
            result = self._read(flight, ahead)  # the one wait
            if result is None:
                return self._with_failed(StepResult())
            if ahead is None and self.runs_ahead and self.scheduler.has_spare_blocks:
                ahead = self._launch(unpublished=True)  # read, then launch; on a CPU the next call of `step` launches
            self._in_flight = ahead
            # A stop string found now ends a row of the step ahead.
            self.committer.publish(flight, result, self._reserved if ahead is None else ahead.batch.reserved)
            self.stats.add(flight.batch, result.num_tokens, flight.model_s, self.clock.step_s)
            self.clock.finish()
            return self._with_failed(result)

    def _take_in_flight(self) -> InFlightStep | None:
        """Return the step that the last call launched, unless all its sequences have ended since."""
        flight, self._in_flight = self._in_flight, None
        if flight is None or all(sequence.finished for sequence in flight.batch.sequences):
            return None
        self.clock.start_behind(flight)
        return flight

    def _launch(self, *, unpublished: bool = False) -> InFlightStep | None:
        """Launch a step whose tokens are all known: decodes with their drafts, prompt chunks, newcomers."""
        batch = self.scheduler.schedule(unpublished=unpublished)
        if not len(batch):
            return None
        try:
            return self.runner.launch(batch, self.drafters.propose(batch, self.policy.min_node_probability))
        except Exception as problem:
            self._lost = batch.sequences, memory_advice(problem)
            return None

    def _launch_ahead(self, flight: InFlightStep) -> InFlightStep | None:
        """Launch the step behind one that is not read, or else the drafts for it. Tokens are taken from the unread
        verdict on the device."""
        self._reserved, batch = NONE_RESERVED, self.scheduler.schedule_ahead(flight.batch)
        if batch is None:
            if flight.batch.num_drafted and self.policy.may_repeat():
                rows, self._reserved = self.scheduler.reserve(flight.batch, self.drafters.begins)
                if rows:
                    self.drafters.begin_early(flight.batch, rows, flight.unread)
            return None
        try:
            return self.runner.launch(batch, self.drafters.propose(batch), flight)
        except Exception as problem:  # launched again once the flight is read, and then it fails its own requests
            log.warning("a pass could not be launched ahead: %r", problem)
            return None

    def _read(self, flight: InFlightStep, ahead: InFlightStep | None) -> StepResult | None:
        """Read a step and note its time; None where the device failed: then neither it nor the step ahead counts."""
        try:
            result = self.committer.read(flight)
        except Exception as problem:
            batches = [flight.batch] if ahead is None else [flight.batch, ahead.batch]
            self._lost = [sequence for batch in batches for sequence in batch.sequences], problem
            return None
        timing, plain_s = self.clock.read(flight, self.drafters), None
        if self.drafters.drafters:
            self.policy.observe(result, timing)
            if flight.batch.only_decodes:
                plain_s = self.policy.plain_seconds(len(flight.batch), any_sampled(result.sequences))
        else:
            plain_s = timing.step_s
        self.clock.share(flight.batch, result, timing.step_s, plain_s)
        return result

    def _with_failed(self, result: StepResult) -> StepResult:
        """Add the requests of a pass that failed to the result of a step, and forget all that ended in it."""
        (sequences, problem), self._lost = self._lost, ([], None)
        for sequence in dict.fromkeys(sequences):
            if not sequence.finished:
                self.committer.fail(sequence, f"{type(problem).__name__}: {problem}")
                result.add_failed(sequence)
        for index in result.ended:
            self._forget(result.sequences[index])
        if problem is not None:
            log.error("a pass failed and ends its requests: %r", problem)
            self._check_device(problem)
        return result

    def _check_device(self, problem: Exception) -> None:
        if self.model.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.model.device)
            except Exception as lost:
                raise EngineDied(f"the device is lost ({lost}); start again") from problem

    def add_request(
        self,
        request_id: str,
        prompt: SequenceOf[int],
        params: SamplingParams,
        wait_group: str | None = None,
        grammar: Any = None,
        owner: Owner = Owner(),  # noqa: B008  (immutable)
    ) -> list[Sequence]:
        """Queue n sequences for one prompt. `params` are resolved: nothing is left to the model's defaults.

        Requests of one `wait_group` are waited for together; that changes when rows draft, never their tokens.
        `grammar`: compiled by `grammars`, or the reason why it cannot be; None: compiled in this call.
        """
        if request_id in self._requests:
            raise InvalidParameter("request_id", f"{request_id!r} is already running; give every request its own")
        queue, most = self.scheduler.waiting, self.config.max_waiting
        waiting, own = queue.num_of(owner.client), queue.num_unfinished(owner.client, wait_group or request_id)
        # A queue that one large request has filled has room for small ones.
        room = most + most // RESERVE if own + params.n <= most // SMALL_REQUEST else most
        if waiting and waiting + params.n > room:
            raise QueueFull(f"{waiting} answers wait and max_waiting is {most}; try again later")
        if len(queue) + params.n > FULL_QUEUES * most:
            raise QueueFull(f"the queues of {FULL_QUEUES} clients are full; try again later")
        sequences = self.admission.sequences(request_id, prompt, params, wait_group, grammar, owner)
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
        """Close the drafters, which store what the next run can use. The parts of an engine do not refer to it, so its
        memory is free once its last reference is gone."""
        self._in_flight = None
        self.drafters.close()

    def _forget(self, sequence: Sequence) -> None:
        self.policy.forget(sequence)
        left = self._requests.get(sequence.request_id)
        if left is not None:
            left.remove(sequence)
            if not left:
                del self._requests[sequence.request_id]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work
