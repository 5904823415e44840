"""The flags `generate` and `chat` share, as one dataclass: each field is declared once and arrives as one object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from paceline.config import AUTO, NONE
from paceline.drafters.methods import method_names

if TYPE_CHECKING:
    from paceline.sampling_params import SamplingParams


def _flag(*names: str, help: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(
        *names, help=help, rich_help_panel=panel, metavar=metavar, show_default=not panel.startswith("Sampling")
    )


_model = functools.partial(_flag, panel="Model")
_drafting = functools.partial(_flag, panel="Speculation (never changes the model's output)")
_sampling = functools.partial(_flag, panel="Sampling (unset: the model's own generation config)")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A sampling field left at None is not passed on, so that the model's own defaults hold."""

    model: Annotated[
        str, _model("--model", "-m", help="Alias, folder with safetensors, .gguf file or hub id.", metavar="MODEL")
    ] = "smollm2"
    dtype: Annotated[str, _model("--dtype", help="Weights.", metavar="auto|float32|bfloat16")] = "auto"
    device: Annotated[str, _model("--device", help="Where to run.", metavar="auto|cpu|cuda")] = "auto"
    threads: Annotated[int | None, _model("--threads", help="CPU threads; all usable cores if unset.")] = None
    numerics: Annotated[
        str,
        _model("--numerics", help="fast: a GPU's large passes may round by their size.", metavar="exact|fast"),
    ] = "exact"
    max_model_len: Annotated[int | None, _model("--max-model-len", help="Longest context, in tokens.")] = None
    gpu_memory_fraction: Annotated[
        float, _model("--gpu-memory-fraction", help="Of the GPU's memory, for weights, cache and all.")
    ] = 0.9
    system: Annotated[str | None, typer.Option("--system", help="System message.", metavar="TEXT")] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False

    method: Annotated[
        str,
        _drafting(
            "--method",
            help=f"Drafting method; {AUTO} chooses at each step, {NONE} decodes plainly.",
            metavar="|".join((AUTO, *method_names())),
        ),
    ] = AUTO
    k: Annotated[
        str, _drafting("--k", help=f"Tokens drafted ahead; {AUTO} decides each step.", metavar=f"N|{AUTO}")
    ] = AUTO
    draft_model: Annotated[
        str | None, _drafting("--draft-model", help="A smaller model with the same vocabulary.", metavar="MODEL")
    ] = None
    drafter: Annotated[str | None, _drafting("--drafter", help="A drafter trained for this model.", metavar="PATH")] = (
        None
    )
    suffix_corpus: Annotated[
        list[str] | None, _drafting("--suffix-corpus", help="Text to draft from; repeatable.", metavar="FILE")
    ] = None
    suffix_store: Annotated[
        str | None, _drafting("--suffix-store", help="Keeps past answers to draft from between runs.", metavar="FILE")
    ] = None
    speculative_config: Annotated[
        str | None, _drafting("--speculative-config", help="All of it in one object, as vLLM has it.", metavar="JSON")
    ] = None

    temperature: Annotated[float | None, _sampling("--temperature", "-t", help="0 is greedy.")] = None
    top_k: Annotated[int | None, _sampling("--top-k", help="Keep the k most likely tokens.")] = None
    top_p: Annotated[float | None, _sampling("--top-p", help="Keep the smallest set with this mass.")] = None
    min_p: Annotated[float | None, _sampling("--min-p", help="Drop tokens below this share of the likeliest.")] = None
    repetition_penalty: Annotated[
        float | None, _sampling("--repetition-penalty", help="Above 1: repeat less, prompt included.")
    ] = None
    presence_penalty: Annotated[
        float | None, _sampling("--presence-penalty", help="Subtracted once from tokens already written.")
    ] = None
    frequency_penalty: Annotated[
        float | None, _sampling("--frequency-penalty", help="Subtracted per occurrence in the answer.")
    ] = None
    logit_bias: Annotated[
        list[str] | None, _sampling("--logit-bias", help="Added to a token's logit; repeatable.", metavar="ID=VALUE")
    ] = None
    bad_words: Annotated[
        list[str] | None, _sampling("--bad-word", help="Never write this; repeatable.", metavar="TEXT")
    ] = None
    min_tokens: Annotated[int | None, _sampling("--min-tokens", help="No end before this many tokens.")] = None
    max_tokens: Annotated[int | None, _sampling("--max-tokens", help="Unset: to the end of the context.")] = None
    stop: Annotated[list[str] | None, _sampling("--stop", help="End before this text; repeatable.", metavar="TEXT")] = (
        None
    )
    stop_token_ids: Annotated[
        list[int] | None, _sampling("--stop-token-id", help="End at this token; repeatable.", metavar="ID")
    ] = None
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Write on past the end-of-sequence token.")] = False
    include_stop_str_in_output: Annotated[
        bool, _sampling("--include-stop-str-in-output", help="Keep the stop text in the answer.")
    ] = False
    keep_special_tokens: Annotated[
        bool, _sampling("--keep-special-tokens", help="Show special tokens in the text.")
    ] = False
    seed: Annotated[int | None, _sampling("--seed", help="The same seed gives the same tokens.")] = None
    logprobs: Annotated[
        int | None, _sampling("--logprobs", help="With --json: log-probabilities of this many tokens per position.")
    ] = None

    def sampling_params(self, **more: Any) -> SamplingParams:
        from paceline.sampling_params import SamplingParams

        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given |= {"logit_bias": parse_logit_bias(self.logit_bias or []), **more}
        # By identity: 0 is a value the user may have given (--temperature 0), an unset flag is None, False or [].
        given = {
            name: value for name, value in given.items() if value is not None and value is not False and value != []
        }
        if self.keep_special_tokens:
            given["skip_special_tokens"] = False
        return SamplingParams(**given)


_SAMPLING_FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("bad_words", "min_tokens", "max_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "seed", "logprobs"),
)
REQUEST_FIELDS = (*_SAMPLING_FIELDS, "system", "json", "keep_special_tokens", "logit_bias")  # of one request


def parse_logit_bias(items: list[str]) -> dict[int, float] | None:
    bias: dict[int, float] = {}
    for item in items:
        token, _, value = item.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise typer.BadParameter(f"expected ID=VALUE, got {item!r}", param_hint="--logit-bias") from None
    return bias or None


def with_options(command: Callable[..., int], without: Sequence[str] = ()) -> Callable[..., int]:
    """Give a command the fields of RunOptions as flags; it receives them as its keyword `options`."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
    hints = get_type_hints(RunOptions, include_extras=True)
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(RunOptions)
        if f.name not in without
    ]

    @functools.wraps(command)
    def wrapper(**values: Any) -> int:
        options = RunOptions(**{parameter.name: values.pop(parameter.name) for parameter in shared})
        return command(**values, options=options)

    parameters = [*own, *shared]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper
