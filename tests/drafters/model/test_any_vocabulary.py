"""A draft model of another vocabulary: its K/V, its text, its q. The contract suite shows that it changes no output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters import METHODS, DrafterContext, DraftRequest
from paceline.drafters.model.any_vocabulary import AnyVocabularyDrafter
from paceline.drafters.model.private_kv import BLOCK_SIZE, OwnKV, PrivateKV
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan
from paceline.models.load.open_model import load_model
from paceline.testing import toy_config
from paceline.text.tokenizer import Tokenizer
from paceline.verify import Nodes, probabilities, process
from paceline.verify.metadata import SamplingMetadataBuilder
from tests.drafters.test_contract import FALSE_ALARM, SAMPLED, likelihood
from tests.helpers.contract_toys import (
    VOCAB,
    ByRequest,
    FunctionModel,
    OtherLetters,
    contrary,
    exercised,
    imitating,
    make_engine,
    other_vocabulary,
    params,
    plain,
    prompt_of,
    repeating,
    run,
)
from tests.helpers.errors import refused
from tests.helpers.small_tokenizers import small_tokenizers
from tests.helpers.tiny import save_tiny

CONFIG = toy_config(VOCAB)


def sequences_of(engine, count, **wishes):
    """Sequences in mid-answer, and the engine."""
    for index in range(count):
        engine.add_request(str(index), prompt_of(index, 7 + index), params(max_tokens=60, **wishes))
    running = list(engine.scheduler.waiting)
    for _ in range(6):
        engine.step()
    return running


def test_after_every_step_its_tokens_are_a_fresh_encoding_and_its_cache_holds_them_in_order():
    """`FunctionModel` asserts that positions are in order; what it reads back is compared here."""
    drafter = other_vocabulary(CONFIG)
    letters, engine = OtherLetters(VOCAB), make_engine([drafter], k=4)
    for index in range(3):
        engine.add_request(str(index), prompt_of(index, 7), params(max_tokens=40))
    running = list(engine.scheduler.waiting)
    while engine.has_work:
        before = {one.key: list(one.tokens) for one in running}
        engine.step()
        for sequence in running:
            state = drafter._states.get(sequence.key)
            if state is None or not state.text.num_followed:
                continue
            text = "".join(letters.letters[token] for token in before[sequence.key][: state.text.num_followed])
            assert state.text.ids == letters.encode(text)
            kv = drafter._kv.layers[0].k.view(-1)
            slots = [
                state.kv.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(len(state.kv.tokens))
            ]
            assert kv[slots].tolist() == state.kv.tokens
    assert drafter._states == {}
    assert drafter._kv.num_free == drafter._kv.most_tokens // BLOCK_SIZE


@pytest.mark.parametrize("wishes", [{"temperature": 0.8}, {"temperature": 1.1, "top_p": 0.8, "logit_bias": {2: 1.0}}])
def test_q_is_the_drafters_distribution_over_shared_tokens_under_the_requests_parameters(wishes):
    drafter, letters = other_vocabulary(CONFIG, certain=0.0), OtherLetters(VOCAB)
    running = sequences_of(make_engine([drafter], k=3), 3, **wishes)
    draft = drafter.propose([DraftRequest(sequence, 3) for sequence in running])
    assert draft.q is not None
    builder = SamplingMetadataBuilder(VOCAB, frozenset(), torch.device("cpu"))
    for row, sequence in enumerate(running):
        assert int(draft.num_nodes[row]) == 3
        for depth in range(3):
            tokens = (*sequence.tokens, *draft.tokens[row, :depth].tolist())
            own = torch.tensor(letters.logits_of(imitating)(tuple(letters.encode_tokens(tokens)), VOCAB))
            mass = torch.zeros(VOCAB, dtype=torch.float64)
            for token, text in enumerate(letters.spelt):
                if text is not None and len(text) == 1:
                    mass[ord(text) - ord("a")] += own.double().exp()[token]
            metadata = builder.metadata([sequence])
            node = torch.tensor([depth])
            path = draft.tokens[row : row + 1, :depth]
            nodes = Nodes(seq=torch.zeros(1, dtype=torch.int64), node=node - 1, depth=node, path=path)
            expected = probabilities(process(mass.log()[None].float(), metadata, nodes))[0]
            found = draft.q.over(VOCAB)[draft.q.row_of[row, depth]]
            assert torch.allclose(found, expected, atol=1e-5)
            assert found[VOCAB - 1] == 0, "a letter that the drafter has not is never drafted"


def test_q_of_a_row_is_the_same_beside_rows_of_other_parameters():
    wishes = [{"temperature": 0.8}, {"temperature": 0.8, "logit_bias": {2: 1.0}}, {"temperature": 0.8, "seed": 3}, {}]
    alone, beside = other_vocabulary(CONFIG, certain=0.0), other_vocabulary(CONFIG, certain=0.0)
    engine = make_engine([beside], k=3)
    for index, wish in enumerate(wishes):
        engine.add_request(str(index), prompt_of(index, 9), params(max_tokens=60, **wish))
    running = list(engine.scheduler.waiting)
    for _ in range(3):
        engine.step()
    draft = beside.propose([DraftRequest(sequence, 3) for sequence in running])
    assert (draft.q.ids is None, draft.q.row_of[2:].max()) == (True, -1)
    for row, sequence in enumerate(running):
        alone.admit(sequence, 0, 0)
        own = alone.propose([DraftRequest(sequence, 3)])
        assert own.tokens[0].tolist() == draft.tokens[row].tolist()
        if row < 2:
            assert torch.equal(own.q.over(VOCAB), draft.q.probs[draft.q.row_of[row, :3]])
            assert (own.q.ids is not None) == (row == 0)


def test_chains_that_end_where_the_drafter_is_unsure_keep_the_distribution():
    for certain in (0.5, 0.9):
        drafter = other_vocabulary(toy_config(3), certain=certain)
        assert likelihood(drafter, SAMPLED["temperature"], k=4) > FALSE_ALARM


def test_chains_that_end_where_the_drafter_is_unsure_are_shorter():
    drafted = {}
    for certain in (0.0, 0.5, 1.1):
        drafter = other_vocabulary(CONFIG, certain=certain)
        request = (0, "a", prompt_of(0, 9), params(max_tokens=40))
        sequence = run(make_engine([drafter], k=5), [request])[0]["a"]
        assert sequence.output_tokens == plain([request])["a"].output_tokens
        drafted[certain] = sequence.stats.num_draft_tokens / sequence.stats.num_drafts
    assert drafted[0.0] > drafted[0.5] > drafted[1.1] == 1


def test_nothing_is_drafted_where_hardly_any_probability_is_on_shared_tokens():
    def foreign(context, vocab_size):
        return [-20.0] * (VOCAB - 1) + [20.0]  # the last letter, which the drafter has not

    drafter = other_vocabulary(CONFIG, function=foreign)
    request = (0, "a", prompt_of(0, 9), params(max_tokens=20))
    sequence = run(make_engine([drafter]), [request])[0]["a"]
    assert sequence.stats.num_draft_tokens == 0
    assert drafter.shared_mass < 0.01
    assert sequence.output_tokens == plain([request])["a"].output_tokens


def test_a_small_cache_is_shared_by_all_rows():
    drafter = other_vocabulary(CONFIG)
    drafter._kv = PrivateKV(drafter.model, 4 * 128)  # four blocks of 16 tokens for six rows
    requests = [(0, str(i), prompt_of(i, 9 + i), params(max_tokens=30)) for i in range(6)]
    engine = make_engine([drafter])
    sequences, _ = run(engine, requests)
    for name, alone in plain(requests).items():
        assert sequences[name].output_tokens == alone.output_tokens
    assert exercised(sequences.values())
    assert engine.drafters.failures == 0
    assert drafter._kv.num_free == 4


def test_blocks_are_taken_from_the_row_that_drafted_longest_ago_and_from_none_of_the_step():
    kv = PrivateKV(FunctionModel(repeating, CONFIG, num_layers=1), 4 * 128)
    old, new, third = OwnKV(), OwnKV(), OwnKV()
    assert kv.allocate(old, 2 * BLOCK_SIZE, [])
    assert kv.allocate(new, BLOCK_SIZE + 1, [])
    old.tokens, new.tokens = [1], [2]
    assert kv.allocate(third, 2 * BLOCK_SIZE, [new])
    assert (old.tokens, old.blocks, new.tokens) == ([], [], [2])
    assert not kv.allocate(old, 3 * BLOCK_SIZE, [new, third])


def test_a_pass_that_fails_leaves_the_drafter_sound():
    drafter = other_vocabulary(CONFIG)
    drafter.model.fail_at = set(range(3, 60, 4))
    requests = [(0, str(i), prompt_of(i, 9), params(max_tokens=40)) for i in range(3)]
    engine = make_engine([drafter])
    sequences, _ = run(engine, requests)
    for name, alone in plain(requests).items():
        assert sequences[name].output_tokens == alone.output_tokens
    assert engine.drafters.failures > 3
    assert exercised(sequences.values())


def test_a_drafter_that_is_always_wrong_costs_nothing_but_time():
    request = (0, "a", prompt_of(0, 7), params(max_tokens=20))
    sequence = run(make_engine([other_vocabulary(CONFIG, function=contrary)]), [request])[0]["a"]
    assert sequence.output_tokens == plain([request])["a"].output_tokens


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target and a smaller model of another vocabulary, each in its folder."""
    folders = {}
    for name, kind in (("target", "byte level"), ("draft", "gemma")):
        folder = folders[name] = tmp_path_factory.mktemp(name)
        tokenizer = small_tokenizers()[kind]
        save_tiny("llama-tied", folder, vocab_size=tokenizer.vocab_size + (name == "target"))
        tokenizer.backend.save(str(folder / "tokenizer.json"))
    return folders


def context_of(target, draft_model):
    return DrafterContext(
        config=target.config,
        device=target.decoder.device,
        speculation=SpeculationConfig(method="draft-model", draft_model=draft_model),
        token_texts=target.tokenizer.token_text,
        tokenizer=target.tokenizer,
    )


def test_the_table_makes_it_from_the_name_of_a_model_of_another_vocabulary(pair):
    target = load_model(pair["target"], device="cpu", threads=1)
    drafter = METHODS["draft-model"].make(context_of(target, str(pair["draft"])))
    assert isinstance(drafter, AnyVocabularyDrafter)
    config = EngineConfig(block_size=4, num_blocks=64)
    requests = [
        (0, str(i), target.tokenizer.encode("The quick brown fox, 日本 "), params(max_tokens=24, **wish))
        for i, wish in enumerate([{}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8}])
    ]
    engine = Engine(target.decoder, config, drafters=[drafter], policy=ByRequest({}, DraftPlan("draft-model", 3)))
    sequences = run(engine, requests)[0]
    alone = run(Engine(target.decoder, config), requests[:2])[0]
    assert {name: sequences[name].output_tokens for name in alone} == {
        name: one.output_tokens for name, one in alone.items()
    }
    assert sum(sequence.stats.num_draft_tokens for sequence in sequences.values()) > 0
    assert engine.drafters.failures == 0


def test_vocabularies_without_a_common_token_and_tokenizers_that_spell_no_text_are_refused(pair, tmp_path):
    target = load_model(pair["target"], device="cpu", threads=1)
    save_tiny("llama-tied", tmp_path)  # its tokenizer knows whole words only
    with refused("draft_model"):
        METHODS["draft-model"].make(context_of(target, str(tmp_path)))
    with refused("draft_model"):  # without a tokenizer nothing can be compared
        METHODS["draft-model"].make(replace(context_of(target, str(pair["draft"])), tokenizer=None))
    assert isinstance(target.tokenizer, Tokenizer)
