"""The page to open first: one step of continuous batching, plain or speculative.

There are no phases: a sequence knows how many of its tokens are computed, and a step gives it some more. Plain
decoding is the empty draft, so the baseline and the fast path are the same code, and comparing them is honest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from paceline.config import EngineConfig
from paceline.drafters import NONE, Drafter
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.batch import Batch, StepOutput
from paceline.engine.block_manager import BlockManager
from paceline.engine.commit import Collected, Committer
from paceline.engine.drafting import DrafterSet
from paceline.engine.model_runner import Flight, ModelRunner
from paceline.engine.policy import AUTO, Policy, StepReport, any_sampled, wish
from paceline.engine.sampler import Sampler
from paceline.engine.scheduler import Scheduler
from paceline.engine.stats import EngineStats
from paceline.engine.text import OutputText, TextDecoder
from paceline.errors import InvalidParameter, InvalidPrompt
from paceline.garbage import expect_objects, no_collection
from paceline.models.decoder import Model
from paceline.models.kv_cache import KVCache
from paceline.models.memory import cache_bytes, says_what_to_lower
from paceline.models.threads import torch_threads
from paceline.sampling_params import SamplingParams
from paceline.sequence import Sequence

AWAY = 0.1  # of a step's time that the caller may take: more, and it is not known how long the device took
OBJECTS_A_ROW = 8  # that a step makes and the next one drops, about


class EngineTokenizer(Protocol):
    """What the engine asks of a tokenizer: stop strings need text, bad words need tokens."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...
    def incremental_decoder(self, skip_special_tokens: bool) -> TextDecoder: ...


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
        eos = frozenset(model.config.eos_token_ids)
        self.drafters = DrafterSet(drafters, model.config.vocab_size)
        specs = (*model.kv_specs, *self.drafters.kv_specs)
        per_block = KVCache.bytes_per_block(specs, config.block_size, model.cache_dtype)
        kv_bytes = config.kv_cache_bytes or cache_bytes(model.device, config.gpu_memory_fraction)
        num_blocks = config.num_blocks or kv_bytes // per_block
        self.max_model_len = _context(config, model.config.max_positions, num_blocks * config.block_size)
        with says_what_to_lower():
            cache = KVCache(
                specs, num_blocks=num_blocks, block_size=config.block_size, dtype=model.cache_dtype, device=model.device
            )
        self.drafters.bind(cache, len(model.kv_specs))
        self.policy: Policy = policy or AdaptivePolicy(drafters)
        self.blocks = BlockManager(num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self.scheduler = Scheduler(
            config,
            self.blocks,
            self.policy,
            recompute_last=bool(self.drafters.taps),
            on_admit=lambda sequence: self.drafters.admit(sequence, self.blocks),
            on_release=self.drafters.release,
        )
        self.runner = ModelRunner(model, cache, self.drafters, Sampler(model.config.vocab_size, eos, model.device))
        with says_what_to_lower():
            self.runner.prepare(config.max_num_seqs, config.max_num_batched_tokens)
        self.committer = Committer(self.scheduler, self.drafters, eos, self._make_text)
        self.stats = EngineStats()
        expect_objects(OBJECTS_A_ROW * config.max_num_seqs)
        # A step may be launched before the one before it is read, whose taps it would overwrite.
        self.runs_ahead = model.device.type != "cpu" and not self.drafters.taps
        self._ahead: tuple[Batch, Flight] | None = None
        self._problem: Exception | None = None  # what came of launching a step early
        self._read_at = self._returned_at = 0.0  # when the last step had been read, and when it was over
        self._unfinished = False  # the last step was interrupted

    def step(self) -> list[StepOutput]:
        # A step leaves nothing behind that refers to itself; looking for it amid hundreds of rows takes milliseconds.
        with torch_threads(self.model.torch_threads), says_what_to_lower(), no_collection():
            if self._unfinished:  # a step was interrupted: who had said the last word leaves now
                for sequence in [one for one in self.scheduler.running if one.finish_reason is not None]:
                    self._forget(sequence)
                    self.scheduler.finish(sequence, sequence.finish_reason or "stop", sequence.stop_reason)
                if self.runner.relay is not None:
                    self.runner.relay.forget_unsaid(self.scheduler.running)
            self._unfinished = True
            outputs = self._step()
            self._unfinished = False
            return outputs

    def _step(self) -> list[StepOutput]:
        started = time.perf_counter()
        under_way = self._under_way()
        batch, flight = under_way or self._launch()
        if flight is None:
            return []
        if under_way is not None:
            if flight.over and started - self._returned_at > AWAY * (started - self._read_at):
                flight.warm = False  # when it ended nobody knows: the caller was away
            else:
                started = self._read_at  # the device went on from there
        ahead = self._launch_ahead(batch, flight)
        if ahead is None and self.runs_ahead and batch.num_drafted and self.policy.drafts_on():
            self.runner.draft_ahead(flight, self.scheduler.drafting_on(batch, self.drafters.ahead))
        self.drafters.overlap()  # what may run while the device computes
        self.policy.meanwhile()
        self.committer.expect(flight)
        early = self.runs_ahead and ahead is None
        collected = self.committer.collect(flight)  # the one device-to-host copy; append
        outputs = [] if early else self.committer.tell(collected)  # text, stop, finish
        try:
            report = self._observe(batch, flight, collected.outputs, started)
        except BaseException:
            if early:
                self.committer.tell(collected)  # what was said stands
            raise
        if early:
            ahead, outputs = self._launch_early(collected)
        self._ahead = ahead  # not before: where this step is interrupted, what followed it is computed again
        self._account(batch, collected, report)
        self._returned_at = time.perf_counter()
        return outputs

    def _launch(self) -> tuple[Batch, Flight | None]:
        batch = self.scheduler.schedule()  # prefill chunks and decodes alike
        return batch, self.runner.launch(batch) if batch.rows else None  # draft, one target pass, verify

    def _launch_ahead(self, batch: Batch, flight: Flight) -> tuple[Batch, Flight] | None:
        """The step after this one, where nothing in it depends on tokens the host has not seen: the device goes on."""
        following = self.scheduler.ahead(batch) if self.runs_ahead else None
        return None if following is None else (following[0], self.runner.launch_after(flight, *following))

    def _launch_early(self, collected: Collected) -> tuple[tuple[Batch, Flight] | None, list[StepOutput]]:
        """The step after one whose tokens stand, before they are told: the device goes on meanwhile. Who turns out to
        have ended, by a stop string, is left out of its result."""
        batch = flight = None
        try:
            batch = self.scheduler.early(ends=collected.ends)
            if batch is not None and batch.rows:
                flight = self.runner.launch(batch)
                self.scheduler.keep(batch)
        except Exception as problem:  # what was said stands; whoever asks for more is told
            self._problem = problem
        finally:
            outputs = self.committer.tell(collected)
        for output in outputs:
            if output.finished:  # it may have learnt of the step already, but not how it ended
                self.policy.forget(output.sequence)
        if batch is None or flight is None:
            return None, outputs
        self.scheduler.let_go(batch)
        return (batch, flight), outputs

    def _under_way(self) -> tuple[Batch, Flight] | None:
        """The step launched ahead, unless all its sequences have ended meanwhile."""
        ahead, self._ahead = self._ahead, None
        problem, self._problem = self._problem, None
        if problem is not None and self.scheduler.running:  # else it is nobody's any more
            raise problem
        live = ahead is not None and any(not row.sequence.finished for row in ahead[0].rows)
        return ahead if live else None

    def _observe(self, batch: Batch, flight: Flight, outputs: list[StepOutput], started: float) -> StepReport:
        """A step was read: the policy may learn from it."""
        read_before, self._read_at = self._read_at, time.perf_counter()
        if batch.num_drafted:  # the device may have been drafting since the step before was read
            started = max(started - self.drafters.time_devices(), min(read_before, started))
        report = self._report(batch, flight, outputs, self._read_at - started)
        self.policy.observe(report)
        return report

    def _report(self, batch: Batch, flight: Flight, outputs: list[StepOutput], step_s: float) -> StepReport:
        rows = flight.layout.tokens.shape[0]
        took, retired = self.drafters.seconds if batch.num_drafted else {}, self.drafters.retired
        return StepReport(len(batch.rows), rows, step_s, took, outputs, retired, flight.warm, flight.stage is not None)

    def _account(self, batch: Batch, collected: Collected, report: StepReport) -> None:
        """Timings for the user: what the step took, and what it would have taken plainly."""
        outputs, step_s = report.outputs, report.step_s
        together = collected.stats
        committed = len(outputs) if together else sum([len(output.tokens) for output in outputs])
        self.stats.add(batch, committed=committed, model_s=collected.flight.model_s, step_s=step_s)
        if not batch.only_decodes:
            return
        sampled = batch.stage.company.sampled if batch.stage else any_sampled(output.sequence for output in outputs)
        plain_s = self.policy.plain_seconds(len(batch.rows), sampled)
        if not plain_s:
            return
        for stats in together or ():
            stats.spent_s += step_s
            stats.plain_s += plain_s
        for output in () if together else outputs:
            stats = output.sequence.stats
            stats.spent_s += step_s
            stats.plain_s += plain_s * len(output.tokens)

    def add_request(
        self, request_id: str, prompt: SequenceOf[int], params: SamplingParams, job: str | None = None
    ) -> list[Sequence]:
        """Queue n sequences for one prompt. `params` are resolved: nothing is left to the model's defaults.

        Requests of one `job` are waited for together; it changes when what is drafted, never what is said.
        """
        if any(sequence.request_id == request_id for sequence in self.scheduler.sequences()):
            raise InvalidParameter("request_id", f"{request_id!r} is already running; give every request its own")
        self._check_prompt(prompt)
        params.check_vocab(self.model.config.vocab_size)
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        bad_words = self._bad_words(params)
        sequences = [
            Sequence(request_id, prompt, params, index=index, max_len=limit, bad_words=bad_words, job=job)
            for index in range(params.n)
        ]
        self._check_speculation(sequences[0])
        for sequence in sequences:
            self.scheduler.add(sequence)
        return sequences

    def cancel(self, request_id: str) -> list[Sequence]:
        """Stop all answers to a request; their blocks are free when this returns."""
        cancelled = [sequence for sequence in self.scheduler.sequences() if sequence.request_id == request_id]
        for sequence in cancelled:
            self._forget(sequence)
            self.scheduler.finish(sequence, "abort")
        return cancelled

    def _forget(self, sequence: Sequence) -> None:
        """Before it leaves: where this is interrupted, whoever tries again still finds it."""
        self.policy.forget(sequence)
        self.committer.forget(sequence)

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
        if method not in (AUTO, *names):
            available = ", ".join((NONE, AUTO, *names))
            raise InvalidParameter("speculation", f"{method!r} is not available here; choose from {available}")

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
            raise InvalidPrompt(f"token id {bad} is outside the model's vocabulary of {vocab}")

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
        if self.tokenizer is None:
            return None
        params = sequence.params
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
