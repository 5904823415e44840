"""Steps of all kinds as the engine has them judged: what each asks for, and drafts made up at random."""

from dataclasses import fields, replace

import numpy as np
import torch

from paceline.core import rng
from paceline.core.draft import Draft, Proposal
from paceline.core.sequence import Sequence
from paceline.core.verdict import Logprobs
from paceline.sampling_params import SamplingParams
from paceline.verify import DrawKeys, Nodes, SamplingMode
from tests.helpers.enumeration import depths_of

ASKED = {
    "greedy": [{"temperature": 0.0}],
    "sampled": [{"temperature": 0.7}],
    "top-p": [{"temperature": 0.7, "top_p": 0.9}],
    "all filters": [{"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01}],
    "seeded": [{"temperature": 0.7, "seed": 3}],
    "seeded, top-p": [{"temperature": 0.7, "seed": 3, "top_p": 0.9}],
    "logprobs": [{"temperature": 0.7, "logprobs": 3}],
    "penalties": [{"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {3: 2.0}}],
    "allowed": [{"temperature": 0.7, "allowed_token_ids": range(0, 40, 2)}, {"temperature": 0.7, "seed": 3}],
    "each its own": [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "seed": 3}],
}
DRAFTS = ("nothing", "chains", "trees", "sampled chains", "trees and sampled chains")


def sequences_of(asked, count):
    every = [SamplingParams(max_tokens=400, **ASKED[asked][at % len(ASKED[asked])]).resolve({}) for at in range(count)]
    return [Sequence(str(at), [1, 2, 3 + at], params, max_len=500) for at, params in enumerate(every)]


MODES = {"greedy": SamplingMode.GREEDY, "seeded": SamplingMode.SEEDED, "coins": SamplingMode.COIN}


def draws_of(key, committed, kinds):
    """`DrawKeys` of sequences whose kinds are greedy, seeded or coins."""
    kind = torch.tensor([MODES[each] for each in kinds], device=key.device)
    return DrawKeys(key=key, committed=committed, kind=kind)


def greedy_draws(count):
    return DrawKeys(key=torch.zeros(count, dtype=torch.int64), committed=torch.zeros(count, dtype=torch.int64))


def gumbel_noise(seeds, positions, vocab):
    """(R, V) the noise of every token at each (seed, position)."""
    keys, tokens = rng.bits(rng.Lane.GUMBEL, seeds, positions), np.arange(vocab, dtype=np.uint32)
    return torch.from_numpy(np.stack([rng.gumbel_from(rng.unit_row(key, tokens)) for key in keys.tolist()]))


def tree(tokens, parents, width=None):
    """A Draft of one row."""
    return batch_of([(tokens, parents)], width)


def batch_of(rows, width=None):
    """A Draft of rows (tokens, parents)."""
    width = max([len(tokens) for tokens, _ in rows], default=0) if width is None else width

    def pad(values, filler):
        return torch.tensor([[*v, *[filler] * (width - len(v))] for v in values], dtype=torch.int64).view(
            len(rows), width
        )

    return Draft(
        tokens=pad([r[0] for r in rows], 0),
        parents=pad([r[1] for r in rows], -1),
        depth=pad([depths_of(r[1]) for r in rows], 0),
        num_nodes=torch.tensor([len(r[0]) for r in rows]),
    )


def flatten(draft):
    """Valid slots in order: row_of (B, N + 1) and the nodes behind the rows."""
    slots = torch.arange(draft.width + 1) <= draft.num_nodes[:, None]
    row_of = torch.where(slots, slots.flatten().cumsum(0).view_as(slots) - 1, -1)
    seq, slot = slots.nonzero(as_tuple=True)
    return row_of, Nodes.of(draft, seq, slot - 1, draft.width)


def step(draft, batch, width, logits, shape, generator):
    """A draft, which row of logits is whose, and the logits: written where they always stand, a draft's tokens likely.

    Rows draft from 1 to `width` nodes; how many, and below which others, is the seed `shape`'s to say.
    """
    vocab, device, shaping = logits.shape[1], logits.device, torch.Generator().manual_seed(shape)

    logits.copy_(torch.randn(logits.shape, generator=generator) * 2)
    if draft == "nothing":
        return Draft.empty(batch), logits[:batch], torch.arange(batch)[:, None]
    counts = torch.randint(1, width + 1, (batch,), generator=shaping)
    node = torch.arange(width)
    used = node < counts[:, None]
    parents = (node - 1).expand(batch, width)
    is_tree = torch.full((batch, 1), "trees" in draft)
    if "sampled" in draft:
        is_tree[::2] = False
    if "trees" in draft:
        trees = torch.minimum(torch.randint(width, (batch, width), generator=shaping), node) - 1
        parents = torch.where(is_tree, trees, parents)
    depth = torch.zeros(batch, width + 1, dtype=torch.int64)
    for at in range(width):
        depth[:, at + 1] = depth.gather(1, parents[:, at : at + 1] + 1)[:, 0] + 1
    row_of = torch.full((batch, width + 1), -1)
    there = torch.cat((torch.ones(batch, 1, dtype=torch.bool), used), 1)
    row_of[there] = torch.arange(int(there.sum()))
    tokens, q = torch.randint(vocab, (batch, width), generator=generator), None
    if "sampled" in draft:
        probs = torch.softmax(torch.randn(int(there.sum()), vocab, generator=generator) * 2, -1)
        above = row_of.gather(1, parents + 1).clamp_min(0)
        tokens = torch.multinomial(probs[above.flatten()], 1, generator=generator).view(batch, width)
        q = Proposal(probs=probs.to(device), row_of=torch.where(is_tree, -1, row_of))
    chosen = used & (torch.rand(batch, width, generator=generator) < 0.7)
    logits[row_of.gather(1, parents + 1)[chosen].to(device), tokens[chosen].to(device)] += 6
    made = Draft(
        tokens=tokens * used,
        parents=torch.where(used, parents, -1),
        depth=depth[:, 1:] * used,
        num_nodes=counts,
        q=q,
    )
    return made, logits[: int(there.sum())], row_of


def unlike(one, other):
    """Names of what differs in what two verdicts commit, logprobs included. One may have room for greater depths."""
    counts, width = one.num_accepted, min(one.path.shape[1], other.path.shape[1])
    one, other = (cut(verdict, width) for verdict in (one, other))
    depth = torch.arange(width + 1, device=counts.device)
    meant = depth <= counts[:, None]  # beyond it logprobs are not meant to be read
    parts = [(name, getattr(one, name), getattr(other, name)) for name in ("tokens", "num_accepted", "path", "kinds")]
    if one.logprobs is not None:
        for field in fields(one.logprobs):
            parts.append((field.name, *(getattr(each.logprobs, field.name)[meant] for each in (one, other))))
    return [name for name, mine, theirs in parts if not torch.equal(mine, theirs)]


def cut(verdict, width):
    """To so many depths; what is beyond is empty."""
    assert (verdict.tokens[:, width + 1 :] == -1).all()
    assert (verdict.path[:, width:] == -1).all()
    logprobs = verdict.logprobs
    if logprobs is not None:
        logprobs = Logprobs(**{field.name: getattr(logprobs, field.name)[:, : width + 1] for field in fields(logprobs)})
    kinds, tokens = verdict.kinds[:, : width + 1], verdict.tokens[:, : width + 1]
    return replace(verdict, tokens=tokens, path=verdict.path[:, :width], kinds=kinds, logprobs=logprobs)
