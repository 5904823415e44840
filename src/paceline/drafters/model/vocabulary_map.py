"""Which tokens of a drafter stand for the bytes of which tokens of the target.

Tokens are alike by bytes, special tokens by role. Several tokens of a drafter may have the bytes of one of the target:
their probabilities are summed. Of several tokens of the target with the same bytes its tokenizer's own choice, the
lowest id, counts. Ids outside either model's vocabulary (padding) are matched with nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.model.token_bytes import BEGIN_TEXT, BEGIN_TURN, END_TEXT, END_TURN, TokenBytes

OTHERWISE = {END_TURN: END_TEXT, END_TEXT: END_TURN, BEGIN_TURN: None, BEGIN_TEXT: None}  # where a role is not filled
ENDS = (END_TURN, END_TEXT)  # roles of special tokens that are drafted


@dataclass(frozen=True, eq=False)
class VocabularyMap:
    """Pairs of ids of equal bytes. `draft_of` also holds special tokens that are read and never drafted."""

    target_of: Tensor  # (V_d,) int64 the target's token; -1: none
    draft_of: Tensor  # (V_t,) int64 the drafter's token that is read for a token of the target; -1: none
    specials: dict[int, int]  # special tokens of the target -> those of the drafter, by role

    @staticmethod
    def of(target: TokenBytes, draft: TokenBytes, target_size: int, draft_size: int) -> VocabularyMap:
        """Match two vocabularies, of models with logits of these widths."""
        ids = range(min(target_size, len(target.of)) - 1, -1, -1)  # of equal bytes the lowest stays
        known = {spelt: token for token in ids if (spelt := target.of[token])}
        target_of = np.full(draft_size, -1, np.int64)
        shown = draft.of[:draft_size]
        target_of[: len(shown)] = [known.get(spelt, -1) if spelt else -1 for spelt in shown]
        specials = {}
        for role, token in target.roles.items():
            fills = draft.roles.get(role, draft.roles.get(OTHERWISE[role] or ""))
            if fills is not None and fills < draft_size and token < target_size:
                specials[token] = fills
        for role in reversed(ENDS):  # of both roles filled by one token of the drafter, the end of a turn is drafted
            token = target.roles.get(role, -1)
            if token in specials:
                target_of[specials[token]] = token
        draft_of = np.full(target_size, -1, np.int64)
        paired = np.flatnonzero(target_of >= 0)[::-1]
        draft_of[target_of[paired]] = paired  # the lowest id of several
        return VocabularyMap(torch.from_numpy(target_of), torch.from_numpy(draft_of), specials)

    @functools.cached_property
    def ids(self) -> Tensor:
        """(Vq,) the target's tokens that can be drafted, ascending."""
        ids: Tensor = torch.unique(self.target_of[self.target_of >= 0])
        return ids

    @functools.cached_property
    def first(self) -> Tensor:
        """(Vq,) the drafter's token of each of `ids`."""
        return self.draft_of[self.ids]

    @functools.cached_property
    def further(self) -> tuple[Tensor, Tensor]:
        """Further tokens of the drafter with the bytes of another, and the places of these bytes in `ids`."""
        tokens = torch.nonzero(self.target_of >= 0)[:, 0]
        tokens = tokens[self.draft_of[self.target_of[tokens]] != tokens]
        return tokens, torch.searchsorted(self.ids, self.target_of[tokens])

    @functools.cached_property
    def unshared(self) -> Tensor:
        """(V_d,) -inf for the drafter's tokens that the target does not have, otherwise 0."""
        return torch.where(self.target_of < 0, -torch.inf, 0.0)

    def shared(self, logits: Tensor) -> Tensor:
        """Return (R, Vq) logits of `ids` from the drafter's (R, V_d): the probabilities of equal bytes are summed."""
        found = logits[:, self.first]
        tokens, places = self.further
        for token, place in zip(tokens.tolist(), places.tolist(), strict=True):
            found[:, place] = torch.logaddexp(found[:, place], logits[:, token])
        return found

    @property
    def is_empty(self) -> bool:
        return not bool((self.target_of >= 0).any())
