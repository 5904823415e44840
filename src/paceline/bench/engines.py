"""Engines under comparison: they share the loaded weights; each has drafters, a policy and a cache of its own.

An engine is built as by `LLM(method=...)`, so the figures are those that a user gets; only the policy's stored tables
are left out, since they would not be equal for all. Every concurrency gets new engines: the prompts are repeated, and a
suffix store must not have seen their answers.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.bench.draft_models import MEMORY_SHARE, WITH_MODEL, DraftModel, load_draft_model
from paceline.bench.grid import Contender
from paceline.bench.measurement import Run, TimedAnswer
from paceline.bench.prompts import Prompt
from paceline.bench.results import machine_facts
from paceline.build import load, make_drafters, make_engine, make_policy
from paceline.config import AUTO, MAX_K, NONE, EngineConfig, SpeculationConfig
from paceline.core.verdict import TokenKind
from paceline.drafters import Drafter
from paceline.drafters.method_names import drafter_specs
from paceline.drafters.methods import METHODS
from paceline.engine.engine import Engine
from paceline.errors import InvalidParameter, InvalidPrompt
from paceline.models.kv_cache import KVCache, KVSpec
from paceline.models.load.hub import PullProgress, resolve
from paceline.platform import cpu as machine
from paceline.sampling_params import SamplingParams

TURN_SLACK = 16  # tokens a chat template and a second tokenisation may add to an answer of an earlier turn


class TimedEngine:
    """An engine that records when each token was committed."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine, self._clock = engine, clock
        on_cpu = engine.model.device.type == "cpu"
        # With an asynchronous device, or a drafter with a model, the time outside the models cannot be measured.
        self._knows_outside = on_cpu and not any(drafter.kv_layers for drafter in engine.drafters.drafters)

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Run:
        engine = self._engine
        if any(each.structured_outputs is not None for each in params):
            _ = engine.admission.grammars  # made once, and not for these prompts
        inside, moment = engine.stats.model_s, 0.0
        started = self._clock()
        sequences = [
            engine.add_request(str(index), prompt, each, wait_group="group")[0]  # the group is waited for as a whole
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]
        commits: dict[str, list[tuple[float, int]]] = {sequence.key: [] for sequence in sequences}
        kinds: dict[str, list[bool]] = {sequence.key: [] for sequence in sequences}
        while engine.has_work:
            result = engine.step()
            moment = self._clock() - started
            for at, (sequence, tokens) in enumerate(zip(result.sequences, result.tokens, strict=True)):
                commits[sequence.key].append((moment, len(tokens)))
                kinds[sequence.key] += [kind == TokenKind.DRAFTED for kind in result.kinds_of(at)]
        answers = tuple(
            TimedAnswer(
                tuple(sequence.output_tokens),
                tuple(commits[sequence.key]),
                sequence.stats,
                prompt_tokens=sequence.num_prompt,
                drafted=tuple(kinds[sequence.key]),
            )
            for sequence in sequences
        )
        assert all(len(answer.tokens) == sum(count for _, count in answer.commits) for answer in answers)
        outside = moment - (engine.stats.model_s - inside)  # learning and planning included
        return Run(answers, outside if self._knows_outside else None)


class Engines:
    """A model, loaded once, and the contenders that share its weights."""

    def __init__(
        self,
        model: str,
        contenders: Sequence[Contender],
        *,
        draft_model: Sequence[str] = (),
        drafter: Sequence[str] = (),
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        raw: bool = False,
        progress: PullProgress | None = None,
    ) -> None:
        self.contenders, self._raw = list(contenders), raw
        target = load(model, dtype=dtype, device=device, threads=threads, progress=progress)
        self.path, self.loaded = target.path, target.loaded
        self._drafter = tuple(drafter)
        self._draft_models = [
            load_draft_model(name, resolve(name, progress), self.loaded) for name in draft_model if name != NONE
        ]
        self._longest = 0  # tokens of the longest request, its answer included

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self.loaded.generation_defaults

    def encode(self, prompt: Prompt, answers: Sequence[str]) -> list[int]:
        """Return the tokens of the conversation after the turns that have answers."""
        tokenizer = self.loaded.tokenizer
        return (
            tokenizer.encode(prompt.turns[0]) if self._raw else tokenizer.apply_chat_template(prompt.messages(answers))
        )

    def decode(self, tokens: Sequence[int]) -> str:
        return self.loaded.tokenizer.decode(tokens)

    def check(self, prompts: Sequence[Prompt], max_tokens: int) -> None:
        """Refuse, before the run, a prompt that would not fit with its whole answer."""
        for prompt in prompts:
            earlier = len(prompt.turns) - 1
            if self._raw and (earlier or prompt.before):
                raise InvalidPrompt(f"{prompt.origin}: a conversation needs the chat template, which --raw leaves out")
            tokens = len(self.encode(prompt, ["."] * earlier)) + earlier * (max_tokens + TURN_SLACK)
            if tokens + max_tokens > self.loaded.config.max_positions:
                raise InvalidPrompt(
                    f"{prompt.origin}: {tokens} tokens and {max_tokens} of answer are more than the model's context "
                    f"of {self.loaded.config.max_positions}; shorten the prompt or lower --max-tokens"
                )
            self._longest = max(self._longest, tokens + max_tokens)

    def open(self, concurrency: int) -> dict[Contender, TimedEngine]:
        """Make new engines with cache for `concurrency` of the longest requests."""
        gc.collect()  # the engines of the concurrency before
        config = self._config(concurrency)
        return {contender: TimedEngine(self._engine(contender, config)) for contender in self.contenders}

    def _config(self, concurrency: int) -> EngineConfig:
        config, decoder = room_for(concurrency, self._longest), self.loaded.decoder
        layers = [self._kv_layers(contender) for contender in self.contenders]
        each = [KVCache.bytes_per_block(specs, config.block_size, decoder.cache_dtype) for specs in layers]
        needed = (config.num_blocks or 0) * sum(each)
        free = _free_bytes(decoder.device)
        if free and needed > MEMORY_SHARE * free:
            raise InvalidParameter(
                "concurrency",
                f"{concurrency} requests of up to {self._longest} tokens on {len(self.contenders)} engines need "
                f"{needed / 1e9:.1f} GB of cache and {free / 1e9:.1f} GB are free; "
                "lower the concurrency or --max-tokens, or compare fewer methods",
            )
        return config

    def _kv_layers(self, contender: Contender) -> list[KVSpec]:
        """Return the cached layers of the target and of the draft models that the contender may use."""
        decoders = [self.loaded.decoder, *(model.loaded.decoder for model in self.draft_models_for(contender))]
        return [spec for decoder in decoders for spec in decoder.kv_specs]

    def draft_models_for(self, contender: Contender) -> list[DraftModel]:
        return self._draft_models if contender.method in (*WITH_MODEL, AUTO) else []

    def _engine(self, contender: Contender, config: EngineConfig) -> Engine:
        drafters = self.drafters(contender)
        wanted = SpeculationConfig(method=contender.method, k=contender.k)
        return make_engine(self.loaded, config, drafters, make_policy(self.loaded, wanted))

    def drafters(self, contender: Contender) -> list[Drafter]:
        """Make the drafters that LLM would make: draft models and trained drafters only if the method uses them."""
        method, models = contender.method, {model.name: model for model in self.draft_models_for(contender)}
        uses = method == AUTO or (method in METHODS and "drafter" in METHODS[method].needs)
        wanted = SpeculationConfig(
            method=method, k=contender.k, draft_model=tuple(models), drafter=self._drafter if uses else ()
        )
        shared: dict[str, Drafter] = {}
        for each in drafter_specs(wanted):
            if isinstance(each.source, str):
                shared[each.name] = models[each.source].drafter(self.loaded.config)
                shared[each.name].name = each.name
        return make_drafters(self.loaded, wanted, shared)

    def where(self) -> dict[str, Any]:
        """Return the machine and the settings that the figures depend on."""
        loaded, device = self.loaded, self.loaded.decoder.device
        return {
            **machine_facts(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
            "dtype": loaded.kind.label,
            "kernels": loaded.decoder.kernels.name,
            "activations": loaded.decoder.kernels.activations,
            "kv_dtype": loaded.kv_dtype,
        }


def room_for(sequences: int, length: int, *, prefix_caching: bool = True) -> EngineConfig:
    """Return the settings of an engine with cache for `sequences` of `length` tokens."""
    usual = EngineConfig()
    most = max(usual.max_num_seqs, sequences)
    return EngineConfig(
        num_blocks=sequences * -(-(length + MAX_K + 1) // usual.block_size) + 2,
        max_num_seqs=most,
        max_num_batched_tokens=max(usual.max_num_batched_tokens, most),
        prefix_caching=prefix_caching,
    )


def weights_facts(path: Path) -> dict[str, Any]:
    """Return size and hash of a model's weights; those of a folder are all its files, by name."""
    files, digest = sorted(path.glob("*.safetensors")) if path.is_dir() else [path], hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(1 << 22):
                digest.update(block)
    return {"weight_bytes": sum(file.stat().st_size for file in files), "weights_sha256": digest.hexdigest()}


def _free_bytes(device: torch.device) -> int:
    return machine.memory().available if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0])
