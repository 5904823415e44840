"""Each sampling parameter against a reference in lists and math, and nodes against a loop of one-token calls."""

import itertools
import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.verify import (
    BadWords,
    Bias,
    MinTokens,
    Nodes,
    Penalties,
    SamplingMetadata,
    distribution,
    logprobs,
    probabilities,
    process,
    processors,
)
from tests.verify.steps import flatten, tree

VOCAB, EOS = 7, 0


@dataclass(frozen=True)
class Asked:
    """One sequence: what was asked, and what has been said."""

    prompt: tuple = (1, 2)
    output: tuple = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict = field(default_factory=dict)
    allowed: tuple = ()  # empty: all
    bad_words: tuple = ()
    min_tokens: int = 0
    stop_ids: tuple = (EOS,)


# --- the reference: no tensors, nothing shared with the product ---


def reference(logits, asked, said):
    """p as a list, after the drafted or committed tokens `said`; one-hot for a greedy request."""
    output, scores = [*asked.output, *said], list(logits)
    for token in range(len(scores)):
        if token in asked.prompt or token in output:
            scores[token] = scores[token] / asked.repetition if scores[token] > 0 else scores[token] * asked.repetition
        scores[token] -= asked.frequency * output.count(token)
        scores[token] -= asked.presence * (token in output)
        scores[token] += asked.bias.get(token, 0.0)
        if asked.allowed and token not in asked.allowed:
            scores[token] = -math.inf
    history = [*asked.prompt, *output]
    for word in asked.bad_words:
        if history[len(history) - len(word) + 1 :] == list(word[:-1]) or len(word) == 1:
            scores[word[-1]] = -math.inf
    if len(output) < asked.min_tokens:
        for token in asked.stop_ids:
            scores[token] = -math.inf
    if max(scores) == -math.inf:
        scores[fallback_of(asked)] = 0.0
    if asked.temperature == 0:
        best = scores.index(max(scores))
        return [float(token == best) for token in range(len(scores))]
    return reference_filters([score / asked.temperature for score in scores], asked)


def fallback_of(asked):
    return EOS if not asked.allowed or EOS in asked.allowed else asked.allowed[0]


def leave_out(on_the_border):
    """Where rounding decides, the reference has no opinion."""
    if on_the_border:
        assume(False)


def reference_filters(scores, asked):
    p = softmax(scores)
    bar = asked.min_p * max(p)
    leave_out(asked.min_p > 0 and any(abs(x - bar) < 1e-9 for x in p))
    p = normalise([x if x >= bar else 0.0 for x in p])
    if 0 < asked.top_k < len(p):
        kth = sorted(p, reverse=True)[asked.top_k - 1]
        p = normalise([x if x >= kth * (1 - 1e-12) else 0.0 for x in p])  # ties with the k-th stay
    if asked.top_p < 1:
        total, last = 0.0, 0.0
        for x in sorted(p, reverse=True):
            last, total = x, total + x
            leave_out(abs(total - asked.top_p) < 1e-9)
            if total >= asked.top_p:
                break
        p = normalise([x if x >= last * (1 - 1e-12) else 0.0 for x in p])
    return p


def softmax(scores):
    high = max(scores)
    return normalise([math.exp(score - high) for score in scores])


def normalise(weights):
    total = math.fsum(weights)
    return [weight / total for weight in weights]


# --- from Asked to the product's tensors ---


def padded(rows, width):
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.int64).view(len(rows), width)


def flush_right(tokens, width):
    kept = list(tokens)[-width:] if width else []
    return [-1] * (width - len(kept)) + kept


def controls_of(requests, vocab=VOCAB, plain_parts=False):
    """`plain_parts`: leave out parts that no sequence uses, as the engine does."""
    counts = torch.zeros(len(requests), vocab, dtype=torch.int32)
    in_prompt = torch.zeros(len(requests), vocab, dtype=torch.bool)
    for row, asked in enumerate(requests):
        in_prompt[row, list(asked.prompt)] = True
        for token in asked.output:
            counts[row, token] += 1

    def floats(name):
        return torch.tensor([getattr(asked, name) for asked in requests], dtype=torch.float64)

    longest = max([len(word) for asked in requests for word in asked.bad_words], default=1)
    most = max(len(asked.bad_words) for asked in requests)
    words = [
        [flush_right(word, longest) for word in (*asked.bad_words, *[()] * (most - len(asked.bad_words)))]
        for asked in requests
    ]
    tails = [flush_right([*asked.prompt, *asked.output], longest - 1) for asked in requests]
    wide = max(len(asked.bias) for asked in requests)
    parts = {
        "penalties": Penalties(
            repetition=floats("repetition"),
            presence=floats("presence"),
            frequency=floats("frequency"),
            in_prompt=in_prompt,
            counts=counts,
        ),
        "bias": Bias(
            tokens=padded([asked.bias for asked in requests], wide),
            values=torch.tensor(
                [[*asked.bias.values(), *[0.0] * (wide - len(asked.bias))] for asked in requests], dtype=torch.float64
            ).view(len(requests), wide),
        ),
        "allowed": torch.tensor(
            [[token in (asked.allowed or range(vocab)) for token in range(vocab)] for asked in requests]
        ),
        "bad_words": BadWords(
            words=torch.tensor(words, dtype=torch.int64).view(len(requests), most, longest),
            tail=torch.tensor(tails, dtype=torch.int64).view(len(requests), longest - 1),
        ),
        "min_tokens": MinTokens(
            minimum=torch.tensor([asked.min_tokens for asked in requests]),
            output_len=torch.tensor([len(asked.output) for asked in requests]),
            ends=padded([asked.stop_ids for asked in requests], max(len(asked.stop_ids) for asked in requests)),
        ),
        "top_k": torch.tensor([asked.top_k for asked in requests]),
        "top_p": floats("top_p"),
        "min_p": floats("min_p"),
    }
    if plain_parts:
        parts = {}
    fallback = torch.tensor([fallback_of(asked) for asked in requests])
    return SamplingMetadata(temperature=floats("temperature"), fallback=fallback, **parts)


def p_of(logits, metadata, nodes):
    """Rows of p; a greedy row as one-hot."""
    processed = process(logits, metadata, nodes)
    p = probabilities(processed)
    greedy = metadata.temperature[nodes.seq] == 0
    p[greedy] = torch.nn.functional.one_hot(distribution.argmax(processed), logits.shape[1]).to(p.dtype)[greedy]
    return p


def assert_matches_reference(logits, requests):
    logits = torch.tensor(logits, dtype=torch.float64)
    got = p_of(logits, controls_of(requests, logits.shape[1]), Nodes.roots(len(requests)))
    for row, asked in enumerate(requests):
        expected = torch.tensor(reference(logits[row].tolist(), asked, ()), dtype=torch.float64)
        assert torch.allclose(got[row], expected, rtol=0, atol=1e-9), (asked, got[row], expected)


tokens = st.integers(0, VOCAB - 1)
scores = st.lists(st.integers(-16, 16).map(lambda x: x / 4), min_size=VOCAB, max_size=VOCAB)  # ties are common
shares = st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.93, 1.0])
requests = st.builds(
    Asked,
    prompt=st.lists(tokens, min_size=1, max_size=3).map(tuple),
    output=st.lists(tokens, max_size=4).map(tuple),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, VOCAB + 1),
    top_p=shares,
    min_p=st.sampled_from([0.0, 0.02, 0.2, 0.9]),
    repetition=st.sampled_from([0.7, 1.0, 1.3]),
    presence=st.sampled_from([-1.5, 0.0, 0.4]),
    frequency=st.sampled_from([-0.3, 0.0, 0.6]),
    bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
    allowed=st.lists(tokens, max_size=VOCAB, unique=True).map(tuple),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    min_tokens=st.integers(0, 6),
    stop_ids=st.lists(tokens, min_size=1, max_size=2, unique=True).map(tuple),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(scores, requests), min_size=1, max_size=4))
def test_everything_at_once_matches_the_reference(rows):
    assert_matches_reference([s for s, _ in rows], [r for _, r in rows])


ALONE = {
    "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 4.0]),
    "top_k": st.integers(0, VOCAB + 1),
    "top_p": shares,
    "min_p": st.sampled_from([0.0, 0.02, 0.2, 0.9]),
    "repetition": st.sampled_from([0.5, 1.0, 1.7]),
    "presence": st.sampled_from([-2.0, 0.0, 2.0]),
    "frequency": st.sampled_from([-2.0, 0.0, 0.7]),
    "bias": st.dictionaries(tokens, st.integers(-100, 100).map(float), max_size=VOCAB),
    "allowed": st.lists(tokens, max_size=VOCAB, unique=True).map(tuple),
    "bad_words": st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple),
    "min_tokens": st.integers(0, 6),
}


@pytest.mark.parametrize("name", ALONE)
def test_each_parameter_alone_matches_the_reference(name):
    @settings(max_examples=40, deadline=None)
    @given(scores, ALONE[name], st.lists(tokens, max_size=5).map(tuple))
    def check(logits, value, output):
        assert_matches_reference([logits], [Asked(output=output, **{name: value})])

    check()


@settings(max_examples=60, deadline=None)
@given(
    requests,
    st.lists(tokens, min_size=5, max_size=5),
    st.tuples(*[st.integers(-1, node - 1) for node in range(5)]),
    st.lists(scores, min_size=6, max_size=6),
)
def test_a_node_is_processed_as_by_a_loop_of_one_token_calls(asked, drafted, parents, logits):
    draft = tree(drafted, parents)
    draft.validate(VOCAB)
    rows = torch.tensor(logits, dtype=torch.float64)
    _, nodes = flatten(draft)
    in_tree = process(rows, controls_of([asked]), nodes)
    for row in range(6):
        said, node = (), row - 1
        while node >= 0:
            said, node = (drafted[node], *said), parents[node]
        alone = replace(asked, output=(*asked.output, *said))
        assert torch.equal(in_tree[row : row + 1], process(rows[row : row + 1], controls_of([alone]), Nodes.roots(1)))


def test_unused_parts_cost_nothing_and_change_nothing():
    logits = torch.randn(3, VOCAB, dtype=torch.float64)
    assert process(logits, SamplingMetadata(), Nodes.roots(3)) is logits
    asked = [Asked(temperature=t) for t in (0.0, 0.7, 1.0)]
    full, plain = controls_of(asked), controls_of(asked, plain_parts=True)
    assert torch.equal(process(logits, full, Nodes.roots(3)), process(logits, plain, Nodes.roots(3)))


def test_the_models_logits_are_never_written_into():
    logits = torch.randn(1, VOCAB)
    kept = logits.clone()
    asked = Asked(temperature=0.5, top_k=2, top_p=0.5, min_p=0.1, repetition=1.3, bias={1: 3.0}, bad_words=((2,),))
    process(logits, controls_of([asked]), Nodes.roots(1))
    process(logits, controls_of([asked], plain_parts=True), Nodes.roots(1))
    assert torch.equal(logits, kept)


def test_ties_with_the_last_token_kept_are_kept():
    logits = [[2.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]]
    for asked in (Asked(top_k=2), Asked(top_p=0.5)):
        kept = process(torch.tensor(logits), controls_of([asked]), Nodes.roots(1)) > -math.inf
        assert kept[0].tolist() == [True, True, True, True, False, False, False]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_where_every_token_is_banned_the_fallback_is_drawn(temperature):
    asked = Asked(temperature=temperature, bad_words=tuple((token,) for token in range(VOCAB)), top_p=0.5)
    p = p_of(torch.randn(1, VOCAB), controls_of([asked]), Nodes.roots(1))
    assert p.tolist() == [[float(token == EOS) for token in range(VOCAB)]]


@pytest.mark.parametrize("repetitions", [[1.0], [1e-300, 1e300]], ids=["without penalties", "penalties"])
def test_extreme_values_never_make_a_nan(path, repetitions):
    asked = [
        Asked(temperature=temperature, repetition=repetition, prompt=tuple(range(VOCAB)), bad_words=((3,),))
        for temperature, repetition in itertools.product([1e-45, 1e-30, 1e30, 3.4e38, 1e300], repetitions)
    ]
    logits = torch.tensor([[9.0, -9.0, 0.0, 50.0, 1.0, 1.0, -1e4]]).repeat(len(asked), 1)
    p = p_of(logits, controls_of(asked), Nodes.roots(len(asked)))
    assert torch.isfinite(p).all()
    assert (p[:, 3] == 0).all()
    assert p.sum(1).tolist() == pytest.approx([1] * len(asked))


def test_a_flat_row_is_sorted_whole_and_a_sharp_one_is_not():
    """Both ways of reaching top_p agree with the reference beyond the first candidates."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 5000, dtype=torch.float64, generator=generator)
    logits[1] *= 6
    rows = [Asked(top_p=0.95), Asked(top_p=0.95)]
    kept = process(logits, controls_of(rows, 5000), Nodes.roots(2)) > -math.inf
    assert int(kept[0].sum()) > distribution.CANDIDATES > int(kept[1].sum())
    assert_matches_reference(logits.tolist(), rows)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(scores, requests), min_size=1, max_size=4), st.lists(tokens, min_size=2, max_size=2))
def test_penalties_for_whole_batches_equal_those_row_by_row(rows, drafted):
    logits, asked = torch.tensor([s for s, _ in rows], dtype=torch.float64), [r for _, r in rows]
    nodes = replace(
        Nodes.roots(len(rows)),
        depth=torch.full((len(rows),), 2),
        path=torch.tensor([drafted]).expand(len(rows), 2),
    )
    penalties = controls_of(asked).penalties
    dense = processors._penalise(logits, penalties, nodes)
    assert torch.equal(dense, processors._penalise_rows(logits, penalties, nodes))


def test_a_row_is_the_same_bits_in_any_batch():
    generator = torch.Generator().manual_seed(3)
    vocab = 3001
    logits = torch.randn(33, vocab, generator=generator) * 4
    kinds = [
        Asked(temperature=0.7, top_p=0.9),
        Asked(temperature=0.0, repetition=1.2, output=(5, 5, 9)),
        Asked(temperature=5.0, top_p=0.99),
        Asked(temperature=1.0, top_k=40, min_p=0.01, frequency=0.4, output=(1, 2, 3)),
        Asked(temperature=1.3, bias={7: 3.0}, bad_words=((5, 6), (8,)), min_tokens=3),
    ]
    asked = [kinds[row % len(kinds)] for row in range(33)]

    def everything(rows):
        processed = process(logits[rows], controls_of(asked[rows], vocab), Nodes.roots(len(asked[rows])))
        scores = logprobs(logits[rows], torch.arange(33)[rows], 5)
        return [processed, probabilities(processed), scores.chosen, scores.rank, scores.top, scores.top_tokens]

    alone = [torch.cat(parts) for parts in zip(*[everything(slice(row, row + 1)) for row in range(33)], strict=True)]
    for size in range(1, 34):
        for part, expected in zip(everything(slice(0, size)), alone, strict=True):
            assert torch.equal(part, expected[:size])


def test_logprobs_are_of_the_raw_logits_with_ranks():
    logits = [1.0, 3.0, 2.0, -1.0]
    p = softmax(logits)
    got = logprobs(torch.tensor([logits], dtype=torch.float64), torch.tensor([0]), 2)
    assert float(got.chosen) == pytest.approx(math.log(p[0]))
    assert got.rank.tolist() == [3]
    assert got.top_tokens.tolist() == [[1, 2]]
    assert got.top[0].tolist() == pytest.approx([math.log(p[1]), math.log(p[2])])
    assert logprobs(torch.tensor([logits]), torch.tensor([1]), 0).top_tokens.shape == (1, 0)
