"""A target that repeats itself, read through the cache like `HashModel`, and a way to run it with real drafters."""

from __future__ import annotations

import itertools
import time

import torch

from paceline.config import EngineConfig
from paceline.core.sequence import Sequence
from paceline.drafters import DraftRequest
from paceline.engine.engine import Engine
from paceline.models.plan import ModelOutput
from paceline.sampling_params import SamplingParams
from paceline.testing import HashModel, read_context, toy_config
from tests.helpers.contract_toys import ByRequest

VOCAB = 11
PERIOD = 7
SURPRISE = 13  # every so often the pattern breaks


def next_token(context):
    """The token a period ago, except at positions divisible by `SURPRISE`."""
    if len(context) < PERIOD:
        return sum(context) % VOCAB
    return (context[-PERIOD] + (len(context) % SURPRISE == 0)) % VOCAB


def greedy_periodic(prompt, max_tokens):
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(context))
    return context[len(prompt) :]


class PeriodicModel(HashModel):
    def forward(self, tokens, plan, caches, logit_rows, taps=()):
        super().forward(tokens, plan, caches, logit_rows[:0])
        logits = torch.zeros(len(logit_rows), VOCAB)
        for index, row in enumerate(logit_rows.tolist()):
            logits[index, next_token(read_context(plan, caches, row))] = 5.0
        return ModelOutput(logits, None)


def run_engine(drafters, choices, prompts, num_blocks=128, max_tokens=24, **sampling):
    """(sequence by request id, target passes); every request at once, blocks checked after every step."""
    config = EngineConfig(block_size=4, num_blocks=num_blocks, max_num_seqs=8, max_num_batched_tokens=32)
    model = PeriodicModel(toy_config(VOCAB))
    engine = Engine(model, config, drafters=drafters, policy=ByRequest(choices))
    params = SamplingParams(max_tokens=max_tokens, **sampling).resolve({})
    sequences = {name: engine.add_request(name, prompt, params)[0] for name, prompt in prompts.items()}
    for step in itertools.count():
        if not engine.has_work:
            break
        engine.step()
        engine.blocks.check(engine.scheduler.sequences())
        assert step < 2000, "the engine does not finish"
    assert engine.drafters.failures == 0
    return sequences, model.num_passes


def thread_seconds(run):
    """What `run` takes this thread: other programs' time does not count."""
    started = time.thread_time()
    run()
    return time.thread_time() - started


def sequence_of(tokens, num_prompt=None, request_id="a", index=0):
    prompt = tokens[: len(tokens) if num_prompt is None else num_prompt]
    sequence = Sequence(request_id, prompt, SamplingParams().resolve({}), index=index, max_len=100_000)
    sequence.tokens += tokens[len(prompt) :]
    return sequence


def propose(drafter, sequence, budget):
    """(tokens, parents) of a valid draft of one row."""
    draft = drafter.propose([DraftRequest(sequence, budget)])
    draft.validate(1 << 30)
    assert draft.q is None
    count = int(draft.num_nodes[0])
    assert count <= budget
    return draft.tokens[0, :count].tolist(), draft.parents[0, :count].tolist()
