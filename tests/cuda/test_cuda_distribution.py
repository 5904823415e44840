"""Sampled answers with a draft model have the distribution of plain ones: drafted behind steps under way, on a device.

Tokens and pairs of tokens at several positions are compared by a two-sample G-test. With 16 p-values a false alarm at
FALSE_ALARM is one in some 600 runs.
"""

from __future__ import annotations

import collections

import pytest
import torch

from paceline.config import EngineConfig
from paceline.drafters.model.draft_model import DraftModelDrafter
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan
from tests.cuda.test_cuda import CONFIG, DEVICE
from tests.helpers.contract_toys import ByRequest, params
from tests.helpers.random_llama import decoder_and_drafter

pytestmark = pytest.mark.cuda
PROMPT, LENGTH, K = [3, 1, 4, 1, 5], 7, 3
COLUMNS = ((1,), (2,), (4,), (6,), (1, 2), (2, 3), (3, 4), (5, 6))
ANSWERS, FALSE_ALARM = 6000, 1e-4


def engine_of(drafts):
    target, small = decoder_and_drafter(CONFIG, DEVICE)
    config = EngineConfig(
        prefix_caching=False, num_blocks=1024, block_size=16, max_num_seqs=128, max_num_batched_tokens=1024
    )
    return Engine(target, config, drafters=[DraftModelDrafter(small)] if drafts else [], policy=ByRequest({}))


def sample(engine, count, together, sampling):
    """Answers to one prompt, and the share of drafted tokens that was accepted."""
    method = DraftPlan(DraftModelDrafter.name, K) if engine.drafters.drafters else DraftPlan()
    engine.policy.choices = {str(at): method for at in range(together)}
    outputs, drafted, accepted = [], 0, 0
    while len(outputs) < count:
        wanted = params(max_tokens=LENGTH, ignore_eos=True, **sampling)
        sequences = [engine.add_request(str(at), PROMPT, wanted)[0] for at in range(together)]
        while engine.has_work:
            engine.step()
        outputs += [sequence.output_tokens for sequence in sequences]
        drafted += sum(sequence.stats.num_draft_tokens for sequence in sequences)
        accepted += sum(sequence.stats.num_accepted_tokens for sequence in sequences)
    assert engine.drafters.failures == 0
    return outputs, accepted / max(drafted, 1)


def two_samples(one, other, columns):
    """p-value of both having one distribution; cells of fewer than 20 are taken together."""
    counts = [collections.Counter(tuple(each[at] for at in columns) for each in sample) for sample in (one, other)]
    pairs = [[count[cell] for count in counts] for cell in set(counts[0]) | set(counts[1])]
    cells = [pair for pair in pairs if sum(pair) >= 20]
    if rare := [pair for pair in pairs if sum(pair) < 20]:
        cells.append([sum(column) for column in zip(*rare, strict=True)])
    if len(cells) < 2:
        return 1.0
    seen = torch.tensor(cells, dtype=torch.float64)
    expected = seen.sum(1, keepdim=True) * seen.sum(0) / seen.sum()
    g = 2 * torch.special.xlogy(seen, seen / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2, dtype=torch.float64), g / 2))


@pytest.mark.parametrize("sampling", [{"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.8, "top_k": 30}])
def test_sampled_answers_with_a_draft_model_are_distributed_as_plain_ones(sampling):
    plain, _ = sample(engine_of(False), ANSWERS, 128, sampling)
    drafting = engine_of(True)
    for together in (128, 16):
        drafted, accepted = sample(drafting, ANSWERS // (1 if together == 128 else 4), together, sampling)
        assert 0.2 < accepted < 0.95, "drafts are rejected and accepted"
        assert min(two_samples(plain, drafted, columns) for columns in COLUMNS) > FALSE_ALARM
