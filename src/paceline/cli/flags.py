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
Dtype = Annotated[str, flag("--dtype", help="Weights.", metavar="auto|float32|bfloat16")]
Device = Annotated[str, flag("--device", help="Where to run.", metavar="auto|cpu|cuda")]
Activations = Annotated[str, flag("--activations", help="int8 is another model.", metavar="float32|int8")]
KVDtype = Annotated[
    str, flag("--kv-dtype", "--kv-cache-dtype", help="fp8 is another model (a GPU only).", metavar="auto|fp8")
]
Threads = Annotated[int | None, flag("--threads", help="CPU threads; all usable cores if unset.")]
DraftModel = Annotated[str | None, flag("--draft-model", help="A smaller model that drafts.", metavar="MODEL")]
Drafter = Annotated[str | None, flag("--drafter", help="A drafter trained for this model.", metavar="PATH")]
Prompts = Annotated[
    Path | None, flag("--prompts", help="Your own: jsonl, or text with one a line; ours if unset.", metavar="FILE")
]
MaxTokens = Annotated[int | None, flag("--max-tokens", help="Most tokens of an answer; 64 if unset, 48 if quick.")]
Temperature = Annotated[float, flag("--temperature", help="0 is greedy.")]
Out = Annotated[Path | None, flag("--out", help="Folder for the files that are written.", metavar="FOLDER")]
Quick = Annotated[bool, flag("--quick", help="Less of everything: a few minutes on two cores.")]
Raw = Annotated[bool, flag("--raw", help="Continue prompts as text, without the chat template.")]
Json = Annotated[bool, flag("--json", help="Print one JSON object and nothing else.")]
