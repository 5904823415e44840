"""From the slot at which a rule of law 2 stopped to the tokens, kinds and path of a Verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.draft import Draft
from paceline.core.verdict import TokenKind, Verdict


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Where a rule for sampled drafts stopped, and the weights of the token drawn there."""

    slot: Tensor  # (B,) int64, 0 = the root
    leaf: Tensor  # (B,) bool: nothing was drafted below, the bonus comes from p
    residual: Tensor  # (B, V) weights of the recovered token; undefined at a leaf


def outcome(draft: Draft, path: Tensor, num_accepted: Tensor, last: Tensor, leaf: Tensor) -> Verdict:
    """The accepted nodes `path` (B, D) and the token (B,) drawn after them, at a leaf or not."""
    depth = torch.arange(path.shape[1] + 1, device=path.device)
    before, at_end = depth < num_accepted[:, None], depth == num_accepted[:, None]
    known = torch.cat((draft.tokens, last[:, None]), 1)  # so that there is a column even where nothing was drafted
    drafted = torch.cat((known.gather(1, path.clamp_min(0)), last[:, None]), 1)
    tokens = torch.where(before, drafted, torch.where(at_end, last[:, None], -1))
    final = torch.where(leaf, int(TokenKind.BONUS), int(TokenKind.RECOVERED))[:, None]
    kinds = torch.where(before, int(TokenKind.DRAFTED), torch.where(at_end, final, int(TokenKind.PAD))).to(torch.uint8)
    return Verdict(tokens=tokens, num_accepted=num_accepted, path=path, kinds=kinds)


def climb(draft: Draft, slot: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """(B, D) the nodes from the root's child down to the slot (B,), -1 beyond, and (B,) how many."""
    node = slot - 1
    height = torch.where(node >= 0, draft.depth.gather(1, node.clamp_min(0)[:, None])[:, 0], 0)
    path = node.new_full((draft.batch, max_depth + 1), -1)  # the last column discards what is above the root
    for up in range(max_depth):
        column = torch.where(height > up, height - 1 - up, max_depth)
        path.scatter_(1, column[:, None], node[:, None])
        node = torch.where(node >= 0, draft.parents.gather(1, node.clamp_min(0)[:, None])[:, 0], -1)
    return path[:, :max_depth], height


def has_children(draft: Draft) -> Tensor:
    """(B, N + 1) by slot."""
    used = torch.arange(draft.width, device=draft.tokens.device) < draft.num_nodes[:, None]
    below = draft.tokens.new_zeros(draft.batch, draft.width + 1)
    return below.scatter_reduce_(1, draft.parents + 1, used.to(below.dtype), "amax") > 0


def take(draft: Draft, rows: Tensor) -> Draft:
    """Some rows (B',) of a draft, ascending; q keeps its tensor."""
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
