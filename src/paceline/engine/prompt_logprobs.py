"""How likely the tokens of a prompt were (`prompt_logprobs`): logits of prompt rows, looked at beside those that are
verified.

The rows of both are computed in the order of the pass. Verification then finds its own at the front, as in any pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.draft import packed_to
from paceline.core.sequence import TokenLogprobs
from paceline.core.verdict import Logprobs
from paceline.engine.layout import Layout, PromptRows
from paceline.verify import logprobs_at


@dataclass
class PromptLogprobs:
    """How likely the prompt tokens of a pass were; on the device until they are read."""

    rows: list[PromptRows]
    logprobs: Logprobs  # of the rows of all, in order

    def hand_out(self) -> None:
        """To the sequences; tokens computed again after a preemption are left out."""
        of, at = Logprobs(**{name: part.cpu() for name, part in vars(self.logprobs).items()}), 0
        for sequence, first, count, _ in self.rows:
            part = Logprobs(**{name: values[at : at + count] for name, values in vars(of).items()})
            at += count
            known = sequence.prompt_logprobs
            assert known is not None
            assert len(known) >= first - 1, "a part of the prompt was never computed"
            entries = logprob_entries(
                part, sequence.tokens[first : first + count], sequence.params.prompt_logprobs or 0
            )
            known += entries[len(known) - first + 1 :]


def rows_with_logits(layout: Layout) -> Tensor:
    """In the order of the pass."""
    if not layout.prompts:
        return layout.logit_rows
    looked_at = [torch.arange(part.row, part.row + part.size) for part in layout.prompts]
    return torch.cat([layout.logit_rows, *looked_at]).sort().values


def look_at_prompts(layout: Layout, rows: Tensor, logits: Tensor) -> PromptLogprobs:
    """`logits` of the `rows` of the pass."""
    at = [torch.arange(count) + torch.searchsorted(rows, row) for _, _, count, row in layout.prompts]
    expected = [token for one, first, size, _ in layout.prompts for token in one.tokens[first : first + size]]
    index, chosen = packed_to(logits.device, torch.cat(at), torch.tensor(expected))
    most = max(part.sequence.params.prompt_logprobs or 0 for part in layout.prompts)
    return PromptLogprobs(layout.prompts, logprobs_at(logits, index, chosen, most))


def moved_to_front(logits: Tensor, rows: Tensor) -> Tensor:
    """Captured verification reads logits from where the buffer begins."""
    (index,) = packed_to(logits.device, rows)
    logits[: len(rows)] = logits[index]
    return logits[: len(rows)]


def logprob_entries(of: Logprobs, tokens: list[int], most: int) -> list[TokenLogprobs]:
    """Of the first places of one row, where these tokens were chosen."""
    count = len(tokens)
    chosen = zip(tokens, of.chosen[:count].tolist(), of.rank[:count].tolist(), strict=True)
    best = zip(of.top_tokens[:count, :most].tolist(), of.top[:count, :most].tolist(), strict=True)
    return [
        {token: (value, rank)} | {likely: (high, at) for at, (likely, high) in enumerate(zip(*pair, strict=True), 1)}
        for (token, value, rank), pair in zip(chosen, best, strict=True)
    ]
