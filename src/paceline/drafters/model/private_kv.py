"""K/V of a drafter whose positions are not the target's: its own cache, in blocks of its own, for several sequences.

The cache is bounded. A sequence that needs blocks takes them from those that drafted longest ago, which read their
text again when they draft next.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.models.decoder import Model
from paceline.models.kv_cache import KVCache

BLOCK_SIZE = 16  # tokens
MOST_BYTES = 512 << 20  # of all K/V: 11,000 tokens of a small model; on a CPU pages are taken when they are written


@dataclass(eq=False)
class OwnKV:
    """The K/V of one sequence: slot i of its blocks holds those of token i."""

    tokens: list[int] = field(default_factory=list)  # the drafter's tokens whose K/V are computed
    blocks: list[int] = field(default_factory=list)
    last_used: int = 0


class PrivateKV:
    def __init__(self, model: Model, most_bytes: int = MOST_BYTES) -> None:
        per_block = KVCache.bytes_per_block(model.kv_specs, BLOCK_SIZE, model.cache_dtype)
        self._model, self._num_blocks = model, max(most_bytes // per_block, 1)
        self._cache = KVCache(
            model.kv_specs,
            num_blocks=self._num_blocks,
            block_size=BLOCK_SIZE,
            dtype=model.cache_dtype,
            device=model.device,
        )
        self.layers = self._cache.layers
        self._free = list(range(self._num_blocks))
        self._held: dict[OwnKV, None] = {}
        self._clock = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def most_tokens(self) -> int:
        """Return the tokens that one sequence may have, if no other has any."""
        return self._num_blocks * BLOCK_SIZE

    def allocate(self, kv: OwnKV, num_tokens: int, keep: Collection[OwnKV]) -> bool:
        """Give a sequence blocks for this number of tokens; return whether there are enough beside those of `keep`."""
        self._clock += 1
        kv.last_used = self._clock
        missing = -(-num_tokens // BLOCK_SIZE) - len(kv.blocks)
        while missing > len(self._free):
            others = [one for one in self._held if one not in keep and one is not kv]
            if not others:
                return False
            self.free(min(others, key=lambda one: one.last_used))
        if missing > 0:
            kv.blocks += [self._free.pop() for _ in range(missing)]
            self._held[kv] = None
        return True

    def free(self, kv: OwnKV) -> None:
        """Take back all blocks of a sequence; its K/V are gone."""
        self._free += kv.blocks
        kv.blocks, kv.tokens = [], []
        self._held.pop(kv, None)
