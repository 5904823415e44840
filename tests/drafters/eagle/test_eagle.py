"""EAGLE and EAGLE-3: the layer and its trees against a re-computation written down from the papers, its own cache, its
folders, and that a drafter that knows an answer by heart is always right."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters.base import DrafterContext
from paceline.drafters.eagle import drafter as eagle_drafter
from paceline.drafters.eagle.checkpoint import read, write
from paceline.drafters.eagle.config import published_layers
from paceline.drafters.eagle.tree import BELOW, DEPTH, TreeShape, grow, width_of
from paceline.drafters.method_names import drafter_specs
from paceline.drafters.methods import EAGLE, EAGLE3, METHODS, accepts_folder
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan
from paceline.errors import BrokenModel, InvalidParameter, UnsupportedModel
from paceline.models.kv_cache import slots_of
from tests.cuda.test_cuda import CONFIG, PROMPTS
from tests.drafters.eagle.eagles import Reference, config_for, drafter_of, overfit, random_tensors
from tests.drafters.overfit import CPU, taps_of, tiny_decoder
from tests.helpers.contract_toys import ByRequest, NowAndThen, params, run
from tests.helpers.errors import refused

LAYERS = (0, 1, 2)  # of the tiny target, which has two
KINDS = {
    "eagle3": {"layer_ids": LAYERS, "vocab": 40},
    "eagle3.1": {"layer_ids": LAYERS, "vocab": 40, "fc_norm": True, "norm_output": True, "own_embedding": True},
    "eagle3 as others train it": {
        "layer_ids": (1,),
        "norm_before_residual": True,
        "norm_before_fc": True,
        "qk_norm": True,
        "own_head": False,
    },
    "eagle": {"fused": False, "own_head": False},
    "mtp": {"fused": False, "mtp": True, "own_head": False, "feature_first": True, "norm_output": True},
    "mtp of the state before the final norm": {
        "fused": False,
        "mtp": True,
        "own_head": False,
        "norm_output": True,
        "normed_feature": False,
        "biases": frozenset(f"layers.0.self_attn.{part}_proj" for part in "qkv"),
    },
    "eagle with biases": {
        "fused": False,
        "own_head": False,
        "biases": frozenset({"fc", *(f"layers.0.self_attn.{part}_proj" for part in "qkv")}),
    },
}
SIZES = EngineConfig(num_blocks=64, block_size=16, max_num_seqs=4, max_num_batched_tokens=96)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def make(kind, decoder, tensors=None, **options):
    config = config_for(CONFIG, **KINDS[kind])
    tensors = tensors or random_tensors(config)
    drafter = drafter_of(config, tensors, CONFIG, decoder.kernels, decoder.embedding, decoder.head, **options)
    return drafter, Reference(config, tensors, decoder.embedding, decoder.embedding)


class Spy:
    """Records what `grow` is given and what it asks of the layer, with the text that is committed then."""

    def __init__(self, drafter, monkeypatch):
        self.calls = []
        draft, sequences = drafter.draft, []

        def drafting(rows, req_indices, lengths):
            sequences[:] = [list(row.sequence.tokens) for row in rows]
            return draft(rows, req_indices, lengths)

        def growing(logits, features, max_nodes, shape, expand, translate):
            levels = []

            def expanding(nodes):
                found = expand(nodes)
                levels.append((nodes, found[0].clone()))
                return found

            proposed = grow(logits, features, max_nodes, shape, expanding, translate)
            self.calls.append(([*sequences], logits.clone(), levels, max_nodes.tolist(), shape, proposed))
            return proposed

        monkeypatch.setattr(drafter, "draft", drafting)
        monkeypatch.setattr(eagle_drafter, "grow", growing)

    def logits(self, row, call):
        """(path of tokens: logits behind it) of everything the row expanded."""
        _, root, levels, *_ = self.calls[call]
        found, paths = {(): root[row]}, {}
        for nodes, logits in levels:
            for lane in range(nodes.tokens.shape[1]):
                if bool(nodes.alive[row, lane]):
                    above = nodes.above[row, lane].tolist()
                    path = (*(paths[above[-1]] if above else ()), int(nodes.tokens[row, lane]))
                    paths[int(nodes.number[row, lane])] = path
                    found[path] = logits[row, lane]
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_node_are_those_of_its_path(kind, decoder, monkeypatch):
    """After chunks of prompts, accepted and rejected drafts, and plain steps."""
    drafter, reference = make(kind, decoder)
    spy = Spy(drafter, monkeypatch)
    engine = Engine(decoder, SIZES, drafters=[drafter], policy=NowAndThen(drafter.name, (1, 4, 13, 30), 0.7))
    run(engine, [(at, str(at), prompt[:40], params(max_tokens=32)) for at, prompt in enumerate(PROMPTS)])
    assert engine.drafters.failures == 0
    seen, deep, fresh = 0, 0, tiny_decoder()
    for call in range(0, len(spy.calls), 4):
        for row, text in enumerate(spy.calls[call][0]):
            taps = taps_of(fresh, text, drafter.taps)[:-1]
            for path, logits in list(spy.logits(row, call).items())[::-5]:
                expected = reference.after(text, taps, path)
                assert (logits - expected).abs().max() < 3e-4 * expected.abs().max(), (call, row, path)
                seen, deep = seen + 1, max(deep, len(path))
    assert seen > 20
    assert deep == BELOW


def explicit_tree(logits, nodes, ids, shape):
    """EAGLE-2 in plain Python, from logits by path: the paths kept and their log probabilities, best first."""
    width = min(width_of(nodes), shape.width)
    kept, frontier = [], [((), 0.0)]
    for _ in range(shape.depth):
        children = []
        for path, score in frontier:
            if path not in logits:
                continue
            logp = logits[path].log_softmax(-1)
            best, which = logp.topk(shape.children)
            tokens = which if ids is None else ids[which]
            children += [
                ((*path, token), score + value) for token, value in zip(tokens.tolist(), best.tolist(), strict=True)
            ]
        kept += children
        frontier = sorted(children, key=lambda one: -one[1])[:width]
    return zip(*sorted(kept, key=lambda one: -one[1])[:nodes], strict=True)


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_trees_hold_the_likeliest_paths_in_order(kind, decoder, monkeypatch):
    drafter, reference = make(kind, decoder)
    spy = Spy(drafter, monkeypatch)
    engine = Engine(decoder, SIZES, drafters=[drafter], policy=NowAndThen(drafter.name, (2, 7, 20, 60), 0.7))
    run(engine, [(0, str(at), prompt[:20], params(max_tokens=70)) for at, prompt in enumerate(PROMPTS)])
    checked = 0
    for call, (texts, _, _, max_nodes, shape, proposed) in enumerate(spy.calls[:6]):
        for row in range(len(texts)):
            count = shape.most(max_nodes[row])
            paths = []
            for token, parent in zip(proposed.tokens[row].tolist(), proposed.parents[row].tolist(), strict=True):
                assert parent < len(paths)
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            assert len(set(paths[:count])) == count, "siblings differ"
            told, scores = explicit_tree(spy.logits(row, call), count, reference.ids, shape)
            assert paths[:count] == list(told)
            assert proposed.scores[row, :count].tolist() == pytest.approx(scores, abs=1e-4)
            checked += 1
    assert checked > 8


@pytest.mark.parametrize("nodes", [*range(1, 20), 24, 60, 64])
def test_no_tree_expands_more_nodes_than_it_has_slots(nodes):
    for vocab in (1, 3, 1000):
        shape = TreeShape.of(nodes, vocab)
        assert shape.width * (shape.depth - 1) <= nodes
        assert shape.depth <= DEPTH
        assert 1 <= shape.most(nodes) <= nodes
    assert TreeShape.of(nodes, 1000).most(nodes) == nodes


def test_ties_never_place_a_child_before_its_parent():
    """A drafter that is certain gives children the probability of their parents."""
    max_nodes, shape = torch.tensor([30, 9]), TreeShape.of(30, 50)
    logits = torch.full((2, 50), -torch.inf)
    logits[:, 3] = 0

    def expand(nodes):
        each = logits[:, None].expand(-1, nodes.tokens.shape[1], -1)
        return each, nodes.features

    tokens, parents, _ = grow(logits, torch.zeros(2, 4), max_nodes, shape, expand, lambda ids: ids)
    assert (parents < torch.arange(parents.shape[1])).all()
    assert tokens[:, :DEPTH].tolist() == [[3] * DEPTH] * 2
    assert parents[:, :DEPTH].tolist() == [list(range(-1, DEPTH - 1))] * 2


@pytest.mark.parametrize("num_blocks", [40, 14])
@pytest.mark.parametrize("kind", ["eagle3.1", "eagle", "mtp"])
def test_the_own_cache_is_that_of_a_pass_over_the_committed_tokens(kind, num_blocks, decoder):
    """After chunks, prefix hits, unread tokens and, with few blocks, preemption."""
    drafter, reference = make(kind, decoder)
    config = EngineConfig(num_blocks=num_blocks, block_size=16, max_num_seqs=4, max_num_batched_tokens=48)
    engine = Engine(decoder, config, drafters=[drafter], policy=NowAndThen(drafter.name, (2, 5, 9, 14), 0.7))
    prompts = [PROMPTS[1][:40], PROMPTS[1][:37], PROMPTS[2][:50], PROMPTS[1][:40]]
    added = [
        engine.add_request(str(at), prompt, params(max_tokens=60, ignore_eos=True))[0]
        for at, prompt in enumerate(prompts)
    ]
    checked, preempted, hits, fresh = 0, 0, 0, tiny_decoder()
    for step in range(150):
        if not engine.has_work:
            break
        engine.step()
        preempted = max(preempted, *(one.num_preemptions for one in added))
        hits = max(hits, *(one.num_cached_prompt for one in added))
        for sequence in added if step % 13 == 0 else ():
            if sequence.finished or sequence.key not in drafter._states:
                continue
            start, end = drafter.kv_range(sequence)
            at = np.arange(max(start, 1), end)
            if not len(at):
                continue
            slots = torch.from_numpy(slots_of(np.array([sequence.blocks]), 0, at, 16))
            taps = taps_of(fresh, sequence.tokens[: end - 1], drafter.taps)[at[0] - 1 :]
            k, v = reference.keys_values(
                torch.tensor(sequence.tokens[at[0] : end]), reference.fuse(taps), torch.from_numpy(at - 1).double()
            )
            assert torch.allclose(drafter._cache.k[slots].double(), k, atol=1e-4)
            assert torch.allclose(drafter._cache.v[slots].double(), v, atol=1e-4)
            checked += len(at)
    assert engine.drafters.failures == 0
    assert checked > 200
    assert hits > 0
    assert (preempted > 0) == (num_blocks == 14)


@pytest.fixture(scope="module")
def answered(decoder):
    requests = [(0, str(at), PROMPTS[at][:8], params(max_tokens=20, ignore_eos=True)) for at in range(1)]
    sequences, _ = run(Engine(decoder, SIZES), requests)
    return requests, [list(sequence.tokens) for sequence in sequences.values()]


@pytest.mark.parametrize("kind", ["eagle3", "eagle3.1", "eagle", "mtp"])
def test_a_drafter_that_knows_the_answers_by_heart_is_always_right(kind, decoder, answered):
    requests, texts = answered
    config = config_for(CONFIG, **{**KINDS[kind], "vocab": 0})
    taps = [taps_of(decoder, text, config.taps(CONFIG.num_layers)) for text in texts]
    recipe = {"steps": 50, "rate": 0.01} if config.fused else {"steps": 120, "rate": 0.002}
    tensors = overfit(config, decoder.embedding, decoder.embedding, texts, taps, **recipe)
    for top_k, nodes in ((1, 4), (10, 6)):
        drafter = drafter_of(config, tensors, CONFIG, decoder.kernels, decoder.embedding, decoder.head, top_k=top_k)
        engine = Engine(decoder, SIZES, drafters=[drafter], policy=ByRequest({}, DraftPlan(drafter.name, nodes)))
        sequences, _ = run(engine, requests)
        assert [list(one.tokens) for one in sequences.values()] == texts
        for one in sequences.values():
            assert one.stats.num_accepted_tokens >= 0.9 * 4 / 5 * 19, top_k  # four of five tokens are drafted
        assert engine.drafters.failures == 0


# -- folders


LAYOUTS = [(kind, False) for kind in KINDS if not kind.startswith("mtp")]
LAYOUTS += [(kind, True) for kind, flags in KINDS.items() if "fused" not in flags]


@pytest.mark.parametrize(("kind", "speculators"), LAYOUTS)
def test_a_folder_gives_back_what_was_written(kind, speculators, tmp_path):
    config = config_for(CONFIG, **KINDS[kind])
    tensors = random_tensors(config, dtype=torch.bfloat16)
    write(tmp_path, config, tensors, speculators=speculators)
    found, again = read(tmp_path, CONFIG)
    assert found == config
    assert again.keys() == tensors.keys()
    assert all(
        torch.equal(again[name], tensor) and again[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    assert accepts_folder(EAGLE3 if config.fused else EAGLE, tmp_path)


def context_of(folder, decoder, method=EAGLE3):
    return DrafterContext(
        config=CONFIG,
        device=CPU,
        speculation=SpeculationConfig(method=method, drafter=str(folder)),
        embedding=decoder.embedding,
        head=decoder.head,
        kernels=decoder.kernels,
        checkpoint=folder,
    )


def edited(folder, **changes):
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw.update(changes)
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))


def test_the_table_makes_a_drafter_from_a_folder(tmp_path, decoder):
    config = config_for(CONFIG, **KINDS["eagle3"])
    write(tmp_path, config, random_tensors(config))
    drafter = METHODS[EAGLE3].make(context_of(tmp_path, decoder))
    assert (drafter.name, drafter.taps) == (EAGLE3, LAYERS)
    assert (
        drafter.version
        != drafter_of(
            config, random_tensors(config, 1), CONFIG, decoder.kernels, decoder.embedding, decoder.head
        ).version
    )


def test_weights_that_are_no_numbers_are_named(tmp_path):
    config = config_for(CONFIG, **KINDS["eagle3"])
    for dtype in (torch.int32, torch.float8_e4m3fn, torch.complex64):
        write(tmp_path, config, {**(tensors := random_tensors(config)), "fc.weight": tensors["fc.weight"].to(dtype)})
        with pytest.raises(BrokenModel, match=r"tensor fc\.weight has dtype"):
            read(tmp_path, CONFIG)


def test_layers_that_a_folder_does_not_name_are_the_published_ones(tmp_path):
    assert published_layers(32) == (2, 16, 29)
    config = config_for(CONFIG, layer_ids=LAYERS, vocab=40)
    write(tmp_path, config, random_tensors(config))
    edited(tmp_path, eagle_config="absent")
    found, _ = read(tmp_path)
    assert found.layer_ids is None
    assert found.taps(30) == (2, 15, 27)
    with refused("drafter"):
        read(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocab_size": 50, "paceline": {}}, InvalidParameter, "its vocabulary is 50, and this model's is 96"),
        ({"paceline": {"target": {"num_layers": 7}}}, InvalidParameter, "its number of layers is 7, and this model's"),
        ({"paceline": {"target": {"embedding_sample": [1.0] * 64}}}, InvalidParameter, "whose embeddings are not"),
        ({"num_hidden_layers": 2}, UnsupportedModel, "2 layers are not supported; one is"),
        ({"draft_vocab_size": 41}, BrokenModel, r"lm_head.weight has shape .* asks for \[41, 64\]"),
        ({"fc_norm": True}, BrokenModel, "tensor fc_norm.0.weight is missing"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, BrokenModel, r"asks for \[64, 128\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1, 0]}}, UnsupportedModel, "must ascend"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 5]}}, InvalidParameter, "this model has 2"),
        ({"model_type": "gemma"}, UnsupportedModel, "model_type 'gemma' is not supported"),
        ({"num_key_value_heads": 4}, BrokenModel, "k_proj.weight has shape"),
        ({"hidden_size": 32, "paceline": {}}, InvalidParameter, "its hidden size is 32, and this model's is 64"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_with_the_reason(changes, error, message, tmp_path, decoder):
    config = config_for(CONFIG, **KINDS["eagle3"])
    write(tmp_path, config, random_tensors(config))
    edited(tmp_path, **changes)
    with pytest.raises(error, match=message):
        METHODS[EAGLE3].make(context_of(tmp_path, decoder))


def test_missing_and_foreign_tensors_are_named(tmp_path, decoder):
    config = config_for(CONFIG, **KINDS["eagle3"])
    write(tmp_path, config, random_tensors(config))
    stored = load_file(tmp_path / "model.safetensors")
    for name in ("midlayer.hidden_norm.weight", "fc.weight", "d2t", "midlayer.self_attn.q_proj.weight"):
        save_file({key: value for key, value in stored.items() if key != name}, tmp_path / "model.safetensors")
        with pytest.raises(BrokenModel, match=f"{name.replace('midlayer', 'layers.0')}|describes no EAGLE drafter"):
            read(tmp_path, CONFIG)
    save_file({**stored, "extra.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(BrokenModel, match=r"tensor extra.weight has no place"):
        read(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(BrokenModel, match="damaged"):
        read(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BrokenModel, match="holds no weights"):
        read(tmp_path, CONFIG)


def test_a_language_model_of_one_layer_is_no_drafter(tmp_path, decoder):
    """Its config.json is that of an EAGLE as published; its tensors are not."""
    config = config_for(CONFIG, **KINDS["eagle"])
    write(tmp_path, config, random_tensors(config))
    edited(tmp_path, architectures=["LlamaForCausalLM"], paceline="absent", bias="absent")
    (wanted,) = (each for each in drafter_specs(SpeculationConfig(method="auto"), [tmp_path]) if each.source)
    assert wanted.name == EAGLE
    assert wanted.method.make(context_of(tmp_path, decoder, EAGLE)).name == EAGLE
    stored = load_file(tmp_path / "model.safetensors")
    del stored["fc.weight"]
    whole = {"layers.0.input_layernorm.weight", "norm.weight"}
    stored |= {name: stored["layers.0.post_attention_layernorm.weight"].clone() for name in whole}
    stored["embed_tokens.weight"] = torch.zeros(CONFIG.vocab_size, CONFIG.hidden_size)
    save_file({f"model.{name}": tensor for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    with pytest.raises(BrokenModel, match=r"holds a language model of one layer .* drafts with --draft-model"):
        wanted.method.make(context_of(tmp_path, decoder, EAGLE))


def test_a_pickled_folder_is_read(tmp_path):
    config = config_for(CONFIG, **KINDS["eagle"])
    tensors = random_tensors(config)
    write(tmp_path, config, tensors)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    found, again = read(tmp_path, CONFIG)
    assert found == config
    assert torch.equal(again["fc.weight"], tensors["fc.weight"])
    assert accepts_folder(EAGLE, tmp_path)
