"""The drafts of a step, chosen by one formula, and the loss that may be risked for them, by one account a method.

A plan's rate is (rows + expected tokens of its nodes) / (seconds of the pass, of drafting and of reading). Reading what
a drafter lags behind is paid once, so it is spread over the tokens that are still expected. The plan of the highest
rate that the accounts allow is taken if it beats plain decoding. All of it comes from committed tokens and timings,
never from the draft itself: that would bias the output.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import compress
from typing import Any, NamedTuple

from paceline.config import MAX_K, NONE
from paceline.core.sequence import Sequence
from paceline.engine.batch import StepResult, StepTiming
from paceline.engine.policy import DEEPEST, NO_DRAFT, DraftPlan, Offer, Offers, any_sampled, wish
from paceline.engine.policy.account import CREDIT, STAKE, Account
from paceline.engine.policy.allocate import Candidate, PlannedStep, Prefix, RowGroup, best_prefix, token_weights
from paceline.engine.policy.costs import LOOKUP, OUTLIER, RECENT, DraftCost, StepTimes, size_of
from paceline.engine.policy.priors import CPU, PassPrior
from paceline.engine.policy.survival import SurvivalTable, bucket

MARGIN = 0.02  # gain over plain decoding that a plan must promise: the tables err by as much
RISK = 0.05  # share of the best rate that every DEEPEST-th plan may give up to learn the cost of more nodes
LONG = 128  # tokens of an answer before any ended; steps between plain steps, and until unused records count half
CHECK_BELOW = 1.5  # expected gain from which no plain step is taken to keep its time current
SLOPE_NODES = 4.0  # nodes; least range over which the cost of one more is taken, since neighbours differ by noise
FEW = 8  # sequences, of which a CPU plans every step; steps until the first plain one, and that are learnt from at once


class Pending(NamedTuple):
    """The basis of the step under way, from which the policy learns."""

    step: PlannedStep | None = None  # None: no row drafts with a k that the policy chose
    expected_s: float = 0.0
    levels: Mapping[str, tuple[int, int]] = {}  # by sequence: level, and limit of nodes or 0
    is_urgent: bool = False  # its method may lose little more, so the next plan depends on it


class ObservedStep(NamedTuple):
    plan: Pending
    result: StepResult
    timing: StepTiming
    paths: Mapping[int, SequenceOf[int]]  # by index in the result: the accepted nodes of its tree


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
        self._observed: list[ObservedStep] = []  # steps that are not learnt from
        self._candidates: dict[tuple[Any, ...], Candidate] = {}  # of steps of one row, until a table changes
        self._faded = 0  # times that unused records were halved
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
            step = PlannedStep(
                sequences, remaining, max(left, 1.0), times, base, times.seconds(base), other_rows, weights
            )
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
        """Return the candidates of each plan: one method for all rows, for each method, and each row's best method; and
        where a model has yet to read the tokens of some rows, the same without these, and with the one of them that
        takes least."""
        by_method: dict[str, list[Offer]] = {}
        for wished, rows in open_rows.items():
            for offer in offers.of(wished, rows):
                by_method.setdefault(offer.method, []).append(offer)
        if len(step.sequences) == 1:
            return [[self._candidate_of_one(step, offer)] for (offer,) in by_method.values()]
        each = {name: [self._candidate(step, offer) for offer in several] for name, several in by_method.items()}
        options = list(each.values())
        options += self._mixed(step, by_method, each)
        for name, several in by_method.items():
            for part in (part for offer in several for part in _parts(offer)):
                alone = [self._candidate(step, part)]
                options += [alone, *self._mixed(step, {**by_method, name: [part]}, {**each, name: alone})]
        return options

    def _mixed(
        self, step: PlannedStep, offers: Mapping[str, list[Offer]], each: Mapping[str, list[Candidate]]
    ) -> list[list[Candidate]]:
        """Return a plan in which each row has the method that promises it most, if there are several."""
        if len(each) < 2:
            return []
        best: dict[int, tuple[float, str]] = {}
        for of in (of for several in each.values() for of in several):
            for group in of.groups:
                promise = sum(group.expected), of.method
                best.update([(row, promise) for row in group.rows if promise > best.get(row, (0.0, ""))])
        rows_of = {name: {row for row, (_, chosen) in best.items() if chosen == name} for name in each}
        parts = [_part(offer, rows_of[name]) for name, several in offers.items() for offer in several]
        return [[self._candidate(step, part) for part in parts if part.rows]]

    def _candidate_of_one(self, step: PlannedStep, offer: Offer) -> Candidate:
        """Return the candidate of the only row, made anew where a table has changed."""
        level, unread = bucket(offer.levels[0]), sum(offer.unread)
        key = offer.method, step.sequences[0].sampled, level, min(step.remaining[0], MAX_K + 1), max(unread, 2)
        known = None if step.other_rows else self._candidates.get(key)
        if known is None:
            known = self._candidates[key] = self._candidate(step, offer)
        return known

    def _candidate(self, step: PlannedStep, offer: Offer) -> Candidate:
        method, rows, levels, unread, price, needs_model, is_tree, max_depth = offer
        self._kinds[method] = needs_model, is_tree
        cost = self.draft_costs.get(method)
        if cost is None:
            cost = self.draft_costs[method] = DraftCost(price if needs_model else LOOKUP)
        pass_s, read_s = cost.parts(step.times, len(rows), sum(unread))
        if not needs_model and self._drafting:  # a model that drafted last reads these tokens before it drafts again
            pass_s += max([self.draft_costs[one].parts(step.times, n, 0)[0] for one, n in self._drafting.items()])
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
            expected = survival[:nodes] if weight == 1.0 else [weight * one for one in survival[:nodes]]
            groups.append(RowGroup(members, expected, shares, drafts))
        of_row = dict(zip(rows, levels, strict=True))
        return Candidate(method, groups, pass_s, read_s, is_tree or not needs_model, of_row)

    # -- the formula

    def _choose(
        self, step: PlannedStep, options: list[list[Candidate]], offers: Offers, plans: list[DraftPlan]
    ) -> None:
        number, best, highest, top = len(step.sequences), None, 1.0, 0.0
        plain_rate = number / step.plain_s
        for candidates in options:
            needs_model = any(self._kinds[candidate.method][0] for candidate in candidates)
            margin = 1 + MARGIN * (1.0 if needs_model else math.sqrt(number))  # of many lookups the highest are chosen
            found = self._best(step, candidates, highest * margin * plain_rate)
            if found is not None:
                gain = found.rate / plain_rate
                top = max(top, gain)
                if gain > highest * margin:
                    best, highest = found, gain / margin
        self.expected_gain = top or None
        self._planned.update([sequence.key for sequence in step.sequences])
        self._planned_size = size_of(number)
        if best is None:
            if (number > FEW or self._on_device) and not offers.awaits_model:
                self._pause_left = max(self._pause, number // 4, 1)
                self._pause = min(2 * self._pause_left, max(LONG, 2 * number))
            return
        self._pause, self._pause_left = max(self._pause // 2, 1), 0
        drafted_before, self._drafting = self._drafting, {}
        levels = dict(self._pending.levels)
        for row, (candidate, nodes) in best.by_row().items():
            plans[row] = DraftPlan(candidate.method, nodes)
            # On a device trees are not cut, and an early draft has the nodes of the last plan.
            levels[step.sequences[row].key] = candidate.levels[row], 0 if self._on_device else nodes
            if self._kinds[candidate.method][0]:
                self._drafting[candidate.method] = self._drafting.get(candidate.method, 0) + 1
        if step.base == number:  # no row has its k fixed
            most = max(best.nodes, SLOPE_NODES)
            node_s = (step.seconds_with(most + 1) - step.seconds_with(1)) / most
            self.min_node_probability = best.rate * node_s
        if self._drafting != drafted_before:
            self._candidates.clear()
        is_urgent = min([self._holds(candidate.method, number) for candidate, _ in best.groups]) < 2 * CREDIT
        self._pending = Pending(step, best.seconds + best.read_s, levels, is_urgent)

    def _best(self, step: PlannedStep, candidates: list[Candidate], least: float) -> Prefix | None:
        """Return the best prefix of the candidates' nodes that their accounts allow."""
        risk = 0.0 if self._steps % DEEPEST else RISK  # now and then more nodes, so that their cost is known
        one, found = candidates[0], None
        if len(step.sequences) == 1 and not risk and not one.read_s:
            found = one.best = one.best or best_prefix(step, candidates, 0.0)
        else:
            found = best_prefix(step, candidates, least, risk)
        if found is None or found.rate <= least:
            return found
        is_allowed = self._allowance(step, candidates)
        if is_allowed(found.tokens, found.seconds, found.read_s):
            return found
        return best_prefix(step, candidates, least, risk, is_allowed)

    def _allowance(self, step: PlannedStep, candidates: list[Candidate]) -> Callable[[float, float, float], bool]:
        """Return whether the accounts hold what a plan may lose: all of its time but a plain step, if no token is
        accepted. A share of what it promises to save until the answers end may be lost besides; the share grows with
        the drafts that the promise comes from."""
        number, plain_s = len(step.sequences), step.plain_s
        holds = min([self._holds(one.method, number) for one in candidates])
        drafts = min([one.drafts for one in candidates])
        stake, (tokens_without, steps_without) = (1 + drafts) / (STAKE + drafts), self._without_model

        def is_allowed(tokens: float, drafted_s: float, read_s: float) -> bool:
            share = min(steps_without / tokens_without, 1.0) if read_s > 0 else 1.0
            promised = step.left / number * (share - number * drafted_s / (plain_s * tokens)) - read_s / plain_s
            return (drafted_s + read_s) / plain_s - 1 <= holds + stake * max(promised, 0.0)

        return is_allowed

    def _holds(self, method: str, number: int) -> float:
        """Return the plain steps that a method may lose in a batch."""
        return self.accounts[method, size_of(number)].at(self._steps)

    # -- learning

    def observe(self, result: StepResult, timing: StepTiming) -> None:
        self._steps += 1
        plan, self._pending = self._pending, Pending()  # a step launched ahead has no plan
        paths = {}
        for at, (method, _, accepted, _) in result.drafts.items():
            if self._kinds[method][1]:
                paths[at] = range(accepted) if result.paths is None else result.paths(at)
        self._observed.append(ObservedStep(plan, result, timing, paths))
        # With cold caches to learn from one step takes as long as from several.
        enough = plan.is_urgent or len(self._observed) >= min(1 + 4 * self._steps // LONG, FEW)
        if not self._on_device and (enough or self.step_times[any_sampled(result.sequences)].speed is None):
            self._learn()

    def learn(self) -> None:
        if self._on_device:
            self._learn()

    def _learn(self) -> None:
        for step in self._observed:
            self._learn_from(*step)
        if self._steps // LONG > self._faded:
            for table in (self.survival, *self.draft_costs.values(), *(() if self._drafted else self.step_times)):
                table.fade()
            self._drafted, self._faded = False, self._steps // LONG
        self._observed.clear()
        self._candidates.clear()

    def _learn_from(
        self, plan: Pending, result: StepResult, timing: StepTiming, paths: Mapping[int, SequenceOf[int]]
    ) -> None:
        self._runs_ahead |= timing.ahead
        self._drafted |= plan.step is not None
        if result.sequences:
            self._learn_times(result, timing, plan)
        for at, (method, nodes, accepted, depth) in result.drafts.items():
            sequence = result.sequences[at]
            level, limit = plan.levels.get(sequence.key, (1, 0))
            if at in paths:
                self.survival.note_tree(method, sequence.sampled, level, limit, nodes, paths[at])
            else:
                self.survival.note_chain(method, sequence.sampled, level, depth, accepted)
        for sequence, tokens in zip(result.sequences, result.tokens, strict=True) if result.drafts else ():
            if not sequence.finished:
                pace = self._pace.get(sequence.key, 1.0)
                self._pace[sequence.key] = pace + RECENT * (len(tokens) - pace)
        for at in result.ended:
            self._length += RECENT * (result.sequences[at].num_output - self._length)
            self.forget(result.sequences[at])

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
            self.accounts[method, size_of(number)].add(saved, self._steps)

    def plain_seconds(self, num_sequences: int, sampled: bool) -> float | None:
        times = self.step_times[sampled]
        return None if times.speed is None else times.seconds(num_sequences)

    def forget(self, sequence: Sequence) -> None:
        self._pace.pop(sequence.key, None)
        self._planned.discard(sequence.key)

    def relearn(self, method: str) -> None:
        """Drop the method's record, accounts and pause: the acceptance of its drafts has changed."""
        self._learn()
        self.survival.forget(method)
        for key in [key for key in self.accounts if key[0] == method]:
            del self.accounts[key]
        self._pause, self._pause_left = 1, 0

    # -- between runs

    def state(self) -> dict[str, Any]:
        self._learn()
        steps = [times.state() for times in self.step_times]
        return {"steps": steps, "survival": self.survival.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a stored state; raise KeyError, TypeError or ValueError on one of another form, unchanged."""
        greedy, sampled = (times.of_state(one) for times, one in zip(self.step_times, state["steps"], strict=True))
        survival = SurvivalTable.of_state(state["survival"])
        self.step_times, self.survival = [greedy, sampled], survival
        self.accounts.clear()
        self._observed.clear()
        self._candidates.clear()


def _parts(offer: Offer) -> Iterator[Offer]:
    """Return the offer for the rows that a model has read, and for these and the one that takes least to read."""
    unread = dict(zip(offer.rows, offer.unread, strict=False))
    read = {row for row, tokens in unread.items() if tokens <= 2}
    behind = sorted(unread.keys() - read, key=unread.__getitem__)
    for rows in ([read] if behind and read else []) + ([read | {behind[0]}] if len(behind) > 1 else []):
        yield _part(offer, rows)


def _part(offer: Offer, rows: set[int]) -> Offer:
    """Return the offer for some of its rows."""
    chosen = [row in rows for row in offer.rows]
    columns = [list(compress(column, chosen)) for column in (offer.rows, offer.levels, offer.unread)]
    return offer._replace(rows=columns[0], levels=columns[1], unread=columns[2])
