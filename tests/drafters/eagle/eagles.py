"""EAGLE drafters with random weights, a straightforward re-computation of them, and one overfitted to some texts."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from paceline.drafters.eagle.config import LAYER, EagleConfig, shapes
from paceline.drafters.eagle.drafter import EagleDrafter
from paceline.drafters.eagle.layer import EagleLayer
from paceline.drafters.folder import TargetShape
from paceline.models.backends.torch import TorchKernels
from paceline.models.spec import ModelConfig, uniform
from paceline.models.weights import Dtypes


def config_for(target: ModelConfig, *, vocab=0, **flags) -> EagleConfig:
    qk_norm = flags.pop("qk_norm", False)
    body = uniform(
        architecture="qwen3" if qk_norm else "llama",
        vocab_size=target.vocab_size,
        hidden_size=flags.pop("hidden_size", target.hidden_size),
        intermediate_size=2 * target.hidden_size,
        num_layers=1,
        num_heads=flags.pop("num_heads", 4),
        num_kv_heads=flags.pop("num_kv_heads", 2),
        head_dim=flags.pop("head_dim", 32),
        max_positions=64,
        qk_norm=qk_norm,
    )
    shape = TargetShape(hidden_size=body.hidden_size, num_layers=target.num_layers, vocab_size=target.vocab_size)
    return EagleConfig(body=body, draft_vocab_size=vocab, target=shape, **flags)


def random_tensors(config: EagleConfig, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes(config).items():
        if name == "d2t":
            ids = torch.randperm(config.body.vocab_size, generator=generator)[: config.vocab].sort().values
            made[name] = ids - torch.arange(config.vocab)
        elif name.endswith(".bias"):  # larger ones make attention so sharp that rounding alone changes logits
            made[name] = (0.2 * torch.randn(shape, generator=generator)).to(dtype)
        elif len(shape) == 1:
            made[name] = (1 + 0.2 * torch.randn(shape, generator=generator)).to(dtype)
        else:
            made[name] = (1.5 * torch.randn(shape, generator=generator) / shape[1] ** 0.5).to(dtype)
    return made


def drafter_of(config, tensors, target, kernels, embedding, head, *, dtypes=None, device=None, **options):
    device = device or torch.device("cpu")
    layer = EagleLayer(config, tensors, target, kernels, device=device, dtypes=dtypes, embedding=embedding, head=head)
    return EagleDrafter(layer, config.taps(target.num_layers), kernels, target.max_positions, **options)


def norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Reference(torch.nn.Module):
    """The same drafter written down from the papers, over whole sequences with a mask; differentiable."""

    def __init__(self, config, tensors, embedding, head):
        super().__init__()
        self.config = config
        self.weights = {name: tensor.double() for name, tensor in tensors.items() if name != "d2t"}
        self.ids = None
        if "d2t" in tensors:
            self.ids = tensors["d2t"] + torch.arange(config.vocab)
        every = torch.arange(len(embedding))  # a packed embedding is read by token ids alone
        self.embedding = self.weights.get("embed_tokens.weight", embedding[every].double())
        self.head = self.weights.get("lm_head.weight", head)
        if "lm_head.weight" not in self.weights and self.ids is not None:
            self.head = head.double()[self.ids]

    def of(self, name):
        return self.weights.get(f"{name}.weight")

    def linear(self, x, name):
        return F.linear(x, self.of(name), self.weights.get(f"{name}.bias"))

    def fuse(self, taps):
        config, eps = self.config, self.config.body.rms_norm_eps
        if not config.fused:
            return taps[:, 0].double()
        parts = list(taps.double().unbind(1))
        if config.fc_norm:
            parts = [norm(part, self.of(f"fc_norm.{at}"), eps) for at, part in enumerate(parts)]
        flat = torch.cat(parts, -1)
        if config.norm_before_fc:
            flat = norm(flat, self.of("input_norm"), eps)
        return self.linear(flat, "fc")

    def rotated(self, x, positions):
        body = self.config.body
        inverse = body.layer.rope.theta ** -(torch.arange(0, body.layer.head_dim, 2).double() / body.layer.head_dim)
        angle = positions[:, None] * inverse
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def inputs(self, tokens, features):
        embedded, eps = self.embedding[tokens], self.config.body.rms_norm_eps
        if self.config.mtp:
            halves = [norm(embedded, self.of("embedding_norm"), eps), norm(features, self.of("feature_norm"), eps)]
            joint = self.linear(torch.cat(halves[::-1] if self.config.feature_first else halves, -1), "fc")
            return norm(joint, self.of(f"{LAYER}.input_layernorm"), eps), joint
        if not self.config.fused:
            joint = self.linear(torch.cat((embedded, features), -1), "fc")
            return joint, joint
        normed = norm(features, self.of(f"{LAYER}.hidden_norm"), eps)
        hidden = torch.cat((norm(embedded, self.of(f"{LAYER}.input_layernorm"), eps), normed), -1)
        return hidden, normed if self.config.norm_before_residual else features

    def keys_values(self, tokens, features, positions):
        body = self.config.body
        hidden, _ = self.inputs(tokens, features)
        k = self.linear(hidden, f"{LAYER}.self_attn.k_proj").view(len(tokens), -1, body.layer.head_dim)
        v = self.linear(hidden, f"{LAYER}.self_attn.v_proj").view(len(tokens), -1, body.layer.head_dim)
        if body.layer.qk_norm:
            k = norm(k, self.of(f"{LAYER}.self_attn.k_norm"), body.rms_norm_eps)
        return self.rotated(k, positions), v

    def forward(self, tokens, features, positions, visible, past=()):
        """(n, Vd) logits and (n, h) features for the next token; `visible` (n, m), with keys and values before them."""
        body, eps = self.config.body, self.config.body.rms_norm_eps
        hidden, residual = self.inputs(tokens, features)
        k, v = map(torch.cat, zip(*past, self.keys_values(tokens, features, positions), strict=True))
        q = self.linear(hidden, f"{LAYER}.self_attn.q_proj").view(len(tokens), -1, body.layer.head_dim)
        if body.layer.qk_norm:
            q = norm(q, self.of(f"{LAYER}.self_attn.q_norm"), eps)
        q = self.rotated(q, positions)
        k, v = (x.repeat_interleave(body.layer.heads // body.layer.kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / body.layer.head_dim**0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        out = residual + self.linear(attended, f"{LAYER}.self_attn.o_proj")
        inner = norm(out, self.of(f"{LAYER}.post_attention_layernorm"), eps)
        gated = F.silu(self.linear(inner, f"{LAYER}.mlp.gate_proj")) * self.linear(inner, f"{LAYER}.mlp.up_proj")
        out = out + self.linear(gated, f"{LAYER}.mlp.down_proj")
        normed = norm(out, self.of("norm"), eps) if self.of("norm") is not None else out
        return normed @ self.head.double().T, normed if self.config.norm_output else out

    def token(self, drafted):
        return int(drafted if self.ids is None else self.ids[drafted])

    def after(self, text, taps, path=()):
        """Logits behind `path` when `text` is committed; taps (len(text) - 1, T, H) of all but its last token."""
        features, tokens = self.fuse(taps), list(text[1:])
        for at in range(len(path) + 1):
            n = len(tokens)
            visible = torch.ones(n, n, dtype=torch.bool).tril()
            logits, out = self(torch.tensor(tokens), features, torch.arange(n).double(), visible)
            if at < len(path):
                tokens, features = [*tokens, path[at]], torch.cat((features, out[-1:]))
        return logits[-1]


def unrolled(reference, tokens, features, depth):
    """Logits (depth, n, Vd) as a drafter meets them: at step s the pair of position t holds token t + 1 + s and the
    output of step s - 1, and sees the pairs of the text up to t and those of its own earlier steps."""
    n = len(tokens)
    visible, own = torch.ones(n, n, dtype=torch.bool).tril(), torch.eye(n, dtype=torch.bool)
    past, found = [], []
    for s in range(depth):
        shifted, positions = torch.tensor(tokens[s:] + tokens[-1:] * s), torch.arange(n).double() + s
        logits, out = reference(shifted, features, positions, visible, past)
        past.append(reference.keys_values(shifted, features, positions))
        found.append(logits)
        features, visible = out, torch.cat((visible, own), 1)
    return torch.stack(found)


def overfit(config, embedding, head, texts, taps, *, depth=4, steps=80, rate=0.02, seed=0):
    """Tensors of a drafter that knows these texts by heart, `taps` (n, T, H) being the target's over each."""
    reference = Reference(config, random_tensors(config, seed), embedding, head)
    trained = [tensor.requires_grad_() for tensor in reference.weights.values()]
    if "lm_head.weight" in reference.weights:
        reference.head = reference.weights["lm_head.weight"]
    optimiser = torch.optim.Adam(trained, rate)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, 2 - 2 * step / steps)
        loss = torch.zeros((), dtype=torch.float64)
        for text, each in zip(texts, taps, strict=True):
            n = len(text) - 1
            logits = unrolled(reference, list(text[1:]), reference.fuse(each[:n]), depth)
            for s in range(depth):
                wanted = torch.tensor(text[2 + s :])
                if reference.ids is not None:
                    wanted = torch.searchsorted(reference.ids, wanted)
                loss = loss + F.cross_entropy(logits[s, : len(wanted)], wanted)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
    tensors = {name: tensor.detach().float() for name, tensor in reference.weights.items()}
    return tensors | ({"d2t": reference.ids - torch.arange(config.vocab)} if reference.ids is not None else {})


def fitted(decoder, texts, taps_of, *, fused, into=None, fits=True, **flags):
    """A drafter of random weights whose head is fitted to what follows each position of these texts; for the decoder
    `into`, which may be on another device. Not `fits`: the head is random too."""
    target = decoder.config
    known = sorted({token for text in texts for token in text})
    flags |= {"layer_ids": (1, target.num_layers)} if fused else {"fused": False}
    config = config_for(target, vocab=len(known), **flags)
    tensors = random_tensors(config)
    tensors["d2t"] = torch.tensor(known) - torch.arange(len(known))
    identity = torch.eye(target.hidden_size)
    reference = Reference(config, {**tensors, "lm_head.weight": identity}, decoder.embedding, identity)
    states, wanted = [], []
    for text in texts:
        n = len(text) - 2
        features = reference.fuse(taps_of(decoder, text, config.taps(target.num_layers))[:n])
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        states.append(reference(torch.tensor(text[1 : n + 1]), features, torch.arange(n).double(), visible)[0])
        wanted += text[2:]
    which = torch.searchsorted(torch.tensor(known), torch.tensor(wanted))
    goal = F.one_hot(which, len(known)).double()
    solved = torch.linalg.lstsq(torch.cat(states), goal, driver="gelsd").solution
    if fits:
        tensors["lm_head.weight"] = 20 * solved.T.float().contiguous()
    to = into or decoder
    return drafter_of(config, tensors, target, to.kernels, to.embedding, to.head, dtypes=to.dtypes, device=to.device)


def toy_drafter(target, heads, *, fused, knows, **flags):
    """For a target of `features`: with random weights, or one that hands the feature on to heads that know it."""
    hidden = heads[0].output.shape[1]
    flags |= {"layer_ids": (1,), "vocab": target.vocab_size - 1} if fused else {"fused": False, "own_head": False}
    config = config_for(target, hidden_size=hidden, num_heads=1, num_kv_heads=1, head_dim=2, **flags)
    tensors = random_tensors(config)
    if knows:
        for name in (f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.mlp.down_proj.weight", "fc.weight"):
            tensors[name] = torch.zeros_like(tensors[name])
        tensors["fc.weight"][:, -hidden:] = torch.eye(hidden)
    output = heads[0].output
    if fused:
        tensors["d2t"] = torch.zeros(config.vocab, dtype=torch.int64)
        if knows:
            tensors["lm_head.weight"] = output[: config.vocab].contiguous()
    kernels = TorchKernels()
    embedding = torch.randn(target.vocab_size, hidden, generator=torch.Generator().manual_seed(3))
    dtypes = Dtypes.of(torch.float32, torch.device("cpu"))
    return drafter_of(config, tensors, target, kernels, embedding, kernels.pack(output), dtypes=dtypes)
