"""The sampling metadata of a batch, put together from the parameters of its sequences."""

from __future__ import annotations

import torch

from paceline.core.sequence import Sequence
from paceline.sampling_params import SamplingParams
from paceline.verify import Nodes, draw, process
from paceline.verify.metadata import SamplingMetadataBuilder


def test_every_sequence_has_its_own_parameters_whichever_rows_share_the_step():
    sets = [
        SamplingParams(**given).resolve({"temperature": 0.0})
        for given in (
            {},
            {"temperature": 0.7, "top_p": 0.9, "seed": 3},
            {"temperature": 1.0, "top_k": 5, "min_p": 0.1},
            {"temperature": 0.7, "top_p": 0.9, "seed": 3},  # equal to another, and not the same object
        )
    ]
    sequences = [
        Sequence(str(index), [1], sets[which], max_len=9) for index, which in enumerate((1, 0, 0, 2, 1, 3, 2, 1))
    ]
    builder = SamplingMetadataBuilder(11, frozenset({4}), torch.device("cpu"))
    together, draws = builder.metadata(sequences), builder.draws(sequences)
    neutral = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for name, value in neutral.items():
        part = getattr(together, name)
        assert part is not None
        for index, sequence in enumerate(sequences):
            alone = getattr(SamplingMetadataBuilder(11, frozenset({4}), torch.device("cpu")).metadata([sequence]), name)
            assert part[index] == (value if alone is None else alone[0]), (name, index)
    assert draws.kind.tolist() == [2, 0, 0, 1, 2, 2, 1, 2]  # of DrawKind
    assert draws.key.tolist() == [sequence.noise_key for sequence in sequences]


def test_a_temperature_too_low_for_float32_is_not_taken_for_none():
    sequence = Sequence("a", [1], SamplingParams(temperature=1e-46).resolve({}), max_len=9)
    builder = SamplingMetadataBuilder(11, frozenset({4}), torch.device("cpu"))
    metadata, draws = builder.metadata([sequence]), builder.draws([sequence])
    logits = torch.arange(11.0)[None] * 1e-3
    for committed in range(20):
        draws.committed.fill_(committed)
        assert draw(process(logits, metadata, Nodes.roots(1)), draws, Nodes.roots(1)) == 10


def test_a_req_index_that_changes_hands_holds_the_parameters_of_its_new_sequence():
    """And a sequence that comes back to another index keeps its own."""
    builder = SamplingMetadataBuilder(11, frozenset({4}), torch.device("cpu"))
    first, second = (
        Sequence(name, [1], SamplingParams(temperature=temperature, top_k=3).resolve({}), max_len=9)
        for name, temperature in (("a", 0.5), ("b", 2.0))
    )
    for req_indices in ((0, 5), (5, 0), (7, 5)):
        first.req_index, second.req_index = req_indices
        for sequences in ([first, second], [second, first], [second]):
            assert builder.metadata(sequences).temperature.tolist() == [one.params.temperature for one in sequences]
            assert builder.draws(sequences).key.tolist() == [one.noise_key for one in sequences]


def test_bans_come_with_the_token_that_stands_where_all_are_banned():
    sequence = Sequence("a", [1], SamplingParams(min_tokens=2).resolve({}), max_len=9)
    builder = SamplingMetadataBuilder(11, frozenset({4}), torch.device("cpu"))
    assert builder.metadata([sequence]).fallback.tolist() == [4]
    sequence.tokens += [3, 3]
    assert builder.metadata([sequence]).min_tokens is None


def test_a_sequence_never_draws_a_token_it_did_not_allow_even_where_the_rest_is_banned():
    """EOS (4) stands in where all is banned, unless it is not allowed; neighbours keep all tokens."""
    builder = SamplingMetadataBuilder(11, frozenset({4}), torch.device("cpu"))
    asked = ({"allowed_token_ids": [7, 2]}, {}, {"allowed_token_ids": [4, 7]}, {"allowed_token_ids": [2]})
    sequences = [
        Sequence(str(at), [1], SamplingParams(temperature=0, **one).resolve({}), max_len=9, bad_words=[[7], [2]])
        for at, one in enumerate(asked)
    ]
    for batch in (sequences, sequences[2:], sequences[:1], sequences[::-1]):
        metadata = builder.metadata(batch)
        drawn = process(torch.arange(11.0).repeat(len(batch), 1), metadata, Nodes.roots(len(batch))).argmax(-1)
        expected = {"0": 7, "1": 10, "2": 4, "3": 2}
        assert drawn.tolist() == [expected[sequence.request_id] for sequence in batch]
