"""Sampling parameters of one request: every field is honoured or refused by name, never ignored.

Names and meanings are vLLM's. None means "the model's default": `resolve` fills it from the model's generation_config,
so a resolved object holds numbers only. No torch.
"""

from __future__ import annotations

import functools
import hashlib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.config import AUTO, MAX_INT, MAX_K, truth, whole_number
from paceline.errors import InvalidParameter, short_repr
from paceline.text import structured_outputs
from paceline.vllm_compat import SAMPLING, refuse

MAX_LOGPROBS = 20
MAX_N = 4096  # answers to one prompt
SEED_LIMIT = 2**63
T = TypeVar("T")


def _refusing(cls: type[T]) -> type[T]:
    """Refuse arguments that the dataclass does not have by name, in place of a TypeError."""
    create: Callable[..., None] = cls.__init__

    @functools.wraps(create)
    def init(self: T, *unnamed: Any, **values: Any) -> None:
        if unnamed:
            raise InvalidParameter(cls.__name__, "takes its parameters by name, such as temperature=0.7")
        refuse({name: value for name, value in values.items() if name not in _CHECKS}, SAMPLING, _CHECKS, cls.__name__)
        create(self, **{name: value for name, value in values.items() if name in _CHECKS})

    cls.__init__ = init  # type: ignore[assignment]
    return cls


@_refusing
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling of one request. Unset fields take the model's own defaults, from its generation_config.

        SamplingParams(temperature=0.7, top_p=0.9, max_tokens=200, seed=1)

    Values are checked here: one out of range raises `InvalidParameter`. Sequences are kept as tuples, numbers as plain
    Python numbers.
    """

    n: int = 1
    temperature: float | None = None  # 0: greedy
    top_k: int | None = None  # 0 or -1: off
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None  # over prompt and output
    presence_penalty: float = 0.0  # over the output only
    frequency_penalty: float = 0.0  # over the output only
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None  # None: all
    bad_words: Sequence[str] = ()  # never written by the tokens that spell them at a text's start or after a space
    min_tokens: int = 0
    max_tokens: int | None = None  # None: to EOS or the context's end
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None  # 0: the chosen token's only; n: also the n most likely
    prompt_logprobs: int | None = None  # `logprobs` for every prompt token but the first
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: Mapping[str, Any] | None = None  # one of structured_outputs.KINDS
    speculation: str | Mapping[str, Any] | None = None  # None: the engine's choice

    def __post_init__(self) -> None:
        self._set({name: getattr(self, name) for name in _CHECKS})

    def _set(self, values: Mapping[str, Any]) -> None:
        """Set fields to values in their plain form; raise InvalidParameter at the first one out of range."""
        for name, value in values.items():
            object.__setattr__(self, name, _CHECKS[name](name, value))
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidParameter("ignore_eos", "a structured answer ends with EOS; leave one of the two out")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise InvalidParameter(
                "n", f"{self.n} answers at temperature 0 would all be the same; set temperature above 0 or n to 1"
            )

    @property
    def greedy(self) -> bool:
        """Return True at temperature 0; before `resolve` the temperature may be unknown."""
        return self.temperature == 0

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return tuple(self.stop)

    @property
    def penalised(self) -> bool:
        """Return True if a penalty makes p depend on earlier tokens beyond the model's logits."""
        return self.repetition_penalty not in (None, 1.0) or self.presence_penalty != 0 or self.frequency_penalty != 0

    def resolve(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Fill every None from a generation_config; only filled fields are checked again.

        do_sample false means greedy, true means its temperature or 1.0; without do_sample a temperature written down
        counts, else greedy. Its top_k, top_p and min_p are read only for sampling.
        """
        temperature = _default_temperature(defaults) if self.temperature is None else self.temperature
        filters = defaults if temperature > 0 else {}
        filled: dict[str, Any] = {"temperature": temperature}
        for name, source, neutral in (
            ("top_k", filters, 0),
            ("top_p", filters, 1.0),
            ("min_p", filters, 0.0),
            ("repetition_penalty", defaults, 1.0),
        ):
            if getattr(self, name) is None:
                default = source.get(name)
                filled[name] = neutral if default is None else default
        resolved = object.__new__(type(self))
        resolved.__dict__.update(self.__dict__)
        resolved._set(filled)
        return resolved

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse token ids the model does not have."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            ids: Iterable[int] = getattr(self, name) or ()
            for token in ids:
                if token >= vocab_size:
                    raise InvalidParameter(
                        name, f"token id {short_repr(token)} is outside the vocabulary (0 to {vocab_size - 1})"
                    )

    def with_seed(self, seed: int) -> SamplingParams:
        """Return the parameters with a seed; those of a greedy request, or with a seed, stay as they are."""
        if self.greedy or self.seed is not None:
            return self
        seeded = object.__new__(type(self))
        seeded.__dict__.update(self.__dict__, seed=seed)
        return seeded

    def sub_seed(self, index: int) -> int | None:
        """Return the seed of the index-th of n answers; the first one's is the seed itself."""
        if self.seed is None or index == 0:
            return self.seed
        return derived_seed(self.seed, index)


def derived_seed(seed: int, index: int) -> int:
    """Return the index-th of the seeds that follow from one."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SEED_LIMIT


def _default_temperature(defaults: Mapping[str, Any]) -> float:
    do_sample, temperature = defaults.get("do_sample"), defaults.get("temperature")
    if do_sample is None:
        do_sample = temperature is not None
    if not do_sample:
        return 0.0
    return 1.0 if temperature is None else _temperature("temperature", temperature)


Check = Callable[[str, Any], Any]  # (field, value) -> the value in its plain form


def _real(allowed: str, holds: Callable[[float], bool]) -> Check:
    def check(name: str, value: Any) -> float:
        if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise InvalidParameter(name, f"must be a number {allowed}, got {short_repr(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise InvalidParameter(name, f"must be a finite number {allowed}, got {short_repr(value)}")
        if not holds(number):
            raise InvalidParameter(name, f"must be {allowed}, got {short_repr(value)}")
        return number

    return check


def _integer(low: int, high: int) -> Check:
    return lambda name, value: whole_number(name, value, low, high)


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _top_k(name: str, value: Any) -> int:
    try:
        return max(whole_number(name, value, -1, MAX_INT), 0)
    except InvalidParameter:
        raise InvalidParameter(
            name, f"must be a whole number between 1 and {MAX_INT}, or 0 or -1 for off, got {short_repr(value)}"
        ) from None


def _items(name: str, value: Any, what: str) -> tuple[Any, ...]:
    try:
        if isinstance(value, str | bytes | bytearray | Mapping):
            raise TypeError
        return tuple(value)
    except TypeError:  # an array without dimensions claims to be iterable
        raise InvalidParameter(name, f"must be a list of {what}, got {short_repr(value)}") from None


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if name == "stop" and isinstance(value, str):
        value = (value,)
    strings = _items(name, () if value is None else value, "strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidParameter(name, f"must hold non-empty strings only, got {short_repr(string)}")
        if any("\ud800" <= character <= "\udfff" for character in string):  # bytes that were no text
            raise InvalidParameter(name, f"{short_repr(string)} is not valid Unicode text")
    return strings


_token_id = _integer(0, MAX_INT)
_bias = _real("between -100 and 100", lambda x: -100 <= x <= 100)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(_token_id(name, token) for token in _items(name, () if value is None else value, "token ids"))


def _allowed(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = tuple(dict.fromkeys(_token_ids(name, value)))
    if not ids:
        raise InvalidParameter(name, "is empty, so that no token could be written; name some, or leave it out")
    return ids


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidParameter(name, f"must map token ids to numbers between -100 and 100, got {short_repr(value)}")
    return None if not value else {_token_id(name, token): _bias(name, bias) for token, bias in value.items()}


def _speculation(name: str, value: Any) -> str | dict[str, Any] | None:
    """Return a method's name, or {"method": ..., "k": ...}; the engine checks that the method exists."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise InvalidParameter(name, f'must be a method or {{"method": ..., "k": ...}}, got {short_repr(value)}')
    for key in value:
        if key not in ("method", "k"):
            raise InvalidParameter(name, f"{short_repr(key)} is not understood; it takes method and k")
    chosen = dict(value)
    if "method" in chosen and not isinstance(chosen["method"], str):
        raise InvalidParameter(name, f"method must be a name, got {short_repr(chosen['method'])}")
    if chosen.get("k") == AUTO:
        chosen["k"] = None
    if chosen.get("k") is not None:
        chosen["k"] = whole_number(name, chosen["k"], 1, MAX_K)
    return chosen


_temperature = _real("at least 0", lambda x: x >= 0)
_penalty = _real("between -2 and 2", lambda x: -2 <= x <= 2)
_CHECKS: dict[str, Check] = {
    "n": _integer(1, MAX_N),
    "temperature": _optional(_temperature),
    "top_k": _optional(_top_k),
    "top_p": _optional(_real("above 0 and at most 1", lambda x: 0 < x <= 1)),
    "min_p": _optional(_real("between 0 and 1", lambda x: 0 <= x <= 1)),
    "repetition_penalty": _optional(_real("above 0 (1 = off)", lambda x: x > 0)),
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed,
    "bad_words": _strings,
    "min_tokens": _integer(0, MAX_INT),
    "max_tokens": _optional(_integer(1, MAX_INT)),
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "ignore_eos": truth,
    "seed": _optional(_integer(0, SEED_LIMIT - 1)),
    "logprobs": _optional(_integer(0, MAX_LOGPROBS)),
    "prompt_logprobs": _optional(_integer(0, MAX_LOGPROBS)),
    "include_stop_str_in_output": truth,
    "skip_special_tokens": truth,
    "structured_outputs": structured_outputs.check,
    "speculation": _speculation,
}
