"""The flags of all commands: each is declared once, and arrives as a field of the command's options, a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from paceline.config import AUTO, NONE, SpeculationConfig
from paceline.drafters.method_names import method_names
from paceline.drafters.speculative_config import check, given_options
from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from paceline.sampling_params import SamplingParams

Result = TypeVar("Result")
DEFAULT_MAX_TOKENS = 1024  # tokens; limit of an answer where none is given: a model that repeats itself never ends
SEVERAL = ("draft_model", "drafter", "suffix_corpus")  # fields of flags that are repeatable


def flag(*names: str, help: str, metavar: str | None = None, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **more)


_model = functools.partial(flag, panel="Model")
_drafting = functools.partial(flag, panel="Speculation (never changes the model's output)")
_sampling = functools.partial(flag, panel="Sampling (unset: as the model's generation config says)", show_default=False)

# -- flags of several commands

_WHICH = "Alias, folder, .gguf file or hub id."
Model = Annotated[str, typer.Argument(help=_WHICH, metavar="MODEL")]
ModelFlag = Annotated[str, _model("--model", "-m", help=_WHICH, metavar="MODEL")]
Dtype = Annotated[
    str,
    _model("--dtype", help="How weights are stored in memory: auto, float32, bfloat16 or float16.", metavar="TYPE"),
]
Device = Annotated[str, _model("--device", help="Where the model runs: auto, cpu or cuda.", metavar="NAME")]
Threads = Annotated[int | None, _model("--threads", help="CPU threads; unset: all usable cores.")]
Activations = Annotated[
    str,
    _model(
        "--activations",
        help="float32, or int8: faster with weights stored as blocks, but another model's output.",
        metavar="NAME",
    ),
]
KVDtype = Annotated[
    str,
    _model(
        "--kv-dtype",
        "--kv-cache-dtype",
        help="auto, or fp8: half the cache's memory on a GPU, but another model's output.",
        metavar="NAME",
    ),
]
Method = Annotated[
    str,
    _drafting(
        "--method",
        help=f"What drafts: {AUTO} (chosen at each step), {NONE} (plain decoding) or {', '.join(method_names()[1:])}.",
        metavar="NAME",
    ),
]
K = Annotated[str, _drafting("--k", help=f"Tokens drafted ahead; {AUTO} decides each step.", metavar=f"N|{AUTO}")]
DraftModel = Annotated[
    list[str] | None,
    _drafting("--draft-model", help="A smaller model of the same vocabulary; repeatable.", metavar="MODEL"),
]
Drafter = Annotated[
    list[str] | None,
    _drafting("--drafter", help="A drafter that was trained for this model; repeatable.", metavar="PATH"),
]
Quick = Annotated[bool, flag("--quick", help="Measure less of everything: a few minutes on two cores.")]
Json = Annotated[bool, flag("--json", help="Print one JSON object and nothing else.")]

# -- options


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The target."""

    model: ModelFlag = "smollm2"
    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    activations: Activations = "float32"
    kv_dtype: KVDtype = "auto"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            refuse_undecodable(name, value)

    @property
    def target(self) -> tuple[str, ...]:
        """Every option on which the model's output depends, but for sampling."""
        return self.model, self.dtype, self.activations, self.kv_dtype

    @property
    def load_options(self) -> dict[str, Any]:
        """Keywords of `LLM` and `build.load`."""
        return {name: getattr(self, name) for name in ("dtype", "device", "threads", "activations", "kv_dtype")}


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Measurements on the user's prompts, or the packaged ones."""

    prompts: Annotated[
        Path | None,
        flag(
            "--prompts",
            help="Prompts to use, jsonl or a text with one a line; unset: the packaged ones.",
            metavar="FILE",
        ),
    ] = None
    max_tokens: Annotated[
        int | None, flag("--max-tokens", help="Answers end after this many tokens; unset: 64, with --quick 48.")
    ] = None
    temperature: Annotated[float, flag("--temperature", help="0: always the likeliest token (greedy).")] = 0.0
    out: Annotated[
        Path | None, flag("--out", help="Folder for the files that the command writes.", metavar="FOLDER")
    ] = None
    quick: Quick = False
    raw: Annotated[bool, flag("--raw", help="Continue prompts as text, without the chat template.")] = False
    draft_model: DraftModel = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions):
    """An engine: the target, its limits, and what drafts."""

    max_model_len: Annotated[
        int | None, _model("--max-model-len", help="Longest context (prompt and answer), in tokens.")
    ] = None
    gpu_memory_fraction: Annotated[
        float, _model("--gpu-memory-fraction", help="Share of the GPU's memory to use, weights included.")
    ] = 0.9
    method: Method = AUTO
    k: K = AUTO
    draft_model: DraftModel = None
    drafter: Drafter = None
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

    system: Annotated[str | None, flag("--system", help="System message, before the prompt.", metavar="TEXT")] = None
    json: Annotated[bool, flag("--json", help="Print one JSON object per answer and nothing else.")] = False
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
    def token_limit(self) -> int:
        return max(DEFAULT_MAX_TOKENS, self.min_tokens or 0) if self.max_tokens is None else self.max_tokens

    def sampling_params(self, **more: Any) -> SamplingParams:
        from paceline.sampling_params import SamplingParams

        values = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        values |= {"logit_bias": parse_logit_bias(self.logit_bias or []), "max_tokens": self.token_limit, **more}
        # By identity: 0 may be a value of the user's (--temperature 0), an unset flag is None, False or [].
        values = {
            name: value for name, value in values.items() if value is not None and value is not False and value != []
        }
        if self.keep_special_tokens:
            values["skip_special_tokens"] = False
        return SamplingParams(**values)


_SAMPLING_FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("bad_words", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "seed", "logprobs"),
)


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


def with_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give a command the fields of its `options`, a dataclass, as flags, after the parameters of its own."""
    parameters = inspect.signature(command, eval_str=True).parameters
    kind = parameters["options"].annotation
    hints = get_type_hints(kind, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in sorted(fields(kind), key=lambda field: field.name not in kind.__annotations__)  # inherited: later
    ]

    @functools.wraps(command)
    def wrapper(**values: Any) -> Result:
        options = kind(**{parameter.name: values.pop(parameter.name) for parameter in shared})
        return command(**values, options=options)

    whole = [*(parameter for name, parameter in parameters.items() if name != "options"), *shared]
    wrapper.__signature__ = inspect.Signature(whole)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in whole}
    return wrapper


def refuse_undecodable(name: str, value: object) -> None:
    """Refuse lone surrogates, which bytes of the command line that are not UTF-8 become: no tokenizer takes them."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InvalidParameter(name, "is not UTF-8 text")
