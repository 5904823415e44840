"""The methods at hand: which of them a request may use, and what each says it knows.

A drafter that fails to answer has nothing to say; the answer under way does not suffer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from paceline.drafters import Drafter
from paceline.drafters.base import HostDrafter
from paceline.engine.policy import AUTO, wish
from paceline.sequence import Sequence

log = logging.getLogger("paceline")
PATIENT_TOKENS, SMALL_LAG = 2, 8  # a drafter that must read the prompt first does not delay the first tokens


def is_patient(sequence: Sequence, said: int = 0) -> bool:
    """Its first tokens do not wait for a drafter that must read the prompt. `said`: tokens it will have said more."""
    return sequence.num_output + said < PATIENT_TOKENS


class Methods:
    def __init__(self, drafters: SequenceOf[Drafter], method: str, k: int | None) -> None:
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self._method, self._k = method, k
        self.retire(frozenset())
        self._complained: set[tuple[str, type]] = set()

    def wish(self, sequence: Sequence) -> tuple[str, int | None]:
        return wish(sequence, self._method, self._k)

    def retire(self, names: frozenset[str]) -> None:
        """These are switched off."""
        self.retired = names
        working = {name: drafter for name, drafter in self.drafters.items() if name not in names}
        hosts = [drafter for drafter in working.values() if isinstance(drafter, HostDrafter)]
        covered = {name for host in hosts for name in host.covers}
        for host in hosts:
            host.idle = self._method == AUTO and host.name in covered
        self._auto = [name for name in working if name not in covered]
        # Whether they all only look up: what has to read before it drafts runs a model, or is the record of one.
        lags: list[object] = [type(host).lag for host in hosts]
        self.look_up = len(hosts) == len(working) and all(lag is HostDrafter.lag for lag in lags)

    def allowed(self, method: str) -> SequenceOf[str]:
        """Of those that look the same up, whoever leaves the choice open gets the one that finds most."""
        if method == AUTO:
            return self._auto
        return [method] if method not in self.retired else []

    def wanted(self, wishes: Iterable[str]) -> list[str]:
        """Methods that may draft for somebody."""
        names = {name for wish in set(wishes) for name in self.allowed(wish)}
        return [name for name in self.drafters if name in names]

    def evidence(self, sequences: SequenceOf[Sequence], method: str, said: int = 0) -> list[int]:
        """Of each. `said`: tokens they will have said more."""
        drafter = self.drafters.get(method)
        if isinstance(drafter, HostDrafter):
            try:
                found = drafter.look(sequences)
                if found is not None and len(found) != len(sequences):
                    raise ValueError(f"{len(found)} answers for {len(sequences)} sequences")
                if found is not None:
                    return found
            except Exception as problem:  # of one of them, perhaps
                self.complain(method, problem)
        return [self._evidence(sequence, method, said) for sequence in sequences]

    def _evidence(self, sequence: Sequence, method: str, said: int) -> int:
        """The first tokens of an answer do not wait for a drafter that is far behind."""
        try:
            drafter = self.drafters[method]
            if not is_patient(sequence, said) or drafter.lag(sequence) <= SMALL_LAG:
                return drafter.evidence(sequence)
        except Exception as problem:
            self.complain(method, problem)
        return 0

    def lag(self, sequence: Sequence, method: str) -> int:
        try:
            return self.drafters[method].lag(sequence)
        except Exception as problem:
            self.complain(method, problem)
        return 0

    def complain(self, method: str, problem: Exception) -> None:
        if (method, type(problem)) not in self._complained:  # said once: it may fail at every step
            log.warning("drafter %s failed to say what it knows: %r", method, problem)
            self._complained.add((method, type(problem)))
