"""Files of models that are damaged at random."""

from __future__ import annotations

import random


def mutated(whole: bytes, rng: random.Random) -> bytes:
    """Cut a file, lengthen it, or change bytes: anywhere, in the first eight, or in the header."""
    data, kind = bytearray(whole), rng.randrange(6)
    if kind == 0:
        return bytes(data[: rng.randrange(len(data))])
    if kind == 1:
        return bytes(data) + rng.randbytes(rng.randint(1, 50))
    most = {2: len(data), 3: 32}.get(kind, min(len(data), 1200))
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(most)
        data[place] = rng.choice([rng.randrange(256), 0, 255, data[place] ^ 1 << rng.randrange(8)])
    return bytes(data)
