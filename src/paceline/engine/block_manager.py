"""The cache blocks that each sequence holds. Ids only: `models.kv_cache` has the tensors, and `slots_of` there computes
the slots of positions from block ids.

A block is free (in the free list, oldest use first) or referenced by one or more sequences. A full block whose every
slot is committed is published under a hash of its domain and all tokens up to its end, and can be shared; it keeps its
contents while free, until it is handed out again. Shared blocks are never written.

Each block carries marks: the drafters whose own K/V in it are complete. Drafters store K/V of the pair (hidden state
of t, token t + 1) in slot t + 1, so a slot depends on nothing after it, and a marked block proves all its slots.

A sequence that holds blocks has a `req_index`: a row of one array with its block ids, from which a pass takes tables.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import numpy as np

from paceline.core.sequence import Sequence, block_hash, root_hash
from paceline.engine.batch import Ints, Tables

Reserved = Mapping[str, int]  # sequence key -> end of the slots that a launched step or an early draft writes
NONE_RESERVED: Reserved = {}


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._references = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._marks: list[frozenset[str]] = [frozenset()] * num_blocks
        self._chain: dict[str, list[bytes]] = {}  # sequence key -> hashes of its full committed blocks
        self._tables: Tables = np.full((1, 8), -1, np.int32)  # rows by req_index; either side doubles when it is full
        self._req_indices = [0]  # free ones

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the blocks that a sequence of `num_tokens` tokens needs beside its own."""
        return self.blocks_for(num_tokens) - len(sequence.blocks)

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the sequence blocks for `num_tokens` tokens in all; the missing ones are free."""
        held = len(sequence.blocks)
        for _ in range(held, self.blocks_for(num_tokens)):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            sequence.blocks.append(block)
        if len(sequence.blocks) > held:
            self._write_table(sequence, held)

    def trim(self, sequence: Sequence, num_tokens: int) -> None:
        """Take back blocks beyond `num_tokens`: those allocated for drafts that were not accepted."""
        while len(sequence.blocks) > self.blocks_for(num_tokens):
            self._release((sequence.blocks.pop(),))
            self._tables[sequence.req_index, len(sequence.blocks)] = -1

    def tables_at(self, req_indices: Ints, width: int) -> Tables:
        """Return (S, width) the block ids of sequences that hold some, -1 beyond a sequence's end."""
        return self._tables[:, :width].take(req_indices, 0)

    def free(self, sequence: Sequence) -> None:
        """Release all blocks, the last first, so that a shared beginning is evicted last."""
        self._release(reversed(sequence.blocks))
        sequence.blocks.clear()
        if sequence.req_index >= 0:
            self._tables[sequence.req_index] = -1
            self._req_indices.append(sequence.req_index)
            sequence.req_index = -1
        self._chain.pop(sequence.key, None)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Return published blocks that hold the sequence's first tokens; at least one token is left to compute."""
        prefix: list[int] = []
        if not self.prefix_caching:
            return prefix
        parent, size = root_hash(sequence.owner.domain), self.block_size
        for start in range(0, len(sequence.tokens) - size, size):
            parent = block_hash(parent, sequence.tokens[start : start + size])
            block = self._published.get(parent)
            if block is None:
                break
            prefix.append(block)
        return prefix

    def num_free_after(self, prefix: Iterable[int]) -> int:
        """Return the free blocks left once `prefix` is taken: its unreferenced blocks are in the free list."""
        return len(self._free) - sum(self._references[block] == 0 for block in prefix)

    def num_unshared(self, sequence: Sequence) -> int:
        """Return the blocks that are free once the sequence has left."""
        return sum([self._references[block] == 1 for block in sequence.blocks])

    def take_prefix(self, sequence: Sequence, prefix: list[int]) -> None:
        assert not sequence.blocks
        for block in prefix:
            self._free.pop(block, None)
            self._references[block] += 1
        sequence.blocks = list(prefix)
        if prefix:
            self._write_table(sequence, 0)
        self._chain[sequence.key] = [self._hash[block] or b"" for block in prefix]

    def publish(self, sequence: Sequence) -> None:
        """Make every full block of computed, committed tokens available to other sequences."""
        if not self.prefix_caching:
            return
        chain, size = self._chain.setdefault(sequence.key, []), self.block_size
        for index in range(len(chain), sequence.num_computed // size):
            parent = chain[-1] if chain else root_hash(sequence.owner.domain)
            chain.append(block_hash(parent, sequence.tokens[index * size : (index + 1) * size]))
            block = sequence.blocks[index]
            if chain[-1] not in self._published:  # else a twin was published first and this block stays private
                self._published[chain[-1]] = block
                self._hash[block] = chain[-1]

    def settle(self, sequences: Iterable[Sequence], reserved: Reserved = NONE_RESERVED) -> None:
        """Free blocks behind the sequences' tokens and reserved slots, and publish full ones."""
        size = self.block_size
        for sequence in sequences:
            if len(sequence.blocks) * size >= len(sequence.tokens) + size:
                self.trim(sequence, max(len(sequence.tokens), reserved.get(sequence.key, 0)))
            if self.prefix_caching:
                self.publish(sequence)

    def mark(self, sequence: Sequence, drafter: str, start: int, end: int) -> None:
        """Mark the blocks inside positions [start, end), where the drafter's K/V are complete.

        The last block comes first: those before a marked one were marked with it, or earlier.
        """
        first, last = -(-start // self.block_size), min(end // self.block_size, len(sequence.blocks))
        for block in reversed(sequence.blocks[first:last]):
            if drafter in self._marks[block]:
                break
            self._marks[block] |= {drafter}

    def marked_from(self, sequence: Sequence, drafter: str) -> int:
        """Return the first position from which all cached blocks of a sequence are marked for the drafter."""
        index = sequence.num_cached // self.block_size
        while index and drafter in self._marks[sequence.blocks[index - 1]]:
            index -= 1
        return index * self.block_size

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that references, the free list and tables agree with the blocks that sequences hold."""
        held, sequences = [0] * self.num_blocks, list(sequences)
        for sequence in sequences:
            for block in sequence.blocks:
                held[block] += 1
        assert held == self._references, "a block leaked or is held twice"
        assert all((count == 0) == (block in self._free) for block, count in enumerate(held))
        assert all(self._hash[block] == key for key, block in self._published.items())
        for sequence in sequences:
            row = [] if sequence.req_index < 0 else self._tables[sequence.req_index].tolist()
            assert row == sequence.blocks + [-1] * (len(row) - len(sequence.blocks)), "a table is not what is held"

    def _write_table(self, sequence: Sequence, changed: int) -> None:
        """Copy the sequence's block ids from index `changed` on into its row of the tables, and first assign one."""
        while len(sequence.blocks) > self._tables.shape[1]:
            self._tables = np.pad(self._tables, ((0, 0), (0, self._tables.shape[1])), constant_values=-1)
        if sequence.req_index < 0:
            if not self._req_indices:
                self._req_indices = list(range(len(self._tables), 2 * len(self._tables)))
                self._tables = np.pad(self._tables, ((0, len(self._tables)), (0, 0)), constant_values=-1)
            sequence.req_index = self._req_indices.pop()
        if changed == len(sequence.blocks) - 1:  # mostly
            self._tables[sequence.req_index, changed] = sequence.blocks[-1]
        else:
            self._tables[sequence.req_index, changed : len(sequence.blocks)] = sequence.blocks[changed:]

    def _release(self, blocks: Iterable[int]) -> None:
        references, free, hashes, unmarked = self._references, self._free, self._hash, frozenset[str]()
        for block in blocks:
            references[block] -= 1
            if references[block] == 0:
                free[block] = None
                if hashes[block] is None:  # nothing worth keeping: hand it out first
                    self._marks[block] = unmarked
                    free.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        key = self._hash[block]
        if key is not None:
            del self._published[key]
        self._hash[block] = None
        self._marks[block] = frozenset()
