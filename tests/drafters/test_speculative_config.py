"""vLLM's settings of speculation."""

from __future__ import annotations

import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.speculative_config import FIELD, read
from paceline.errors import InvalidParameter


def test_vllms_speculative_config_is_understood_and_lossy_options_are_refused():
    base = SpeculationConfig(method="auto")
    config = read('{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4}', base)
    assert (config.method, config.k, config.ngram_max) == ("ngram", 6, 4)
    assert read({"model": "smollm2"}, base).method == "draft-model"
    assert read({"prompt_lookup_max": 1}, base).ngram_min == 1
    given = {"method": "dspark", "model": "b", "num_speculative_tokens": 4}
    for beside in ({"drafter": "a"}, {"method": "auto", "k": 3}, {"method": "suffix"}):
        with pytest.raises(InvalidParameter):
            read(given, SpeculationConfig(**beside))
    for wrong, named in (
        ({"posterior_threshold": 0.1}, "posterior_threshold"),
        ({"method": "mlp_speculator"}, "mlp_speculator"),
        ({"method": ["ngram"]}, "ngram"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"method": "ngram", "model": "smollm2"}, "model"),
        ({"warp": 9}, "'warp'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": "many"}, "num_speculative_tokens"),
        ("{", "JSON"),
        ("[]", "empty"),
    ):
        with pytest.raises(InvalidParameter) as refused:
            read(wrong, base)
        assert refused.value.field == FIELD
        assert named in str(refused.value)
