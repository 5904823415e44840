"""The drafts of a step, chosen by one formula, and the loss that may be risked for them, by one account a method.

A plan's rate is (rows + expected tokens of its nodes) / (seconds of the pass, of drafting and of reading). Reading what
a drafter lags behind is paid once, so it is spread over the tokens that are still expected. The plan of the highest
rate that the accounts allow is taken if it beats plain decoding. All of it comes from committed tokens and timings,
never from the draft itself: that would bias the output.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from paceline.config import MAX_K, NONE
from paceline.core.sequence import Sequence
from paceline.engine.batch import StepResult, StepTiming
from paceline.engine.policy import DEEPEST, NO_DRAFT, DraftPlan, Offer, Offers, any_sampled, wish
from paceline.engine.policy.account import STAKE, Account
from paceline.engine.policy.allocate import Candidate, Floats, Prefixes, RowGroup, prefixes, token_weights
from paceline.engine.policy.costs import LOOKUP, OUTLIER, RECENT, DraftCost, StepTimes, size_of
from paceline.engine.policy.priors import CPU, PassPrior
from paceline.engine.policy.survival import SurvivalTable, bucket

MARGIN = 0.02  # gain over plain decoding that a plan must promise: the tables err by as much
RISK = 0.05  # share of the best rate that every DEEPEST-th plan may give up to learn the cost of more nodes
LONG = 128  # tokens of an answer before any ended; steps between plain steps, and until unused records count half
CHECK_BELOW = 1.5  # expected gain from which no plain step is taken to keep its time current
FEW = 8  # sequences, of which a CPU plans every step; steps until the first plain step that is taken for its time


class PlannedStep(NamedTuple):
    """The step that is planned."""

    sequences: SequenceOf[Sequence]
    remaining: list[int]  # tokens that each row may still commit
    left: float  # tokens that all rows are expected to commit
    times: StepTimes
    base: int  # decode rows, plus nodes of rows whose k is fixed
    plain_s: float
    other_rows: int  # of prompts
    weights: Mapping[int, float]  # of tokens, by row; empty: 1 each


class Choice(NamedTuple):
    """The best prefix of some candidates' nodes."""

    rate: float  # tokens per second
    nodes: int
    prefixes: Prefixes
    expected_s: float
    node_s: float  # seconds of one more row


class Pending(NamedTuple):
    """The basis of the step under way, from which the policy learns."""

    step: PlannedStep | None = None  # None: no row drafts with a k that the policy chose
    expected_s: float = 0.0
    levels: Mapping[str, tuple[int, int]] = {}  # by sequence: level, and limit of nodes or 0


class AdaptivePolicy:
    """`method`: auto, or one method; `k`: fixed, or None; a request's own choice outranks both.

    `prior`: how the time of a pass grows with its rows on this device.
    """

    def __init__(self, method: str = NONE, k: int | None = None, prior: PassPrior = CPU) -> None:
        self._method, self._k = method, k
        self._on_device = bool(prior.padded_to)  # steps are launched ahead where no row drafts
        self.step_times = [StepTimes(prior), StepTimes(prior)]  # of greedy and of sampled batches
        self.draft_costs: dict[str, DraftCost] = {}
        self.survival = SurvivalTable()
        self.accounts: defaultdict[tuple[str, int], Account] = defaultdict(Account)  # by method and class of the batch
        self._kinds: dict[str, tuple[bool, bool]] = {}  # by method: needs a model, makes trees
        self._length = float(LONG)  # tokens of an answer, lately
        # Tokens a row, lately, and the plain steps they would have taken without a model.
        self._without_model = LONG / 4, LONG / 4
        self._pace: dict[str, float] = {}  # by sequence: tokens per step
        self._steps = self._since_plain = 0
        self._check_due = LONG if self._on_device else FEW  # steps; captured passes take equal times
        self._checks = self._runs_ahead = self._drafted = False
        self._pause, self._pause_left = 1, 0  # plain steps after a plan without a draft
        self._planned: set[str] = set()  # sequences that were in some plan
        self._planned_size = 0
        self._drafting: dict[str, int] = {}  # models that drafted last, and their rows
        self._pending = Pending()
        self._observed: list[tuple[StepResult, StepTiming, Pending]] = []
        self.min_node_probability = 0.0
        self.expected_gain: float | None = None  # over plain decoding, when drafting was last considered

    # -- planning

    def plan(
        self, sequences: SequenceOf[Sequence], offers: Offers, other_rows: int, others_wait: bool
    ) -> list[DraftPlan]:
        self._pending, self.min_node_probability = Pending(), 0.0
        plans = [NO_DRAFT] * len(sequences)
        if not offers.working:
            return plans
        remaining = [sequence.max_len - len(sequence.tokens) for sequence in sequences]
        rows_by_wish: dict[tuple[str, int | None], list[int]] = {}
        for row, sequence in enumerate(sequences):
            if remaining[row] > 1:
                rows_by_wish.setdefault(wish(sequence, self._method, self._k), []).append(row)
        open_rows = {method: rows for (method, k), rows in rows_by_wish.items() if k is None and method != NONE}
        levels: dict[str, tuple[int, int]] = {}
        for (method, k), rows in rows_by_wish.items():
            if k is not None and method != NONE:
                for row, (offer, level) in self._highest(offers, method, rows).items():
                    # The target gives the last token itself, so a chain has at most remaining - 1 nodes.
                    most = MAX_K if remaining[row] > offer.max_depth else remaining[row] - 1
                    plans[row], levels[sequences[row].key] = DraftPlan(offer.method, min(k, most)), (level, 0)
        self._pending = Pending(levels=levels)
        if open_rows and not self._is_plain(sequences):
            times, base = self.step_times[any_sampled(sequences)], len(sequences)
            base += sum([plan.max_nodes for plan in plans])
            pace = [self._pace.get(sequence.key, 1.0) for sequence in sequences]
            weights = {} if others_wait else token_weights(remaining, pace, [one.wait_group for one in sequences])
            outputs = [sequence.num_output for sequence in sequences]
            left = sum([min(a, max(self._length - b, b, DEEPEST)) for a, b in zip(remaining, outputs, strict=True)])
            step = PlannedStep(sequences, remaining, left, times, base, times.seconds(base), other_rows, weights)
            self._choose(step, self._options(step, offers, open_rows), offers, plans)
        return plans

    def _highest(self, offers: Offers, method: str, rows: list[int]) -> dict[int, tuple[Offer, int]]:
        """Return for each row the offer with the highest level, and that level."""
        best: dict[int, tuple[Offer, int]] = {}
        for offer in offers.of(method, rows):
            self._kinds[offer.method] = offer.needs_model, offer.is_tree
            for row, level in zip(offer.rows, offer.levels, strict=True):
                if row not in best or level > best[row][1]:
                    best[row] = offer, level
        return best

    def _is_plain(self, sequences: SequenceOf[Sequence]) -> bool:
        """Decide whether the step is plain without a plan: its time is to be known, or no draft paid lately."""
        self._since_plain += 1
        self._checks = not self.may_repeat() or self.step_times[any_sampled(sequences)].speed is None
        if self._checks:
            self._check_due, self._since_plain = min(2 * self._check_due, LONG), 0
        return self._checks or self._count_pause(sequences)

    def may_repeat(self) -> bool:
        gains = self._method == NONE or self._k is not None or (self.expected_gain or 1.0) >= CHECK_BELOW
        return gains or self._since_plain < self._check_due

    def _count_pause(self, sequences: SequenceOf[Sequence]) -> bool:
        """Count a step of the pause; False where there is none, the batch has shrunk, or sequences are new: on a device
        half of those beyond FEW, since a step that is planned is not launched ahead."""
        if self._pause_left <= 0 or size_of(len(sequences)) < self._planned_size:
            return False
        least_new = max((len(sequences) - FEW) // 2, 1) if self._on_device else 1
        if len({sequence.key for sequence in sequences} - self._planned) >= least_new:
            return False
        self._pause_left -= 1
        return True

    def skip_plan(self, sequences: SequenceOf[Sequence], offers: Offers) -> bool:
        ks = {k for method, k in [wish(one, self._method, self._k) for one in sequences] if method != NONE}
        if not offers.working or not ks:
            return True
        if self._pending.step is not None or ks != {None}:
            return False
        checks, self._checks = self._checks, False  # a plain step is timed where it is launched ahead
        return checks or self._count_pause(sequences)

    # -- candidates

    def _options(self, step: PlannedStep, offers: Offers, open_rows: Mapping[str, list[int]]) -> list[list[Candidate]]:
        """Return the candidates of each plan: one method for all rows, for each method, and each row's best method."""
        by_method: dict[str, list[Offer]] = {}
        for wished, rows in open_rows.items():
            for offer in offers.of(wished, rows):
                by_method.setdefault(offer.method, []).append(offer)
        options = list[list[Candidate]]()
        for variant in _variants(by_method) if len(step.sequences) > 1 else [by_method]:
            each = {name: [self._candidate(step, offer) for offer in several] for name, several in variant.items()}
            options += each.values()
            if len(each) > 1 and len(step.sequences) > 1:
                best: dict[int, tuple[float, str]] = {}
                for of in (of for several in each.values() for of in several):
                    promises = [(row, (group.total, of.method)) for group in of.groups for row in group.rows]
                    best.update([(row, promise) for row, promise in promises if promise > best.get(row, (0.0, ""))])
                rows_of = {name: {row for row, (_, chosen) in best.items() if chosen == name} for name in each}
                parts = [_part(offer, rows_of[name]) for name, several in variant.items() for offer in several]
                options.append([self._candidate(step, part) for part in parts if part.rows])
        return options

    def _candidate(self, step: PlannedStep, offer: Offer) -> Candidate:
        method, rows, levels, unread, price, needs_model, is_tree, max_depth = offer
        self._kinds[method] = needs_model, is_tree
        cost = self.draft_costs.get(method)
        if cost is None:
            cost = self.draft_costs[method] = DraftCost(price if needs_model else LOOKUP)
        pass_s, read_s = cost.parts(step.times, len(rows), sum(unread))
        if not needs_model:  # a model that drafted last reads what the lookup commits before it drafts again
            models = self._drafting.items()
            pass_s += max(
                [self.draft_costs[name].parts(step.times, count, 0)[0] for name, count in models], default=0.0
            )
        weights = {} if needs_model else step.weights  # a model drafts equally deep for all rows
        most = MAX_K if is_tree else DEEPEST
        beyond = min(max_depth, most)  # with more tokens remaining a draft may have any number of nodes
        alike: dict[tuple[bool, int, int, float], list[int]] = {}
        for row, level in zip(rows, levels, strict=True):
            nodes = most if step.remaining[row] > beyond else step.remaining[row] - 1
            alike.setdefault((step.sequences[row].sampled, bucket(level), nodes, weights.get(row, 1.0)), []).append(row)
        groups = list[RowGroup]()
        for (sampled, level, nodes, weight), members in alike.items():
            survival, shares, drafts = self.survival.estimate(method, sampled, level, tree=is_tree)
            groups.append(RowGroup(members, weight * survival[:nodes], shares[:nodes], drafts))
        return Candidate(
            method, groups, pass_s, read_s, is_tree or not needs_model, dict(zip(rows, levels, strict=True))
        )

    # -- the formula

    def _choose(
        self, step: PlannedStep, options: list[list[Candidate]], offers: Offers, plans: list[DraftPlan]
    ) -> None:
        number, best, highest, top = len(step.sequences), None, 1.0, 0.0
        for candidates in options:
            choice = self._best(step, candidates)
            gain = choice.rate * step.plain_s / number
            needs_model = any(self._kinds[candidate.method][0] for candidate in candidates)
            top = max(top, gain)
            gain /= 1 + MARGIN * (1.0 if needs_model else math.sqrt(number))  # of many lookups the highest are chosen
            if gain > highest:
                best, highest = choice, gain
        self.expected_gain = top or None
        self._planned.update([sequence.key for sequence in step.sequences])
        self._planned_size = size_of(number)
        if best is None:
            if (number > FEW or self._on_device) and not offers.awaits_model:
                self._pause_left = max(self._pause, number // 4, 1)
                self._pause = min(2 * self._pause_left, max(LONG, 2 * number))
            return
        self._pause, self._pause_left, self._drafting = max(self._pause // 2, 1), 0, {}
        levels = dict(self._pending.levels)
        for row, (candidate, nodes) in best.prefixes.by_row(best.nodes).items():
            plans[row] = DraftPlan(candidate.method, nodes)
            # On a device trees are not cut, and an early draft has the nodes of the last plan.
            levels[step.sequences[row].key] = candidate.levels[row], 0 if self._on_device else nodes
            if self._kinds[candidate.method][0]:
                self._drafting[candidate.method] = self._drafting.get(candidate.method, 0) + 1
        if step.base == number:  # no row has its k fixed
            self.min_node_probability = best.rate * best.node_s
        self._pending = Pending(step, best.expected_s, levels)

    def _best(self, step: PlannedStep, candidates: list[Candidate]) -> Choice:
        """Return the prefix of the highest rate, among those that the accounts allow."""
        number, each = len(step.sequences), prefixes(candidates)
        # Prompt rows are computed whatever is drafted, so only the time that nodes add to them counts.
        with_nodes = step.times.seconds_with(step.base + step.other_rows, max(int(each.nodes[-1]) + 2, DEEPEST))
        if step.other_rows:
            with_nodes = with_nodes + (step.times.seconds_with(step.base, 1) - with_nodes[0])
        drafted_s = each.draft_s + np.interp(each.nodes, np.arange(1.0, len(with_nodes) + 1), with_nodes)
        tokens = number + each.tokens
        rates = tokens / (drafted_s + each.read_s * np.minimum(tokens / max(step.left, 1.0), 1.0))
        rates[~self._is_allowed(step, candidates, tokens, drafted_s, each.read_s)] = 0.0
        place = int(rates.argmax())
        if self._steps % DEEPEST == 0:  # now and then more nodes, so that their cost is known
            place = int(np.flatnonzero(rates >= (1 - RISK) * rates[place])[-1])
        last = min(max(place + 1, DEEPEST), len(with_nodes)) - 1
        node_s = float(with_nodes[last] - with_nodes[0]) / last
        return Choice(rates.item(place), place + 1, each, (drafted_s + each.read_s).item(place), node_s)

    def _is_allowed(
        self, step: PlannedStep, candidates: list[Candidate], tokens: Floats, drafted_s: Floats, read_s: Floats
    ) -> Any:
        """Return, by prefix, whether the accounts hold what it may lose: all of its time but a plain step, if no token
        is accepted. A share of what it promises to save until the answers end may be lost besides; the share grows with
        the drafts that the promise comes from."""
        number, plain_s = len(step.sequences), step.plain_s
        holds = min([self.accounts[of.method, size_of(number)].at(self._steps) for of in candidates])
        drafts = min([group.drafts for of in candidates for group in of.groups])
        tokens_without, steps_without = self._without_model
        share = min(steps_without / tokens_without, 1.0) if read_s[0] > 0 else 1.0
        promised = step.left / number * (share - number * drafted_s / (plain_s * tokens)) - read_s / plain_s
        stake = (1 + drafts) / (STAKE + drafts)
        return (drafted_s + read_s) / plain_s - 1 <= holds + stake * np.maximum(promised, 0.0)

    # -- learning

    def observe(self, result: StepResult, timing: StepTiming) -> None:
        self._observed.append((result, timing, self._pending))
        self._pending = Pending()  # a step launched ahead has no plan
        if not self._on_device:
            self.learn()

    def learn(self) -> None:
        for step in self._observed:
            self._learn_from(*step)
        self._observed.clear()

    def _learn_from(self, result: StepResult, timing: StepTiming, plan: Pending) -> None:
        self._steps += 1
        self._runs_ahead |= timing.ahead
        self._drafted |= plan.step is not None
        if result.sequences:
            self._learn_times(result, timing, plan)
        for at, (method, nodes, accepted, depth) in result.drafts.items():
            sequence = result.sequences[at]
            level, limit = plan.levels.get(sequence.key, (1, 0))
            if self._kinds[method][1]:
                path = range(accepted) if result.paths is None else result.paths(at)
                self.survival.note_tree(method, sequence.sampled, level, limit, nodes, path)
            else:
                self.survival.note_chain(method, sequence.sampled, level, depth, accepted)
        for sequence, tokens in zip(result.sequences, result.tokens, strict=True) if result.drafts else ():
            pace = self._pace.get(sequence.key, 1.0)
            self._pace[sequence.key] = pace + RECENT * (len(tokens) - pace)
        for at in result.ended:
            self._length += RECENT * (result.sequences[at].num_output - self._length)
            self.forget(result.sequences[at])
        if self._steps % LONG == 0:
            for table in (self.survival, *self.draft_costs.values(), *(() if self._drafted else self.step_times)):
                table.fade()
            self._drafted = False

    def _learn_times(self, result: StepResult, timing: StepTiming, plan: Pending) -> None:
        times, number = self.step_times[any_sampled(result.sequences)], timing.num_sequences
        nodes = sum([draft.nodes for draft in result.drafts.values()])
        rows_of: dict[str, int] = {}  # by method: rows that drafted
        for draft in result.drafts.values() if timing.rows > number else ():
            rows_of[draft.method] = rows_of.get(draft.method, 0) + 1
        if times.speed is not None:
            for method in rows_of.keys() & timing.work.keys() & self.draft_costs.keys():
                self.draft_costs[method].observe(times, rows_of[method], timing.work[method])
            if len(result) == number:  # where a model drafted, every token counts as a plain step
                fade, tokens = math.exp(-result.num_tokens / number / LONG), result.num_tokens / number
                needs_model = any(self._kinds[method][0] for method in rows_of)
                steps = tokens if needs_model else min(timing.step_s / times.seconds(number), 2 * OUTLIER)
                tokens_before, steps_before = self._without_model
                self._without_model = fade * tokens_before + tokens, fade * steps_before + steps
            if plan.step is not None and not plan.step.other_rows and rows_of:
                self._settle(result, timing, plan.step, plan.expected_s, nodes)
        seconds = timing.step_s - sum([work.seconds for work in timing.work.values()])
        only_decodes = len(result) == number and timing.rows <= number + nodes
        is_timed = timing.time_is_typical and only_decodes and rows_of.keys() <= timing.work.keys()
        # Where plain steps are launched ahead, one that was not takes longer than they do.
        is_timed &= bool(rows_of) or timing.ahead or not self._runs_ahead or times.speed is None
        if is_timed and seconds > 0:
            times.observe(timing.rows, seconds, drafted=plan.step is not None and bool(rows_of))

    def _settle(self, result: StepResult, timing: StepTiming, step: PlannedStep, expected_s: float, nodes: int) -> None:
        """Add to the accounts what a drafted step saved. The time of newcomers' prompts beside it is taken off, by the
        number of their rows; a step in which that exceeds a plain step is skipped."""
        beside_s, number = 0.0, len(step.sequences)
        if timing.rows > timing.num_sequences + nodes:
            beside_s = max(step.times.seconds(timing.rows - nodes) - step.times.seconds(timing.num_sequences), 0.0)
            if beside_s > step.plain_s:
                return
        draft_s = sum([work.seconds for work in timing.work.values()])
        taken_s = draft_s + min(timing.step_s - beside_s - draft_s, OUTLIER * max(expected_s, step.plain_s))
        weights = {step.sequences[row].key: weight for row, weight in step.weights.items()}
        more = [weights.get(result.sequences[at].key, 1.0) * (len(result.tokens[at]) - 1) for at in result.drafts]
        saved = 1 + sum(more) / number - (taken_s if timing.time_is_typical else expected_s) / step.plain_s
        for method in {draft.method for draft in result.drafts.values()}:
            self.accounts[method, size_of(number)].add(saved)

    def plain_seconds(self, num_sequences: int, sampled: bool) -> float | None:
        times = self.step_times[sampled]
        return None if times.speed is None else times.seconds(num_sequences)

    def forget(self, sequence: Sequence) -> None:
        self._pace.pop(sequence.key, None)
        self._planned.discard(sequence.key)

    def relearn(self, method: str) -> None:
        """Drop the method's record, accounts and pause: the acceptance of its drafts has changed."""
        self.learn()
        self.survival.forget(method)
        for key in [key for key in self.accounts if key[0] == method]:
            del self.accounts[key]
        self._pause, self._pause_left = 1, 0

    # -- between runs

    def state(self) -> dict[str, Any]:
        self.learn()
        drafts = {method: [cost.price, cost.state()] for method, cost in self.draft_costs.items()}
        steps = [times.state() for times in self.step_times]
        return {"steps": steps, "drafts": drafts, "survival": self.survival.state(), "length": self._length}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a stored state; raise KeyError, TypeError or ValueError on one of another form, unchanged."""
        greedy, sampled = (times.of_state(one) for times, one in zip(self.step_times, state["steps"], strict=True))
        draft_costs = {str(name): DraftCost.of_state(*one) for name, one in state["drafts"].items()}
        survival, length = SurvivalTable.of_state(state["survival"]), float(state["length"])
        if not 0 < length < 1e9:
            raise ValueError("a length of another form")
        self.step_times, self.draft_costs, self.survival = [greedy, sampled], draft_costs, survival
        self._length = length
        self.accounts.clear()
        self._observed.clear()


def _variants(offers: Mapping[str, list[Offer]]) -> Iterator[Mapping[str, list[Offer]]]:
    """Return the offers, and where a model has yet to read the tokens of some rows: without these rows, and with the
    one of them that takes least."""
    yield offers
    for method, several in offers.items():
        for offer in several:
            unread = dict(zip(offer.rows, offer.unread, strict=False))
            read = {row for row, tokens in unread.items() if tokens <= 2}
            behind = sorted(unread.keys() - read, key=unread.__getitem__)
            for rows in ([read] if behind and read else []) + ([read | {behind[0]}] if len(behind) > 1 else []):
                yield {**offers, method: [_part(offer, rows)]}


def _part(offer: Offer, rows: set[int]) -> Offer:
    """Return the offer for some of its rows."""
    chosen = [row in rows for row in offer.rows]
    columns = [list(compress(column, chosen)) for column in (offer.rows, offer.levels, offer.unread)]
    return offer._replace(rows=columns[0], levels=columns[1], unread=columns[2])
