"""`paceline quantize`: a model with its weights rounded to few bits, and how far that moved its output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.output import human_bytes, print_json
from paceline.cli.progress import progress

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.models.runtime import LoadedModel

LONGEST = 256  # tokens of a prompt that are compared


def quantize(
    model: Annotated[str, typer.Option("--model", "-m", help="Alias, folder or hub id.", metavar="MODEL")],
    to: Annotated[str, typer.Option("--to", help="How weights are stored.", metavar="q8_0|q4_1|q4_k|int4|fp8")],
    out: Annotated[Path, typer.Option("--out", help="A new folder.", metavar="DIR")],
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="To measure on; the shipped ones if unset.", metavar="FILE")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Round a model's weights to fewer bits, and measure what that changes.

    q8_0, q4_1 and q4_k are GGUF's blocks; int4 and fp8 are compressed-tensors' layout, which others read too.
    """
    with progress(plain=not json) as report:
        from paceline.bench.prompts import from_file, shipped
        from paceline.models.hub import resolve
        from paceline.models.quantize import quantize_folder, write_card
        from paceline.models.runtime import load_model

        talks = shipped(per_workload=4) if prompts is None else from_file(prompts)
        source = resolve(model, report)

        def written(done: int, total: int) -> None:
            if report is not None:
                report("writing", done, total)

        kinds = quantize_folder(source, to, out, written)
        if report is not None:
            report("measuring", 0, None)
        original, rounded = load_model(source, device="cpu"), load_model(out, device="cpu")
        found = distance(original, rounded, [talk.messages(())[-1]["content"] for talk in talks])
        write_card(out, model=model, to=to, kinds=kinds, distance=found)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    if json:
        print_json({"model": model, "to": to, "path": str(out), "bytes": size, "kinds": kinds, "distance": found})
        return
    print(
        f"{out}: {human_bytes(size)} · KL {found['mean_kl']:.5f} · same likeliest token "
        f"{100 * found['top1_agreement']:.1f} % of {found['tokens']:.0f}"
    )


def distance(original: LoadedModel, rounded: LoadedModel, texts: list[str]) -> dict[str, float]:
    """Of next-token distributions at every position of the prompts: KL(original || rounded), likeliest tokens."""
    import torch

    divergences, agreements = [], []
    for text in texts:
        tokens = original.tokenizer.encode(text)[:LONGEST]
        p, q = (logits_of(loaded, tokens).log_softmax(-1) for loaded in (original, rounded))
        divergences.append((p.exp() * (p - q)).sum(-1).clamp(min=0))
        agreements.append(p.argmax(-1) == q.argmax(-1))
    kl, same = torch.cat(divergences), torch.cat(agreements)
    return {
        "tokens": float(len(kl)),
        "mean_kl": float(kl.mean()),
        "max_kl": float(kl.max()),
        "top1_agreement": float(same.double().mean()),
    }


def logits_of(loaded: LoadedModel, tokens: list[int]) -> Tensor:
    """(M, V): one pass over the tokens, with an empty cache."""
    import torch

    from paceline.models.kv_cache import KVCache
    from paceline.models.plan import PassPlan

    decoder, block_size = loaded.decoder, 16
    num_blocks = -(-len(tokens) // block_size)
    cache = KVCache(
        decoder.kv_specs,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=decoder.cache_dtype,
        device=decoder.device,
    )
    at = torch.arange(len(tokens), dtype=torch.int32)
    tables = torch.arange(num_blocks, dtype=torch.int32)[None]
    plan = PassPlan.in_order(at, at, torch.zeros_like(at), tables, block_size, len(tokens))
    with torch.inference_mode():
        return decoder.forward(torch.tensor(tokens), plan, cache.layers, torch.arange(len(tokens))).logits.clone()
