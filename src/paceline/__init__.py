"""Speculative decoding: language models that answer sooner without changing their output.

`from paceline import LLM, AsyncLLM, SamplingParams` is the public API. The names are looked up on first use, so that
importing the package, and with it `paceline --help`, does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.errors import PacelineError
    from paceline.llm import LLM
    from paceline.outputs import CompletionOutput, RequestOutput, StreamChunk
    from paceline.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "PacelineError",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
    "__version__",
]

_HOME = {
    "LLM": "paceline.llm",
    "AsyncLLM": "paceline.async_llm",
    "SamplingParams": "paceline.sampling_params",
    "PacelineError": "paceline.errors",
    "RequestOutput": "paceline.outputs",
    "CompletionOutput": "paceline.outputs",
    "StreamChunk": "paceline.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
