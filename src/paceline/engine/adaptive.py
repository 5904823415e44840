"""Which method drafts for a sequence, and how far ahead, decided anew each step by expected tokens per second.

Who is asked what it knows is decided by `asking`, what each could have is worked out by `offers`, how many nodes each
gets by `budget`, from what steps have taught (`experience`): what they and drafts cost, and how often drafts held.
Everything used here is committed history and timings, never the draft at hand: that would bias the output.

Where several answers are waited for together, a token of one that runs ahead is worth less (`value`). Where drafts by a
model begin behind a step under way, so does the plan for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from functools import cache
from typing import Any

from paceline.config import MAX_K
from paceline.drafters import NONE, Drafter
from paceline.engine.asking import Asking
from paceline.engine.budget import Budget, Offer, Terms
from paceline.engine.cost import NOTHING_S, CostModel, size_of
from paceline.engine.experience import Experience
from paceline.engine.lead import Lead
from paceline.engine.methods import Methods, is_patient
from paceline.engine.offers import TRIAL, Candidate, Offers, Outlook
from paceline.engine.plans import STILL_THERE, Open, Plan, Question, Standing, any_sampled
from paceline.engine.policy import Choice, StepReport
from paceline.models.pass_prior import CPU, PassPrior
from paceline.sequence import Sequence

PROBE_EVERY = 64  # looks after which a method that casts no shadow is tried once more
PROBE_BUDGET = 2
PLAIN_FIRST, PLAIN_EVERY = 4, 128  # steps until the next plain one: three times as many after each,
PLAIN_TIMES = 4  # so many times
OVERHEAD_RATE = 0.1
STANDS = 6  # steps a plan serves at most
MANY = 16  # sequences: planning for them takes so long that a plan serves for two steps at least
DOUBTED = 0.5  # not while so little is known of what promises are worth
LOOKUPS = 4  # one in so many of those that draft may do so by lookup
NEWCOMERS, NEWCOMERS_SHARE = 16, 0.05  # asked in one step at least, and for what share of its time more of them


@cache
def _choice(method: str, budget: int) -> Choice:
    return Choice(method, budget)


class AdaptivePolicy:
    """`method` auto, or one method with k left open, or both fixed; what a request asks for outranks it.

    `prior` says how a pass's time grows with its rows where it runs, `clock` what deciding takes.
    """

    def __init__(
        self,
        drafters: SequenceOf[Drafter],
        method: str = NONE,
        k: int | None = None,
        prior: PassPrior = CPU,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._method, self._k, self._clock = method, k, clock
        self._methods, self._asking, self._budget = Methods(drafters, method, k), Asking(), Budget()
        self._known = Experience(self._methods, prior, self._asking.purse, clock)
        self._lead = Lead(self._can_lead, possible=self._known.on_device)
        self._offers = Offers(self._methods, self._known, self._lead, self._asking, self._budget)
        self._made = Plan()
        self._lesson: tuple[Plan, StepReport, list[int]] | None = None  # not learnt yet; where its tokens begin
        self._heard: set[str] = set()  # sequences that were asked
        self._standing: Standing | None = None
        self._outlook: Outlook | None = None
        self._live: list[Sequence] = []  # that were planned for
        self._others_wait = False
        self._since_tried: dict[str, int] = {}  # looks since a method that casts no shadow was asked for a draft
        self._since_plain = 0
        self._waiting = False  # a method for somebody to have said its first tokens
        self._plain_due = PLAIN_EVERY  # steps from one that was plain to see what that takes to the next
        self._asked_for = 0  # size of the batch when somebody was last asked
        self._checking = False  # what plain steps take

    @property
    def expected_gain(self) -> float | None:
        """What drafting promised over plain decoding when it was last considered."""
        return self._budget.expected_gain

    # -- deciding

    def plan(self, sequences: SequenceOf[Sequence], other_rows: int, others_wait: bool) -> list[Choice]:
        began = self._clock()
        self._made = plan = Plan()
        choices = [_choice(NONE, 0)] * len(sequences)
        if not self._methods.drafters:
            return choices
        open_ended: Open = {}
        common = self._method, self._k
        fixed: dict[str, list[tuple[int, int]]] = {}
        for index, sequence in enumerate(sequences):
            method, k = common if sequence.params.speculation is None else self._methods.wish(sequence)
            most = min(k or MAX_K, sequence.max_len - len(sequence.tokens) - 1)
            if method == NONE or most < 1:
                continue
            if k is None:
                open_ended[index] = method, most
            elif method in fixed:
                fixed[method].append((index, most))
            else:
                fixed[method] = [(index, most)]
        for method, rows in fixed.items():
            self._choose_surest(sequences, method, rows, choices)
        began_open = self._clock() if fixed else began
        self._live = [sequences[index] for index in open_ended]
        self._others_wait = others_wait
        if open_ended:
            if self._known.on_device and self._known.acceptance.doubt > DOUBTED:
                self._learn()  # on a device drafts begin large: what the first ones brought is not waited for
            base = len(sequences) + sum(choice.budget for choice in choices)
            cost = self._known.costs.of(len(sequences), any_sampled(sequences))
            if self._knows_plain(cost, base + other_rows) and not self._stands(sequences, open_ended, choices):
                self._choose(Question(sequences, open_ended, others_wait, cost, base, other_rows), choices, began_open)
                self._let_stand(sequences, open_ended, choices)
        plan.seconds = self._clock() - began
        return choices

    def _plan_ahead(self) -> None:
        """Where drafts begin behind a step under way, so does the plan for the step after it, once the last has served
        or many have ended. Nobody waits for it, and how deep drafts go was decided with the plan before anyway."""
        last = self._standing
        if last is None or not self._known.on_device or self._known.acceptance.doubt > DOUBTED:
            return
        self._live = [sequence for sequence in self._live if not sequence.finished]
        if last.left and len(self._live) >= STILL_THERE * len(last.choices):
            return
        going: list[Sequence] = []
        open_ended: Open = {}
        for sequence in self._live:
            # Who is likely to end keeps what it had.
            room = max(sequence.room - round(self._known.pace.get(sequence.key, 1.0)), sequence.room // 2)
            if room > 1 and sequence.key in last.choices:
                open_ended[len(going)] = self._methods.wish(sequence)[0], min(MAX_K, room - 1)
                going.append(sequence)
        if not going:
            return
        made, self._made = self._made, Plan(ahead=True)
        choices = [_choice(NONE, 0)] * len(going)
        cost = self._known.costs.of(len(going), any_sampled(going))
        asked = Question(going, open_ended, self._others_wait, cost, len(going), 0, said=1)
        self._choose(asked, choices, self._clock())
        self._let_stand(going, open_ended, choices)
        if self._standing is not None:
            self._standing.left += 1  # it has not served yet
            before = {one.key: last.choices[one.key] for one in self._live if one.key in last.choices}
            self._standing.choices = {**before, **self._standing.choices}
        self._made = made

    def rests(self, sequences: SequenceOf[Sequence]) -> bool:
        """While nobody drafts, all were asked once and no time is saved up to ask again; and for one step at each check
        of what plain ones take."""
        if not self._methods.drafters:
            return True
        drafting = [sequence for sequence in sequences if self._methods.wish(sequence)[0] != NONE]
        if not drafting:
            return True
        if self._made.drafts or any(self._methods.wish(sequence)[1] is not None for sequence in drafting):
            return False
        if self._checking:
            self._checking = False
            return True
        waits = not self._lead.now and self._asking.purse.seconds <= 0 and not self._shrank(len(sequences))
        return waits and self._heard.issuperset([sequence.key for sequence in drafting])

    def _choose_surest(
        self, sequences: SequenceOf[Sequence], method: str, rows: list[tuple[int, int]], choices: list[Choice]
    ) -> None:
        """With k fixed only the method is left to choose: the one with the most to go by. `rows`: who, and k."""
        most = [0] * len(rows)
        for name in self._methods.allowed(method):
            found = self._evidence([sequences[index] for index, _ in rows], name)
            for at, evidence in enumerate(found):
                if evidence > most[at]:
                    most[at] = evidence
                    index, k = rows[at]
                    choices[index] = _choice(name, k)

    def _stands(
        self, sequences: SequenceOf[Sequence], open_ended: dict[int, tuple[str, int]], choices: list[Choice]
    ) -> bool:
        """Whether the last plan serves once more: nobody is new, and few have ended, which matters little where drafts
        have begun."""
        last = self._standing
        if last is None or not last.left:
            return False
        if not self._known.on_device and len(open_ended) < STILL_THERE * len(last.choices):
            return False
        found = {index: last.choices.get(sequences[index].key) for index in open_ended}
        if None in found.values():
            return False
        last.left -= 1
        # A copy: what came of the step before is perhaps not learnt yet, and that by what was known then.
        self._made.evidence, self._made.promises, self._made.drafts = dict(last.plan.evidence), last.plan.promises, True
        empty = set[int]()
        for method in {choice.method for choice in found.values() if choice is not None and choice.budget}:
            if self._known.shadows.casts(method):
                asked = [at for at, choice in found.items() if choice is not None and choice.method == method]
                evidence = self._evidence([sequences[at] for at in asked], method)
                empty.update(at for at, some in zip(asked, evidence, strict=True) if not some)
        for index, choice in found.items():
            assert choice is not None
            if index not in empty:
                most = open_ended[index][1]
                choices[index] = choice if choice.budget <= most else _choice(choice.method, most)
        return True

    def _let_stand(
        self, sequences: SequenceOf[Sequence], open_ended: dict[int, tuple[str, int]], choices: list[Choice]
    ) -> None:
        """A plan mostly by methods that know as much in every step, twice as long each time it says the same."""
        last, self._standing = self._standing, None
        if sum(map(self._known.shadows.casts, self._lead.now.values())) * LOOKUPS < len(self._lead.now):
            made = {sequences[index].key: choices[index] for index in open_ended}
            least = 2 if len(made) >= MANY and self._known.acceptance.doubt < DOUBTED else 1
            steps = min(2 * last.steps, STANDS) if last is not None and last.like(made) else least
            if self._waiting:
                steps = 1
            elif self._budget.explores:
                steps = TRIAL if self._made.ahead else 1
            self._standing = Standing(made, self._made, steps, left=steps - 1)

    def _choose(self, asked: Question, choices: list[Choice], began: float) -> None:
        """For those whose method or k is open. `began`: when that was thought of."""
        sequences, open_ended = asked.sequences, asked.open_ended
        spent = self._asking.spent_s
        few = self._known.few(len(sequences)) and self._methods.look_up
        found = self._candidates_of_few(asked, began) if few else self._candidates(asked)
        if not found:
            self._outlook = None
        else:
            outlook = self._looked_out(asked, found)
            terms = outlook.terms
            offers, prospect = self._offers.best(asked, found, outlook)
            depths = self._budget.spread(prospect, terms) if prospect else [0] * len(offers)
            if prospect and self._budget.explores and not self._known.on_device and not asked.other_rows:
                self._made.trial = terms  # on a device a plan for what it teaches serves for some steps
            for offer, depth in zip(offers, depths, strict=True):
                self._made.promises[sequences[offer.sequence].key] = offer.survival
                if depth:
                    choices[offer.sequence] = _choice(offer.method, depth)
            self._probe(sequences, offers, choices, terms)
        drafting = ((sequences[index].key, choices[index]) for index in open_ended)
        self._lead.follow({key: choice.method for key, choice in drafting if choice.budget}, len(sequences))
        self._made.drafts = bool(self._lead.now)
        if self._made.asked:
            self._asked_for = size_of(len(sequences))
        taken = self._clock() - began - (self._asking.spent_s - spent)
        if self._made.drafts:
            exposed = 0.0 if asked.said else taken  # else it hides behind a pass
            self._offers.overhead_s += OVERHEAD_RATE * (exposed - self._offers.overhead_s)
        elif found:
            self._asking.purse.empty()
            self._asking.purse.pay(taken)
            self._hear(sequences, open_ended)  # some speak for all; the others in turn

    def _looked_out(self, asked: Question, found: Mapping[int, list[Candidate]]) -> Outlook:
        """What offers are weighed by: as in the step before where that serves, but for what a token is worth."""
        outlook = self._outlook
        if outlook is not None and outlook.serves(asked):
            outlook.left -= 1
        else:
            self._outlook = outlook = self._offers.outlook(asked, found)
        outlook.values = self._offers.values(asked, outlook.jobs)
        outlook.terms = outlook.terms._replace(value=sum(outlook.values))
        return outlook

    def _candidates(self, asked: Question) -> dict[int, list[Candidate]]:
        """Methods that have something to say. Asked are newcomers, those that draft, and some of the others in turn."""
        sequences, open_ended = asked.sequences, asked.open_ended
        found: dict[int, list[Candidate]] = {}
        methods = self._methods.wanted([wish for wish, _ in open_ended.values()])
        may_take = self._asking.purse.seconds / max(len(methods), 1)
        shrank = self._shrank(len(sequences))
        new = [at for at in open_ended if shrank or sequences[at].key not in self._heard]
        leads = self._lead.leader(len(sequences)) != NONE
        early: set[int] = set()  # of a crowd: what they begin with is taken in while a pass is under way
        if len(new) > NEWCOMERS or leads:
            early = {at for at in new if asked.patient(sequences[at])}
            new = [at for at in new if at not in early]
        self._waiting = bool(leads and early)
        if may_take <= 0 and not self._lead.now and not new:
            return found
        current = {at: self._lead.now.get(sequences[at].key) for at in open_ended if at not in early}
        some: list[int] = []
        if new and not leads:
            each_s = max(map(self._asking.each_s, methods), default=0.0) or NOTHING_S
            some = new[: max(NEWCOMERS, int(NEWCOMERS_SHARE * asked.cost.seconds(asked.base) / each_s))]
        for method in methods:
            casts = self._known.shadows.casts(method)
            may = [at for at in current if method in self._methods.allowed(open_ended[at][0])]
            due = {at for at in may if current[at] == method}
            if not casts and self._lead.now:
                due.update(may)  # a pass of a model serves many at little more than one
            if new:
                due.update({*may}.intersection(some if casts else new))
            rest = [at for at in may if at not in due] if may_take > 0 and len(due) < len(may) else []
            others = self._asking.in_turn(method, rest, may_take, together=not casts)
            if due or others:
                self._made.asked = True
                began = self._clock()
                order = [*sorted(due), *others]
                evidence = self._evidence([sequences[index] for index in order], method, asked.said)
                for index, known in zip(order, evidence, strict=True):
                    if known:
                        found.setdefault(index, []).append((method, known))
                self._asking.note(method, self._clock() - began, len(due), len(others))
        self._hear(sequences, new if leads else some)
        return found

    def _candidates_of_few(self, asked: Question, began: float) -> dict[int, list[Candidate]]:
        """The same where one more question takes next to nothing: all are asked, or nobody while nobody drafts."""
        sequences, open_ended = asked.sequences, asked.open_ended
        found: dict[int, list[Candidate]] = {}
        new = [at for at in open_ended if sequences[at].key not in self._heard]
        due = bool(self._lead.now or new or self._shrank(len(sequences)))
        if not due and self._asking.purse.seconds <= 0:
            return found
        self._made.asked = True
        for method in self._methods.wanted([wish for wish, _ in open_ended.values()]):
            order = [at for at, (wish, _) in open_ended.items() if method in self._methods.allowed(wish)]
            evidence = self._evidence([sequences[at] for at in order], method)
            for at, known in zip(order, evidence, strict=True):
                if known:
                    found.setdefault(at, []).append((method, known))
            others, now = 0 if due else len(order), self._clock()
            self._asking.note(method, now - began, len(order) - others, others)
            began = now
        self._hear(sequences, new)
        return found

    def _shrank(self, num_sequences: int) -> bool:
        """What did not pay for many may pay for fewer."""
        return size_of(num_sequences) < self._asked_for

    def _hear(self, sequences: SequenceOf[Sequence], asked: Iterable[int]) -> None:
        """A drafter that has to read the prompt says nothing at first."""
        self._heard.update(sequences[at].key for at in asked if not is_patient(sequences[at]))

    def _probe(
        self, sequences: SequenceOf[Sequence], offers: SequenceOf[Offer], choices: list[Choice], terms: Terms
    ) -> None:
        """A method that casts no shadow and has not drafted for long is tried once more, when there is time for it."""
        for method, index in {offer.method: offer.sequence for offer in offers}.items():
            if self._known.shadows.casts(method) or any(choice.method == method for choice in choices):
                self._since_tried[method] = 0
                continue
            self._since_tried[method] = self._since_tried.get(method, 0) + 1
            if self._since_tried[method] < PROBE_EVERY or choices[index].budget:
                continue
            seconds = float(terms.with_nodes[PROBE_BUDGET - 1]) + terms.drafting[method].at(1, PROBE_BUDGET)
            if self._budget.afford(seconds / terms.plain_s - 1):
                self._since_tried[method] = 0
                choices[index] = _choice(method, min(PROBE_BUDGET, sequences[index].room - 1))

    def _knows_plain(self, cost: CostModel, base: int) -> bool:
        """Whether to draft pays is judged against plain steps, so some are taken at first, and one now and then."""
        self._since_plain += 1
        seen = cost.plain_seen(base)
        # Where passes are recorded they take what they took before.
        first = PLAIN_EVERY if self._known.costs.prior.padded_to else PLAIN_FIRST
        self._plain_due = min(first * 3 ** min(max(seen - 1, 0), PLAIN_TIMES), PLAIN_EVERY)
        self._checking = not seen or self._since_plain >= self._plain_due
        if self._checking:
            self._since_plain = 0
        return not self._checking

    def drafts_on(self) -> bool:
        return self._method == NONE or self._k is not None or self._since_plain + 1 < self._plain_due

    def settled(self, sequences: SequenceOf[Sequence]) -> tuple[str, list[int]] | None:
        wishes = [self._methods.wish(sequence) for sequence in sequences]
        budgets = [k for _, k in wishes if k is not None]
        methods = {name for method, _ in wishes for name in self._methods.allowed(method)}
        if len(methods) != 1 or len(budgets) < len(wishes):
            return None
        (method,) = methods
        return method, budgets

    def _evidence(self, sequences: SequenceOf[Sequence], method: str, said: int = 0) -> list[int]:
        found = self._methods.evidence(sequences, method, said)
        self._made.evidence.update(zip([(one.key, method) for one in sequences], found, strict=True))
        return found

    def _can_lead(self, method: str) -> bool:
        return not self._known.shadows.casts(method) and method not in self._methods.retired

    # -- learning

    def observe(self, report: StepReport) -> None:
        self._learn()
        if report.retired != self._methods.retired:
            self._methods.retire(report.retired)
            self._standing = self._outlook = None  # nobody drafts by those any more
        judged = report.outputs if self._methods.drafters else ()
        starts = [len(output.sequence.tokens) - len(output.tokens) for output in judged]
        self._lesson, self._made = (self._made, report, starts), Plan()  # a step launched ahead has no plan

    def meanwhile(self) -> None:
        """There is time for it while a pass is under way."""
        self._learn()
        self._plan_ahead()

    def _learn(self) -> None:
        """From the last step."""
        lesson, self._lesson = self._lesson, None
        if lesson is None:
            return
        self._known.learn(*lesson)
        plan, report, _ = lesson
        if plan.trial is not None and report.warm:
            taken = report.step_s - sum(seconds for _, seconds in report.draft_s.values())
            self._budget.settle(plan.trial, report.rows - plan.trial.base, taken)
        for output in report.outputs if self._methods.drafters else ():
            if output.finished or output.sequence.finished:
                self.forget(output.sequence)

    def plain_seconds(self, num_sequences: int, sampled: bool) -> float | None:
        cost = self._known.costs.of(num_sequences, sampled)
        return None if cost.scale is None else cost.seconds(num_sequences)

    def forget(self, sequence: Sequence) -> None:
        self._heard.discard(sequence.key)
        self._lead.now.pop(sequence.key, None)
        self._known.forget(sequence)

    # -- between runs

    def state(self) -> dict[str, Any]:
        self._learn()
        return self._known.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError on a state of another form, and is then as before."""
        self._known.load(state)
        self._lead.forget()
        self._lesson = self._standing = self._outlook = None
