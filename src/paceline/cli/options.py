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
from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from paceline.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 1024  # of an answer: a model that repeats itself would write on to the end of its context


def _flag(*names: str, help: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(
        *names, help=help, rich_help_panel=panel, metavar=metavar, show_default=not panel.startswith("Sampling")
    )


_model = functools.partial(_flag, panel="Model")
_drafting = functools.partial(_flag, panel="Speculation (never changes the model's output)")
_sampling = functools.partial(_flag, panel="Sampling (unset: as the model's generation config says)")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A sampling field left at None is not passed on, so that the model's own defaults hold; `max_tokens` has ours."""

    model: Annotated[
        str, _model("--model", "-m", help="Alias, folder with safetensors, .gguf file or hub id.", metavar="MODEL")
    ] = "smollm2"
    dtype: Annotated[
        str,
        _model("--dtype", help="How weights are stored in memory: auto, float32, bfloat16 or float16.", metavar="TYPE"),
    ] = "auto"
    device: Annotated[str, _model("--device", help="Where the model runs: auto, cpu or cuda.", metavar="NAME")] = "auto"
    threads: Annotated[int | None, _model("--threads", help="CPU threads; unset: all usable cores.")] = None
    numerics: Annotated[
        str,
        _model(
            "--numerics",
            help="exact: drafting changes no bit; fast: large passes on a GPU may round differently.",
            metavar="NAME",
        ),
    ] = "exact"
    activations: Annotated[
        str,
        _model(
            "--activations",
            help="float32, or int8: faster with weights stored as blocks, but another model's output.",
            metavar="NAME",
        ),
    ] = "float32"
    kv_dtype: Annotated[
        str,
        _model(
            "--kv-dtype",
            "--kv-cache-dtype",
            help="auto, or fp8: half the cache's memory on a GPU, but another model's output.",
            metavar="NAME",
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None, _model("--max-model-len", help="Longest context (prompt and answer), in tokens.")
    ] = None
    gpu_memory_fraction: Annotated[
        float, _model("--gpu-memory-fraction", help="Share of the GPU's memory to use, weights included.")
    ] = 0.9
    system: Annotated[
        str | None, typer.Option("--system", help="System message, before the prompt.", metavar="TEXT")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per answer and nothing else.")] = False

    method: Annotated[
        str,
        _drafting(
            "--method",
            help=f"What drafts: {AUTO} (chosen at each step), {NONE} (plain decoding) or "
            f"{', '.join(method_names()[1:])}.",
            metavar="NAME",
        ),
    ] = AUTO
    k: Annotated[
        str, _drafting("--k", help=f"Tokens drafted ahead; {AUTO} decides each step.", metavar=f"N|{AUTO}")
    ] = AUTO
    draft_model: Annotated[
        list[str] | None,
        _drafting("--draft-model", help="A smaller model of the same vocabulary; repeatable.", metavar="MODEL"),
    ] = None
    drafter: Annotated[
        list[str] | None,
        _drafting("--drafter", help="A drafter that was trained for this model; repeatable.", metavar="PATH"),
    ] = None
    suffix_corpus: Annotated[
        list[str] | None, _drafting("--suffix-corpus", help="A text to draft from; repeatable.", metavar="FILE")
    ] = None
    suffix_store: Annotated[
        str | None,
        _drafting("--suffix-store", help="Where answers are kept, to draft from in later runs.", metavar="FILE"),
    ] = None
    speculative_config: Annotated[
        str | None,
        _drafting("--speculative-config", help="These settings as one object with vLLM's names.", metavar="JSON"),
    ] = None

    temperature: Annotated[
        float | None, _sampling("--temperature", "-t", help="0: always the likeliest token (greedy).")
    ] = None
    top_k: Annotated[int | None, _sampling("--top-k", help="Sample from the k likeliest tokens only.")] = None
    top_p: Annotated[
        float | None, _sampling("--top-p", help="Sample from the fewest tokens with this probability together.")
    ] = None
    min_p: Annotated[
        float | None, _sampling("--min-p", help="Drop tokens less likely than this share of the likeliest.")
    ] = None
    repetition_penalty: Annotated[
        float | None, _sampling("--repetition-penalty", help="Above 1: fewer repetitions of the prompt and the answer.")
    ] = None
    presence_penalty: Annotated[
        float | None, _sampling("--presence-penalty", help="Lowers the logit of every token already in the answer.")
    ] = None
    frequency_penalty: Annotated[
        float | None, _sampling("--frequency-penalty", help="Lowers a token's logit each time the answer has it.")
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        _sampling("--logit-bias", help="Add VALUE to the logit of token ID; repeatable.", metavar="ID=VALUE"),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        _sampling(
            "--bad-word",
            help="Ban the tokens that spell TEXT, alone or after a space; others may still spell it. Repeatable.",
            metavar="TEXT",
        ),
    ] = None
    min_tokens: Annotated[
        int | None, _sampling("--min-tokens", help="The answer does not end before this many tokens.")
    ] = None
    max_tokens: Annotated[
        int | None,
        _sampling("--max-tokens", help=f"The answer ends after this many tokens; unset: {DEFAULT_MAX_TOKENS}."),
    ] = None
    stop: Annotated[
        list[str] | None, _sampling("--stop", help="The answer ends before this text; repeatable.", metavar="TEXT")
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        _sampling("--stop-token-id", help="The answer ends with this token; repeatable.", metavar="ID"),
    ] = None
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Write on past the end-of-sequence token.")] = False
    include_stop_str_in_output: Annotated[
        bool, _sampling("--include-stop-str-in-output", help="Keep the stop text in the answer.")
    ] = False
    keep_special_tokens: Annotated[
        bool, _sampling("--keep-special-tokens", help="Show special tokens in the answer.")
    ] = False
    seed: Annotated[int | None, _sampling("--seed", help="Sampling with the same seed gives the same answer.")] = None
    logprobs: Annotated[
        int | None, _sampling("--logprobs", help="Log-probabilities of this many tokens per position (--json).")
    ] = None

    @property
    def target(self) -> tuple[str, ...]:
        """What decides the model's output beside sampling: drafting never does."""
        return (self.model, self.dtype, self.numerics, self.activations, self.kv_dtype)

    @property
    def token_limit(self) -> int:
        return max(DEFAULT_MAX_TOKENS, self.min_tokens or 0) if self.max_tokens is None else self.max_tokens

    def sampling_params(self, **more: Any) -> SamplingParams:
        from paceline.sampling_params import SamplingParams

        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given |= {"logit_bias": parse_logit_bias(self.logit_bias or []), "max_tokens": self.token_limit, **more}
        # By identity: 0 is a value the user may have given (--temperature 0), an unset flag is None, False or [].
        given = {
            name: value for name, value in given.items() if value is not None and value is not False and value != []
        }
        if self.keep_special_tokens:
            given["skip_special_tokens"] = False
        return SamplingParams(**given)


_SAMPLING_FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("bad_words", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "seed", "logprobs"),
)
REQUEST_FIELDS = (
    *_SAMPLING_FIELDS,
    "system",
    "json",
    "keep_special_tokens",
    "logit_bias",
    "max_tokens",
)  # of one request


def parse_logit_bias(items: list[str]) -> dict[int, float] | None:
    bias: dict[int, float] = {}
    for item in items:
        token, _, value = item.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise typer.BadParameter(f"expected ID=VALUE, got {item!r}", param_hint="--logit-bias") from None
    return bias or None


def refuse_undecodable(name: str, value: object) -> None:
    """Bytes of the command line that are not UTF-8 arrive as lone surrogates, which no tokenizer takes."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InvalidParameter(name, "is not UTF-8 text")


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
        for parameter in shared:
            refuse_undecodable(parameter.name, values[parameter.name])
        options = RunOptions(**{parameter.name: values.pop(parameter.name) for parameter in shared})
        return command(**values, options=options)

    parameters = [*own, *shared]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper
