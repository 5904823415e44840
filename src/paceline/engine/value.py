"""What a token is worth, in tokens, to whoever waits for the last of several answers.

Requests that come alone are each worth sooner: a token is a token. The answers of one call of `generate` are waited for
together, and then one that runs ahead saves little: it leaves its rows to nobody, and the slowest decides. With answers
of unknown length (memoryless, `speeds` their rates of ending), the time until all have ended falls, for a token of one
of them, by what it costs to keep that one alive: the whole pass while it is the last, one more row before that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LENGTH = 256.0  # tokens after which an answer may have ended by itself
FORESEEN, FORESEEN_MOST = 0.6, 4.0  # how far a limit tells who will be the last
_POINTS = 24
_V = (np.arange(_POINTS) + 0.5)[:, None] / _POINTS  # (P, 1); u = v^4 crowds points where few are left


def token_values(paces: Sequence[float], rooms: Sequence[float], pass_s: float, row_s: float) -> list[float]:
    """`paces`: tokens per step; `rooms`: tokens that may still come; a pass of S rows takes pass_s + S row_s.

    1.0 for each where all are alike, less for one that will have ended long before the others.
    """
    room = np.asarray(rooms)
    rate = np.asarray(paces) / room  # of ending, per step
    mean = rate.mean()
    speed = rate / mean
    gone = 1 - _V ** (4 * speed) + 1e-12  # (P, S): probability to have ended by then
    all_others_gone = gone.prod(axis=1, keepdims=True) / gone
    alive = 4 * _V ** (4 * speed - 1) / _POINTS
    value = (alive * all_others_gone).sum(axis=0) * pass_s + row_s / speed
    value = value / (mean * room) * len(room) / (pass_s + len(room) * row_s)
    return [float(one) for one in value]


def values_of_few(paces: Sequence[float], rooms: Sequence[float], pass_s: float, row_s: float) -> list[float]:
    """The same of a few, in a tenth of the time, and with an eye to limits.

    How likely one is to be the last grows with the steps it still needs: of two in proportion where answers end by
    themselves, as above, and as a higher power of them where a limit is near that ends them all.
    """
    power = min(1 + FORESEEN * LENGTH / max(rooms), FORESEEN_MOST)
    chances = [(room / pace) ** power for pace, room in zip(paces, rooms, strict=True)]
    last_s, scale = pass_s / sum(chances), len(rooms) / (pass_s + len(rooms) * row_s)
    return [(chance * last_s + row_s) / pace * scale for chance, pace in zip(chances, paces, strict=True)]
