"""The command line. Nothing here imports torch, rich or the engine before a command needs it."""

from __future__ import annotations

from paceline.cli.app import main

__all__ = ["main"]
