"""The tables that a policy learns, and the candidates that follow from them for the offers of a step.

Results are cached until a table changes: steps of a run are often alike.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

from paceline.config import MAX_K
from paceline.core.sequence import Sequence
from paceline.engine.policy import DEEPEST, DraftPlan, Offer, Offers, allocate
from paceline.engine.policy.allocate import Allocation, Candidate, RowGroup, token_weights
from paceline.engine.policy.costs import LOOKUP_GUESS, MAX_NODES, PASS_GUESS, DraftTimes, Floats, StepTimes
from paceline.engine.policy.priors import PassPrior
from paceline.engine.policy.survival import SurvivalTable, bucket

SLOPE_NODES = 4  # nodes; least range over which the cost of one more node is taken
PACE_DEPTH = 4  # tokens of a draft whose survival counts towards the pace of its sequence
FORESIGHT = 0.3  # share of a draft's expected tokens that counts towards the pace of its sequence
PACE_RATE = 0.1  # weight of the newest step in a sequence's tokens per step


class BatchRows(NamedTuple):
    """Properties of the batch's sequences that do not change; cached between steps."""

    sequences: list[Sequence]
    keys: list[str]
    sampled: list[bool]
    open: dict[str, list[int]]  # by method: rows whose k the policy chooses
    fixed: dict[str, dict[int, int]]  # by method: k of the other rows
    wait_groups: dict[str, list[int]]  # rows whose answers are waited for together; empty: no group has two rows


class PlannedStep(NamedTuple):
    """The step that is planned."""

    rows: BatchRows
    remaining: list[int]  # tokens that each row may still commit
    times: StepTimes
    base: int  # decode rows, plus nodes of rows whose k is fixed
    other_rows: int  # of prompts
    weigh: bool  # the tokens of a wait group are weighed against each other


class PolicyTables:
    def __init__(self, prior: PassPrior) -> None:
        self._prior, self._on_device = prior, bool(prior.padded_to)
        self.step_times = [StepTimes(prior), StepTimes(prior)]  # of greedy and of sampled batches
        self.draft_times, self.survival = DraftTimes(), SurvivalTable()
        self.pace: dict[str, float] = {}  # by sequence: tokens per step, over steps in which some sequence drafts
        self.last_draft: dict[str, DraftPlan] = {}  # by sequence
        self.models: set[str] = set()  # methods whose offers need a model
        self.trees: set[str] = set()  # methods that offer trees
        self._seconds: dict[Hashable, Floats] = {}  # of steps with nodes
        self._groups: dict[Hashable, RowGroup] = {}
        self._allocations: dict[Hashable, Allocation] = {}  # the best of some candidates

    def changed(self) -> None:
        """Clear what was derived from the tables."""
        self._seconds.clear()
        self._groups.clear()
        self._allocations.clear()

    # -- candidates

    def read(self, offers: Offers, wish: str, rows: SequenceOf[int], leave_out: Collection[str] = ()) -> list[Offer]:
        """Read offers, and note the kind of each method."""
        each = offers.of(wish, rows, leave_out)
        self.models.update([offer.method for offer in each if offer.needs_model])
        self.trees.update([offer.method for offer in each if offer.is_tree])
        return each

    def candidate(self, step: PlannedStep, offer: Offer) -> Candidate:
        method, rows, levels, needs_model, is_tree, max_depth = offer
        weights: dict[int, float] = {}
        if step.weigh and not needs_model and step.rows.wait_groups:  # a model drafts equally deep for all rows
            weights = self._token_weights(step, method, dict(zip(rows, levels, strict=True)))
        guess_s = step.times.seconds(1)
        a, b = self.draft_times.line(method, len(rows), guess_s * (PASS_GUESS if needs_model else LOOKUP_GUESS))
        if not needs_model:
            a += self.leaving_s([step.rows.keys[row] for row in rows], guess_s * PASS_GUESS)
        # Rows of a group have in common: sampled or not, level, the most nodes, the weight of a token.
        remaining, sampled, width = step.remaining, step.rows.sampled, MAX_K if is_tree else DEEPEST
        beyond = min(max_depth, width)  # with more tokens remaining than that a draft may have any number of nodes
        alike = [
            (sampled[row], bucket(level), MAX_K if remaining[row] > beyond else remaining[row] - 1)
            for row, level in zip(rows, levels, strict=True)
        ]
        weight_of = [weights[row] for row in rows] if weights else [1.0] * len(rows)
        of_rows = list(zip(alike, weight_of, strict=True))
        place = {one: at for at, one in enumerate(dict.fromkeys(of_rows))}
        group_of = [place[one] for one in of_rows]
        groups = [self._group(method, is_tree, *one, group_of.count(at)) for one, at in place.items()]
        line = (a + b, 0.0) if is_tree else (a, b)  # a tree is made in one pass, so its depth counts as one
        key = None if weights else (method, line, *place, *rows, *group_of)
        return Candidate(method, rows, levels, group_of, groups, line, weights, key)

    def _group(self, method: str, tree: bool, alike: tuple[bool, int, int], weight: float, rows: int) -> RowGroup:
        key = method, alike, weight, rows
        if key in self._groups:
            return self._groups[key]
        sampled, level, most = alike
        expected, shares, total = self.survival.estimate(method, sampled, level, tree=tree)
        if weight != 1.0:
            expected, total = weight * expected, weight * total
        if most < len(expected):
            expected, shares = expected[:most], None if shares is None else shares[:most]
            total = expected.sum().item()
        self._groups[key] = RowGroup(expected, shares, total, rows)
        return self._groups[key]

    def _token_weights(self, step: PlannedStep, method: str, level_of: Mapping[int, int]) -> dict[int, float]:
        """Return the weight of each row's tokens, by the pace of its sequence with drafts of this method."""
        pace = [self.pace.get(key, 1.0) for key in step.rows.keys]
        for row, level in level_of.items():
            soon = self.survival.survival(method, step.rows.sampled[row], level)[:PACE_DEPTH]
            pace[row] += FORESIGHT * float(soon.sum())
        return token_weights(step.remaining, pace, step.rows.wait_groups.values())

    def leaving_s(self, keys: SequenceOf[str], guess_s: float) -> float:
        """Return the seconds that a lookup costs besides its own, where a model drafted last: the model has to catch up
        before it drafts again, and on a device the draft it began behind the last step is lost."""
        drafted: dict[str, int] = {}  # by model: the most nodes
        for key in keys:
            last = self.last_draft.get(key)
            if last is not None and last.max_nodes > drafted.get(last.method, 0):
                drafted[last.method] = last.max_nodes
        seconds = 0.0
        for method, max_nodes in drafted.items():
            if method in self.models:
                a, b = self.draft_times.line(method, len(keys), guess_s)
                chain = self._on_device and method not in self.trees
                seconds = max(seconds, a + b * (max_nodes if chain else 1))
        return seconds

    # -- the formula

    def best(
        self, step: PlannedStep, with_nodes: Floats, candidates: list[Candidate]
    ) -> tuple[list[Candidate], Allocation]:
        """Return the best of: one method for all rows, for each method, and the best method of each row."""
        best, highest = list[Candidate](), allocate.NOTHING
        for plan in (allocate.mixed(candidates), *([candidate] for candidate in candidates)):
            keys = [candidate.key for candidate in plan]
            key = (step.times, step.base, step.other_rows, len(step.remaining), *keys)
            allocation = self._allocations.get(key)
            if allocation is None:
                allocation = allocate.best(len(step.remaining), with_nodes, plan, beat=highest.rate)
                if allocation.rate and None not in keys:
                    self._allocations[key] = allocation
            if allocation.rate > highest.rate:
                best, highest = plan, allocation
        return best, highest

    def with_nodes(self, step: PlannedStep, candidates: list[Candidate]) -> Floats:
        """Return the seconds of the step with 1, 2, ... nodes, at least to the most that the candidates have."""
        nodes = sum([group.rows * len(group.expected_tokens) for each in candidates for group in each.groups])
        nodes = min(1 << max(nodes, SLOPE_NODES).bit_length(), MAX_NODES)
        key = step.times, step.base, step.other_rows, nodes
        if key not in self._seconds:
            seconds = step.times.seconds_with(step.base + step.other_rows, nodes)
            if step.other_rows:
                # Prompts are read whatever is drafted, so only the time of more nodes counts. The tables of plain and
                # drafted steps of many rows differ by more than a plain step takes.
                seconds += step.times.seconds_with(step.base, 1) - seconds[0]
            self._seconds[key] = seconds
        return self._seconds[key]

    # -- sequences, and runs

    def note_pace(self, sequences: Iterable[Sequence], tokens: Iterable[SequenceOf[int]]) -> None:
        """Note the tokens of a step with drafts; in steps without drafts all sequences have pace 1."""
        for sequence, committed in zip(sequences, tokens, strict=True):
            if sequence.finished:  # cancelled since, so it was forgotten
                continue
            pace = self.pace.get(sequence.key, 1.0)
            self.pace[sequence.key] = pace + PACE_RATE * (len(committed) - pace)

    def forget(self, sequence: Sequence) -> None:
        self.pace.pop(sequence.key, None)
        self.last_draft.pop(sequence.key, None)

    def state(self) -> dict[str, Any]:
        tables = {"drafts": self.draft_times.state(), "acceptance": self.survival.state()}
        return {"steps": [times.state() for times in self.step_times], **tables}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a stored state; raise KeyError, TypeError or ValueError on one of another form, unchanged."""
        greedy, sampled = (StepTimes.of_state(one, self._prior) for one in state["steps"])
        draft_times, survival = DraftTimes.of_state(state["drafts"]), SurvivalTable.of_state(state["acceptance"])
        self.step_times, self.draft_times, self.survival = [greedy, sampled], draft_times, survival
        self.changed()


def slope(with_nodes: Floats, nodes: int) -> float:
    """Return the seconds of one more node, over `nodes` and at least the first few: neighbours differ by noise."""
    last = min(max(nodes, SLOPE_NODES), len(with_nodes)) - 1
    return float(with_nodes[last] - with_nodes[0]) / max(last, 1)
