"""The target drafts for itself with some of its layers left out (Draft & Verify, Zhang et al. 2023).

No second model and no second cache: the kept layers read the K/V that verification wrote for committed tokens, and
write those of drafted tokens into the slots reserved for the draft. Verification writes these slots again in every
layer before anything reads them, so nothing is rolled back. All rows of a draft keep the same layers, which change
between drafts only: a row of a layer sees committed slots and drafted ones that the layer wrote.

Which layers are kept is searched (`skip_search`) on committed text, in a bounded share of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from paceline.config import TRAINED_LEVEL
from paceline.core.draft import Draft
from paceline.core.sequence import Sequence
from paceline.drafters.base import DrafterContext, DraftRequest, HostDrafter
from paceline.drafters.methods import SKIP
from paceline.drafters.model.by_passes import ByPasses, ModelKV
from paceline.drafters.model.skip_search import POSITIONS, Kept, SkipSearch, expected_gain
from paceline.errors import InvalidParameter
from paceline.models.decoder import Decoder, Model
from paceline.models.kv_cache import LayerCache

SEARCH_SHARE = 0.02  # of the time since the engine began; bounds searches behind the first
LEAST_LAYERS = 3  # the first and the last layer are always kept
SURE_SEARCHES = 8  # searches that found nothing better, after which the set is final


class SkipDrafter(HostDrafter):
    name, only_by_name, reads_kv = SKIP, True, True

    def __init__(
        self,
        subset: Callable[[Kept], Model],
        kept: Kept,
        *,
        search: SkipSearch | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """`subset` returns the target with these layers alone. Without `search` they stay the first `kept`."""
        self._subset, self._search, self._eos = subset, search, frozenset(eos_token_ids)
        self._states: dict[str, ModelKV] = {}
        self._caches: SequenceOf[LayerCache] = ()
        self._block_size = 0
        self._began, self._searching_s = time.monotonic(), 0.0
        self._vain = 0  # searches since the set last changed
        self.use(kept)

    @classmethod
    def from_context(cls, context: DrafterContext) -> SkipDrafter:
        target, ratio = context.target, context.speculation.skip_ratio
        if not isinstance(target, Decoder):
            raise InvalidParameter("method", f"{SKIP} needs the target's own layers, which this model does not offer")
        layers = target.config.num_layers
        most = round(ratio * layers)
        if layers < LEAST_LAYERS or most > layers - 2:
            raise InvalidParameter(
                "skip_ratio",
                f"{ratio:g} of {layers} layers leaves none beside the first and the last; choose a smaller one",
            )
        if not most:
            raise InvalidParameter("skip_ratio", f"{ratio:g} of {layers} layers skips none; choose a larger one")
        first = tuple(layer for layer in range(layers) if layer in (0, layers - 1) or layer % 2 == 0)
        first = first if layers - len(first) <= most else (*range(layers - most - 1), layers - 1)
        search = SkipSearch(target, most)
        return cls(target.with_layers, first, search=search, eos_token_ids=context.config.eos_token_ids)

    def use(self, kept: Kept) -> None:
        """Draft with these layers from now on."""
        self.kept, model = kept, self._subset(kept)
        self.pass_bytes = model.pass_bytes
        self._by_passes = ByPasses(model, self._states, self._eos)
        self._by_passes.bind([self._caches[layer] for layer in kept if self._caches], self._block_size, 1 << 30)
        self._max_positions = model.config.max_positions

    def bind_target(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        self._caches, self._block_size = caches, block_size
        self.use(self.kept)

    def level(self, sequence: Sequence) -> int:
        return TRAINED_LEVEL if len(sequence.tokens) < self._max_positions else 0

    def unread_tokens(self, sequence: Sequence) -> int:
        return 1  # the last token, whose K/V the target has not computed either

    def propose(self, rows: SequenceOf[DraftRequest]) -> Draft:
        self.passes = max(row.max_nodes for row in rows)
        self._search_in(rows)
        self._states.clear()
        self._states.update({row.sequence.key: ModelKV(len(row.sequence.tokens) - 1) for row in rows})
        return self._by_passes.draft(rows)

    def _search_in(self, rows: SequenceOf[DraftRequest]) -> None:
        """Search on the newest text of one row, where a search is due."""
        now = time.monotonic()
        due = self._searching_s <= SEARCH_SHARE * (now - self._began) and self._vain < SURE_SEARCHES
        sequence = max((row.sequence for row in rows), key=lambda one: len(one.tokens))
        if self._search is None or not due or len(sequence.tokens) <= POSITIONS:
            return
        own, found = self._search.run(sequence, self._caches, self._block_size, self.kept)
        better = expected_gain(*found[1:]) > expected_gain(*own[1:])
        self._vain = 0 if better else self._vain + 1
        if better:
            self.use(found.kept)
        self._searching_s += time.monotonic() - now
