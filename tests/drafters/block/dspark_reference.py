"""A block drafter's forward pass in plain torch, one sequence at a time and without any cache, as the paper has it; and
small drafters to compare with it."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from torch.nn import functional as F

from paceline.drafters.block.config import MASKS, TAP_NORM, W1, W2, DSparkConfig, shapes
from paceline.drafters.block.drafter import DSparkDrafter
from paceline.drafters.folder import TargetShape
from paceline.models.spec import ModelConfig, uniform


def drafter_config(target: ModelConfig, /, **changes):
    body = uniform(
        architecture="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=2 * target.hidden_size,
        num_layers=changes.pop("num_layers", 2),
        num_heads=changes.pop("num_heads", 4),
        num_kv_heads=changes.pop("num_kv_heads", 2),
        head_dim=changes.pop("head_dim", 16),
        max_positions=target.max_positions,
        qk_norm=changes.pop("qk_norm", False),
    )
    settings = {
        "block_size": 5,
        "taps": (0, target.num_layers),
        "mask_token_id": 3,
        "draft_vocab_size": target.vocab_size,
        "markov_rank": 8,
        "target": TargetShape(hidden_size=target.hidden_size, num_layers=target.num_layers),
    }
    return DSparkConfig(body=body, **{**settings, **changes})


def random_tensors(config, seed=0, scale=1.0):
    """Sharp enough that a slip changes tokens."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes(config).items():
        drawn = torch.randn(shape, generator=generator)
        if "norm" in name:
            found[name] = 1 + 0.2 * drawn
        elif name in (W1, W2, MASKS):
            found[name] = scale * drawn
        else:
            found[name] = 1.5 * scale * drawn / shape[-1] ** 0.5
    if "d2t" in found:
        ids = torch.randperm(config.body.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        found["d2t"] = ids - torch.arange(len(ids))
    return found


def ids_of(config, tensors):
    ids = torch.arange(config.draft_vocab_size)
    return ids + tensors["d2t"] if "d2t" in tensors else ids


def make(config, tensors, embedding, *, head=None, **options):
    """With a head tied to the embedding (V, H), unless one is given."""
    tied = embedding[ids_of(config, tensors).to(embedding.device)]
    return DSparkDrafter(config, tensors, embedding=embedding, head=tied if head is None else head, **options)


def norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x, positions, theta):
    """x (n, heads, D)."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def context_of(config, tensors, taps):
    """(n, H) from the target's hidden states (n, T, H)."""
    eps = config.body.rms_norm_eps
    if config.tap_norm:
        taps = norm(taps, tensors[TAP_NORM], eps)
    return norm(taps.flatten(1) @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)


def keys_and_values(config, tensors, layer, x, positions):
    """(n, heads, D) each, of the context or of a layer's normed input."""
    body, at = config.body, f"layers.{layer}.self_attn"
    k = (x @ tensors[f"{at}.k_proj.weight"].T).unflatten(-1, (-1, body.layer.head_dim))
    v = (x @ tensors[f"{at}.v_proj.weight"].T).unflatten(-1, (-1, body.layer.head_dim))
    if body.layer.qk_norm:
        k = norm(k, tensors[f"{at}.k_norm.weight"], body.rms_norm_eps)
    return rotate(k, positions, body.layer.rope.theta), v


def unary_logits(config, tensors, embedding, taps, anchor):
    """(depth, draft vocabulary) without the Markov head, from the hidden states (n, T, H) of the n tokens before the
    anchor."""
    return block_states(config, tensors, embedding, taps, anchor) @ embedding[ids_of(config, tensors)].T


def block_states(config, tensors, embedding, taps, anchor):
    """(depth, H), what the head is given."""
    body, eps, size = config.body, config.body.rms_norm_eps, config.block_size
    context = context_of(config, tensors, taps)
    before = torch.arange(len(taps))
    at = len(taps) + torch.arange(size)
    masks = tensors[MASKS] if config.mask_embedding else embedding[config.mask_token_id].expand(size - 1, -1)
    x = torch.cat((embedding[anchor][None], masks))
    for layer in range(body.num_layers):
        part = f"layers.{layer}"
        h = norm(x, tensors[f"{part}.input_layernorm.weight"], eps)
        q = (h @ tensors[f"{part}.self_attn.q_proj.weight"].T).unflatten(-1, (-1, body.layer.head_dim))
        if body.layer.qk_norm:
            q = norm(q, tensors[f"{part}.self_attn.q_norm.weight"], eps)
        q = rotate(q, at, body.layer.rope.theta)
        old, new = (keys_and_values(config, tensors, layer, *of) for of in ((context, before), (h, at)))
        shared = body.layer.heads // body.layer.kv_heads
        k, v = (torch.cat(pair).repeat_interleave(shared, 1) for pair in zip(old, new, strict=True))
        scores = torch.einsum("qhd,khd->hqk", q, k) / body.layer.head_dim**0.5
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ tensors[f"{part}.self_attn.o_proj.weight"].T
        h = norm(x, tensors[f"{part}.post_attention_layernorm.weight"], eps)
        gate, up = (h @ tensors[f"{part}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ tensors[f"{part}.mlp.down_proj.weight"].T
    return norm(x, tensors["norm.weight"], eps)[size - config.depth :]


def after(config, tensors, logits, before):
    """Log probabilities of one position (draft vocabulary,) behind the target's token `before`."""
    if not config.markov_rank:
        return logits.log_softmax(-1)
    w1 = tensors[W1]
    if config.markov_over_draft_vocab:
        where = (ids_of(config, tensors) == before).nonzero()
        row = w1[int(where)] if len(where) else torch.zeros_like(w1[0])
    else:
        row = w1[before]
    return (logits + tensors[W2] @ row).log_softmax(-1)


def overfit_head(config, tensors, embedding, taps, tokens, begin):
    """(V, H) output weights with which a drafter over the whole vocabulary continues `tokens` from every position
    behind `begin`, fitted by least squares; `taps` (n, T, H) are the target's hidden states over them."""
    states, wanted = [], []
    for anchor in range(begin, len(tokens) - config.depth):
        states.append(block_states(config, tensors, embedding, taps[:anchor], tokens[anchor]))
        for before, following in itertools.pairwise(tokens[anchor : anchor + config.depth + 1]):
            right = 20.0 * F.one_hot(torch.tensor(following), config.body.vocab_size)
            wanted.append(right - tensors[W2] @ tensors[W1][before] if config.markov_rank else right)
    # Without small singular values: the fit must survive activations in int8.
    fitted = torch.linalg.lstsq(torch.cat(states).double(), torch.stack(wanted).double(), rcond=0.02, driver="gelsd")
    return fitted.solution.T.float().contiguous()


def knowing(target: ModelConfig, embedding, texts, **changes):
    """(config, tensors) of a drafter that has seen texts, without training: random layers whose Markov head knows which
    tokens follow which; without one, layers that do nothing, and masks that stand for the commonest tokens."""
    tokens = sorted({token for text in texts for token in text})
    at = {token: index for index, token in enumerate(tokens)}
    rank = changes.pop("markov_rank", len(tokens))
    config = drafter_config(
        target,
        **{"draft_vocab_size": len(tokens), "markov_rank": rank, "markov_over_draft_vocab": bool(rank), **changes},
        mask_embedding=True,
    )
    tensors = random_tensors(config)
    if len(tokens) < target.vocab_size:
        tensors["d2t"] = torch.tensor(tokens) - torch.arange(len(tokens))
    if rank:
        tensors[W1], tensors[W2] = torch.eye(len(tokens)), torch.zeros(len(tokens), len(tokens))
        for text in texts:
            for token, following in itertools.pairwise(text):
                tensors[W2][at[following], at[token]] = 100.0
    else:
        for name in tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] = torch.zeros_like(tensors[name])
        common = Counter(token for text in texts for token in text).most_common(config.block_size - 1)
        tensors[MASKS] = embedding[[token for token, _ in common]].float()
        tensors["norm.weight"] = torch.full_like(tensors["norm.weight"], 5.0)
    return config, tensors
