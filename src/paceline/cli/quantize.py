"""`paceline quantize`: a model with its weights rounded to few bits, and how far that moved its output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from paceline.cli.flags import Json, option
from paceline.cli.output import human_bytes, print_json
from paceline.cli.progress import progress


def quantize(
    model: Annotated[str, option("Alias, folder or hub id.", "MODEL", "--model", "-m")],
    to: Annotated[str, option("How weights are stored then: q8_0, q4_1, q4_k, int4 or fp8.", "NAME")],
    out: Annotated[Path, option("Folder to write; it must not exist.", "DIR")],
    prompts: Annotated[Path | None, option("Prompts to measure on; unset: the packaged ones.", "FILE")] = None,
    json: Json = False,
) -> None:
    """Round a model's weights to fewer bits, and measure what that changes.

    q8_0, q4_1 and q4_k are GGUF's blocks; int4 and fp8 are compressed-tensors' layout, which others read too.
    """
    with progress(plain=not json) as report:
        from paceline.bench.prompts import from_file, shipped
        from paceline.models.load.hub import resolve
        from paceline.models.load.open_model import load_model
        from paceline.models.quant.distance import compared_tokens, distance
        from paceline.models.quant.quantize import quantize_folder, write_card

        talks = shipped(per_workload=4) if prompts is None else from_file(prompts)
        source = resolve(model, report)
        compared = compared_tokens(source, [str(talk.messages(())[-1]["content"]) for talk in talks])
        distances: dict[str, float] = {}

        def written(done: int, total: int) -> None:
            if report is not None:
                report("writing", done, total)

        def measure(folder: Path, kinds: dict[str, int]) -> None:
            if report is not None:
                report("measuring", 0, None)
            original, rounded = load_model(source, device="cpu"), load_model(folder, device="cpu")
            distances.update(distance(original.decoder, rounded.decoder, compared))
            name = source.resolve().name if Path(model).is_dir() else model  # a card goes where a path means nothing
            write_card(folder, name=out.name, model=name, to=to, kinds=kinds, distance=distances)

        kinds = quantize_folder(source, to, out, written, measure)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    if json:
        print_json({"model": model, "to": to, "path": str(out), "bytes": size, "kinds": kinds, "distance": distances})
        return
    print(
        f"{out}: {human_bytes(size)} · KL {distances['mean_kl']:.5f} · same likeliest token "
        f"{100 * distances['top1_agreement']:.1f} % of {distances['tokens']:.0f}"
    )
