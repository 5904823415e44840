"""From the nodes that a rule accepted, and the token drawn after them, to a Verdict."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.draft import Draft
from paceline.core.verdict import TokenKind, Verdict


def outcome(draft: Draft, path: Tensor, num_accepted: Tensor, last: Tensor, leaf: Tensor) -> Verdict:
    """Return the verdict that accepts the nodes `path` (B, D) and commits the tokens `last` (B,) after them.

    `leaf` (B,): nothing was drafted there, so the last token is a bonus.
    """
    depth = torch.arange(path.shape[1] + 1, device=path.device)
    before, at_end = depth < num_accepted[:, None], depth == num_accepted[:, None]
    known = torch.cat((draft.tokens, last[:, None]), 1)  # so that there is a column even where nothing was drafted
    drafted = torch.cat((known.gather(1, path.clamp_min(0)), last[:, None]), 1)
    tokens = torch.where(before, drafted, torch.where(at_end, last[:, None], -1))
    final = torch.where(leaf, int(TokenKind.BONUS), int(TokenKind.RECOVERED))[:, None]
    kinds = torch.where(before, int(TokenKind.DRAFTED), torch.where(at_end, final, int(TokenKind.PAD))).to(torch.uint8)
    return Verdict(tokens=tokens, num_accepted=num_accepted, path=path, kinds=kinds)


def has_children(draft: Draft) -> Tensor:
    """Return (B, N + 1) bool, by slot."""
    used = torch.arange(draft.width, device=draft.tokens.device) < draft.num_nodes[:, None]
    below = draft.tokens.new_zeros(draft.batch, draft.width + 1)
    return below.scatter_reduce_(1, draft.parents + 1, used.to(below.dtype), "amax") > 0


def take(draft: Draft, rows: Tensor) -> Draft:
    """Return some rows (B',) of a draft, ascending; q keeps its tensor."""
    if rows.shape[0] == draft.batch:
        return draft
    q = None if draft.q is None else replace(draft.q, row_of=draft.q.row_of[rows])
    return Draft(
        tokens=draft.tokens[rows],
        parents=draft.parents[rows],
        depth=draft.depth[rows],
        num_nodes=draft.num_nodes[rows],
        q=q,
    )
