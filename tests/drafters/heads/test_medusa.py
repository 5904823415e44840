"""Medusa: its heads against torch's own modules, its tree, its folder, and that its guesses follow the last token."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import MAX_K, EngineConfig, SpeculationConfig
from paceline.drafters.base import DrafterContext, DraftRequest
from paceline.drafters.heads.checkpoint import MedusaHead, load_heads, save_heads
from paceline.drafters.heads.medusa import FIRST, LATER, MOST_ROWS, MedusaDrafter, StaticTree
from paceline.drafters.methods import MEDUSA, METHODS
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan
from paceline.errors import BrokenModel, ModelNotFound
from paceline.models.backends.torch import TorchKernels
from paceline.models.kernels import kernels_for
from tests.cuda.test_cuda import CONFIG
from tests.drafters.overfit import CPU, overfit_heads, random_heads, tiny_decoder
from tests.helpers.contract_toys import ByRequest, answers, params, run
from tests.helpers.errors import refused

HIDDEN = CONFIG.hidden_size


class Block(torch.nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.linear.weight.data, self.linear.bias.data = weight, bias

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(x))


def module_of(head):
    last = torch.nn.Linear(HIDDEN, CONFIG.vocab_size, bias=False)
    last.weight.data = head.output
    return torch.nn.Sequential(*(Block(*block) for block in head.blocks), last)


def drafted(drafter, hidden, node_limits):
    drafter.last_taps = lambda req_indices, lengths: hidden[:, None]
    nothing = torch.zeros(len(node_limits), dtype=torch.int64)
    return drafter.draft([DraftRequest(None, max_nodes) for max_nodes in node_limits], nothing, nothing)


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize("kernels", [None, kernels_for(CPU)], ids=["torch", "own"])
def test_the_tokens_are_those_the_published_architecture_ranks_highest(layers, kernels):
    heads = random_heads(HIDDEN, CONFIG.vocab_size, layers=layers)
    hidden = 3 * torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    draft = drafted(MedusaDrafter(heads, CONFIG.vocab_size, kernels=kernels), hidden, [40] * 5)
    tree = StaticTree.of(len(heads), 10)
    for at, head in enumerate(heads, start=1):
        ranked = module_of(head)(hidden).sort(descending=True).indices
        for node in (node for node in range(40) if tree.depth[node] == at):
            assert torch.equal(draft.tokens[:, node], ranked[:, tree.rank[node]]), node


def test_more_rows_than_the_heads_look_at_together_draft_what_each_drafts_alone():
    drafter = MedusaDrafter(random_heads(HIDDEN, CONFIG.vocab_size), CONFIG.vocab_size)
    hidden = torch.randn(2 * MOST_ROWS + 3, HIDDEN)
    tokens = drafted(drafter, hidden, [6] * len(hidden)).tokens
    for row in (0, MOST_ROWS, 2 * MOST_ROWS + 2):
        assert torch.equal(drafted(drafter, hidden[row : row + 1], [6]).tokens[0], tokens[row])


def test_a_draft_of_fewer_nodes_is_the_beginning_of_the_same_tree():
    drafter = MedusaDrafter(random_heads(HIDDEN, CONFIG.vocab_size), CONFIG.vocab_size)
    hidden = torch.randn(1, HIDDEN).expand(4, HIDDEN)
    draft = drafted(drafter, hidden, [9, 1, 200, 4])
    draft.validate(CONFIG.vocab_size)
    assert draft.num_nodes.tolist() == [9, 1, MAX_K, 4]
    assert draft.tokens_on_device
    for row, count in enumerate(draft.num_nodes.tolist()):
        for part in (draft.tokens, draft.parents, draft.depth):
            assert torch.equal(part[row, :count], part[2, :count])
        assert (draft.parents[row, count:] == -1).all()
        assert not draft.depth[row, count:].any()
    assert drafted(drafter, hidden, [0, 0, 0, 0]).num_nodes.tolist() == [0] * 4


@pytest.mark.parametrize(("heads", "ranks"), [(1, 10), (3, 10), (5, 10), (4, 3), (2, 1)])
def test_the_first_nodes_of_the_tree_are_the_likeliest_paths(heads, ranks):
    """Against all paths, ordered by the same estimate."""
    tree = StaticTree.of(heads, ranks)
    paths = []
    for parent, rank in zip(tree.parents.tolist(), tree.rank.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    assert [len(path) for path in paths] == tree.depth.tolist()
    assert len(set(paths)) == len(paths)

    def likely(path):
        return math.prod(FIRST * LATER**at / (rank + 1) ** 2 for at, rank in enumerate(path))

    every = [path for depth in range(1, heads + 1) for path in itertools.product(range(ranks), repeat=depth)]
    best = sorted(map(likely, every), reverse=True)[:MAX_K]
    assert list(map(likely, paths)) == pytest.approx(best)


# -- drafting for a target


def test_heads_that_know_the_answer_by_heart_are_always_right():
    """An answer of fewer positions than a hidden state has numbers is fitted exactly: a draft of a token too far, or
    from the hidden state beside, would be wrong at once."""
    decoder, prompt = tiny_decoder(), list(range(12))
    requests = [(0, "a", prompt, params(max_tokens=30, ignore_eos=True))]
    config = EngineConfig(num_blocks=32, max_num_seqs=4)
    result = answers(Engine(decoder, config), requests)["a"]
    drafter = MedusaDrafter(overfit_heads(decoder, [[*prompt, *result]]), CONFIG.vocab_size, kernels=decoder.kernels)
    engine = Engine(decoder, config, drafters=[drafter], policy=ByRequest({}, DraftPlan(MEDUSA, 2)))  # a chain of two
    (sequence,) = run(engine, requests)[0].values()
    assert sequence.output_tokens == result
    # The heads know nothing of the last tokens.
    assert sequence.stats.num_accepted_tokens >= sequence.stats.num_draft_tokens - 3 > 12
    assert engine.drafters.failures == 0


# -- the folder


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))


@pytest.fixture
def folder(tmp_path):
    save_heads(tmp_path / "heads", random_heads(HIDDEN, CONFIG.vocab_size, layers=2), base="some/model")
    return tmp_path / "heads"


def context(folder, **more):
    speculation = SpeculationConfig(method=MEDUSA, drafter=str(folder))
    return DrafterContext(CONFIG, CPU, speculation, checkpoint=folder, **more)


def edit(folder, **changes):
    """Keys of the config replaced, or left out where None."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def rewrite(folder, change):
    """The same tensors, as `change` makes them."""
    path = folder / "medusa_lm_head.safetensors"
    save_file(change(load_file(path)), path)


def pickled(folder, change=lambda tensors: tensors):
    path = folder / "medusa_lm_head.safetensors"
    torch.save(change(load_file(path)), folder / "medusa_lm_head.pt")
    path.unlink()


def test_a_saved_folder_loads_as_it_was(folder):
    assert json.loads((folder / "config.json").read_text())["medusa_num_layers"] == 2
    for one, other in zip(load_heads(folder, CONFIG), random_heads(HIDDEN, 96, layers=2), strict=True):
        assert equal(one, other)


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
def test_pickled_weights_load_as_published(folder, prefix):
    before = load_heads(folder, CONFIG)
    pickled(folder, lambda tensors: {f"{prefix}{name}": tensor for name, tensor in tensors.items()})
    assert all(map(equal, load_heads(folder, CONFIG), before))


def test_heads_beyond_the_configs_number_are_used(folder):
    edit(folder, medusa_num_heads=1)
    assert len(load_heads(folder, CONFIG)) == 3


def test_blocks_without_bias_load(folder):
    rewrite(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith("bias")})
    assert all(bias is None for head in load_heads(folder, CONFIG) for _, bias in head.blocks)
    assert METHODS[MEDUSA].make(context(folder)).name == MEDUSA


def test_heads_without_an_output_share_the_targets(folder):
    rewrite(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if ".2." not in name})
    heads, kernels, output = load_heads(folder, CONFIG), TorchKernels(), torch.randn(CONFIG.vocab_size, HIDDEN)
    assert all(head.output is None for head in heads)
    sharing = METHODS[MEDUSA].make(context(folder, kernels=kernels, head=kernels.pack(output)))
    own = MedusaDrafter([MedusaHead(head.blocks, output) for head in heads], CONFIG.vocab_size)
    hidden = torch.randn(3, HIDDEN)
    assert torch.equal(*(drafted(each, hidden, [20] * 3).tokens for each in (sharing, own)))
    with refused("drafter"):
        METHODS[MEDUSA].make(context(folder))


def test_the_version_changes_with_the_weights(folder):
    versions = [METHODS[MEDUSA].make(context(folder)).version for _ in range(2)]
    rewrite(folder, lambda tensors: tensors | {"1.0.linear.bias": tensors["1.0.linear.bias"] + 0.01})
    assert versions[0] == versions[1] != METHODS[MEDUSA].make(context(folder)).version


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def test_what_no_folder_of_heads_is_is_refused_by_name(folder, tmp_path):
    def refused(error, match):
        with pytest.raises(error, match=match):
            load_heads(folder, CONFIG)

    with pytest.raises(ModelNotFound, match="does not exist"):
        load_heads(tmp_path / "nowhere", CONFIG)
    whole = (folder / "medusa_lm_head.safetensors").read_bytes()
    for missing in ("1.2.weight", "0.1.linear.weight"):
        rewrite(folder, without(missing))
        refused(BrokenModel, f"tensor {missing} is missing")
        (folder / "medusa_lm_head.safetensors").write_bytes(whole)
    edit(folder, medusa_num_heads=4)
    refused(BrokenModel, "tensor 3.0.linear.weight is missing")
    edit(folder, medusa_num_heads=3)
    rewrite(folder, lambda tensors: tensors | {"2.0.linear.bias": torch.ones(HIDDEN, dtype=torch.int32)})
    refused(BrokenModel, "2.0.linear.bias has dtype torch.int32")
    (folder / "medusa_lm_head.safetensors").write_bytes(whole[:-100])
    refused(BrokenModel, "truncated or damaged")
    (folder / "medusa_lm_head.safetensors").unlink()
    refused(BrokenModel, "holds no weights")
    (folder / "medusa_lm_head.pt").write_bytes(b"no pickle")
    refused(BrokenModel, "truncated or damaged")
    torch.save([1, 2], folder / "medusa_lm_head.pt")
    refused(BrokenModel, "tensors by name")
    for wrong in (0, 65, True, "3", 1.5):
        edit(folder, medusa_num_heads=wrong)
        refused(BrokenModel, "medusa_num_heads must be")
    edit(folder, medusa_num_heads=3, medusa_num_layers=-1)
    refused(BrokenModel, "medusa_num_layers must be")
    edit(folder, medusa_num_heads=None)
    refused(BrokenModel, "not a folder of Medusa heads: config.json has no medusa_num_heads")
    (folder / "config.json").write_text("{")
    refused(BrokenModel, "cannot be read")
    (folder / "config.json").unlink()
    refused(BrokenModel, "holds no config.json")


def test_a_pickle_that_would_run_code_is_refused(folder):
    pickled(folder, lambda tensors: {"0.0.linear.weight": print})
    with pytest.raises(BrokenModel, match="damaged"):
        load_heads(folder, CONFIG)


@pytest.mark.parametrize(("hidden", "vocab"), [(HIDDEN + 8, CONFIG.vocab_size), (HIDDEN, CONFIG.vocab_size + 1)])
def test_heads_of_another_target_are_refused(tmp_path, hidden, vocab):
    save_heads(tmp_path, random_heads(hidden, vocab), base="some/model")
    with refused("drafter"):
        METHODS[MEDUSA].make(context(tmp_path))
