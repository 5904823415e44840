"""Waiting sequences, in the order in which they begin: clients take turns, and so do the requests of a client.

**Clients.** Tokens that a step computes are charged to their client, and the client that was charged least is next. A
client that begins to wait is charged at least what the least of the others was before its last turn: idle time earns
nothing, and the newcomer is next. A client that comes back is charged what it was.

**Requests of a client** are ordered by weighted fair queueing. The client's clock advances by 1 / R for each token that
is charged, where R requests of it are unfinished: at that pace all of them would be served at once. A sequence has the
tag (clock at its arrival, or the tag of the sequence of its request before it) + the most tokens that it may have. The
lowest tag is next: a short request passes long ones, and the prompts of one request follow each other.

**Bound.** A sequence waits for at most R j L + 2 P M tokens of its client. It is the j-th of its request; L and M are
the most tokens that it, and any sequence, may have; R is the most unfinished requests meanwhile, P the number of
places. Proof: its tag is at most clock + j L, which the clock reaches within R j L tokens, and a sequence that comes
later has a higher tag. Fair queueing at that pace has then served every sequence with a lower tag. What is left of them
is at most what others computed meanwhile: those that had begun, in P places, at most P M tokens; and lower tags that
have begun take P M tokens once more before a place is free. A client's tokens are at least every C-th where C clients
wait, but for one step's: the client charged least is first.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Generic, Protocol, TypeVar

from paceline.core.sequence import Owner, Sequence

MOST_LEFT = 64  # charges of clients that have left, beyond which those without effect are forgotten


class Queued(Protocol):
    """A sequence, or other work that waits: the fields that `FairQueue` reads."""

    tag: float  # place among the work of its client

    @property
    def owner(self) -> Owner: ...
    @property
    def request_id(self) -> str: ...
    @property
    def wait_group(self) -> str: ...
    @property
    def max_len(self) -> int: ...


W = TypeVar("W", bound=Queued)


class _ClientTurns(Generic[W]):
    """The charges of one client, as long as it has an unfinished sequence."""

    __slots__ = ("before", "charged", "clock", "last", "since", "unfinished", "waiting")

    def __init__(self, charged: float) -> None:
        self.before = charged  # tokens, before the last charge
        self.charged, self.clock = charged, 0.0  # tokens; tokens of each unfinished request
        self.since = 0  # when it began to wait, among clients
        self.waiting: list[W] = []  # by tag
        self.unfinished: dict[str, int] = {}  # sequences, by the request (wait group)
        self.last: dict[str, float] = {}  # the latest tag of each request


class FairQueue(Generic[W]):
    def __init__(self) -> None:
        self._accounts: dict[str, _ClientTurns[W]] = {}
        self._left: dict[str, float] = {}  # charges of clients without an unfinished sequence
        self._size = self._waits = 0  # sequences that wait; times that a client began to wait

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[W]:
        for account in self._accounts.values():
            yield from account.waiting

    def num_of(self, client: str) -> int:
        """Return the sequences of a client that wait."""
        account = self._accounts.get(client)
        return 0 if account is None else len(account.waiting)

    def num_unfinished(self, client: str, request: str) -> int:
        """Return the sequences of a client's request that wait or run."""
        account = self._accounts.get(client)
        return 0 if account is None else account.unfinished.get(request, 0)

    def add(self, sequence: W) -> None:
        """Let a new sequence wait."""
        client, request = sequence.owner.client, sequence.wait_group
        account = self._accounts.get(client)
        if account is None:
            account = self._accounts[client] = _ClientTurns(self._left.pop(client, 0.0))
        sequence.tag = max(account.clock, account.last.get(request, 0.0)) + sequence.max_len
        account.last[request] = sequence.tag
        account.unfinished[request] = account.unfinished.get(request, 0) + 1
        self.put_back(sequence)

    def put_back(self, sequence: W) -> None:
        """Let a sequence wait again, with its tag."""
        account = self._accounts[sequence.owner.client]
        if not account.waiting:
            least = min((each.before for each in self._accounts.values() if each is not account), default=0.0)
            account.before = account.charged = max(account.charged, least)
            self._waits += 1
            account.since = self._waits
        bisect.insort(account.waiting, sequence, key=tag_of)
        self._size += 1

    def take(self, sequence: W) -> None:
        """Remove a sequence: it begins, or is finished."""
        account = self._accounts[sequence.owner.client]
        account.waiting.remove(sequence)
        self._size -= 1

    def finished(self, sequence: W) -> None:
        """Forget a sequence that neither waits nor runs any more."""
        account, request = self._accounts[sequence.owner.client], sequence.wait_group
        account.unfinished[request] -= 1
        if not account.unfinished[request]:
            del account.unfinished[request], account.last[request]
        if not account.unfinished:
            self._left[sequence.owner.client] = self._accounts.pop(sequence.owner.client).charged
            if len(self._left) > 2 * len(self._accounts) + MOST_LEFT or not self._accounts:
                least = min((each.charged for each in self._accounts.values()), default=math.inf)
                self._left = {client: charged for client, charged in self._left.items() if charged > least}

    def charge(self, client: str, tokens: int) -> None:
        account = self._accounts[client]
        account.before = account.charged
        account.charged += tokens
        account.clock += tokens / len(account.unfinished)

    def charge_all(self, sequences: Iterable[W], tokens: Iterable[int]) -> None:
        if len(self._accounts) == 1:  # mostly
            self.charge(next(iter(self._accounts)), sum(tokens))
            return
        for sequence, count in zip(sequences, tokens, strict=True):
            self.charge(sequence.owner.client, count)

    def turn(self, sequence: W) -> tuple[float, int, float]:
        """Return the place of a sequence in the order; the lowest is next."""
        account = self._accounts[sequence.owner.client]
        return account.charged, account.since, sequence.tag

    def precedes(self, waiting: W, running: W) -> bool:
        """Return whether the prompt of a sequence that waits comes before that of one that runs: of two clients that
        are charged the same, the one that waits is next."""
        if waiting.owner.client == running.owner.client:
            return waiting.tag < running.tag
        return self.turn(waiting)[0] <= self.turn(running)[0]

    def head(self, passed: Collection[str] = ()) -> W | None:
        """Return the next sequence that waits; the requests `passed` (by request id) are left out."""
        best: W | None = None
        for account in self._accounts.values():
            first = next((one for one in account.waiting if one.request_id not in passed), None)
            if first is not None and (best is None or self.turn(first) < self.turn(best)):
                best = first
        return best


# -- what running sequences hold


def client_of(sequence: Sequence) -> str:
    return sequence.owner.client


def request_of(sequence: Sequence) -> str:
    return sequence.wait_group


def tag_of(sequence: Queued) -> float:
    return sequence.tag


def one_place(sequence: Sequence) -> int:
    return 1


def num_blocks(sequence: Sequence) -> int:
    return len(sequence.blocks)


NameOf = Callable[[Sequence], str]
Size = Callable[[Sequence], int]


def last_with_most(running: SequenceOf[Sequence], name_of: NameOf, size: Size, above: int = -1) -> Sequence | None:
    """Return the last sequence of the client or request, `name_of` it, that holds the most; None: not `above` this."""
    sums: dict[str, int] = {}
    for sequence in running:
        sums[name_of(sequence)] = sums.get(name_of(sequence), 0) + size(sequence)
    most = max(sums, key=sums.__getitem__, default="")
    if not sums or sums[most] <= above:
        return None
    return max((one for one in running if name_of(one) == most), key=tag_of)


def displaced_by(newcomer: Sequence, running: SequenceOf[Sequence], blocks: int | None) -> Sequence | None:
    """Return the sequence that makes way for a newcomer, which needs `blocks`, or with None a place.

    It is the last one of the client that holds the most, where that is more than the newcomer's would hold; or of the
    request in the newcomer's client that has the most places; or else the last one of the newcomer's client, where that
    is far behind in the order: a long request makes way for a much shorter one. So no two displace each other in turn.
    """
    size, needed = (one_place, 1) if blocks is None else (num_blocks, blocks)
    victim = last_with_most(running, client_of, size, needed + _sum_of(newcomer, running, client_of, size))
    if victim is not None:
        return victim
    own = [one for one in running if one.owner.client == newcomer.owner.client]
    if blocks is None:
        victim = last_with_most(own, request_of, size, needed + _sum_of(newcomer, own, request_of, size))
    last = victim or max(own, key=tag_of, default=None)
    return last if victim is not None or (last is not None and last.tag > newcomer.tag + newcomer.max_len) else None


def _sum_of(newcomer: Sequence, running: SequenceOf[Sequence], name_of: NameOf, size: Size) -> int:
    return sum([size(one) for one in running if name_of(one) == name_of(newcomer)])
