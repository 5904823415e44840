"""Sequences and drafts of one row."""

from __future__ import annotations

import time

from paceline.core.sequence import Owner, Sequence
from paceline.drafters import DraftRequest
from paceline.sampling_params import SamplingParams


def thread_seconds(run):
    """Return this thread's seconds of `run`: other programs' time does not count."""
    started = time.thread_time()
    run()
    return time.thread_time() - started


def sequence_of(tokens, num_prompt=None, request_id="a", index=0, domain=""):
    prompt = tokens[: len(tokens) if num_prompt is None else num_prompt]
    params, owner = SamplingParams().resolve({}), Owner(domain)
    sequence = Sequence(request_id, prompt, params, index=index, max_len=100_000, owner=owner)
    sequence.tokens += tokens[len(prompt) :]
    return sequence


def propose(drafter, sequence, max_nodes):
    """(tokens, parents) of a valid draft of one row."""
    draft = drafter.propose([DraftRequest(sequence, max_nodes)])
    draft.validate(1 << 30)
    assert draft.q is None
    count = int(draft.num_nodes[0])
    assert count <= max_nodes
    return draft.tokens[0, :count].tolist(), draft.parents[0, :count].tolist()
