"""The drafter of a draft model: of the target's vocabulary, or of any other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from paceline.core.sequence import digest_of
from paceline.drafters.base import Drafter, DrafterContext
from paceline.drafters.methods import DRAFT_MODEL
from paceline.drafters.model.any_vocabulary import AnyVocabularyDrafter
from paceline.drafters.model.draft_model import DraftModelDrafter
from paceline.drafters.model.retokenize import Retokenizer
from paceline.drafters.model.token_bytes import TokenBytes
from paceline.drafters.model.vocabulary import load_beside, shares_vocabulary
from paceline.drafters.model.vocabulary_map import VocabularyMap
from paceline.errors import BrokenModel, InvalidParameter
from paceline.models.load.hub import resolve
from paceline.models.load.open_model import LoadedModel
from paceline.text.tokenizer import Tokenizer


class Translation(NamedTuple):
    """Two vocabularies: the tokens they share, and the rules by which the target's text is read."""

    vocabulary: VocabularyMap
    rules: Retokenizer


def from_context(context: DrafterContext) -> Drafter:
    if len(context.speculation.draft_model) != 1:
        raise InvalidParameter("draft_model", "names no model, or several; a drafter has one (--draft-model)")
    (name,) = context.speculation.draft_model
    path = resolve(name)
    loaded = load_beside(path, context)
    version = f"{DRAFT_MODEL}/{digest_of(f'{path} {loaded.config} {loaded.kind.label}')}"
    return drafter_of(loaded, translation_of(name, loaded, context), context.config.eos_token_ids, version)


def drafter_of(
    loaded: LoadedModel, translation: Translation | None, eos_token_ids: Iterable[int], version: str
) -> Drafter:
    """Make a drafter of a loaded model. `eos_token_ids` are the target's."""
    if translation is None:
        return DraftModelDrafter(loaded.decoder, eos_token_ids=eos_token_ids, version=version)
    return AnyVocabularyDrafter(loaded.decoder, *translation, eos_token_ids=eos_token_ids, version=version)


def translation_of(name: str, loaded: LoadedModel, context: DrafterContext) -> Translation | None:
    """Return how a draft model reads and writes the target's tokens; None: its vocabulary is the target's."""
    if shares_vocabulary(loaded, context):
        return None
    if context.tokenizer is None:
        raise InvalidParameter("draft_model", f"{name} has another vocabulary, and the target has no tokenizer here")
    try:
        target, own = TokenBytes.of_tokenizer(context.tokenizer), TokenBytes.of_tokenizer(loaded.tokenizer)
    except BrokenModel as problem:
        raise InvalidParameter(
            "draft_model", f"{name} has another vocabulary than the target, and {problem}; leave it out"
        ) from problem
    vocabulary = VocabularyMap.of(target, own, context.config.vocab_size, loaded.config.vocab_size)
    if vocabulary.is_empty:
        raise InvalidParameter("draft_model", f"{name} has no token in common with the target; leave it out")
    rules = retokenizer(target, own, loaded.tokenizer, vocabulary)
    return Translation(vocabulary, replace(rules, encode_target=context.encode))


def retokenizer(target: TokenBytes, own: TokenBytes, tokenizer: Tokenizer, vocabulary: VocabularyMap) -> Retokenizer:
    """Return the rules by which texts are read. `tokenizer`, the drafter's, is from now on blind to special tokens."""
    prefix = tuple(tokenizer.encode("", add_special_tokens=True))
    tokenizer.backend.encode_special_tokens = True
    (first, *_) = tokenizer.encode("a", add_special_tokens=False)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    adds_space = (own.of[first] or b"").startswith(b" ")
    return Retokenizer(target.of, own.of, vocabulary.specials, encode, prefix, adds_space)
