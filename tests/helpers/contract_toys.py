"""A toy world for the drafters' contract: a target that half repeats itself, and every method made for it.

The target's next token depends on the last two tokens, with a whisper of the whole context *as read back through the
cache*: lookup methods are often right and often wrong, and a slip of the cache changes the output.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig, SpeculationConfig
from paceline.core.sequence import Sequence
from paceline.drafters import METHODS, DeviceDraft, DrafterContext, HostDraft, HostDrafter, KVSpec, TappedDrafter
from paceline.drafters.block.config import W1, W2
from paceline.drafters.heads.checkpoint import MedusaHead
from paceline.drafters.heads.medusa import MedusaDrafter
from paceline.drafters.lookup.forced_tokens import GrammarDrafter
from paceline.drafters.model.any_vocabulary import AnyVocabularyDrafter
from paceline.drafters.model.draft_model import DraftModelDrafter
from paceline.drafters.model.layer_skip import SkipDrafter
from paceline.drafters.model.private_kv import PrivateKV
from paceline.drafters.model.retokenize import Retokenizer
from paceline.drafters.model.token_bytes import TokenBytes
from paceline.drafters.model.vocabulary_map import VocabularyMap
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan, FixedPolicy
from paceline.models.backends.cpu.kernels import NativeKernels
from paceline.models.pass_chain import READ
from paceline.models.plan import ModelOutput, PassPlan
from paceline.models.weights import Dtypes, WeightKind
from paceline.native.library import library_status, load_library
from paceline.sampling_params import SamplingParams
from paceline.testing import context_logits, toy_config
from paceline.text.grammar import Matcher, Owed
from paceline.verify import Nodes, probabilities, process
from paceline.verify.metadata import SamplingMetadataBuilder
from tests.drafters.block.dspark_reference import drafter_config, overfit_head, random_tensors
from tests.drafters.block.dspark_reference import make as make_block_drafter
from tests.drafters.eagle.eagles import toy_drafter
from tests.helpers.results import rows_of

VOCAB = 11
HIDDEN = 128  # of a hidden state, of which the first VOCAB * VOCAB are used: whole blocks of 32, as Q8_0 weights have
TAUGHT = "taught"  # no method of the table: it learns from the feedback on every verified row
TAPPED = "tapped"  # no method of the table: K/V of (hidden state t, token t + 1), unread tokens, trees on the device


@functools.lru_cache(None)
def repeating(context, vocab_size=VOCAB):
    pair = context_logits(context[-2:], vocab_size, "pair")
    whole = context_logits(context, vocab_size, "whole")
    return [a + 0.4 * b for a, b in zip(pair, whole, strict=True)]


@functools.lru_cache(None)
def imitating(context, vocab_size=VOCAB):
    """A good drafter for `repeating`, but not a perfect one."""
    noise = context_logits(context, vocab_size, "imitation")
    return [a + 0.7 * b for a, b in zip(repeating(context, vocab_size), noise, strict=True)]


@functools.lru_cache(None)
def contrary(context, vocab_size=VOCAB):
    return [-a for a in repeating(context, vocab_size)]


@functools.lru_cache(None)
def features(context, tap):
    """A hidden state: which pair of tokens stands last, and a mark of the tap."""
    last = (context[-2] if len(context) > 1 else 0) * VOCAB + context[-1]
    return [float(at == last) for at in range(HIDDEN - 1)] + [float(tap)]


class FunctionModel:
    """Its logits are `logits_of(context, vocab_size)`, the context read through the block tables it was given."""

    def __init__(self, logits_of, config=None, num_layers=2):
        self.logits_of, self.config = logits_of, config or toy_config(VOCAB)
        self.kv_specs = (KVSpec(num_kv_heads=1, head_dim=1),) * num_layers
        self.device, self.cache_dtype, self.torch_threads = torch.device("cpu"), torch.float32, None
        self.pass_bytes = 0
        self.rows_per_pass = []
        self.fail_at = set()  # numbers of the passes that raise

    def prepare(self, *_):
        return False

    def pass_chain(self, *_):
        return None

    def forward(self, tokens, plan, caches, logit_rows, taps=()):
        self.rows_per_pass.append(len(tokens))
        if len(self.rows_per_pass) in self.fail_at:
            raise RuntimeError("the model stumbles")
        assert int(plan.positions.max()) < min(plan.max_len, self.config.max_positions)
        written = plan.slots >= 0
        slots = plan.slots[written].long()
        for cache in caches:
            cache.k[slots, 0, 0] = tokens[written].float()
            cache.v[slots, 0, 0] = plan.positions[written].float()
        contexts = read_contexts(plan, caches, logit_rows)
        logits = [self.logits_of(context, self.config.vocab_size) for context in contexts]
        every = read_contexts(plan, caches, torch.arange(len(tokens))) if taps else ()
        hidden = [[features(context, tap) for tap in taps] for context in every]
        return ModelOutput(
            torch.tensor(logits, dtype=torch.float32).view(len(contexts), self.config.vocab_size),
            torch.tensor(hidden) if taps else None,
        )


class ChainModel(FunctionModel):
    """Offers a chain that makes passes of its own, and remembers what it was asked."""

    time_is_typical = True

    def __init__(self, logits_of, *, most_rows=2, **options):
        super().__init__(logits_of, **options)
        self.most_rows = most_rows
        self.asked, self.ahead, self.sampled = [], [], 0
        self.broken = False

    def pass_chain(self, caches, block_size):
        self.caches, self.block_size = caches, block_size
        return self

    def draft(self, rows, unread=None, sample=None):
        if self.broken:
            raise RuntimeError("waited in vain")
        assert len(rows) <= self.most_rows
        self.sampled += sample is not None
        sample = sample or (lambda logits, depth: logits.argmax(-1))
        if unread is None:
            self.asked.append([(row.unread_tokens, row.count) for row in rows])
            begun = [(list(row.tokens[-row.unread_tokens :]), row.start + READ - row.unread_tokens) for row in rows]
        else:
            self.ahead.append([row.count for row in rows])
            begun = [self._behind(row, unread, which) for row, which in zip(rows, unread.rows, strict=True)]
        drafts = []
        for depth in range(max(row.count for row in rows)):
            drafts.append(sample(self._logits(begun, rows, depth), depth))
            ends = [start + len(tokens) for tokens, start in begun]
            begun = [([token], end) for token, end in zip(drafts[-1].tolist(), ends, strict=True)]
        return torch.stack(drafts, 1)

    def _behind(self, row, unread, which):
        more = unread.tokens[which, : int(unread.num_accepted[which]) + 1].tolist()
        tokens = [*row.tokens, *more]
        return tokens[-READ:], row.start + len(tokens) - READ

    def _logits(self, begun, rows, depth):
        """Beyond a row's count, or at the end of its blocks, its tokens are arbitrary."""
        logits = torch.zeros(len(rows), self.config.vocab_size)
        going = [
            (at, tokens, start, row.blocks)
            for at, ((tokens, start), row) in enumerate(zip(begun, rows, strict=True))
            if depth < row.count and start + len(tokens) <= len(row.blocks) * self.block_size
        ]
        if going:
            logits[[at for at, *_ in going]] = self._pass([rest for _, *rest in going])
        return logits

    def _pass(self, rows):
        """rows: (tokens, position of the first, block ids)."""
        owners = torch.tensor([owner for owner, (tokens, *_) in enumerate(rows) for _ in tokens])
        positions = torch.tensor([start + at for tokens, start, _ in rows for at in range(len(tokens))])
        width = max(len(blocks) for *_, blocks in rows)
        tables = torch.tensor([[*blocks, *[-1] * (width - len(blocks))] for *_, blocks in rows], dtype=torch.int32)
        slots = tables[owners, positions // self.block_size] * self.block_size + positions % self.block_size
        plan = PassPlan.in_order(positions, slots, owners, tables, self.block_size, int(positions.max()) + 1)
        tokens = torch.tensor([token for tokens, *_ in rows for token in tokens])
        last = torch.tensor([len(tokens) for tokens, *_ in rows]).cumsum(0) - 1
        return self.forward(tokens, plan, self.caches, last).logits


class Taught:
    """Checks that the feedback on each row is the target's own for the tokens up to that row."""

    feedback, rows_checked = 3, 0
    logits_of = staticmethod(repeating)

    def on_feedback(self, feedback):
        vocab, contexts = self.vocab_size, {}
        assert len(set(map(id, feedback.sequences))) == len(feedback.sequences)
        spans = zip(feedback.sequences, feedback.lengths, feedback.starts, feedback.ends, strict=True)
        for sequence, length, start, end in spans:
            assert length <= len(sequence.tokens)
            for row in range(start, end):
                parent = int(feedback.parents[row])
                before = tuple(sequence.tokens[: length - 1]) if row == start else contexts[parent]
                assert (parent < 0) == (row == start)
                assert feedback.before[row] == (before[-1] if before else -1)
                contexts[row] = context = (*before, int(feedback.tokens[row]))
                p = torch.tensor(self.logits_of(context, vocab)).softmax(0)
                ids, probs = feedback.ids[row], torch.from_numpy(feedback.probs[row])
                assert ids.tolist() == p.topk(min(vocab, self.feedback)).indices.tolist()
                assert torch.allclose(probs, p[ids], atol=1e-5)
                assert abs(feedback.rest[row] + float(probs.sum()) - 1) < 1e-5
            assert contexts[start] == tuple(sequence.tokens[:length])
        self.rows_checked += len(contexts)
        self.learn(feedback)

    def learn(self, feedback):
        pass


class TaughtDrafter(Taught, HostDrafter):
    """Drafts what followed the last pair of tokens when a row was verified behind that pair, rejected rows too."""

    name = TAUGHT

    def __init__(self, vocab_size):
        self.vocab_size, self.known = vocab_size, {}

    def learn(self, feedback):
        pairs = zip(feedback.before.tolist(), feedback.tokens.tolist(), strict=True)
        self.known.update(zip(pairs, feedback.ids.tolist(), strict=True))

    def propose(self, rows):
        width = max(row.max_nodes for row in rows)
        tokens, parents, depth = np.zeros((3, len(rows), width), np.int64)
        for at, row in enumerate(rows):
            pairs = [tuple([-1, *row.sequence.tokens][-2:])]  # of the root, then of each node
            for node in range(row.max_nodes):  # two children of each node
                parent, second = node // 2 - 1, node % 2
                ids = self.known.get(pairs[parent + 1], (0, 1))
                tokens[at, node], parents[at, node] = max(ids[min(second, len(ids) - 1)], 0), parent
                depth[at, node] = 1 if parent < 0 else depth[at, parent] + 1
                pairs.append((pairs[parent + 1][1], tokens[at, node].item()))
            parents[at, row.max_nodes :] = -1
        return HostDraft.of_arrays(tokens, parents, depth, np.array([row.max_nodes for row in rows]))


class PairDrafter(Taught, TappedDrafter):
    """One layer of K/V of (hidden state t, token t + 1), from which alone it drafts: what followed the last pair of
    tokens when that was seen before, and a second guess beside each node, as trees only the device knows."""

    name, taps = TAPPED, (1, 0)
    kv_layers = (KVSpec(num_kv_heads=1, head_dim=2),)

    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size, self.begun = vocab_size, 0

    def bind(self, caches, block_size):
        super().bind(caches, block_size)
        (self.cache,) = caches

    def write_context_kv(self, batch):
        valid = batch.slots >= 0
        assert batch.taps[valid][:, :, -1].tolist() == [[1, 0]] * int(valid.sum()), "taps in their order"
        pair = batch.taps[:, 0, :-1].argmax(-1)
        self.cache.k[batch.slots[valid], 0, 0] = pair[valid].float()
        self.cache.k[batch.slots[valid], 0, 1] = batch.positions[valid].float()
        self.cache.v[batch.slots[valid], 0, 0] = batch.tokens[valid].float()

    def draft(self, rows, req_indices, lengths):
        width = max(row.max_nodes for row in rows)
        tokens, parents = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width).long()
        for at, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
            self.begun += length > len(row.sequence.tokens)
            start, _ = self.kv_range(row.sequence)
            position = torch.arange(max(start, 1), length)
            slots = torch.tensor(row.sequence.blocks)[position // self.block_size] * self.block_size
            slots += position % self.block_size
            pairs, tokens_after = self.cache.k[slots, 0, 0].long().tolist(), self.cache.v[slots, 0, 0].long().tolist()
            assert self.cache.k[slots, 0, 1].tolist() == (position - 1).tolist(), "a pair in another's slot"
            known = dict(zip(pairs, tokens_after, strict=True))
            last = tokens_after[-1] if tokens_after else row.sequence.tokens[-1]
            pair = (pairs[-1] % self.vocab_size if pairs else 0) * self.vocab_size + last
            trunk = -1
            for node in range(row.max_nodes):
                guess = known.get(pair, (pair * 7) % self.vocab_size)
                if node % 2:  # a second guess beside the node before
                    tokens[at, node], parents[at, node] = (guess + 1) % self.vocab_size, parents[at, node - 1]
                    pair = pair % self.vocab_size * self.vocab_size + guess
                else:
                    tokens[at, node], parents[at, node], trunk = guess, trunk, node
        return DeviceDraft.trees(tokens, parents, torch.tensor([row.max_nodes for row in rows]), (width + 1) // 2)


@functools.lru_cache(None)
def medusa_heads(vocab_size, count=4):
    """The best heads that see `features`: each ranks tokens by their probability so many steps later under
    `repeating` without its whisper of the whole context."""
    step = torch.zeros(HIDDEN, HIDDEN)  # from a pair to the next one
    for first, last in itertools.product(range(vocab_size), repeat=2):
        shares = torch.tensor(context_logits((first, last), vocab_size, "pair")).softmax(0)
        step[first * VOCAB + last, last * VOCAB : last * VOCAB + vocab_size] = shares
    heads, reached = [], step
    for _ in range(count):
        reached = reached @ step
        tokens = reached[:, : VOCAB * VOCAB].view(HIDDEN, VOCAB, VOCAB).sum(1)[:, :vocab_size]
        nothing = torch.zeros(HIDDEN, HIDDEN), torch.zeros(HIDDEN)  # the block hands on what it is given
        heads.append(MedusaHead((nothing,), tokens.T.contiguous()))
    return heads


def block_drafter(config, *, kernels=None, stored=None, weights="knowing", **options):
    """Layers that read `features`. Weights are random, but for a Markov head that knows how tokens follow one another
    under `repeating`; or all of them are ("random"); or they know a greedy answer by heart ("overfit")."""
    target = replace(config, hidden_size=HIDDEN)
    drafter = drafter_config(target, num_layers=1, mask_token_id=0, **options)
    embedding = torch.randn(config.vocab_size, HIDDEN, generator=torch.Generator().manual_seed(1)) / 20
    tensors, head = random_tensors(drafter, scale=0.5), None
    if weights == "overfit":
        head = overfit_to_an_answer(drafter, tensors, embedding)
    elif weights == "knowing" and drafter.markov_rank:
        tokens = range(config.vocab_size)
        logits = torch.tensor([[context_logits((a, b), config.vocab_size, "pair") for b in tokens] for a in tokens])
        tensors[W1], tensors[W2] = torch.eye(config.vocab_size), logits.softmax(-1).mean(0).log().T.contiguous()
    dtypes = replace(Dtypes.of(torch.float32, torch.device("cpu")), stored=stored)
    return make_block_drafter(drafter, tensors, embedding, head=head, kernels=kernels, dtypes=dtypes)


def overfit_to_an_answer(drafter, tensors, embedding):
    """Output weights that know a greedy answer of the toy target."""
    vocab = drafter.body.vocab_size
    prompt = [token % vocab for token in prompt_of(0, 12)]
    model = FunctionModel(repeating, toy_config(vocab))
    answer = answers(make_engine(model=model), [(0, "a", prompt, params(max_tokens=24))])["a"]
    tokens = [*prompt, *answer]
    taps = [[features(tuple(tokens[: at + 1]), tap) for tap in drafter.taps] for at in range(len(tokens))]
    return overfit_head(drafter, tensors, embedding, torch.tensor(taps), tokens, len(prompt))


def native_block_drafter(config, *, int8=False, **options):
    """A drafter of a CPU with a native library: one call. `int8`: Q8_0 weights, as the packaged drafter has."""
    library = load_library()
    if library is None:
        pytest.skip(library_status())
    kernels, stored = NativeKernels(library, 2), None
    if int8:
        kernels, stored = kernels.rounding(), WeightKind.Q8_0
    drafter = block_drafter(config, kernels=kernels, stored=stored, **options)

    def in_passes(*_):
        raise AssertionError("a draft was not one native call")

    drafter.draft = in_passes  # the engine counts what a drafter raises, and tests expect a count of none
    return drafter


def read_contexts(plan, caches, rows):
    if not len(rows):
        return []
    length, prefix = plan.positions[rows, None] + 1, plan.prefix[rows, None]
    at = torch.arange(int(length.max())).expand(len(rows), -1)
    tables = plan.block_tables[plan.sequence[rows].long()]
    slots = tables.gather(1, (at // plan.block_size).clamp_max(tables.shape[1] - 1)) * plan.block_size
    slots = slots + at % plan.block_size
    if plan.path.shape[1]:
        slots = torch.where(
            at < prefix, slots, plan.path[rows].gather(1, (at - prefix).clamp(0, plan.path.shape[1] - 1))
        )
    inside = at < length
    assert bool((slots[inside] >= 0).all()), "a row reads a slot it does not own"
    slots = torch.where(inside, slots, 0).long()
    tokens = caches[0].k[slots, 0, 0]
    for cache in caches:
        assert torch.equal(cache.v[slots, 0, 0][inside], at[inside].float()), "positions are not in order"
        assert torch.equal(cache.k[slots, 0, 0][inside], tokens[inside]), "layers disagree"
    return [tuple(map(int, row[:n])) for row, n in zip(tokens.tolist(), length[:, 0].tolist(), strict=True)]


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) - ord("a") for letter in text if letter != " "]

    def decode(self, tokens):
        return "".join(chr(ord("a") + token) for token in tokens)

    def incremental_decoder(self, skip_special_tokens):
        return self

    def push(self, token):
        return self.decode([token])

    def flush(self):
        return ""


def context_for(config, **options):
    return DrafterContext(
        config=config,
        device=torch.device("cpu"),
        speculation=SpeculationConfig(**options),
        encode=Letters().encode,
        token_texts=lambda token: Letters().decode([token]),
    )


def imitated(vocab_size, sequence):
    """A text that a grammar seems to force, right now and then; of a length that the tokens decide."""
    tokens = list(sequence.tokens)
    for _ in range(sum(tokens[-3:]) % 4):
        logits = imitating(tuple(tokens), vocab_size)
        tokens.append(max(range(len(logits)), key=logits.__getitem__))
    return tokens[len(sequence.tokens) :]


AHEAD = "draft-model, begun ahead"  # its drafts begin behind steps under way, as on a device
# Steps are launched before the one before is read or published, as on a device.
EARLY = {f"{method}, launched early": method for method in ("ngram", "suffix", "grammar", "recycling", TAUGHT)}
EARLY |= {f"{method}, begun ahead": method for method in (TAPPED, "medusa", "dspark", "eagle3")}
DFLASH = {"markov_rank": 0, "sample_from_anchor": False}
# How each method of the table is made for a toy target. A method without an entry fails its whole contract.
MAKERS = {
    "ngram": lambda config: METHODS["ngram"].make(context_for(config, ngram_min=1, ngram_max=3)),
    "suffix": lambda config: METHODS["suffix"].make(context_for(config)),
    "grammar": lambda config: GrammarDrafter(context_for(config), functools.partial(imitated, config.vocab_size)),
    "recycling": lambda config: METHODS["recycling"].make(context_for(config)),
    "draft-model": lambda config: DraftModelDrafter(FunctionModel(imitating, config, num_layers=1)),
    # It reads the target's own K/V, and writes those of drafted tokens into the first of two layers.
    "skip": lambda config: SkipDrafter(lambda kept: FunctionModel(imitating, config), (0,)),
    TAPPED: lambda config: PairDrafter(config.vocab_size),
    TAUGHT: lambda config: TaughtDrafter(config.vocab_size),
    "medusa": lambda config: MedusaDrafter(medusa_heads(config.vocab_size), config.vocab_size),
    "dspark": lambda config: block_drafter(config, markov_rank=config.vocab_size),
    "dflash": lambda config: block_drafter(config, **DFLASH),
    "eagle3": lambda config: toy_drafter(config, medusa_heads(config.vocab_size), fused=True, knows=True),
    "eagle": lambda config: toy_drafter(config, medusa_heads(config.vocab_size), fused=False, knows=False),
    "mtp": lambda config: toy_drafter(
        config, medusa_heads(config.vocab_size), fused=False, knows=True, mtp=True, feature_first=True, norm_output=True
    ),
    AHEAD: lambda config: DraftModelDrafter(ChainModel(imitating, config=config, num_layers=1, most_rows=16)),
}
MAKERS |= {way: MAKERS[method] for way, method in EARLY.items()}


class OtherLetters:
    """The vocabulary of a drafter beside `Letters` of `vocab_size` letters: the letters backwards, "a" twice, "ab" as
    one token, which the target has not, and the last letter unspelt: it is read as an unknown token."""

    def __init__(self, vocab_size):
        self.letters = [chr(ord("a") + at) for at in range(vocab_size)]
        self.spelt = [*reversed(self.letters[:-1]), "a", "ab", None]
        self.target_bytes = [letter.encode() for letter in self.letters]
        self.draft_bytes = [one and one.encode() for one in self.spelt]
        target, draft = TokenBytes(tuple(self.target_bytes), {}), TokenBytes(tuple(self.draft_bytes), {})
        self.map = VocabularyMap.of(target, draft, vocab_size, len(self.spelt))

    def encode(self, text):
        ids = []
        for piece in re.findall("ab|.", text):
            ids.append(self.spelt.index(piece) if piece in self.spelt else len(self.spelt) - 1)
        return ids

    def encode_tokens(self, tokens):
        return self.encode("".join(self.letters[token] for token in tokens))

    def read(self, ids):
        """The target's tokens of the drafter's."""
        texts = (self.spelt[token] or self.letters[-1] for token in ids)
        return tuple(ord(letter) - ord("a") for text in texts for letter in text)

    def logits_of(self, function):
        """What a drafter of this vocabulary says where `function` (context, vocab_size) knows the letters."""

        def logits(context, vocab_size):
            known = function(self.read(context), len(self.letters))
            return [
                known[ord(text[0]) - ord("a")] - math.log(2) * (text == "a") - (text == "ab") if text else known[-1]
                for text in self.spelt
            ]

        return logits


def other_vocabulary(config, function=imitating, **options):
    letters = OtherLetters(config.vocab_size)
    own = replace(config, vocab_size=len(letters.spelt))
    model = FunctionModel(functools.lru_cache(None)(letters.logits_of(function)), own, num_layers=1)
    rules = Retokenizer(letters.target_bytes, letters.draft_bytes, letters.map.specials, letters.encode)
    rules = replace(rules, encode_target=Letters().encode)
    return AnyVocabularyDrafter(
        model, letters.map, rules, eos_token_ids=config.eos_token_ids, kv=PrivateKV(model, 1 << 12), **options
    )


# Ways of a machine without a native library.
PLAIN = {
    "ngram, in Python": lambda config: METHODS["ngram"].make(
        context_for(config, ngram_min=1, ngram_max=3), native=False
    ),
    "suffix, in Python": lambda config: METHODS["suffix"].make(context_for(config), native=False),
    "recycling, in Python": lambda config: METHODS["recycling"].make(context_for(config), native=False),
}
MAKERS |= PLAIN
# Block drafters whose drafts are one native call, with weights of every kind.
NATIVE = {
    "dspark, native": lambda config: native_block_drafter(config, markov_rank=config.vocab_size),
    "dspark, native int8": lambda config: native_block_drafter(config, int8=True, weights="random"),
    "dspark, native int8, overfit": lambda config: native_block_drafter(config, int8=True, weights="overfit"),
    "dflash, native": lambda config: native_block_drafter(config, weights="overfit", **DFLASH),
}
NATIVE_EARLY = {"dspark, native, begun ahead": NATIVE["dspark, native"]}
MAKERS |= NATIVE | NATIVE_EARLY
OTHER = {
    "draft-model, another vocabulary": other_vocabulary,
    "draft-model, another vocabulary, re-encoded": lambda config: other_vocabulary(config, reencode_below=2.0),
}
MAKERS |= OTHER


def make_drafter(method, config=None):
    assert method in MAKERS, f"method {method!r} is in METHODS but contract_toys.MAKERS does not know how to make it"
    return MAKERS[method](config or toy_config(VOCAB))


class ByRequest(FixedPolicy):
    """Method and number of nodes by request id, or the same for all."""

    def __init__(self, choices, default=None):
        self.choices, self.default = choices, default or DraftPlan()

    def choose(self, sequence):
        return self.choices.get(sequence.request_id, self.default)


class NowAndThen(FixedPolicy):
    """Drafts of one of the given numbers of nodes in a share of the steps, plain steps in between."""

    def __init__(self, name, nodes, share, seed=5):
        self.name, self.nodes, self.share, self.chance = name, nodes, share, random.Random(seed)

    def choose(self, sequence):
        drafts = self.chance.random() < self.share
        return DraftPlan(self.name, self.chance.choice(self.nodes)) if drafts else DraftPlan()


class ToyGrammar:
    """A library's matcher: token t may follow a text unless the sum of both divides by three. EOS ends nothing."""

    def __init__(self, vocab_size):
        self._vocab_size, self._taken = vocab_size, []

    @staticmethod
    def allows(taken, token):
        return (sum(taken) + token) % 3 != 0

    def consume_token(self, token):
        allowed = self.allows(self._taken, token)
        if allowed:
            self._taken.append(token)
        return allowed

    def rollback(self, count):
        del self._taken[len(self._taken) - count :]

    def is_error(self):
        return False

    def unsafe_compute_mask_ptr(self, address, count):
        assert count == 4
        bits = sum(1 << token for token in range(self._vocab_size) if self.allows(self._taken, token))
        ctypes.c_uint32.from_address(address).value = bits


class ToyGrammars:
    def __init__(self, vocab_size):
        self._vocab_size = vocab_size

    def compile(self, wanted):
        return wanted

    def matchers(self, compiled, count):
        return [Matcher(ToyGrammar(self._vocab_size), 1, frozenset(), Owed()) for _ in range(count)]


def make_engine(drafters=(), *, k=4, policy=None, model=None, eos=(), tokenizer=None, ahead=False, **config):
    """The first drafter drafts for all sequences, unless a policy is given."""
    model = model or FunctionModel(repeating, toy_config(VOCAB, eos_token_ids=eos))
    if policy is None and drafters:
        policy = ByRequest({}, DraftPlan(drafters[0].name, k))
    defaults = {"block_size": 4, "num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    engine = Engine(
        model,
        EngineConfig(**{**defaults, **config}),
        drafters=drafters,
        policy=policy,
        tokenizer=tokenizer or Letters(),
    )
    engine.runs_ahead = ahead
    engine.admission.grammars = ToyGrammars(model.config.vocab_size)
    return engine


class Stumbling:
    """A real model that errs at some positions: as a drafter it keeps the target's K/V."""

    def __init__(self, model, errs):
        """`errs`: positions (R,) -> (R,) bool."""
        self.model, self._errs = model, errs
        self.config, self.kv_specs, self.device = model.config, model.kv_specs, model.device
        self.cache_dtype, self.torch_threads = model.cache_dtype, model.torch_threads
        self.pass_bytes = model.pass_bytes

    def prepare(self, *_):
        return False

    def pass_chain(self, *_):
        return None

    def forward(self, tokens, plan, caches, logit_rows, taps=()):
        logits = self.model.forward(tokens, plan, caches, logit_rows).logits
        wrong = self._errs(plan.positions[logit_rows])
        return ModelOutput(torch.where(wrong[:, None], -logits, logits), None)


def params(**options):
    return SamplingParams(**options).resolve({})


def prompt_of(which, length):
    """Prompts of the same `which` share their beginning."""
    return [(which * 5 + at * at * (1 + which)) % VOCAB for at in range(length)]


def run(engine, requests, cancel=(), after_step=None):
    """requests: (arrival step, id, prompt, params); cancel: (step, id). (sequences, step outputs) by request id."""
    sequences, outputs = {}, {}
    pending = sorted(requests, key=lambda request: request[0])
    for step in itertools.count():
        while pending and (pending[0][0] <= step or not engine.has_work):
            _, name, prompt, wanted = pending.pop(0)
            (sequences[name],) = engine.add_request(name, prompt, wanted)
        for at, name in cancel:
            if at == step:
                engine.cancel(name)
        if not engine.has_work and not pending:
            return sequences, outputs
        for output in rows_of(engine.step()) if engine.has_work else ():
            outputs.setdefault(output.sequence.request_id, []).append(output)
        engine.blocks.check(engine.scheduler.sequences())
        if after_step is not None:
            after_step(engine)
        assert step < 5000, "the engine does not finish"
    raise AssertionError("unreachable")


def answers(engine, requests, **options):
    return {name: sequence.output_tokens for name, sequence in run(engine, requests, **options)[0].items()}


_PLAIN = {}  # many tests ask for the same answers


def plain(requests, **options):
    """Answers to the same requests one by one without any drafter, cache sharing or company."""
    results = {}
    for _, name, prompt, wanted in requests:
        key = repr((prompt, wanted, options))
        if key not in _PLAIN:
            _PLAIN[key] = run(make_engine(prefix_caching=False, **options), [(0, name, prompt, wanted)])[0][name]
        results[name] = _PLAIN[key]
    return results


def exercised(sequences):
    """Both must have happened, else an identical output proves nothing."""
    drafted = sum(sequence.stats.num_draft_tokens for sequence in sequences)
    accepted = sum(sequence.stats.num_accepted_tokens for sequence in sequences)
    return 0 < accepted < drafted


def exact_joint(logits_of, vocab_size, prompt, wanted, length):
    """Probability of every continuation of `length` tokens, one token after the other, without any engine."""
    joint = {(): 1.0}
    for _ in range(length):
        longer = {}
        for tokens, mass in joint.items():
            sequence = Sequence("x", prompt, wanted, max_len=1000)
            sequence.tokens += tokens
            metadata = SamplingMetadataBuilder(vocab_size, frozenset(), torch.device("cpu")).metadata([sequence])
            logits = torch.tensor([logits_of(tuple(sequence.tokens), vocab_size)])
            if wanted.structured_outputs is not None:
                banned = [token for token in range(vocab_size) if not ToyGrammar.allows(tokens, token)]
                logits[0, banned] = -torch.inf
            p = probabilities(process(logits, metadata, Nodes.roots(1)).double())[0].tolist()
            longer |= {(*tokens, token): mass * share for token, share in enumerate(p) if share > 0}
        joint = longer
    return joint


def g_test(counts, expected):
    """p-value of the observed counts; cells that expect fewer than 5 are taken together."""
    total = sum(counts.values())
    assert set(counts) <= set(expected), f"impossible outcomes: {set(counts) - set(expected)}"
    cells, rest = [], [0.0, 0.0]
    for outcome, mass in expected.items():
        cell = [counts.get(outcome, 0), mass * total]
        if cell[1] >= 5:
            cells.append(cell)
        else:
            rest = [rest[0] + cell[0], rest[1] + cell[1]]
    if rest[1] >= 5:
        cells.append(rest)
    else:  # too little to stand alone
        cells[-1] = [cells[-1][0] + rest[0], cells[-1][1] + rest[1]]
    observed, predicted = torch.tensor(cells, dtype=torch.float64).T
    g = 2 * torch.special.xlogy(observed, observed / predicted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2, dtype=torch.float64), g / 2))
