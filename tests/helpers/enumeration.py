"""Exact enumeration of `verify`: the distribution of three tokens over two consecutive steps, as numbers.

Drafts are enumerated with their probability under q. Coins are variables, one for each key the real `rng.coin` asks
`rng.uniform` for: their breakpoints are bisected from outside, on the real code, to the last bit. A step is then a list
of boxes (an interval for every key it asked for) with the tokens each commits, and two steps are the intersections of
their boxes: a key met in both is one variable, so a coin used twice shows as bias.
"""

import itertools
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

import paceline.verify  # noqa: F401
from paceline.core.draft import Draft, Proposal
from paceline.core.rng import Lane

EXACT = 1e-12
LOW, HIGH, BISECTIONS = 2.0**-53, 1 - 2.0**-53, 50
PRODUCT = SimpleNamespace(verify=sys.modules["paceline.verify"], rng=sys.modules["paceline.core.rng"])


class Toy:
    """Next-token logits that are a fixed random function of all tokens so far."""

    def __init__(self, seed, vocab, spread=1.5):
        self.seed, self.vocab, self.spread, self._known = seed, vocab, spread, {}

    def logits(self, said):
        if said not in self._known:
            generator = torch.Generator().manual_seed(hash((self.seed, *said)) % 2**31)
            self._known[said] = torch.randn(self.vocab, generator=generator, dtype=torch.float64) * self.spread
        return self._known[said]

    def p(self, said):
        return torch.softmax(self.logits(said), -1)


class Fixed:
    """The same distribution at the same depth, whatever the tokens before; zeros allowed."""

    def __init__(self, *rows):
        self.rows = torch.tensor(rows, dtype=torch.float64)
        self.vocab = self.rows.shape[1]

    def p(self, said):
        return self.rows[min(len(said), len(self.rows) - 1)]

    def logits(self, said):
        return self.p(said).log()


# --- drafts with their probability ---


def chains(length):
    """Every node is a child of the one before."""
    return list(range(-1, length - 1))


def depths_of(parents):
    depths = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def drafts(q, said, parents, ends=()):
    """[(tokens, parents, weight)]: siblings without replacement; a chain stops after a token in `ends`."""
    found = [((), 1.0)]
    for node, parent in enumerate(parents):
        longer = []
        for tokens, weight in found:
            if ends and tokens and tokens[-1] in ends:
                longer.append((tokens, weight))
                continue
            probs = q.p((*said, *_path(tokens, parents, parent)))
            gone = [tokens[n] for n in range(node) if parents[n] == parent]
            left = 1 - sum(float(probs[t]) for t in gone)
            for token in range(q.vocab):
                if token not in gone and float(probs[token]) > 0:
                    longer.append(((*tokens, token), weight * float(probs[token]) / left))
        found = longer
    return [(tokens, tuple(parents[: len(tokens)]), weight) for tokens, weight in found]


def _path(tokens, parents, node):
    path = ()
    while node >= 0:
        path, node = (tokens[node], *path), parents[node]
    return path


# --- a batch of rows ready for verify ---


@dataclass(frozen=True)
class Setting:
    """The subject of a check."""

    target: object
    drafter: object
    parents: tuple
    ends: tuple = ()
    ids: tuple | None = None  # the draft vocabulary
    sampled: bool = True  # False: the draft is handed over as a deterministic one
    temperature: float | None = None  # the target's; None: nothing to process
    top_k: int = 0  # the target's; needs a temperature
    allowed: tuple = ()  # tokens the target may write; empty: all
    near: float = 4e-15  # how far a breakpoint may lie from the one on paper before it is looked for
    code: SimpleNamespace = field(default_factory=lambda: PRODUCT)


class Rows:
    """Rows (said, tokens, parents, weight) of equal committed length as one batch; row i has key i."""

    def __init__(self, setting, rows):
        self.setting, self.rows = setting, rows
        self.width = len(setting.parents)
        self.committed = len(rows[0][0])
        columns = [self._columns(*row[:3]) for row in rows]
        self.tokens, self.parents, self.depth = (
            torch.tensor(list(c)) for c in zip(*[c[:3] for c in columns], strict=True)
        )
        self.num_nodes = torch.tensor([len(row[1]) for row in rows])
        self.logits = torch.stack([c[3] for c in columns])  # (B, N + 1, V)
        self.q = torch.stack([c[4] for c in columns])
        self.max_depth = int(self.depth.max())
        self.on_paper = [OnPaper(setting, *row[:3]) for row in rows] if setting.sampled else []

    def _columns(self, said, tokens, parents):
        def pad(values, filler):
            return [*values, *[filler] * (self.width - len(values))]

        slots = [(*said, *_path(tokens, parents, node)) for node in range(-1, len(tokens))]
        slots += [slots[0]] * (self.width - len(tokens))
        logits = torch.stack([self.setting.target.logits(slot) for slot in slots])
        q = torch.stack([self.setting.drafter.p(slot) for slot in slots])
        return pad(tokens, 0), pad(parents, -1), pad(depths_of(parents), 0), logits, q

    def verify_rows(self, index, coins):
        """Verify the rows `index`, repeated at will, with coins {key: (len(index),)}; 1/2 where none is given."""
        setting, size, slots = self.setting, len(index), self.width + 1
        row_of = torch.arange(size * slots).view(size, slots)
        used = torch.arange(slots) <= self.num_nodes[index][:, None]
        parent_rows = torch.zeros(size, slots, dtype=torch.bool).scatter_(1, self.parents[index] + 1, True)
        probs = self.q[index].flatten(0, 1)
        ids = None
        if setting.ids is not None:
            ids = torch.tensor(setting.ids)
            probs = probs[:, ids]
        q = Proposal(probs=probs, row_of=torch.where(used & parent_rows, row_of, -1), ids=ids)
        draft = Draft(
            tokens=self.tokens[index],
            parents=self.parents[index],
            depth=self.depth[index],
            num_nodes=self.num_nodes[index],
            q=q if setting.sampled else None,
        )
        package = setting.code.verify
        nodes = package.Nodes.of(
            draft, torch.arange(size).repeat_interleave(slots), torch.arange(slots).repeat(size) - 1, self.max_depth
        )
        draws = package.DrawKeys.by_coins(torch.arange(size), torch.full((size,), self.committed))
        wanted = {}
        if setting.temperature is not None:
            wanted["temperature"] = torch.full((size,), setting.temperature, dtype=torch.float64)
            wanted["top_k"] = torch.full((size,), setting.top_k) if setting.top_k else None
        if setting.allowed:
            wanted["allowed"] = only_allowed(setting, torch.zeros(size, setting.target.vocab)) == 0
        metadata = package.SamplingMetadata(**wanted)
        asked = {}
        with _uniforms(setting.code.rng, coins, asked, size):
            verdict = package.verify(
                draft,
                self.logits[index].flatten(0, 1),
                torch.where(used, row_of, -1),
                nodes,
                metadata,
                draws,
                max_depth=self.max_depth,
            )
        return verdict, asked


class _uniforms:
    """rng.uniform answers from a table, by (lane, *words after the row's own key); `asked` records key -> rows."""

    def __init__(self, rng, coins, asked, size):
        self.rng, self.coins, self.asked, self.size = rng, coins, asked, size

    def __call__(self, lane, row, *words):
        if not row.is_cpu:
            return self(lane, row.cpu(), *[word.cpu() for word in words]).to(row.device)
        out = torch.full(row.shape, 0.5, dtype=torch.float64)
        code = sum((word + 1) * 1000**place for place, word in enumerate(words)) if words else torch.zeros_like(row)
        for value in code.unique().tolist():
            here = code == value
            first = int(here.int().argmax())
            key = (int(lane), *(int(word[first]) for word in words))
            rows = row[here]
            assert rows.unique().numel() == rows.numel(), f"{key} is asked for twice in a step"
            seen = self.asked.setdefault(key, torch.zeros(self.size, dtype=torch.bool))
            assert not seen[rows].any(), f"{key} is asked for twice in a step"
            seen[rows] = True
            if key in self.coins:
                out[here] = self.coins[key][rows]
        return out

    def __enter__(self):
        self.kept, self.rng.uniform = self.rng.uniform, self

    def __exit__(self, *_):
        self.rng.uniform = self.kept


# --- the rule on paper, in lists: what the tests compare with, and where the breakpoints are expected ---


class OnPaper:
    """One row's stages (node, threshold, weights of the next token): the first whose coin passes is where it stops."""

    def __init__(self, setting, said, tokens, parents):
        nodes = range(-1, len(tokens))
        p = [p_of(setting, (*said, *_path(tokens, parents, node))) for node in nodes]
        q = [setting.drafter.p((*said, *_path(tokens, parents, node))).tolist() for node in nodes]
        self.stages = stages(tokens, p, q)

    def threshold(self, node):
        return next((threshold for at, threshold, _ in self.stages if at == node), 0.5)

    def weights(self, node):
        return next(weights for at, _, weights in self.stages if at == node)


def _ratio(p, q, token):
    return p[token] / q[token] if q[token] > 0 else 0.0


def stages(tokens, p, q):
    """Block verification of a chain, p and q by slot: from its last node up."""
    scales, weights = [1.0], p[-1]
    for node, token in enumerate(tokens):
        scales.append(min(1.0, scales[-1] * _ratio(p[node], q[node], token)))
    threshold, found = scales[-1], []
    for node in reversed(range(len(tokens))):
        found.append((node, threshold, weights))
        scale = scales[node]
        excess = [max(scale * x - y, 0.0) for x, y in zip(p[node], q[node], strict=True)]
        total = sum(excess)
        weights = [x / total for x in excess] if total > 0 else p[node]
        threshold = total / (total + 1 - scale) if total + 1 - scale > 0 else scale
    return [*found, (-1, 1.0, weights)]


def stop_at(found, u):
    """The stage at which a row stops, by its nodes' coins u."""
    return next(stage for stage in found if stage[0] < 0 or u[stage[0]] <= stage[1])


# --- one step as boxes ---


@dataclass(frozen=True)
class Box:
    """Coins {key: (low, high)} under which a row commits these tokens, of which some were drafted."""

    said: tuple
    weight: float  # of the draft
    coins: dict
    tokens: tuple
    accepted: int

    @property
    def probability(self):
        return self.weight * math.prod(high - low for low, high in self.coins.values())


def boxes_of(setting, contexts):
    """Every box of one step, after any of the contexts (of one length)."""
    rows = [
        (said, *draft) for said in contexts for draft in drafts(setting.drafter, said, setting.parents, setting.ends)
    ]
    batch = Rows(setting, rows)
    if setting.sampled:
        return sampled_boxes(batch)
    return walked_boxes(batch)


def _corners(batch):
    """Every combination of the two sides of every acceptance coin's threshold, coins in the middle of their side."""
    all_rows = torch.arange(len(batch.rows))
    _, asked = batch.verify_rows(all_rows, {})
    accept = [key for key in asked if key[0] == Lane.ACCEPT]
    thresholds = _thresholds(batch, accept)
    corners = list(itertools.product((0, 1), repeat=len(accept)))
    index = all_rows.repeat_interleave(len(corners))
    above = torch.tensor(corners, dtype=torch.bool).view(len(corners), len(accept)).repeat(len(all_rows), 1)
    low, high = torch.where(above, thresholds[index], 0), torch.where(above, 1, thresholds[index])
    some = ((high - low) > 0).all(1)
    index, low, high = index[some], low[some], high[some]
    middle = (low + high) / 2
    coins = {key: middle[:, c] for c, key in enumerate(accept)}
    verdict, asked = batch.verify_rows(index, coins)
    return index, coins, low, high, verdict, asked


def sampled_boxes(batch):
    index, coins, low, high, verdict, asked = _corners(batch)
    # The last token depends on where the row stopped: one representative each.
    stops = torch.stack((index, verdict.path.amax(1)), 1)  # the node accepted last: nodes stand parents first
    kinds, which = stops.unique(dim=0, return_inverse=True)
    first = torch.full((len(kinds),), len(index)).scatter_reduce_(0, which, torch.arange(len(index)), "amin")
    ends = _token_ends(batch, index[first], {key: value[first] for key, value in coins.items()}, kinds.tolist())
    residual = torch.zeros(len(index), dtype=torch.int64)
    names = [key for key in asked if key[0] != Lane.ACCEPT]
    for at, key in enumerate(names):
        residual[asked[key]] = at
    found = []
    path, count, tokens = verdict.path.tolist(), verdict.num_accepted.tolist(), verdict.tokens.tolist()
    for box, row in enumerate(index.tolist()):
        said, drafted, _, weight = batch.rows[row]
        run = tuple(drafted[node] for node in path[box][: count[box]])
        assert run == tuple(tokens[box][: count[box]])
        intervals = {key: (float(low[box, c]), float(high[box, c])) for c, key in enumerate(coins)}
        start = 0.0
        for token, end in enumerate(ends[which[box]].tolist()):
            if end > start:
                coins_here = {**intervals, names[int(residual[box])]: (start, end)}
                found.append(Box(said, weight, coins_here, (*run, token), count[box]))
            start = end
    return found


def _thresholds(batch, accept):
    """(B, C) where each coin changes a row's outcome, the others held high or the earlier ones low; 1/2: nowhere."""
    rows, count = len(batch.rows), len(accept)
    index = torch.arange(rows).repeat(2 * count)
    at = torch.arange(count).repeat_interleave(rows).repeat(2)
    earlier = torch.tensor([HIGH, LOW], dtype=torch.float64).repeat_interleave(rows * count)

    def stop(value):
        coins = {key: torch.where(at == c, value, torch.where(at > c, earlier, HIGH)) for c, key in enumerate(accept)}
        verdict, _ = batch.verify_rows(index, coins)
        return torch.cat((verdict.num_accepted[:, None], verdict.path), 1)

    below = stop(torch.full_like(earlier, LOW))
    matters = (below != stop(torch.full_like(earlier, HIGH))).any(1)
    guess = torch.tensor([[s.threshold(c) for s in batch.on_paper] for c in range(count)], dtype=torch.float64)
    found = _locate(lambda value: (stop(value) == below).all(1), guess.flatten().repeat(2), matters, batch.setting.near)
    (one, two), (first, second) = found.view(2, count, rows), matters.view(2, count, rows)
    assert (abs(one - two)[first & second] < EXACT).all(), "a threshold depends on the other coins"
    return torch.where(first, one, torch.where(second, two, 0.5)).T


def _token_ends(batch, index, coins, stops):
    """(len(index), V) the coin up to which each row says token 0, 0 or 1, ..., with those acceptance coins."""
    vocab, size = batch.setting.target.vocab, len(index)
    wide = index.repeat_interleave(vocab)
    token = torch.arange(vocab).repeat(size)
    spread = {key: value.repeat_interleave(vocab) for key, value in coins.items()}
    _, asked = batch.verify_rows(wide, spread)
    others = [key for key in asked if key[0] != Lane.ACCEPT]

    def said(value):
        verdict, _ = batch.verify_rows(wide, {**spread, **dict.fromkeys(others, value)})
        return verdict.tokens.gather(1, verdict.num_accepted[:, None])[:, 0] <= token

    ends = torch.full((size * vocab,), LOW, dtype=torch.float64)
    never, always = ~said(ends), said(torch.full_like(ends, HIGH))
    weights = torch.tensor([batch.on_paper[row].weights(node) for row, node in stops], dtype=torch.float64)
    guess = (weights.cumsum(1) / weights.sum(1, keepdim=True)).flatten()
    found = _locate(said, guess, ~never & ~always, batch.setting.near)
    return torch.where(always, 1.0, torch.where(never, 0.0, found)).view(size, vocab)


def _locate(same, guess, matters, near):
    """(R,) up to where `same(value)` holds: the guess where the code confirms it on both sides, else by bisection."""
    hit = same((guess - near).clamp(LOW, HIGH)) & ~same((guess + near).clamp(LOW, HIGH))
    if (hit | ~matters).all():
        return guess
    low, high = torch.full_like(guess, LOW), torch.full_like(guess, HIGH)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        holds = same(middle)
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    return torch.where(hit, guess, low)


def walked_boxes(batch):
    """The walk: a coin matters through the stretch of cumulative p it falls in, tried at both ends of every stretch."""
    all_rows = torch.arange(len(batch.rows))
    slots, vocab = batch.width + 1, batch.setting.target.vocab
    temperature = batch.setting.temperature or 1.0
    ends = torch.softmax(only_allowed(batch.setting, batch.logits) / temperature, -1).cumsum(-1)  # (B, N + 1, V)
    starts = torch.cat((torch.zeros_like(ends[..., :1]), ends[..., :-1]), -1)
    corners = torch.tensor(list(itertools.product(range(vocab), repeat=slots)))
    index = all_rows.repeat_interleave(len(corners))
    cell = corners.repeat(len(all_rows), 1)[..., None]
    low, high = (x[index].gather(2, cell)[..., 0] for x in (starts, ends))

    def verify_rows(inside):
        point, keys, coins = low + inside * (high - low), set(), {}
        while True:  # the walk may ask for a coin only where it gets to
            verdict, asked = batch.verify_rows(index, coins)
            if set(asked) == keys:
                return verdict, asked
            keys = set(asked)
            coins = {key: point[:, key[-1] % slots] for key in keys}

    verdict, asked = verify_rows(1e-6)
    for other in (verify_rows(0.5)[0], verify_rows(1 - 1e-6)[0]):
        assert torch.equal(verdict.tokens, other.tokens), "a stretch of p does not say one token"
    found = []
    count, tokens = verdict.num_accepted.tolist(), verdict.tokens.tolist()
    for box, row in enumerate(index.tolist()):
        said, _, _, weight = batch.rows[row]
        intervals = {}
        for key in asked:
            slot = key[-1] % slots
            if slot <= len(batch.rows[row][1]):
                intervals[key] = (float(low[box, slot]), float(high[box, slot]))
        unasked = set(range(len(batch.rows[row][1]) + 1)) - {key[-1] % slots for key in intervals}
        if any(int(cell[box, slot, 0]) for slot in unasked) or any(
            int(cell[box, slot, 0]) for slot in range(len(batch.rows[row][1]) + 1, slots)
        ):
            continue  # a coin that was not drawn: one of its cells stands for all
        found.append(Box(said, weight, intervals, tuple(tokens[box][: count[box] + 1]), count[box]))
    return found


# --- two steps ---


def joint_of_three(setting, steps):
    """{tokens: probability} of the first three tokens: `steps` through `verify`, the rest plainly. The mean accepted.
    The keys of coins met in both steps."""
    first = boxes_of(setting, [()])
    second = {}
    for length in (1, 2) if steps == 2 else ():
        contexts = list(itertools.product(range(setting.target.vocab), repeat=length))
        if any(len(box.tokens) == length for box in first):
            for box in boxes_of(setting, contexts):
                second.setdefault(box.said, []).append(box)
    joint = defaultdict(float)
    keys = {key for box in first for key in box.coins}
    later = {key for boxes in second.values() for box in boxes for key in box.coins}
    shared = keys & later
    for said, probability in (_tied if shared else _independent)(first, second):
        for rest in itertools.product(range(setting.target.vocab), repeat=max(3 - len(said), 0)):
            whole = (*said[:3], *rest)
            joint[whole] += probability * math.prod(p_of(setting, whole[:i])[whole[i]] for i in range(len(said), 3))
    return joint, sum(box.probability * box.accepted for box in first), shared


def _independent(first, second):
    ends = defaultdict(float)
    for boxes in second.values():
        for box in boxes:
            ends[box.said, box.tokens] += box.probability
    by_said = defaultdict(list)
    for (said, tokens), probability in ends.items():
        by_said[said].append((tokens, probability))
    starts = defaultdict(float)
    for box in first:
        starts[box.tokens] += box.probability
    for tokens, probability in starts.items():
        for more, then in by_said.get(tokens, [((), 1.0)]):
            yield (*tokens, *more), probability * then


def _tied(first, second):
    for one in first:
        if len(one.tokens) >= 3:
            yield one.tokens, one.probability
            continue
        for two in second[one.tokens]:
            volume = one.weight * two.weight
            for key in {**one.coins, **two.coins}:
                low, high = zip(one.coins.get(key, (0, 1)), two.coins.get(key, (0, 1)), strict=True)
                volume *= max(min(high) - max(low), 0.0)
            if volume:
                yield (*one.tokens, *two.tokens), volume


def p_of(setting, said):
    """The target's p as a list."""
    logits = only_allowed(setting, setting.target.logits(said)) / (setting.temperature or 1.0)
    if setting.top_k:
        logits = torch.where(logits < logits.topk(setting.top_k).values[-1], -torch.inf, logits)
    return torch.softmax(logits, -1).tolist()


def only_allowed(setting, logits):
    banned = [token for token in range(setting.target.vocab) if setting.allowed and token not in setting.allowed]
    return logits.index_fill(-1, torch.tensor(banned, dtype=torch.int64), -torch.inf)


def check(setting, steps=2):
    """Raise unless three tokens are distributed as the target's, exactly; return the mean accepted."""
    joint, accepted, shared = joint_of_three(setting, steps)
    for whole in itertools.product(range(setting.target.vocab), repeat=3):
        exact = math.prod(p_of(setting, whole[:i])[whole[i]] for i in range(3))
        assert abs(joint[whole] - exact) < EXACT, (whole, joint[whole], exact)
    assert abs(sum(joint.values()) - 1) < EXACT
    assert not shared, f"coins used in two steps: {sorted(shared)}"
    return accepted
