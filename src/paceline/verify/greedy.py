"""The walk where nobody samples and nothing changes the logits, on the host: one argmax a row, then plain comparisons.

A step's other work runs from caches the pass has emptied, where a small tensor operation takes many times as long as
it should; this is the most common step, so it takes as few of them as it can.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft, Kind, Verdict


def walk_greedily(draft: Draft, logits: Tensor, row_of: Tensor, max_depth: int) -> Verdict:
    """`walk` by the argmax of raw logits (R, V) in the host's memory; of equal siblings the first one counts."""
    said = np.asarray(logits.numpy().argmax(-1))
    batch = draft.batch
    tokens = np.full((batch, max_depth + 1), -1, np.int64)
    kinds = np.full((batch, max_depth + 1), int(Kind.PAD), np.uint8)
    path = np.full((batch, max_depth), -1, np.int64)
    num_accepted = np.zeros(batch, np.int64)
    if not draft.width:
        tokens[:, 0], kinds[:, 0] = said[row_of.numpy()[:, 0]], int(Kind.BONUS)
        return _verdict(tokens, num_accepted, path, kinds)
    drafts = zip(draft.tokens.tolist(), draft.parents.tolist(), draft.num_nodes.tolist(), strict=True)
    for row, (at, (drafted, parents, count)) in enumerate(zip(row_of.tolist(), drafts, strict=True)):
        node, depth, is_leaf, wanted = -1, 0, True, int(said[at[0]])
        for child in range(count):  # nodes come after their parents
            if parents[child] != node:
                continue
            is_leaf = False
            if drafted[child] == wanted:
                tokens[row, depth], kinds[row, depth], path[row, depth] = wanted, int(Kind.DRAFTED), child
                node, depth, is_leaf, wanted = child, depth + 1, True, int(said[at[child + 1]])
        tokens[row, depth] = wanted
        kinds[row, depth] = int(Kind.BONUS if is_leaf else Kind.RECOVERED)
        num_accepted[row] = depth
    return _verdict(tokens, num_accepted, path, kinds)


def _verdict(
    tokens: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    num_accepted: np.ndarray[tuple[int], np.dtype[np.int64]],
    path: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    kinds: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
) -> Verdict:
    return Verdict(
        tokens=torch.from_numpy(tokens),
        num_accepted=torch.from_numpy(num_accepted),
        path=torch.from_numpy(path),
        kinds=torch.from_numpy(kinds),
    )
