"""The tokens of a drafter that samples, and the q they were drawn from, under the same parameters as verification.

Rows drawn by a coin use a lane of their own; seeded and greedy rows draw the target's token if q equals p.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.rng import Lane, coin
from paceline.verify.pick import pick_weighted
from paceline.verify.processors import Controls, Nodes, probabilities, process
from paceline.verify.seam import with_kernels
from paceline.verify.walk import CoinSource, DrawKind, Draws, draw


@with_kernels
def propose(
    logits: Tensor, controls: Controls, draws: Draws, nodes: Nodes, source: CoinSource = coin
) -> tuple[Tensor, Tensor | None]:
    """(R,) a token for each row of a drafter's logits, and q (R, V); None where no sequence draws by coins."""
    processed = process(logits, controls, nodes)
    if draws.kind is None or not draws.coins:
        return draw(processed, draws, nodes), None
    q, at = probabilities(processed), (draws.kind == DrawKind.COIN)[nodes.seq].nonzero()[:, 0]
    tokens = draw(processed, replace(draws, kind=torch.where(draws.kind == DrawKind.COIN, 0, draws.kind)), nodes)
    seq = nodes.seq[at]
    coins = source(Lane.DRAFT, draws.key[seq], draws.committed[seq], nodes.node[at])
    tokens[at] = pick_weighted(q[at], coins)
    return tokens, q
