"""What the rows of one pass are and what each of them may see.

Every row (a prefill token, a decoded token, a node of a draft tree) sees the logical positions 0..position. The first
`prefix` of them are read through its sequence's block table; the rest, a tree node's drafted ancestors and the node
itself, through explicit slots. So a node reads the same values in the same order as the token would when decoded
plainly: kernels that walk positions in order give the same bits for both.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PassPlan:
    """Built once per pass, shared by all layers. All tensors are int32 on the model's device; M rows, S sequences."""

    positions: Tensor  # (M,) logical position, for RoPE; the row sees positions + 1 tokens
    slots: Tensor  # (M,) cache slot its K/V is written to; -1: the slot already holds it (a recomputed token)
    sequence: Tensor  # (M,) which row of block_tables
    prefix: Tensor  # (M,) positions [0, prefix) are read through the block table
    path: Tensor  # (M, P) slots of positions prefix, prefix + 1, ...; P is 0 where no row has drafted ancestors
    path_len: Tensor  # (M,) prefix + path_len == positions + 1
    block_tables: Tensor  # (S, W) block ids, -1 beyond a sequence's end
    block_size: int
    max_len: int  # the largest positions + 1, known on the host
