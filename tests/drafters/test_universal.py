"""The universal drafter: by itself only where it is in the cache, costs little and nothing better is at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.build import build, drafter_context, load
from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters.base import HostDrafter
from paceline.drafters.model.any_vocabulary import AnyVocabularyDrafter
from paceline.drafters.universal import is_lookup, universal_drafters
from paceline.errors import ModelNotFound
from paceline.models.load import hub
from paceline.models.load.hub import UNIVERSAL
from tests.helpers.small_tokenizers import small_tokenizers
from tests.helpers.tiny import save_tiny

SMALL = EngineConfig(num_blocks=32)


def saved(folder: Path, kind: str, **sizes: int) -> str:
    tokenizer = small_tokenizers()[kind]
    save_tiny("llama-tied", folder, vocab_size=tokenizer.vocab_size, **sizes)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("target"), "byte level", intermediate_size=4000)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small model in the cache under the universal drafter's name."""
    folder = saved(tmp_path, "gemma")
    monkeypatch.setattr("paceline.drafters.universal.resolve_here", lambda name: Path(folder))
    monkeypatch.setattr("paceline.drafters.model.make.resolve", lambda name: Path(folder))
    return folder


def drafters_of(model: str, **wanted: object) -> dict[str, object]:
    bundle = build(load(model, device="cpu", threads=1), SMALL, SpeculationConfig(**wanted), remember=False)  # type: ignore[arg-type]
    found = {drafter.name: drafter for drafter in bundle.engine.drafters.drafters}
    bundle.close()
    return found


def test_auto_takes_it_where_nothing_better_is_at_hand(target: str, small: str) -> None:
    found = drafters_of(target, method="auto")
    assert isinstance(found["draft-model:universal"], AnyVocabularyDrafter)
    for wanted in ({"method": "suffix"}, {"method": "none"}, {"method": "auto", "draft_model": ("none",)}):
        assert "draft-model:universal" not in drafters_of(target, **wanted)
    found = drafters_of(target, method="auto", draft_model=(small,))
    assert "draft-model" in found
    assert "draft-model:universal" not in found


def test_it_is_left_out_where_it_costs_much_or_cannot_be_read(target: str, small: str, tmp_path: Path) -> None:
    loaded = load(target, device="cpu", threads=1).loaded
    context = drafter_context(loaded, SpeculationConfig(method="auto"))
    assert universal_drafters(context, loaded.decoder.pass_bytes)
    assert not universal_drafters(context, loaded.decoder.pass_bytes // 20)
    assert not universal_drafters(context, 0)
    (tmp_path / "config.json").write_text("{")
    assert not universal_drafters(context, loaded.decoder.pass_bytes)


def test_it_is_never_fetched_by_itself(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(hub, "add_model", lambda *_: pytest.fail("it was fetched"))
    assert "draft-model:universal" not in drafters_of(target, method="auto")
    with pytest.raises(ModelNotFound):
        hub.resolve_here(UNIVERSAL)


def test_its_name_is_an_alias(smollm2_path: Path) -> None:
    assert hub.resolve(UNIVERSAL) == hub.resolve_here(UNIVERSAL) == smollm2_path


def test_lookups_are_no_models() -> None:
    class Lookup(HostDrafter):
        pass

    assert is_lookup(Lookup())  # type: ignore[arg-type]
