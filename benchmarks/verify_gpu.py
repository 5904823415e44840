"""What verification costs on a CUDA device: drafts of 64 nodes, captured in a graph and replayed.

Medians of replays between two events, the L2 cache flushed before each, of eager calls by the host's clock, and of
calls as the engine makes them: until they return (host) and until the verdict stands (engine). Logits
are normal with a deviation of 3 (some hundred tokens make up 90 %) or 1 ("flat": tens of thousands).

    python benchmarks/verify_gpu.py [--nodes 64] [--replays 30] [--vocabs 128256 49152] [--rows 1 16]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from harness import finish
from torch import Tensor

from paceline.core.draft import Draft, Proposal
from paceline.core.sequence import Sequence
from paceline.engine.sampler import Sampler
from paceline.sampling_params import SamplingParams
from paceline.verify import DrawKeys, Nodes, SamplingMetadata, SamplingMode, probabilities, verify

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    greedy: bool = False
    seeded: bool = False
    top_p: float | None = None
    q: float | None = None  # how far the drafter's logits are from the target's; None: a deterministic draft
    children: int = 1  # of a node
    spread: float = 3.0  # of the logits
    limit_ms: float | None = None  # what is asked of one row at a vocabulary of 128k


CASES = (
    Case("greedy, tree", greedy=True, children=3, limit_ms=0.1),
    Case("T = 1, tree", children=3),
    Case("T = 1, top-p 0.9, tree", top_p=0.9, children=3, limit_ms=0.35),
    Case("T = 1, top-p 0.9, tree, flat", top_p=0.9, children=3, spread=1.0, limit_ms=0.35),
    Case("seeded, top-p 0.9, tree", seeded=True, top_p=0.9, children=3),
    Case("block, chain", q=0.5),
    Case("block, chain, top-p 0.9", q=0.5, top_p=0.9),
)


def batch(case: Case, rows: int, nodes: int, vocab: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Work that verifies such a batch, and the same as the engine does it."""
    torch.manual_seed(0)
    parents = [node // case.children - 1 for node in range(nodes)]
    depth: list[int] = []
    for parent in parents:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    slots = nodes + 1
    logits = torch.randn(rows * slots, vocab, device=DEVICE) * case.spread
    row_of = torch.arange(rows * slots, device=DEVICE).view(rows, slots)
    shape = (rows, nodes)
    proposal, tokens = None, logits.argmax(-1).view(rows, slots)[:, torch.tensor(parents, device=DEVICE) + 1]
    if case.q is not None:
        probs = probabilities(logits + torch.randn_like(logits) * case.q)
        tokens = torch.multinomial(probs, 1).view(rows, slots)[:, :-1]
        proposal = Proposal(probs=probs, row_of=row_of)
    draft = Draft(
        tokens=tokens.contiguous(),
        parents=torch.tensor(parents, device=DEVICE).expand(shape).contiguous(),
        depth=torch.tensor(depth, device=DEVICE).expand(shape).contiguous(),
        num_nodes=torch.full((rows,), nodes, device=DEVICE),
        q=proposal,
    )
    seq = torch.arange(rows, device=DEVICE).repeat_interleave(slots)
    node = torch.arange(-1, nodes, device=DEVICE).repeat(rows)
    key = torch.arange(rows, device=DEVICE) + 7
    kind = SamplingMode.GREEDY if case.greedy else SamplingMode.SEEDED if case.seeded else SamplingMode.COIN
    draws = DrawKeys(key=key, committed=key + 93, kind=None if case.greedy else torch.full_like(key, kind))
    metadata = SamplingMetadata(
        temperature=None if case.greedy else torch.ones(rows, device=DEVICE),
        top_p=None if case.top_p is None else torch.full((rows,), case.top_p, dtype=torch.float64, device=DEVICE),
    )
    given = (draft, logits, row_of, Nodes.of(draft, seq, node, max(depth), with_path=False), metadata, draws)
    return lambda: verify(*given, max_depth=max(depth)), as_the_engine(case, draft, logits, row_of)


def as_the_engine(case: Case, draft: Draft, logits: Tensor, row_of: Tensor) -> Callable[[], object]:
    """One replay, where such steps are captured: not where chains with a q have more than 16 nodes."""
    asked = {"temperature": 0.0 if case.greedy else 1.0, "top_p": case.top_p, "seed": 3 if case.seeded else None}
    params = SamplingParams(**{name: value for name, value in asked.items() if value is not None}).resolve({})
    sequences = [Sequence(str(row), [0] * 100, params, max_len=1000) for row in range(draft.batch)]
    sampler, host = Sampler(logits.shape[1], frozenset({0}), DEVICE), row_of.cpu()
    parts = {name: getattr(draft, name).cpu() for name in ("tokens", "parents", "depth", "num_nodes")}
    q = None if draft.q is None else replace(draft.q, row_of=draft.q.row_of.cpu())
    on_host = Draft(**parts, q=q)
    sampler.warmup(logits, draft.batch, len(logits), q_rows=0 if q is None else len(logits))
    return lambda: sampler.verify(sequences, on_host, logits, host)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    flush, times = torch.empty(2**28, dtype=torch.int8, device=DEVICE), []
    for _ in range(replays):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def call_ms(work: Callable[[], object], rounds: int = 5) -> tuple[float, float]:
    """Until a call returns, and until the device has done what it asked for."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        times.append((1e3 * (returned - started), 1e3 * (time.perf_counter() - started)))
    host, all_of_it = zip(*times, strict=True)
    return statistics.median(host), statistics.median(all_of_it)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--vocabs", type=int, nargs="+", default=[128_256, 49_152])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    lines = []
    for vocab in options.vocabs:
        for rows in options.rows:
            for case in CASES:
                work, engine = batch(case, rows, options.nodes, vocab)
                verdict = work()
                accepted = float(verdict.num_accepted.double().mean())  # type: ignore[attr-defined]
                replay, (_, eager) = replay_ms(captured(work), options.replays), call_ms(work)
                engine()
                host, whole = call_ms(engine, options.replays)
                limit = case.limit_ms if rows == 1 and vocab > 100_000 else None
                lines.append(
                    {"case": case.name, "vocab": vocab, "rows": rows, "graph_ms": replay, "eager_ms": eager}
                    | {"engine_ms": whole, "engine_host_ms": host, "accepted": accepted, "limit_ms": limit}
                )
                met = "" if limit is None else f"  (asked: {limit}: {'met' if replay <= limit else 'MISSED'})"
                print(
                    f"{vocab:7d} {rows:3d} rows  {case.name:34} graph {replay:7.3f} ms  eager {eager:7.2f} ms  "
                    f"engine {whole:6.3f} ms (host {host:5.3f})  accepted {accepted:5.2f}{met}",
                    flush=True,
                )
                del work, engine, verdict
                torch.cuda.empty_cache()
    finish("verify_gpu", {"device": torch.cuda.get_device_name(), "nodes": options.nodes, "lines": lines})


if __name__ == "__main__":
    main()
