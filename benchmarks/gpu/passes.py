"""Parts of benchmarks.gpu.run below the engine: bits of a pass, time of a pass, prefill, transformers' own loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.subject import Subject
from paceline.models.decoder import Decoder
from paceline.models.kv_cache import KVCache
from paceline.models.plan import PassPlan

BLOCK = 16


class Bench:
    """A decoder with caches of several sequences, blocks handed out in order."""

    def __init__(self, decoder: Decoder, length: int, sequences: int = 1) -> None:
        self.decoder, self.per_sequence = decoder, -(-length // BLOCK)
        self.cache = KVCache(
            decoder.kv_specs,
            num_blocks=self.per_sequence * sequences,
            block_size=BLOCK,
            dtype=decoder.cache_dtype,
            device=decoder.device,
        )
        self.layers = self.cache.layers
        for layer in self.layers:  # contexts that were never computed: any numbers do
            layer.k.copy_(torch.randn(layer.k.shape, device=decoder.device))
            layer.v.copy_(0.5 * torch.randn(layer.v.shape, device=decoder.device))
        tables = torch.arange(sequences * self.per_sequence, dtype=torch.int32)
        self.tables = tables.view(sequences, self.per_sequence)

    def slots(self, sequence: Tensor, positions: Tensor) -> Tensor:
        return (self.tables[sequence.long(), positions.long() // BLOCK] * BLOCK + positions % BLOCK).int()

    def rows(self, sequence: list[int], positions: list[int]) -> PassPlan:
        seq, pos = (torch.tensor(part, dtype=torch.int32) for part in (sequence, positions))
        return PassPlan.in_order(pos, self.slots(seq, pos), seq, self.tables, BLOCK, int(pos.max()) + 1)

    def chain(self, first: int, count: int) -> PassPlan:
        return self.rows([0] * count, list(range(first, first + count)))

    def crowd(self, sequences: int, rows: int, context: int) -> PassPlan:
        owners = [sequence for sequence in range(sequences) for _ in range(rows)]
        plan = self.rows(owners, list(range(context, context + rows)) * sequences)
        return replace(plan, block_tables=self.tables[:sequences])

    def forward(self, tokens: Tensor, plan: PassPlan, chosen: Sequence[int] | None = None) -> Tensor:
        rows = torch.arange(len(tokens)) if chosen is None else torch.tensor(list(chosen))
        with torch.inference_mode():
            return self.decoder.forward(tokens, plan, self.layers, rows).logits


def device_ms(work: Callable[[], Any], repeats: int = 30, warmup: int = 5) -> float:
    """Median milliseconds between events around each call: gaps in which the host is slower count too."""
    for _ in range(warmup):
        work()
    if not torch.cuda.is_available():
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - started))
        return statistics.median(times)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def bits(subject: Subject) -> dict[str, Any]:
    """Plain decoding of each row alone is the reference; every other way must give its bits."""
    decoder = subject.yardstick
    length, count = (150, 6) if subject.tiny else (1000, 64)
    context = length - count
    bench = Bench(decoder, length + 2 * count, sequences=2)
    vocab = decoder.config.vocab_size
    tokens = torch.randint(0, vocab, (length,))
    bench.forward(tokens[:context], bench.chain(0, context))
    alone = torch.cat([bench.forward(tokens[at : at + 1], bench.chain(at, 1)).clone() for at in range(context, length)])
    found: dict[str, Any] = {}

    def note(name: str, got: Tensor, rows: slice = slice(None)) -> None:
        wrong = int((got != alone[rows]).any(1).sum())
        found[name] = wrong
        print(f"   {name:<44} {'same bits' if not wrong else f'{wrong} rows differ'}", flush=True)

    for rows in sorted({1, 2, 3, 5, 8, 16, 17, 32, 33, 48, 63, 64} & set(range(1, count + 1))):
        parts = [
            bench.forward(tokens[at : min(at + rows, length)], bench.chain(at, min(rows, length - at))).clone()
            for at in range(context, length, rows)
        ]
        note(f"chains of {rows}", torch.cat(parts))
    for rows in (2, 2 * count):  # rows of another sequence around, and more than 64 in all
        others = list(range(rows))
        bench.forward(tokens[:rows], bench.rows([1] * rows, others))
        plan = bench.rows([0] * count + [1] * rows, [*range(context, length), *others])
        both = bench.forward(torch.cat([tokens[context:], tokens[:rows]]), plan)
        note(f"{count} rows beside {rows} of another sequence", both[:count])
    for rows in (length,) if subject.tiny else (256, 384, 512, 640, 768, length):  # one choice of tiles after the other
        first = length - rows
        note(f"a prefill chunk of {rows}", bench.forward(tokens[first:], bench.chain(first, rows))[context - first :])
    for step in (2, count - 1):  # fewer rows' logits than rows, also where both fill a bucket
        plan = bench.chain(context, count)
        note(
            f"every {step}th row asked for",
            bench.forward(tokens[context:], plan, range(0, count, step)),
            slice(0, count, step),
        )
    note("a tree: every node's ancestors elsewhere", tree(bench, tokens, context, count))
    return found


def tree(bench: Bench, tokens: Tensor, context: int, count: int) -> Tensor:
    """The same chain hanging in a tree between as many other nodes, written in the order of the tree."""
    nodes = torch.arange(2 * count, dtype=torch.int32)
    right = nodes % 2 == 0  # even nodes are the chain, odd ones their siblings
    depth = nodes // 2
    plan = bench.rows([0] * (2 * count), (context + depth).tolist())
    slots = bench.slots(torch.zeros_like(nodes), context + nodes)
    path = torch.full((2 * count, count), -1, dtype=torch.int32)
    for node in range(2 * count):
        chain = [2 * above for above in range(node // 2)] + [node]
        path[node, : len(chain)] = slots[chain]
    plan = replace(plan, slots=slots, prefix=torch.full_like(nodes, context), path=path)
    drafted = torch.where(right, tokens[context + depth.long()], torch.randint(0, 500, (2 * count,)))
    return bench.forward(drafted, plan)[::2]


def passes(subject: Subject) -> dict[str, Any]:
    decoder = subject.yardstick
    contexts = (100, 200) if subject.tiny else (1024, 16384)
    found: dict[str, Any] = {"weight_gb": 2 * sum(p.numel() for p in _weights(decoder)) / 1e9, "ms": {}}
    longest = min(max(contexts), decoder.config.max_positions - 64)
    bench = Bench(decoder, longest + 64)
    for context in contexts:
        context = min(context, longest)
        for rows in (1, 8, 32, 64):
            plan = bench.chain(context, rows)
            tokens = torch.randint(0, 500, (rows,)).to(decoder.device)
            ms = device_ms(lambda plan=plan, tokens=tokens: bench.forward(tokens, plan))
            found["ms"][f"{rows}@{context}"] = ms
            print(f"   {rows:>3} nodes at {context:>6}: {ms:7.3f} ms", flush=True)
    return found


def _weights(decoder: Decoder) -> list[Tensor]:
    """Return the weights of all layers and of the head; none where they are packed for a CPU."""
    packed = [p for layer in decoder.layers for p in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return [p.weight.data for p in (*packed, decoder.head) if hasattr(p, "weight")]


def prefill(subject: Subject) -> dict[str, Any]:
    decoder = subject.yardstick
    total = 256 if subject.tiny else 8192 - 64
    bench = Bench(decoder, total)
    tokens = torch.randint(0, 500, (total,))
    found: dict[str, Any] = {}
    for chunk in (128,) if subject.tiny else (512, 2048, 4096):

        def run(chunk: int = chunk) -> None:
            for at in range(0, total, chunk):
                n = min(chunk, total - at)
                with torch.inference_mode():
                    decoder.forward(tokens[at : at + n], bench.chain(at, n), bench.layers, torch.tensor([n - 1]))

        ms = device_ms(run, repeats=3, warmup=2)
        plain = plain_products(decoder, chunk) * total / chunk
        found[str(chunk)] = {"ms": ms, "plain_ms": plain}
        share = f"{ms:.1f} ms, plain products {plain:.1f} ms: {plain / ms:.0%}"
        print(f"   {total} tokens in chunks of {chunk}: {share}", flush=True)
    return found


def plain_products(decoder: Decoder, rows: int) -> float:
    weights = _weights(decoder)[:4]  # weights of the first layer
    inputs = [torch.randn(rows, w.shape[1], dtype=w.dtype, device=w.device) for w in weights]
    return decoder.config.num_layers * sum(
        device_ms(lambda x=x, w=w: torch.nn.functional.linear(x, w), 10) for x, w in zip(inputs, weights, strict=True)
    )


def bare(subject: Subject) -> dict[str, Any]:
    """transformers, static cache, compiled: the loop most people have."""
    import transformers

    decoder = subject.yardstick
    c = decoder.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.layer.inner,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.layer.heads,
        num_key_value_heads=c.layer.kv_heads,
        head_dim=c.layer.head_dim,
        max_position_embeddings=c.max_positions,
        tie_word_embeddings=False,
    )
    context = 100 if subject.tiny else 1024
    with torch.device(subject.device):
        torch.set_default_dtype(subject.dtype)
        model = transformers.LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    cache = transformers.StaticCache(config=config, max_cache_len=context + 64)
    ids = torch.randint(0, c.vocab_size, (1, context), device=subject.device)
    with torch.inference_mode():
        model(ids, past_key_values=cache, cache_position=torch.arange(context, device=subject.device))
        step = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
        one, at = ids[:, :1].clone(), torch.tensor([context], device=subject.device)
        started = time.perf_counter()
        ms = device_ms(lambda: step(one, past_key_values=cache, cache_position=at), 30, 5)
    took = time.perf_counter() - started
    print(f"   transformers, static cache, compiled: {ms:.2f} ms a token ({took:.0f} s to compile)", flush=True)
    return {"ms": ms}


PASS_PARTS: dict[str, Callable[[Subject], dict[str, Any]]] = {
    "bits": bits,
    "passes": passes,
    "prefill": prefill,
    "bare": bare,
}
