"""The flags of all commands: each is declared once, and arrives as a field of the command's options, a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

from paceline.config import AUTO, NONE, SpeculationConfig
from paceline.drafters.method_names import method_names
from paceline.drafters.speculative_config import check, given_options
from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from paceline.sampling_params import SamplingParams

Result = TypeVar("Result")
FLAG = "flag"  # key of a field's metadata
DEFAULT_MAX_TOKENS = 1024  # tokens; limit of an answer where none is given: a model that repeats itself never ends
SEVERAL = ("draft_model", "drafter", "suffix_corpus")  # fields of flags that are repeatable


def option(help: str, metavar: str | None = None, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, **more)


def flag(default: Any, help: str, metavar: str | None = None, *names: str, **more: Any) -> Any:
    """Declare a field of a command's options; its flag has the field's name, or `names`."""
    return field(default=default, metadata={FLAG: option(help, metavar, *names, **more)})


def argument(default: Any, help: str, metavar: str, **more: Any) -> Any:
    """Declare a field of a command's options that is no flag, but a word of the command line."""
    return field(default=default, metadata={FLAG: typer.Argument(help=help, metavar=metavar, **more)})


MODEL: dict[str, Any] = {"rich_help_panel": "Model"}
DRAFTING: dict[str, Any] = {"rich_help_panel": "Speculation (never changes the model's output)"}
SAMPLING_PANEL = "Sampling (unset: as the model's generation config says)"
_Declare = Callable[..., Any]
_model: _Declare = functools.partial(flag, **MODEL)
_drafting: _Declare = functools.partial(flag, **DRAFTING)
_sampling: _Declare = functools.partial(flag, rich_help_panel=SAMPLING_PANEL, show_default=False)
_METHODS = f"{AUTO} (chosen at each step), {NONE} (plain decoding) or {', '.join(method_names()[1:])}"

# -- flags of several commands

WHICH = "Alias, folder, .gguf file or hub id."
ModelFlag = Annotated[str, option(WHICH, "MODEL", "--model", "-m", **MODEL)]
Dtype = Annotated[str, option("How weights are stored in memory: auto, float32, bfloat16 or float16.", "TYPE", **MODEL)]
Device = Annotated[str, option("Where the model runs: auto, cpu or cuda.", "NAME", **MODEL)]
Threads = Annotated[int | None, option("CPU threads; unset: all usable cores.", **MODEL)]
Method = Annotated[str, option(f"What drafts: {_METHODS}.", "NAME", **DRAFTING)]
K = Annotated[str, option(f"Tokens drafted ahead; {AUTO} decides each step.", f"N|{AUTO}", **DRAFTING)]
DraftModel = Annotated[list[str] | None, option("A smaller model, of any vocabulary; repeatable.", "MODEL", **DRAFTING)]
Drafter = Annotated[
    list[str] | None, option("A drafter that was trained for this model; repeatable.", "PATH", **DRAFTING)
]
Quick = Annotated[bool, option("Measure less of everything: a few minutes on two cores.", None, "--quick")]
Json = Annotated[bool, option("Print one JSON object and nothing else.", None, "--json")]

# -- options


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The target."""

    model: ModelFlag = "smollm2"
    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    activations: str = _model(
        "float32", "float32, or int8: faster with weights stored as blocks, but another model's output.", "NAME"
    )
    kv_dtype: str = _model(
        "auto",
        "auto; bfloat16 or int8 (CPU), fp8 (GPU): half or a quarter of the cache, but another model's output.",
        "NAME",
        "--kv-dtype",
        "--kv-cache-dtype",
    )

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            refuse_undecodable(name, value)

    @property
    def target(self) -> tuple[str, ...]:
        """Return all options but those of sampling on which the model's output depends."""
        return self.model, self.dtype, self.activations, self.kv_dtype

    @property
    def load_options(self) -> dict[str, Any]:
        """Keywords of `LLM` and `build.load`."""
        return {name: getattr(self, name) for name in ("dtype", "device", "threads", "activations", "kv_dtype")}


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Measurements on the user's prompts, or the packaged ones."""

    prompts: Path | None = flag(
        None, "Prompts to use, jsonl or a text with one a line; unset: the packaged ones.", "FILE"
    )
    max_tokens: int | None = flag(None, "Answers end after this many tokens; unset: 64, with --quick 48.")
    temperature: float = flag(0.0, "0: always the likeliest token (greedy).")
    out: Path | None = flag(None, "Folder for the files that the command writes.", "FOLDER")
    quick: Quick = False
    raw: bool = flag(False, "Continue prompts as text, without the chat template.")
    draft_model: DraftModel = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions):
    """An engine: the target, its limits, and what drafts."""

    max_model_len: int | None = _model(None, "Longest context (prompt and answer), in tokens.")
    gpu_memory_fraction: float = _model(0.9, "Share of the GPU's memory to use, weights included.")
    method: Method = AUTO
    k: K = AUTO
    draft_model: DraftModel = None
    drafter: Drafter = None
    suffix_corpus: list[str] | None = _drafting(None, "A text to draft from; repeatable.", "FILE")
    suffix_store: str | None = _drafting(None, "Where answers are kept, to draft from in later runs.", "FILE")
    speculative_config: str | None = _drafting(None, "These settings as one object with vLLM's names.", "JSON")

    def speculation_arguments(self) -> dict[str, Any]:
        """Return the drafting flags as keywords of `LLM`, checked."""
        self.speculation_config()
        return {**self._drafting_flags(), "speculative_config": self.speculative_config}

    def speculation_config(self) -> SpeculationConfig:
        """Combine the drafting flags; refuse flags without effect, and contradictions."""
        from paceline.drafters.speculative_config import read

        by_flags = config = SpeculationConfig(**self._drafting_flags())
        if self.speculative_config is not None:
            config = read(self.speculative_config, by_flags)
            _refuse_contradictions(by_flags, config)
        check(config, only_chosen=True)
        return config

    def _drafting_flags(self) -> dict[str, Any]:
        several = {name: tuple(getattr(self, name) or ()) for name in SEVERAL}
        return {"method": self.method, "k": parse_k(self.k), "suffix_store": self.suffix_store, **several}


def parse_k(text: str) -> int | None:
    if text == AUTO:
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidParameter("k", f"must be a whole number or {AUTO}, got {text!r}") from None


def _refuse_contradictions(by_flags: SpeculationConfig, config: SpeculationConfig) -> None:
    set_by_flags = [name for name, unset in (("method", AUTO), ("k", None)) if getattr(by_flags, name) != unset]
    for name in (*set_by_flags, *given_options(by_flags)):
        by_flag, by_config = getattr(by_flags, name), getattr(config, name)
        if by_flag != by_config:
            raise InvalidParameter(name, f"is {by_flag} here and {by_config} in speculative_config; give it once")


@dataclass(frozen=True, kw_only=True)
class RunOptions(EngineOptions):
    """An engine and sampling. A sampling field that is None keeps the model's default, but for `max_tokens`."""

    system: str | None = flag(None, "System message, before the prompt.", "TEXT")
    json: bool = flag(False, "Print one JSON object per answer and nothing else.")
    temperature: float | None = _sampling(None, "0: always the likeliest token (greedy).", None, "--temperature", "-t")
    top_k: int | None = _sampling(None, "Sample from the k likeliest tokens only.")
    top_p: float | None = _sampling(None, "Sample from the fewest tokens with this probability together.")
    min_p: float | None = _sampling(None, "Drop tokens less likely than this share of the likeliest.")
    repetition_penalty: float | None = _sampling(None, "Above 1: fewer repetitions of the prompt and the answer.")
    presence_penalty: float | None = _sampling(None, "Lowers the logit of every token already in the answer.")
    frequency_penalty: float | None = _sampling(None, "Lowers a token's logit each time the answer has it.")
    logit_bias: list[str] | None = _sampling(None, "Add VALUE to the logit of token ID; repeatable.", "ID=VALUE")
    bad_words: list[str] | None = _sampling(
        None,
        "Ban the tokens that spell TEXT, alone or after a space; others may still spell it. Repeatable.",
        "TEXT",
        "--bad-word",
    )
    min_tokens: int | None = _sampling(None, "The answer does not end before this many tokens.")
    max_tokens: int | None = _sampling(None, f"The answer ends after this many tokens; unset: {DEFAULT_MAX_TOKENS}.")
    stop: list[str] | None = _sampling(None, "The answer ends before this text; repeatable.", "TEXT")
    stop_token_ids: list[int] | None = _sampling(
        None, "The answer ends with this token; repeatable.", "ID", "--stop-token-id"
    )
    ignore_eos: bool = _sampling(False, "Write on past the end-of-sequence token.")
    include_stop_str_in_output: bool = _sampling(False, "Keep the stop text in the answer.")
    keep_special_tokens: bool = _sampling(False, "Show special tokens in the answer.")
    seed: int | None = _sampling(None, "Sampling with the same seed gives the same answer.")
    logprobs: int | None = _sampling(None, "Log-probabilities of this many tokens per position (--json).")

    @property
    def token_limit(self) -> int:
        return max(DEFAULT_MAX_TOKENS, self.min_tokens or 0) if self.max_tokens is None else self.max_tokens

    def sampling_params(self, **more: Any) -> SamplingParams:
        from paceline.sampling_params import SamplingParams

        values = shared_fields(self, SamplingParams)
        values |= {"logit_bias": parse_logit_bias(self.logit_bias or []), "max_tokens": self.token_limit, **more}
        # An unset flag is None, False or []; compared by identity, since the user may set 0 (--temperature 0).
        values = {
            name: value for name, value in values.items() if value is not None and value is not False and value != []
        }
        if self.keep_special_tokens:
            values["skip_special_tokens"] = False
        return SamplingParams(**values)


def parse_logit_bias(items: list[str]) -> dict[int, float] | None:
    bias: dict[int, float] = {}
    for item in items:
        token, _, value = item.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise typer.BadParameter(f"expected ID=VALUE, got {item!r}", param_hint="--logit-bias") from None
    return bias or None


# -- fields of a dataclass as flags


def shared_fields(options: Any, kind: Any) -> dict[str, Any]:
    """Return the options that are fields of `kind`, a dataclass, too."""
    return {each.name: getattr(options, each.name) for each in fields(kind) if hasattr(options, each.name)}


def with_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give a command the fields of its `options`, a dataclass, as flags, after the parameters of its own."""
    parameters = inspect.signature(command, eval_str=True).parameters
    kind = parameters["options"].annotation
    hints = get_type_hints(kind, include_extras=True)
    shared = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=_annotation(each.name, hints[each.name], each.metadata.get(FLAG)),
        )
        for each in sorted(fields(kind), key=lambda each: each.name not in kind.__annotations__)  # inherited: later
    ]

    @functools.wraps(command)
    def wrapper(**values: Any) -> Result:
        options = kind(**{parameter.name: values.pop(parameter.name) for parameter in shared})
        return command(**values, options=options)

    whole = [*(parameter for name, parameter in parameters.items() if name != "options"), *shared]
    wrapper.__signature__ = inspect.Signature(whole)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in whole}
    return wrapper


def _annotation(name: str, kind: Any, declared: Any) -> Any:
    """Return a field's type for typer. The name is spelt: a switch has then no second flag that switches it off, and
    typer 0.27 takes a metavar for the name where both are one word (MINUTES)."""
    if isinstance(declared, OptionInfo) and declared.default is ...:  # else the first of its own names
        declared.param_decls = (f"--{name.replace('_', '-')}",)
    return kind if declared is None else Annotated[kind, declared]


def refuse_undecodable(name: str, value: object) -> None:
    """Refuse lone surrogates, which bytes of the command line that are not UTF-8 become: no tokenizer takes them."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InvalidParameter(name, "is not UTF-8 text")
