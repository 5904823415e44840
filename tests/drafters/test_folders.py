"""Folders of trained drafters as a user has them: named, found out, packaged, refused."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from paceline import LLM, SamplingParams
from paceline.drafters import packaged
from paceline.drafters.block import checkpoint as block_checkpoint
from paceline.drafters.eagle import checkpoint as eagle_checkpoint
from paceline.drafters.folder import TargetShape
from paceline.drafters.heads.checkpoint import save_heads
from paceline.drafters.methods import DFLASH, DSPARK, EAGLE, EAGLE3, MEDUSA, METHODS, packaged_folders
from paceline.errors import BrokenModel, ModelNotFound
from tests.drafters.block import dspark_reference
from tests.drafters.eagle import eagles
from tests.drafters.overfit import random_heads
from tests.helpers.errors import refused
from tests.helpers.tiny import save_tiny

BLOCK = {
    DSPARK: {"qk_norm": True, "tap_norm": True, "mask_embedding": True, "draft_vocab_size": 60},
    DFLASH: {"markov_rank": 0, "sample_from_anchor": False, "draft_vocab_size": 80},
}
FEATURES = {EAGLE3: {"layer_ids": (0, 1, 2), "vocab": 40}, EAGLE: {"fused": False, "own_head": False}}
TRAINED = (*BLOCK, *FEATURES, MEDUSA)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model with a head of its own, and a drafter of each method for it: (model, {method: folder})."""
    root = tmp_path_factory.mktemp("trained")
    save_tiny("llama3-untied", root / "model")
    with LLM(str(root / "model"), device="cpu") as llm:
        target, embedding = llm.config, llm.loaded.decoder.embedding
    for method, kind in BLOCK.items():
        shape = TargetShape.of(target, embedding, "tiny")
        config = dspark_reference.drafter_config(target, **kind, taps=(0, 2), target=shape)
        tensors = dspark_reference.random_tensors(config)
        block_checkpoint.write(root / method, config, tensors, int8=method == DSPARK)
    for method, kind in FEATURES.items():
        config = eagles.config_for(target, **kind)
        eagle_checkpoint.write(root / method, config, eagles.random_tensors(config))
    save_heads(root / MEDUSA, random_heads(target.hidden_size, target.vocab_size), base="tiny")
    return str(root / "model"), {method: root / method for method in TRAINED}


def methods_of(model, **options):
    """Methods of trained drafters that an engine has."""
    with LLM(str(model), device="cpu", **options) as llm:
        return {drafter.name for drafter in llm.engine.drafters.drafters} & set(TRAINED)


@pytest.mark.parametrize("given", ["method", "found", "vllm"])
@pytest.mark.parametrize("method", TRAINED)
def test_a_user_names_the_folder(folders, method, given):
    model, drafters = folders
    folder = str(drafters[method])
    settings = {"method": METHODS[method].vllm or method, "model": folder, "num_speculative_tokens": 5}
    options = {
        "method": {"drafter": folder, "method": method},
        "found": {"drafter": folder},
        "vllm": {"speculative_config": settings},
    }
    drafted, plain = (
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, speculation=own)
        for own in ({"method": method, "k": 5}, "none")
    )
    with LLM(model, device="cpu", **options[given]) as llm:
        (result,), (alone,) = llm.generate([1, 2, 3], drafted), llm.generate([1, 2, 3], plain)
        assert result.outputs[0].token_ids == alone.outputs[0].token_ids
        assert {drafter.name for drafter in llm.engine.drafters.drafters} & set(TRAINED) == {method}
        assert llm.engine.drafters.failures == 0


@pytest.mark.parametrize("method", TRAINED)
def test_a_method_without_its_folder_is_refused(folders, method, tmp_path):
    model, drafters = folders
    alike = {DSPARK: DFLASH, DFLASH: DSPARK, EAGLE: EAGLE3, EAGLE3: EAGLE}
    others = [{"method": alike[method], "drafter": str(drafters[method])}] if method in alike else []
    for options in ({"method": method}, {"drafter": model}, *others):
        with refused("drafter"):
            LLM(model, device="cpu", **options)
    with pytest.raises(ModelNotFound):
        LLM(model, device="cpu", method=method, drafter=str(tmp_path / "nowhere"))


def test_a_drafter_of_another_model_of_the_same_sizes_is_refused(folders, tmp_path):
    save_tiny("llama-tied", tmp_path / "other")
    with refused("drafter"):
        LLM(str(tmp_path / "other"), device="cpu", drafter=str(folders[1][DSPARK]))


@pytest.mark.parametrize("token", [-1, 10**6])
@pytest.mark.parametrize("method", [DSPARK, EAGLE3])
def test_a_folder_that_drafts_tokens_the_model_does_not_have_is_refused(folders, tmp_path, method, token):
    """Trees of a GPU are taken as they are: nothing later would notice."""
    model, drafters = folders
    shutil.copytree(drafters[method], tmp_path / "drafter")
    [path] = [path for path in (tmp_path / "drafter").glob("*.safetensors") if "d2t" in load_file(path)]
    stored = load_file(path)
    stored["d2t"][5] = token - 5
    save_file(stored, path)
    with pytest.raises(BrokenModel, match=f"drafts token {token}, and the vocabulary has 97"):
        LLM(model, device="cpu", drafter=str(tmp_path / "drafter"))


ODD_PARTS = {
    DSPARK: [{"dflash_config": 5}, {"transformer_layer_config": [1]}, {"paceline": "x"}, {"speculators_config": [1]}],
    EAGLE3: [
        {"paceline": [1]},
        {"paceline": {"target": "x"}},
        {"paceline": {"target": {"vocab_size": 600.0}}},
        {"paceline": {"target": {"embedding_sample": ["a"]}}},
        {"paceline": {"target": {"embedding_sample": 5}}},
        {"speculators_config": [1]},
        {"speculators_config": {"verifier": "x"}},
        {"eagle_config": 5},
        {"eagle_config": {"norm_before_fc": "false"}},
        {"norm_output": "false"},
    ],
}


@pytest.mark.parametrize(("method", "changes"), [(name, one) for name, each in ODD_PARTS.items() for one in each])
def test_a_config_whose_parts_have_other_types_is_named(folders, tmp_path, method, changes):
    shutil.copytree(folders[1][method], tmp_path / "drafter")
    path = tmp_path / "drafter" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    checkpoint = block_checkpoint if method == DSPARK else eagle_checkpoint
    named = next(iter(changes)) if method == DSPARK else ""
    with pytest.raises(BrokenModel, match=rf"config\.json: {named}"):
        checkpoint.read(tmp_path / "drafter")


def test_a_packaged_drafter_is_used_for_its_model_alone(folders, tmp_path, monkeypatch):
    model, drafters = folders
    shutil.copytree(drafters[DSPARK], tmp_path / "shipped" / "tiny")
    monkeypatch.setattr(packaged, "packaged_folders", lambda: packaged_folders(tmp_path / "shipped"))
    assert methods_of(model) == methods_of(model, method=DSPARK) == {DSPARK}
    assert methods_of(model, drafter="none") == methods_of(model, method="suffix") == set()
    assert methods_of(model, drafter=str(drafters[DFLASH])) == {DFLASH}
    save_tiny("llama-tied", tmp_path / "other")  # of the same sizes
    assert methods_of(tmp_path / "other") == set()
    for options in ({}, {"drafter": "none"}):
        with refused("drafter"):
            LLM(str(tmp_path / "other"), device="cpu", method=DSPARK, **options)
    (tmp_path / "shipped" / "tiny" / "config.json").write_text("{")
    assert methods_of(model) == set()
