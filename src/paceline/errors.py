"""Errors a user can cause and fix. Each message is one line with the problem and what to do about it.

PacelineError
├── InvalidParameter   a value out of range or in contradiction with another; carries the field's name
├── InvalidPrompt      empty, or longer than the context
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
    """`field` names the parameter as the user wrote it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class InvalidPrompt(PacelineError):
    pass


class ModelError(PacelineError):
    pass


class ModelNotFound(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class BrokenModel(ModelError):
    pass


class DownloadFailed(ModelError):
    pass


class CacheFolderError(PacelineError):
    pass


class DeviceError(PacelineError):
    pass


class QueueFull(PacelineError):
    pass


class RequestFailed(PacelineError):
    pass


class EngineClosed(PacelineError):
    pass


class EngineDied(PacelineError):
    pass
