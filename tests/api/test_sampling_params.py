"""Every field is honoured or refused by name."""

import math
from fractions import Fraction

import numpy as np
import pytest

from paceline.sampling_params import MAX_LOGPROBS, SamplingParams
from tests.helpers.errors import refused

HUGE = 10**5000  # more digits than Python prints
TOO_LARGE = (2**63, 2**64 + 1, 10**30)  # what a device cannot hold would raise in the step of the whole batch
REFUSED = {
    "n": (0, True, 1.5, *TOO_LARGE),
    "temperature": (-0.1, math.nan, math.inf, "hot", True, HUGE, Fraction(10**400, 3), np.array(0.5)),
    "top_k": (-2, 1.0, *TOO_LARGE),
    "top_p": (0, 1.5, math.nan),
    "min_p": (-0.01, 1.01),
    "repetition_penalty": (0, -1.0),
    "presence_penalty": (2.1,),
    "frequency_penalty": (-2.1, None),
    "logit_bias": ({1: 101}, {1: math.inf}, {-1: 1.0}, {"1": 1.0}, [1, 2], *({huge: 1.0} for huge in TOO_LARGE)),
    "bad_words": ([""], "word", [1], b"w5", ["a\ud800"]),
    "allowed_token_ids": ([], [1.5]),
    "min_tokens": (-1, *TOO_LARGE),
    "max_tokens": (0, 2.0, *TOO_LARGE),
    "stop": ("", ["a", ""], 3, {"a": 1}, "\udcff"),
    "stop_token_ids": ([-1], 5, [True], np.array(5), *([huge] for huge in TOO_LARGE)),
    "ignore_eos": (1, "false"),
    "seed": (-1, *TOO_LARGE),
    "logprobs": (-1, MAX_LOGPROBS + 1),
    "include_stop_str_in_output": ("yes",),
    "skip_special_tokens": (None,),
    "speculation": (3, {"speed": 9}, {"method": "ngram", "k": 0}),
    "best_of": (3,),
    "logits_processors": ([print],),
    "use_beam_search": (True,),
    "max_new_tokens": (5,),
    "guided_decoding": ({"regex": "a"},),
    "temprature": (1,),
}


@pytest.mark.parametrize("field", REFUSED)
def test_values_out_of_range_are_refused_by_name(field):
    for value in REFUSED[field]:
        with refused(field) as caught:
            SamplingParams(**{field: value})
        assert str(caught.value).startswith(f"{field}: ")


def test_contradictions_are_refused():
    with refused("min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with refused("n"):
        SamplingParams(n=2, temperature=0)
    with refused("n"):
        SamplingParams(n=2).resolve({})
    assert SamplingParams(n=2).resolve({"do_sample": True}).n == 2


def test_values_become_plain_python():
    params = SamplingParams(
        n=np.int64(1),
        temperature=np.float32(0.5),
        top_k=-1,
        stop="end",
        stop_token_ids=np.array([3, 4]),
        seed=np.int32(7),
    )
    assert (params.n, params.temperature, params.top_k, params.seed) == (1, 0.5, 0, 7)
    assert [type(v) for v in (params.n, params.temperature, params.top_k, params.seed)] == [int, float, int, int]
    assert params.stops == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert SamplingParams(stop=None, logit_bias={}).stops == ()


def test_the_callers_containers_are_copied():
    bias, stop = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[1], stop[0] = 9.0, "b"
    assert params.logit_bias == {1: 2.0}
    assert params.stops == ("a",)


@pytest.mark.parametrize(
    ("defaults", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.6}, 0.6),
        ({"do_sample": True, "temperature": None}, 1.0),
        ({"temperature": 0.6}, 0.6),
    ],
)
def test_the_default_temperature_is_read_as_transformers_means_it(defaults, temperature):
    assert SamplingParams().resolve(defaults).temperature == temperature


def test_default_filters_apply_only_when_sampling():
    defaults = {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.1}
    greedy = SamplingParams().resolve(defaults)
    assert (greedy.top_k, greedy.top_p, greedy.min_p, greedy.repetition_penalty) == (0, 1.0, 0.0, 1.1)
    assert greedy.greedy
    sampled = SamplingParams(temperature=1.0, top_k=0).resolve(defaults)
    assert (sampled.top_k, sampled.top_p, sampled.min_p, sampled.repetition_penalty) == (0, 0.8, 0.1, 1.1)
    assert not sampled.greedy
    assert sampled.penalised


def test_a_broken_generation_config_is_refused_too():
    with refused("top_p"):
        SamplingParams().resolve({"do_sample": True, "top_p": 7})
    with refused("temperature"):
        SamplingParams().resolve({"do_sample": True, "temperature": "warm"})


def test_token_ids_are_checked_against_the_vocabulary():
    params = SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[3])
    params.check_vocab(10)
    with refused("logit_bias"):
        params.check_vocab(9)
    with refused("stop_token_ids"):
        SamplingParams(stop_token_ids=[3]).check_vocab(3)


def test_sub_seeds_start_with_the_seed_and_never_meet():
    params = SamplingParams(n=4, seed=5, temperature=1.0)
    seeds = [params.sub_seed(i) for i in range(1000)]
    assert seeds[0] == 5
    neighbours = [SamplingParams(seed=6).sub_seed(i) for i in range(1000)]
    assert len({*seeds, *neighbours}) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert params.sub_seed(1) == 2875910158461559956
    assert SamplingParams().sub_seed(3) is None
