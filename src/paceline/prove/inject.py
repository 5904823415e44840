"""Faults of `prove --inject`, at run time and inside `prove` only, to show that they are caught."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.core.draft import Draft
from paceline.core.rng import Lane, coin
from paceline.core.verdict import TokenKind, Verdict
from paceline.engine.engine import Engine
from paceline.engine.in_flight import InFlightStep
from paceline.engine.sampler import Sampler
from paceline.errors import InvalidParameter
from paceline.llm import LLM
from paceline.prove.replay import Verify
from paceline.prove.subject import patched, slots_held
from paceline.verify import DrawKeys, Nodes, SamplingMetadata, SamplingMode, probabilities, process, verify
from paceline.verify.outcome import has_children

BIAS = 0.03  # total variation of the first token from its law
FAULTS = {
    "bias": f"a bias of total variation {BIAS} in what the verifier commits",
    "rollback": "the cache after a rejected draft off by one slot, in one layer",
    "bonus": "the bonus token from the logits of the node before",
    "coins": "coins of a step used again in the next",
}


def validate(fault: str | None) -> None:
    """Raise InvalidParameter unless the fault is known."""
    if fault is not None and fault not in FAULTS:
        raise InvalidParameter("inject", f"{fault!r} is not one of {', '.join(FAULTS)}")


@contextmanager
def injected(llm: LLM, fault: str | None) -> Iterator[Verify]:
    """Yield the verifier to prove, which the engine uses too: the real one, or one with a fault."""
    broken: dict[str, Verify] = {"bias": _biased, "bonus": _wrong_bonus, "coins": _reused_coins}
    chosen: Verify = broken.get(fault or "", verify)
    parts: dict[str, Any] = {}
    if fault == "rollback":
        parts["launch"] = llm.call(_off_by_one)
    if fault is not None:
        parts["sampler"] = llm.call(lambda engine: _sampler(engine, chosen))
    with patched(llm, lambda engine: engine.runner, **parts):
        yield chosen


def _sampler(engine: Engine, verifier: Verify) -> Sampler:
    config = engine.model.config
    return Sampler(config.vocab_size, frozenset(config.eos_token_ids), engine.model.device, verifier=verifier)


def _biased(
    draft: Draft, logits: Tensor, row_of: Tensor, nodes: Nodes, metadata: SamplingMetadata, draws: DrawKeys, **rest: Any
) -> Verdict:
    """Commit the second likeliest token where the likeliest was first, in 3 of 100 steps overall."""
    verdict = verify(draft, logits, row_of, nodes, metadata, draws, **rest)
    p = probabilities(process(logits[row_of[:, 0]], metadata, nodes.take(row_of[:, 0])))
    best = p.topk(2, -1)
    moved = torch.rand(p.shape[0], device=p.device) < BIAS / best.values[:, 0].clamp_min(BIAS)
    moved &= draws.by(SamplingMode.COIN) & (verdict.tokens[:, 0] == best.indices[:, 0])
    tokens, kinds, path = verdict.tokens.clone(), verdict.kinds.clone(), verdict.path.clone()
    tokens[moved, 0], tokens[moved, 1:] = best.indices[moved, 1], -1
    kinds[moved, 0], kinds[moved, 1:] = int(TokenKind.RECOVERED), int(TokenKind.PAD)
    path[moved] = -1
    num_accepted = verdict.num_accepted.masked_fill(moved, 0)
    return replace(verdict, tokens=tokens, kinds=kinds, path=path, num_accepted=num_accepted, packed=None)


def _wrong_bonus(draft: Draft, logits: Tensor, row_of: Tensor, *args: Any, **rest: Any) -> Verdict:
    """Replace the logits of leaves, which are used for the bonus only, by their parents'."""
    if draft.width:
        used = torch.arange(draft.width, device=row_of.device) < draft.num_nodes[:, None]
        leaf = used & ~has_children(draft)[:, 1:]
        above = row_of.gather(1, draft.parents + 1)
        changed = logits.clone()
        changed[row_of[:, 1:][leaf]] = logits[above[leaf]]
        logits = changed
    return verify(draft, logits, row_of, *args, **rest)


def _reused_coins(*args: Any, **rest: Any) -> Verdict:
    def source(lane: Lane, key: Tensor, committed: Tensor, node: Tensor) -> Tensor:
        return coin(lane, key, torch.zeros_like(committed), node)

    return verify(*args, **{**rest, "source": source})


def _off_by_one(engine: Engine) -> Any:
    """Return a `launch` that gives the last accepted slot the K/V of a rejected token, where a draft was rejected."""
    launch, cache = engine.runner.launch, engine.runner.cache
    layer = cache.layers[len(engine.model.kv_specs) // 2]

    def broken(*args: Any) -> InFlightStep:
        flight = launch(*args)
        if flight.unread is None:
            return flight
        for index, accepted in zip(flight.batch.sampling, flight.unread.num_accepted.tolist(), strict=True):
            if accepted < flight.layout.shape.num_nodes[index]:
                sequence = flight.batch.sequences[index]
                length = len(sequence.tokens) - 1 + accepted
                to, source = slots_held(sequence, (length, length + 1), cache.block_size).tolist()
                layer.k[to], layer.v[to] = layer.k[source].clone(), layer.v[source].clone()
        return flight

    return broken
