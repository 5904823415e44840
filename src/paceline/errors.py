"""Errors a user can cause and fix. Each message is one line with the problem and what to do about it.

PacelineError
├── InvalidParameter   a value out of range or in contradiction with another; carries the field's name
├── InvalidPrompt      empty, or of a wrong type
│   └── PromptTooLong      longer than the context, the answer included
├── ModelError
│   ├── ModelNotFound      no such alias, folder, file or hub id
│   ├── UnsupportedModel   an architecture or option the decoder does not know
│   ├── BrokenModel        missing, truncated or contradictory weights
│   └── DownloadFailed     no network, wrong checksum, no space
├── CacheFolderError   the cache folder cannot be read or written
├── DeviceError        no such device, or not enough memory on it
├── QueueFull          more requests wait than `max_waiting` allows
├── RequestFailed      a request ended by an error in its step; others go on
├── EngineClosed       the model was closed
└── EngineDied         the device is lost; every request ends and new ones are refused
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of every error meant for the user; the command line prints it without a traceback."""


class InvalidParameter(PacelineError):
    """A value out of range, or in contradiction with another; `field` is the parameter as the user wrote it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class InvalidPrompt(PacelineError):
    """A prompt or conversation that cannot be read: empty, longer than the context, or of a wrong type."""


class PromptTooLong(InvalidPrompt):
    """A prompt that does not fit into the context with its answer."""


class ModelError(PacelineError):
    """Base of errors of a model."""


class ModelNotFound(ModelError):
    """No alias, folder, file or hub id has this name."""


class UnsupportedModel(ModelError):
    """An architecture or an option of a model that the decoder does not know."""


class BrokenModel(ModelError):
    """Files of a model that are missing, cut off or contradict each other."""


class DownloadFailed(ModelError):
    """No network, a wrong checksum, or no space."""


class CacheFolderError(PacelineError):
    """The cache folder cannot be read or written."""


class DeviceError(PacelineError):
    """No such device, or not enough memory on it."""


class QueueFull(PacelineError):
    """More requests wait than `max_waiting` allows; try again later."""


class RequestFailed(PacelineError):
    """An error in a step ended this request; others go on."""


class EngineClosed(PacelineError):
    """The model was closed."""


class EngineDied(PacelineError):
    """The device is lost: every request ended, and new ones are refused."""


def short_repr(value: object, most: int = 80) -> str:
    """Return a value as messages quote it: shortened, and never an error of its own."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits, or an object that cannot be printed
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= most else text[: most - 1] + "…"
