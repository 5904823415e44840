"""Chains of smollm2, in one launch and by passes: tokens against those of ordinary passes, and time per token; then
the same by passes with tokens sampled between them.

python benchmarks/gpu_chain.py                    # with the cuts in use
python benchmarks/gpu_chain.py --weights random --cuts "Cut(keys=128)" "Cut(head_tile=8)"
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import traceback
from typing import Any

import torch
from common import finish
from gpu_engine import SAMPLED, prompts_of
from gpu_subject import SMALL, Subject, random_weights

from paceline import SamplingParams
from paceline.core.sequence import Sequence
from paceline.drafters.model.chain_sampler import ChainSampler, SamplingGraphs
from paceline.models.backends.cuda.greedy_chain import Cut, TritonChain
from paceline.models.chain import READ, ChainRow, GreedyChain
from paceline.models.decoder import Decoder
from paceline.models.kernels import Weights, kernels_for
from paceline.models.kv_cache import KVCache
from paceline.models.pass_chain import PassChain
from paceline.models.plan import PassPlan
from paceline.models.weights import Dtypes

BLOCK = 16


def chain_of(decoder: Decoder, cache: KVCache, cut: Cut, programs: int) -> TritonChain:
    weights = Weights(decoder.embedding, decoder.layers, decoder.final_norm, decoder.head)
    return TritonChain(
        weights, decoder.shape(cache.layers[0].k.shape[0]), cache.layers, BLOCK, decoder.config, programs, cut
    )


def forward(decoder: Decoder, cache: KVCache, tokens: list[int], first: int, blocks: list[int]) -> torch.Tensor:
    positions = torch.arange(first, first + len(tokens), dtype=torch.int32)
    tables = torch.tensor([blocks], dtype=torch.int32)
    plan = PassPlan.in_order(
        positions,
        tables[0][positions // BLOCK] * BLOCK + positions % BLOCK,
        torch.zeros_like(positions),
        tables,
        BLOCK,
        first + len(tokens),
    )
    return decoder.forward(torch.tensor(tokens), plan, cache.layers, torch.tensor([len(tokens) - 1])).logits[0]


def greedy(decoder: Decoder, cache: KVCache, row: ChainRow) -> list[int]:
    """The same by ordinary passes."""
    lagging = list(row.tokens)[READ - row.unread_tokens :]
    logits = forward(decoder, cache, lagging, row.start + READ - row.unread_tokens, list(row.blocks))
    proposed = [int(logits.argmax())]
    while len(proposed) < row.count:
        at = row.start + len(row.tokens) + len(proposed) - 1
        proposed.append(int(forward(decoder, cache, proposed[-1:], at, list(row.blocks)).argmax()))
    return proposed


def rows_at(
    subject: Subject, decoder: Decoder, cache: KVCache, number: int, context: int, count: int, unread_tokens: int = 1
):
    """Sequences whose context is in the cache; their blocks are scattered."""
    prompts = prompts_of(subject, number)
    need = -(-(context + count) // BLOCK)
    order = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    rows = []
    for index, prompt in enumerate(prompts):
        tokens = (prompt * (context // len(prompt) + 1))[:context]
        blocks = order[index * need : (index + 1) * need]
        forward(decoder, cache, tokens[: context - unread_tokens], 0, blocks)
        rows.append(ChainRow(tokens[-READ:], context - READ, unread_tokens, count, blocks))
    return rows


def check(subject: Subject, decoder: Decoder, cache: KVCache, chain: GreedyChain, number: int) -> str:
    same = total = 0
    for context, unread_tokens in ((41, 1), (64, 2), (129, 1), (600, 2)):
        rows = rows_at(subject, decoder, cache, number, context, 16, unread_tokens)
        proposed = chain.draft(rows).tolist()
        chain.check()
        for row, tokens in zip(rows, proposed, strict=True):
            for a, b in zip(tokens, greedy(decoder, cache, row), strict=True):
                total += 1
                if a != b:
                    break  # what follows continues another text
                same += 1
    return f"{same} of {total} tokens as by passes"


def timed(
    subject: Subject, decoder: Decoder, cache: KVCache, chain: GreedyChain | Sampling, number: int, context: int
) -> Any:
    count = 16
    rows = rows_at(subject, decoder, cache, number, context, count)
    for _ in range(3):
        chain.draft(rows)
    launches, spans = [], []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        started = time.perf_counter()
        chain.draft(rows)
        launches.append(time.perf_counter() - started)
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end))
    return {"token_ms": statistics.median(spans) / count, "host_ms": 1e3 * statistics.median(launches)}


class Sampling:
    """A chain whose tokens are picked between its passes, as a chain."""

    def __init__(self, chain: PassChain, decoder: Decoder, asked: dict[str, Any]) -> None:
        self._chain, self._params = chain, SamplingParams(**asked).resolve({})
        self._graphs = SamplingGraphs(decoder.config.vocab_size, decoder.device)
        self._sequences: list[Sequence] = []

    def draft(self, rows: list[ChainRow]) -> torch.Tensor:
        if len(self._sequences) != len(rows):
            self._sequences = [Sequence(str(at), [0], self._params, max_len=100) for at in range(len(rows))]
        sampler = ChainSampler(self._graphs, self._sequences, max(row.count for row in rows), None)
        return sampler.drafted(self._chain.draft_by(sampler, rows)).tokens


def measure(
    subject: Subject, decoder: Decoder, cache: KVCache, chain: GreedyChain, name: str, numbers: list[int]
) -> dict[str, Any]:
    print(f"{name}: {check(subject, decoder, cache, chain, min(5, chain.most_rows))}", flush=True)
    found = {}
    for number in numbers:
        for context in (100, 1000):
            got = found[f"{name} x{number} at {context}"] = timed(subject, decoder, cache, chain, number, context)
            print(f"   {number} rows, context {context}: {got}", flush=True)
    return found


def warm(cut: str) -> None:
    """Compile a cut into the cache of compiled kernels: a launch of no steps."""
    device = torch.device("cuda")
    config = SMALL
    weights = {name: torch.zeros(1).expand(value.shape) for name, value in random_weights(config).items()}
    decoder = Decoder(config, weights, kernels_for(device), device=device, dtypes=Dtypes.of(torch.bfloat16, device))
    cache = KVCache(decoder.kv_specs, num_blocks=4, block_size=BLOCK, dtype=torch.bfloat16, device=device)
    chain = chain_of(decoder, cache, eval(cut), programs_of(device))
    chain.launch()
    torch.cuda.synchronize()


def programs_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="smollm2")
    parser.add_argument("--cuts", nargs="*", default=["Cut()"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--warm", default=None)
    args = parser.parse_args()
    if args.time_is_typical:
        warm(args.time_is_typical)
        return
    started = time.perf_counter()
    children = [
        subprocess.Popen([sys.executable, __file__, "--warm", cut], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for cut in args.cuts
    ]
    subject = Subject(args.weights, torch.device("cuda"))
    decoder = subject.small
    cache = KVCache(
        decoder.kv_specs, num_blocks=8192, block_size=BLOCK, dtype=decoder.cache_dtype, device=subject.device
    )
    rows_at(subject, decoder, cache, 1, 100, 16)
    print(f"loaded after {time.perf_counter() - started:.0f} s", flush=True)
    result: dict[str, Any] = {}
    for cut, child in zip(args.cuts, children, strict=True):
        try:
            proposed, _ = child.communicate(timeout=100)
            print(f"{cut}: compiled after {time.perf_counter() - started:.0f} s", flush=True)
            if child.returncode:
                print(proposed.decode()[-1500:], flush=True)
                continue
            chain = chain_of(decoder, cache, eval(cut), programs_of(subject.device))
            result |= measure(subject, decoder, cache, chain, cut, [n for n in args.rows if n <= chain.most_rows])
        except Exception:
            traceback.print_exc()
    assert decoder.graphs is not None
    passes = PassChain(decoder.graphs, decoder.config, cache.layers, BLOCK)
    result |= measure(subject, decoder, cache, passes, "passes", args.rows)
    for kind, asked in SAMPLED.items():
        for number in args.rows:
            got = timed(subject, decoder, cache, Sampling(passes, decoder, asked), number, 100)
            result[f"passes {kind} x{number}"] = got
            print(f"passes, {kind}, {number} rows: {got}", flush=True)
    finish("gpu_chain", result)


if __name__ == "__main__":
    main()
