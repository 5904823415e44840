"""Random numbers are hashes: pinned, uniform, independent between neighbours, and blind to the batch.

The statistics run on fixed keys, so they pass or fail for good; each would alarm by chance for one choice of keys in
about three million (5 standard deviations).
"""

import math

import numpy as np
import pytest
import torch

from paceline.core import rng
from paceline.core.rng import Lane, bits, bits_of, coin, coin_of, uniform
from tests.verify.steps import gumbel_noise as gumbel

SIGMAS = 5.0
KNOWN_BITS = [1826112205991530872]
KNOWN_UNIFORM = [0.06595453190963652, 0.5340955931661516]
KNOWN_GUMBEL = [1.35476, -0.238256, 0.085197, 0.66729]


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


def chi_square_sigmas(counts, expected):
    """How many standard deviations the statistic lies above its mean (Wilson and Hilferty's cube root)."""
    k = counts.numel() - 1
    x = float(((counts - expected) ** 2 / expected).sum())
    return ((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


def assert_uniform(u, cells=64):
    counts = torch.histc(u.double(), cells, 0, 1)
    assert chi_square_sigmas(counts, torch.full((cells,), u.numel() / cells)) < SIGMAS


def assert_independent(u, v, cells=16):
    counts = torch.bincount((u * cells).long() * cells + (v * cells).long(), minlength=cells * cells).double()
    assert chi_square_sigmas(counts, torch.full((cells * cells,), u.numel() / cells**2)) < SIGMAS


def reference_bits(lane, *words):
    """The same hash in Python's own integers."""
    top, golden = 2**64, 0x9E3779B97F4A7C15

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % top
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % top
        return z ^ (z >> 31)

    state = (words[0] * golden + mix(lane * golden % top)) % top
    for word in words[1:]:
        state = (mix(state) + word * golden) % top
    return mix(state)


def reference_token_bits(key, token):
    top, x = 2**32, token ^ (key % 2**32)
    x = (x ^ (x >> 17)) * 0xED5AD4BB % top
    x = ((x ^ (x >> 11)) + (key >> 32)) * 0xAC4C1B51 % top
    x = (x ^ (x >> 15)) * 0x31848BAB % top
    return x ^ (x >> 14)


def test_known_answers_stay_what_they_are():
    """A change here changes what every seed of every user means."""
    assert bits(Lane.WALK, ints(0), ints(0), ints(0)).tolist() == KNOWN_BITS
    assert uniform(Lane.ACCEPT, ints(1, 2), ints(3, 4)).tolist() == KNOWN_UNIFORM
    assert gumbel(ints(42), ints(7), 4)[0].tolist() == pytest.approx(KNOWN_GUMBEL, abs=1e-5)


@pytest.mark.parametrize("words", [(0,), (5, 9), (2**63 - 1, 0, 1), (1, 2, 3)])
def test_bits_are_the_hash_on_paper(words):
    found = int(bits(Lane.DRAFT, *[ints(word) for word in words])) % 2**64
    assert found == reference_bits(int(Lane.DRAFT), *words)


def test_the_token_hash_is_the_hash_on_paper():
    tokens = np.arange(0, 200_000, 997, dtype=np.uint32)
    for key in (0, 2**63 + 12345678901, 2**64 - 1):
        expected = [reference_token_bits(key, token) for token in tokens.tolist()]
        assert rng._numpy_token_bits(key, tokens).tolist() == expected


def test_coins_are_uniform_and_never_zero_or_one():
    u = coin(Lane.WALK, torch.arange(200_000), ints(17).expand(200_000), ints(-1).expand(200_000))
    assert_uniform(u)
    assert float(u.min()) > 0
    assert float(u.max()) < 1


@pytest.mark.parametrize("axis", ["seed", "position", "node", "lane"])
def test_neighbouring_keys_give_independent_coins(axis):
    n = 200_000
    key = [torch.arange(n) // 500, torch.arange(n) % 500, torch.zeros(n, dtype=torch.int64)]
    near, lane = list(key), Lane.WALK
    if axis == "lane":
        lane = Lane.GUMBEL
    else:
        at = ["seed", "position", "node"].index(axis)
        near[at] = near[at] + 1
    assert_independent(coin(Lane.WALK, *key), coin(lane, *near))


def test_words_do_not_trade_places():
    n = torch.arange(1000)
    both = torch.cat((bits(Lane.WALK, n, n + 1), bits(Lane.WALK, n + 1, n), bits(Lane.DRAFT, n, n + 1)))
    assert both.unique().numel() == 3000


def gumbel_uniforms(seed, position, vocab):
    return torch.exp(-torch.exp(-gumbel(seed, position, vocab).double()))


def test_gumbel_noise_is_gumbel_distributed_over_tokens_and_over_seeds():
    assert_uniform(gumbel_uniforms(ints(3), ints(0), 300_000)[0].clamp(0, 1 - 1e-12))
    assert_uniform(gumbel_uniforms(torch.arange(5_000), torch.zeros(5_000, dtype=torch.int64), 10)[:, 3])


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_neighbouring_gumbel_noise_is_independent(axis):
    seeds, positions = torch.arange(40), torch.arange(40) % 7
    if axis == "token":
        u = gumbel_uniforms(seeds, positions, 5001)
        a, b = u[:, :-1], u[:, 1:]
    else:
        a = gumbel_uniforms(seeds, positions, 5000)
        b = gumbel_uniforms(seeds + (axis == "seed"), positions + (axis == "position"), 5000)
    assert_independent(a.flatten().clamp(0, 1 - 1e-9), b.flatten().clamp(0, 1 - 1e-9))


def test_the_noise_of_a_rare_token_has_the_right_tail():
    """P(G > -log t) = 1 - exp(-t): over 16 million draws, the counts at t = 1e-5 and 1e-6 within 5 deviations."""
    draws, over = 0, {1e-5: 0, 1e-6: 0}
    for seed in range(8):
        noise = gumbel(ints(seed), ints(1), 2_000_000)
        draws += noise.numel()
        for t in over:
            over[t] += int((noise > -math.log(t)).sum())
    for t, count in over.items():
        assert abs(count - draws * t) < SIGMAS * math.sqrt(draws * t)


def test_the_largest_and_smallest_hash_give_finite_noise():
    extremes = torch.tensor([0, -1, 1, -(2**31), 2**31 - 1], dtype=torch.int32).float()
    noise = torch.from_numpy(rng.gumbel_from(rng.units_from(extremes).numpy()))
    assert torch.isfinite(noise).all()
    assert float(noise[0]) == pytest.approx(-math.log(2.0**-33), abs=1e-5)
    assert float(noise[1]) == pytest.approx(-math.log(1.5 * 2.0**-32), abs=1e-5)


def test_a_row_does_not_depend_on_the_other_rows():
    seeds, positions = torch.arange(33) * 7919, torch.arange(33) * 31
    together = gumbel(seeds, positions, 1001)
    coins = coin(Lane.WALK, seeds, positions, positions)
    for row in range(33):
        one = slice(row, row + 1)
        assert torch.equal(together[one], gumbel(seeds[one], positions[one], 1001))
        assert torch.equal(coins[one], coin(Lane.WALK, seeds[one], positions[one], positions[one]))


@pytest.mark.parametrize(("key", "committed", "node"), [(7, 12, -1), (-5, 0, 3), (2**63 - 1, 10**6, 31)])
def test_the_bits_and_the_coin_of_plain_numbers_are_those_of_arrays(key, committed, node):
    words = ints(key), ints(committed)
    assert bits_of(Lane.GUMBEL, key, committed) == int(bits(Lane.GUMBEL, *words)) % 2**64
    assert coin_of(Lane.WALK, key, committed, node) == float(coin(Lane.WALK, *words, ints(node)))
