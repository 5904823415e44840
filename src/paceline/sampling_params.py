"""What a user may ask of one generation: every field is honoured or refused by name, never ignored.

Names and meanings are those vLLM users know. None means "the model's default": `resolve` fills it from the model's
generation_config, so a resolved object holds numbers only. Knows no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import AUTO, MAX_K
from paceline.errors import InvalidParameter

MAX_LOGPROBS = 20
SEED_LIMIT = 2**63


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's wishes; sequences become tuples and numbers plain Python numbers on the way in."""

    n: int = 1
    temperature: float | None = None  # 0: greedy
    top_k: int | None = None  # 0 or -1: off
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None  # over prompt and output
    presence_penalty: float = 0.0  # over the output only
    frequency_penalty: float = 0.0  # over the output only
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    max_tokens: int | None = None  # None: to EOS or the context's end
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None  # 0: the chosen token's only; n: also the n most likely
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculation: str | Mapping[str, Any] | None = None  # None: the engine's choice

    def __post_init__(self) -> None:
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)
        self._refuse_contradictions()

    def _checked(self) -> dict[str, Any]:
        """Every field in its plain form; raises InvalidParameter at the first one out of range."""
        return {
            "n": _integer("n", self.n, 1),
            "temperature": _optional_real("temperature", self.temperature, "at least 0", lambda x: x >= 0),
            "top_k": _top_k(self.top_k),
            "top_p": _optional_real("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1),
            "min_p": _optional_real("min_p", self.min_p, "between 0 and 1", lambda x: 0 <= x <= 1),
            "repetition_penalty": _optional_real(
                "repetition_penalty", self.repetition_penalty, "above 0 (1 = off)", lambda x: x > 0
            ),
            "presence_penalty": _real("presence_penalty", self.presence_penalty, *_PENALTY),
            "frequency_penalty": _real("frequency_penalty", self.frequency_penalty, *_PENALTY),
            "logit_bias": _logit_bias(self.logit_bias),
            "bad_words": _strings("bad_words", self.bad_words),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0),
            "max_tokens": None if self.max_tokens is None else _integer("max_tokens", self.max_tokens, 1),
            "stop": _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "ignore_eos": _boolean("ignore_eos", self.ignore_eos),
            "seed": None if self.seed is None else _integer("seed", self.seed, 0, SEED_LIMIT - 1),
            "logprobs": None if self.logprobs is None else _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            "include_stop_str_in_output": _boolean("include_stop_str_in_output", self.include_stop_str_in_output),
            "skip_special_tokens": _boolean("skip_special_tokens", self.skip_special_tokens),
            "speculation": _speculation(self.speculation),
        }

    def _refuse_contradictions(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise InvalidParameter(
                "n", f"{self.n} answers at temperature 0 would all be the same; set temperature above 0 or n to 1"
            )

    @property
    def greedy(self) -> bool:
        """Meaningful once resolved: None is not yet a temperature."""
        return self.temperature == 0

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def penalised(self) -> bool:
        """Whether p depends on which tokens came before, beyond the model's own reading of them."""
        return self.repetition_penalty not in (None, 1.0) or self.presence_penalty != 0 or self.frequency_penalty != 0

    def resolve(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Fill every None from a generation_config.

        do_sample false means greedy, true means its temperature or 1.0; without do_sample a temperature written down
        counts, else greedy. Its top_k, top_p and min_p are only read when the outcome is to sample.
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
        return dataclasses.replace(self, **filled)

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse token ids the model does not have."""
        for name, ids in (("logit_bias", self.logit_bias or ()), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= vocab_size:
                    raise InvalidParameter(name, f"token id {token} is outside the vocabulary (0 to {vocab_size - 1})")

    def sub_seed(self, index: int) -> int | None:
        """The seed of the index-th of n answers; the first one's is the seed itself."""
        if self.seed is None or index == 0:
            return self.seed
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % SEED_LIMIT


def _default_temperature(defaults: Mapping[str, Any]) -> float:
    do_sample, temperature = defaults.get("do_sample"), defaults.get("temperature")
    if do_sample is None:
        do_sample = temperature is not None
    if not do_sample:
        return 0.0
    return 1.0 if temperature is None else _real("temperature", temperature, "at least 0", lambda x: x >= 0)


def _real(name: str, value: Any, allowed: str, holds: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidParameter(name, f"must be a number {allowed}, got {value!r}")
    number = float(value)
    if not math.isfinite(number) or not holds(number):
        raise InvalidParameter(name, f"must be {allowed}, got {value}")
    return number


_PENALTY = ("between -2 and 2", lambda x: -2 <= x <= 2)


def _optional_real(name: str, value: Any, allowed: str, holds: Any) -> float | None:
    return None if value is None else _real(name, value, allowed, holds)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    allowed = f"at least {low}" if high is None else f"between {low} and {high}"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InvalidParameter(name, f"must be a whole number {allowed}, got {value!r}") from None
    if number < low or (high is not None and number > high):
        raise InvalidParameter(name, f"must be {allowed}, got {number}")
    return number


def _top_k(value: Any) -> int | None:
    if value is None:
        return None
    try:
        return max(_integer("top_k", value, -1), 0)
    except InvalidParameter:
        raise InvalidParameter(
            "top_k", f"must be a whole number at least 1, or 0 or -1 for off, got {value!r}"
        ) from None


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidParameter(name, f"must be True or False, got {value!r}")
    return value


def _items(name: str, value: Any, what: str) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidParameter(name, f"must be a list of {what}, got {value!r}")
    return tuple(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = _items(name, () if value is None else value, "strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidParameter(name, f"must hold non-empty strings only, got {string!r}")
    return strings


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(_integer(name, token, 0) for token in _items(name, () if value is None else value, "token ids"))


def _logit_bias(value: Any) -> dict[int, float] | None:
    if not value and (value is None or isinstance(value, Mapping)):
        return None
    if not isinstance(value, Mapping):
        raise InvalidParameter("logit_bias", f"must map token ids to numbers between -100 and 100, got {value!r}")
    return {
        _integer("logit_bias", token, 0): _real("logit_bias", bias, "between -100 and 100", lambda x: -100 <= x <= 100)
        for token, bias in value.items()
    }


def _speculation(value: Any) -> str | dict[str, Any] | None:
    """A method's name, or {"method": ..., "k": ...}; which methods there are, the engine knows."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise InvalidParameter("speculation", f'must be a method or {{"method": ..., "k": ...}}, got {value!r}')
    for key in value:
        if key not in ("method", "k"):
            raise InvalidParameter("speculation", f"{key!r} is not understood; it takes method and k")
    chosen = dict(value)
    if "method" in chosen and not isinstance(chosen["method"], str):
        raise InvalidParameter("speculation", f"method must be a name, got {chosen['method']!r}")
    if chosen.get("k") == AUTO:
        chosen["k"] = None
    if chosen.get("k") is not None:
        chosen["k"] = _integer("speculation", chosen["k"], 1, MAX_K)
    return chosen
