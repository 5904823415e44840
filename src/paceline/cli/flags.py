"""Flags that several of the commands prove, bench, advise and demo take, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def flag(*names: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, **more)


_WHICH = "Alias, folder, .gguf file or hub id."
Model = Annotated[str, typer.Argument(help=_WHICH, metavar="MODEL")]
ModelFlag = Annotated[str, flag("--model", "-m", help=_WHICH, metavar="MODEL")]
Dtype = Annotated[
    str, flag("--dtype", help="How weights are stored: auto, float32, bfloat16 or float16.", metavar="TYPE")
]
Device = Annotated[str, flag("--device", help="Where the model runs: auto, cpu or cuda.", metavar="NAME")]
Activations = Annotated[
    str, flag("--activations", help="float32, or int8, which is another model's output.", metavar="NAME")
]
KVDtype = Annotated[
    str,
    flag(
        "--kv-dtype",
        "--kv-cache-dtype",
        help="auto, or fp8 on a GPU, which is another model's output.",
        metavar="NAME",
    ),
]
Threads = Annotated[int | None, flag("--threads", help="CPU threads; unset: all usable cores.")]
DraftModel = Annotated[
    list[str] | None, flag("--draft-model", help="A smaller model that drafts; repeatable.", metavar="MODEL")
]
Drafter = Annotated[
    list[str] | None, flag("--drafter", help="A drafter trained for this model; repeatable.", metavar="PATH")
]
Prompts = Annotated[
    Path | None,
    flag(
        "--prompts", help="Prompts to use, jsonl or a text with one a line; unset: the packaged ones.", metavar="FILE"
    ),
]
MaxTokens = Annotated[
    int | None, flag("--max-tokens", help="Answers end after this many tokens; unset: 64, with --quick 48.")
]
Temperature = Annotated[float, flag("--temperature", help="0: always the likeliest token (greedy).")]
Out = Annotated[Path | None, flag("--out", help="Folder for the files that the command writes.", metavar="FOLDER")]
Quick = Annotated[bool, flag("--quick", help="Measure less of everything: a few minutes on two cores.")]
Raw = Annotated[bool, flag("--raw", help="Continue prompts as text, without the chat template.")]
Json = Annotated[bool, flag("--json", help="Print one JSON object and nothing else.")]
