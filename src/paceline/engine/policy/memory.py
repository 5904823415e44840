"""The policy's tables between runs, in the cache folder, so that a one-shot command does not start cold.

One file per model, device, kind of weights, kernels, activations, cache, number of threads and drafters: neither costs
nor acceptance carry over. A file that cannot be read or written costs speed for a moment, so it raises no error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.errors import BrokenModel, CacheFolderError
from paceline.files.regular import read_text
from paceline.models.load.hub import cache_home
from paceline.models.load.open_model import LoadedModel

log = logging.getLogger("paceline")
FORMAT = 8
MOST_BYTES = 16 << 20  # of a file that is read


class PolicyMemory:
    def __init__(self, model: Path, loaded: LoadedModel, drafters: Sequence[str]) -> None:
        """`drafters`: name and version of each."""
        decoder = loaded.decoder
        kernels = decoder.kernels
        setting = [str(model.resolve()), str(decoder.device), loaded.kind.label, kernels.name, kernels.activations]
        setting += [loaded.kv_dtype, str(torch.get_num_threads())]
        setting += drafters
        name = hashlib.blake2b(json.dumps(setting).encode(), digest_size=8).hexdigest()
        self._setting, self._name = setting, f"{name}.json"

    def load(self, policy: AdaptivePolicy) -> None:
        try:
            stored = json.loads(read_text(self.path(), MOST_BYTES))
            if stored["format"] == FORMAT and stored["setting"] == self._setting:
                policy.load(stored["state"])
        except FileNotFoundError:
            pass
        except (OSError, ArithmeticError, CacheFolderError, BrokenModel, LookupError, RecursionError) as problem:
            log.debug("nothing remembered of earlier runs: %r", problem)
        except (ValueError, TypeError, AttributeError) as problem:
            log.warning("policy/%s is not what an earlier run wrote (%r) and is made anew", self._name, problem)

    def save(self, policy: AdaptivePolicy) -> None:
        body: dict[str, Any] = {
            "format": FORMAT,
            "setting": self._setting,
            "saved": time.time(),
            "state": policy.state(),
        }
        try:
            path = self.path()
            path.parent.mkdir(parents=True, exist_ok=True)
            staging = path.with_suffix(f".{os.getpid()}.tmp")
            staging.write_text(json.dumps(body))
            staging.replace(path)
        except (OSError, CacheFolderError) as problem:
            log.debug("what was learnt could not be kept: %r", problem)

    def path(self) -> Path:
        return cache_home() / "policy" / self._name
