"""The assembly of an engine from a model's name and settings; LLM, bench, advise, prove and the server use it.

`load` reads weights, which may serve several engines; `make_drafters`, `make_policy` and `make_engine` give each engine
drafters, a policy and a cache of its own. `build` is the three in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config import AUTO, NONE, EngineConfig, SpeculationConfig
from paceline.drafters.base import Drafter, DrafterContext
from paceline.drafters.method_names import DrafterSpec, drafter_specs
from paceline.drafters.methods import DRAFTER, METHODS, accepts_folder, needs_one
from paceline.drafters.mtp.layouts import is_head_tensor
from paceline.drafters.packaged import packaged_for
from paceline.drafters.universal import is_lookup, universal_drafters
from paceline.engine.engine import Engine
from paceline.engine.policy import Policy
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.engine.policy.memory import PolicyMemory
from paceline.engine.policy.priors import prior_of
from paceline.errors import InvalidParameter
from paceline.models.load.hub import PullProgress, cache_home_if_any, resolve
from paceline.models.load.open_model import LoadedModel, load_model
from paceline.platform import cpu as machine


@dataclass(frozen=True)
class LoadedTarget:
    """A model's weights in memory."""

    path: Path
    loaded: LoadedModel
    note: str | None  # to the user: a fault of the machine that was worked around, parts of the model that are unused


@dataclass(frozen=True)
class EngineBundle:
    engine: Engine
    policy: AdaptivePolicy
    memory: PolicyMemory | None  # None: the policy neither starts from earlier runs nor is kept

    def close(self) -> None:
        """Store the state of policy and drafters for the next run, and free memory."""
        try:
            if self.memory is not None:
                self.memory.save(self.policy)
        finally:
            self.engine.close()


def load(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    tokenizer: str | None = None,
    activations: str = "float32",
    kv_dtype: str = "auto",
    progress: PullProgress | None = None,
) -> LoadedTarget:
    """Read a model's weights. `tokenizer`: a model whose tokenizer is used in place of the model's own."""
    note = machine.guard_amx(cache_home_if_any())
    path = resolve(model, progress)
    loaded = load_model(
        path,
        dtype=dtype,
        device=device,
        threads=threads,
        activations=activations,
        kv_dtype=kv_dtype,
        declared=is_head_tensor,
        tokenizer=None if tokenizer is None else resolve(tokenizer, progress),
    )
    return LoadedTarget(path, loaded, "; ".join(filter(None, (note, *loaded.notes))) or None)


def build(
    target: LoadedTarget, config: EngineConfig, speculation: SpeculationConfig | None = None, *, remember: bool = True
) -> EngineBundle:
    """Make an engine. `remember`: the policy starts from the state that earlier runs of the model stored."""
    wanted = speculation or SpeculationConfig()
    drafters = make_drafters(target.loaded, wanted)
    if wanted.method == AUTO and not wanted.draft_model and all(map(is_lookup, drafters)):
        drafters += universal_drafters(drafter_context(target.loaded, wanted), target.loaded.decoder.pass_bytes)
    policy = make_policy(target.loaded, wanted)
    versions = [f"{drafter.name} {drafter.version}" for drafter in drafters]
    memory = PolicyMemory(target.path, target.loaded, versions) if remember else None
    if memory is not None:
        memory.load(policy)
    return EngineBundle(make_engine(target.loaded, config, drafters, policy), policy, memory)


def make_drafters(
    loaded: LoadedModel, speculation: SpeculationConfig, shared: Mapping[str, Drafter] | None = None
) -> list[Drafter]:
    """Make a drafter of every method whose needs are met: a request can choose its own. `shared` drafters, by method,
    are used unchanged, for engines that share the weights of a draft model."""
    ready = dict(shared or {})
    context = drafter_context(loaded, speculation)
    folders = trained_folders(loaded, speculation)
    wanted = drafter_specs(speculation, folders, native_heads=bool(loaded.extra))
    return [*(_make(each, context) for each in wanted if each.name not in ready), *ready.values()]


def _make(wanted: DrafterSpec, context: DrafterContext) -> Drafter:
    """Make one drafter; its context names its own model or folder alone."""
    if isinstance(wanted.source, Path):
        context = replace(context, checkpoint=wanted.source)
    elif wanted.source is not None:
        context = replace(context, speculation=replace(context.speculation, draft_model=(wanted.source,)))
    drafter = wanted.method.make(context)
    drafter.name = wanted.name
    return drafter


def drafter_context(loaded: LoadedModel, speculation: SpeculationConfig) -> DrafterContext:
    """Return what drafters are made from, with the first trained drafter's folder, if there is one."""
    decoder, tokenizer = loaded.decoder, loaded.tokenizer
    on_cpu = decoder.device.type == "cpu"
    return DrafterContext(
        config=loaded.config,
        device=decoder.device,
        speculation=speculation,
        dtype="auto" if on_cpu else str(decoder.dtypes.numbers).removeprefix("torch."),
        kv_dtype=loaded.kv_dtype,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        token_texts=tokenizer.token_text,
        tokenizer=tokenizer,
        embedding=decoder.embedding,
        head=decoder.head,
        kernels=decoder.kernels,
        extra=loaded.extra,
        checkpoint=next(iter(trained_folders(loaded, speculation)), None),
        target=decoder,
    )


def trained_folders(loaded: LoadedModel, speculation: SpeculationConfig) -> list[Path]:
    """Return the folders of trained drafters: those named, or a packaged one where it may be used."""
    method = speculation.method
    needed = method in METHODS and DRAFTER in METHODS[method].needs
    if not speculation.drafter and (method == AUTO or needed):
        packaged = packaged_for(loaded.config, loaded.decoder.embedding)
        if packaged is not None and accepts_folder(method, packaged):
            return [packaged]
        if needed and not (METHODS[method].native and loaded.extra):
            raise InvalidParameter(
                DRAFTER, f"{needs_one(method)} (none comes with the package or in the checkpoint for this model)"
            )
    return [resolve(name) for name in speculation.drafter if name != NONE]


def make_policy(loaded: LoadedModel, speculation: SpeculationConfig) -> AdaptivePolicy:
    return AdaptivePolicy(speculation.method, speculation.k, prior_of(loaded.decoder, loaded.kind))


def make_engine(loaded: LoadedModel, config: EngineConfig, drafters: SequenceOf[Drafter], policy: Policy) -> Engine:
    return Engine(loaded.decoder, config, tokenizer=loaded.tokenizer, drafters=drafters, policy=policy)
