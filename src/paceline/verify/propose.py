"""The tokens of a drafter that samples, and the q they were drawn from, under the same parameters as verification.

Rows drawn by a coin use a lane of their own; seeded and greedy rows draw what the target would if q were p.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from paceline.rng import Lane, coin
from paceline.verify import seam
from paceline.verify.pick import pick_weighted
from paceline.verify.processors import Controls, Nodes, probabilities, process
from paceline.verify.walk import CoinSource, Draws, draw


def propose(
    logits: Tensor, controls: Controls, draws: Draws, nodes: Nodes, source: CoinSource = coin
) -> tuple[Tensor, Tensor | None]:
    """(R,) a token for each row of a drafter's logits, and (Rc, V) q of the rows drawn by coins; None: no row is."""
    if (kernels := seam.kernels(logits)) is not None:
        return kernels.propose(logits, controls, draws, nodes, source)  # type: ignore[no-any-return]
    processed = process(logits, controls, nodes)
    tokens = draw(processed, replace(draws, coins=None), nodes)
    if (at := draws.coins) is None:
        return tokens, None
    q, seq = probabilities(processed[at]), nodes.seq[at]
    tokens[at] = pick_weighted(q, source(Lane.DRAFT, draws.key[seq], draws.committed[seq], nodes.node[at]))
    return tokens, q
