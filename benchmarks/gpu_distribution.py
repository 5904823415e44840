"""Answers of a target with a draft model are distributed as its plain ones: sampled on a device, drafted behind steps
under way, judged there.

    python -m benchmarks.gpu_distribution

Two small random Llamas, one a blend of the other, so that about half of what is drafted is rejected. Tokens and pairs
of tokens at several positions are compared by a two-sample G-test; the least of the p-values is what counts: a false
alarm below 1e-4 is one in some three hundred runs.
"""

from __future__ import annotations

import argparse
import collections
from typing import Any

import torch

from benchmarks.harness import finish
from paceline import SamplingParams
from paceline.config import EngineConfig
from paceline.drafters.model.draft_model import DraftModelDrafter
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan, FixedPolicy
from paceline.models.decoder import Decoder
from paceline.models.kernels import kernels_for
from paceline.models.spec import ModelConfig
from paceline.models.weights import Dtypes

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_positions=128,
    tie_embeddings=True,
)
PROMPT, LENGTH, K, OTHER = [3, 1, 4, 1, 5], 7, 3, 0.12
COLUMNS = ((1,), (2,), (4,), (6,), (1, 2), (2, 3), (3, 4), (5, 6))
ASKED: tuple[dict[str, Any], ...] = ({"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.8, "top_k": 30})


class Always(FixedPolicy):
    def __init__(self, choice: DraftPlan) -> None:
        self._choice = choice

    def plan(self, sequences: Any, *_: object) -> list[DraftPlan]:
        return [self._choice for _ in sequences]


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inter = CONFIG.hidden_size, CONFIG.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (CONFIG.vocab_size, hidden), "model.norm": (hidden,)}
    for layer in range(CONFIG.num_layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}.self_attn.{name}_proj": (CONFIG.kv_size, hidden) for name in "kv"}
        shapes[f"{at}.self_attn.q_proj"] = (CONFIG.q_size, hidden)
        shapes[f"{at}.self_attn.o_proj"] = (hidden, CONFIG.q_size)
        shapes |= {f"{at}.mlp.{name}_proj": (inter, hidden) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj"] = (hidden, inter)

    def made(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.rand(shape, generator=generator) + 0.5
        return torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5

    return {f"{name}.weight": made(shape) for name, shape in shapes.items()}


def engines(device: torch.device) -> tuple[Engine, Engine]:
    """Plain, and with a draft model."""
    own, other, kernels = random_weights(1), random_weights(2), kernels_for(device)
    blend = {name: torch.lerp(own[name], other[name], OTHER) for name in own}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target, small = (
        Decoder(CONFIG, weights, kernels, device=device, dtypes=Dtypes.of(dtype, device)) for weights in (own, blend)
    )
    config = EngineConfig(
        prefix_caching=False, num_blocks=1024, block_size=16, max_num_seqs=128, max_num_batched_tokens=1024
    )
    drafting = Always(DraftPlan(DraftModelDrafter.name, K))
    return (
        Engine(target, config, policy=Always(DraftPlan())),
        Engine(target, config, drafters=[DraftModelDrafter(small)], policy=drafting),
    )


def answers(engine: Engine, count: int, together: int, asked: dict[str, Any]) -> tuple[list[list[int]], float]:
    """So many answers, and the share of drafted tokens that was accepted."""
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **asked).resolve({})
    outputs, drafted, accepted = [], 0, 0
    while len(outputs) < count:
        sequences = [engine.add_request(str(at), PROMPT, params)[0] for at in range(together)]
        while engine.has_work:
            engine.step()
        outputs += [sequence.output_tokens for sequence in sequences]
        drafted += sum(sequence.stats.num_draft_tokens for sequence in sequences)
        accepted += sum(sequence.stats.num_accepted_tokens for sequence in sequences)
    assert engine.drafters.failures == 0
    return outputs, accepted / max(drafted, 1)


def two_samples(one: list[list[int]], other: list[list[int]], columns: tuple[int, ...]) -> float:
    """p-value of both having one distribution; cells of fewer than 20 are taken together."""
    counts = [collections.Counter(tuple(each[at] for at in columns) for each in sample) for sample in (one, other)]
    pairs = [[count[cell] for count in counts] for cell in set(counts[0]) | set(counts[1])]
    cells = [pair for pair in pairs if sum(pair) >= 20]
    if rare := [pair for pair in pairs if sum(pair) < 20]:
        cells.append([sum(column) for column in zip(*rare, strict=True)])
    seen = torch.tensor(cells, dtype=torch.float64)
    expected = seen.sum(1, keepdim=True) * seen.sum(0) / seen.sum()
    g = 2 * torch.special.xlogy(seen, seen / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2, dtype=torch.float64), g / 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--answers", type=int, default=24000)
    args = parser.parse_args()
    plain, drafting = engines(torch.device(args.device))
    (drafter,) = drafting.drafters.drafters
    assert isinstance(drafter, DraftModelDrafter)
    assert args.device == "cpu" or drafter._chain_samples, "rows that sample would be drafted by the host"
    found: dict[str, Any] = {}
    for asked in ASKED:
        alone, _ = answers(plain, args.answers, 128, asked)
        for together, count in ((128, args.answers), (16, args.answers // 4)):
            outputs, accepted = answers(drafting, count, together, asked)
            least = min(two_samples(alone, outputs, columns) for columns in COLUMNS)
            found[f"{asked} x{together}"] = {"answers": len(outputs), "accepted": accepted, "least_p": least}
            print(f"{asked}, {together} together: {accepted:.0%} accepted, least p {least:.4f}", flush=True)
    found["passes"] = all(cell["least_p"] > 1e-4 for cell in found.values())
    finish("gpu_distribution", found)


if __name__ == "__main__":
    main()
