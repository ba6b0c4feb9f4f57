"""Requests that wait for room: a bounded queue, most urgent first, with a deadline each.

Of equally urgent ones tenants take turns, and within a tenant the first that came is the first. A read goes
before the puts of the last READS_FIRST_S, whichever tenant they are of: a prefill waits for it, and seldom
for a put. Always before them was rejected: while there are reads no put would get room.

A put or an acquire that finds a tier full is not refused at once: spills are on their way, and the caller
said how long it can wait. When room appears the waiting requests are tried again in order; one that still
does not fit stops those of its tenant, so that a large request is not starved by small ones. A put that
comes is tried at once: what room there was, those that wait have taken after the last event. Letting it wait
behind these was rejected: the device had less to write, and a flood of puts took 1.3 times as long.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Protocol

from ....tiers.block import Urgency
from ..catalog.core_state import CoreState
from ..shares import Shares

#: The start that a read has over a put.
READS_FIRST_S: Final = 0.5
#: Tenants tried in vain in one step.
MAX_MISFITS: Final = 4


class Job(Protocol):
    """A request that can be continued when room appears."""

    is_done: bool
    #: Whether it waits for nothing but its next turn: it has done as much as one step may.
    wants_turn: bool

    def advance(self) -> bool:
        """Continue; True when it needs no more room."""
        ...

    def give_up(self) -> None:
        """Its time is over: settle for what it has."""
        ...


@dataclass(order=True, slots=True)
class _Entry:
    urgency: Urgency
    turn_at: float
    order: int
    job: Job = field(compare=False)
    deadline_at: float = field(compare=False)


class Waiting:
    """The queue, in which each tenant has a share.

    `retry` is called by the planner after anything that may have freed a place.
    """

    def __init__(self, core: CoreState) -> None:
        self._core = core
        #: A heap for each tenant, first that of the tenant that has its turn.
        self._queues: OrderedDict[str, list[_Entry]] = OrderedDict()
        self._order = 0
        self._shares = Shares(core.options.max_waiting_puts, core.options.num_tenants)

    def __len__(self) -> int:
        return self._shares.taken

    def is_full(self, tenant: str) -> bool:
        """Whether one more request of a tenant must be refused with TOO_MANY_IN_FLIGHT."""
        if not self._queues:
            return False
        self._shares.resize(self._core.options.max_waiting_puts, self._core.options.num_tenants)
        return not self._shares.may_take(tenant, 1)

    def held(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""
        return self._shares.held(tenant)

    @property
    def wants_turn(self) -> bool:
        """Whether the first request of a tenant waits for nothing but a Tick."""
        return any(queue[0].job.wants_turn for queue in self._queues.values())

    def add(self, job: Job, urgency: Urgency, deadline_at: float, tenant: str, behind_s: float = 0.0) -> None:
        """Let a request of a tenant wait until room appears or its deadline passes.
        Those as urgent that come within `behind_s` go before it."""
        self._order += 1
        self._shares.add(tenant, 1)
        turn_at = self._core.now + behind_s
        entry = _Entry(urgency, turn_at, self._order, job, deadline_at)
        heapq.heappush(self._queues.setdefault(tenant, []), entry)

    def retry(self, is_tick: bool) -> None:
        """Continue the waiting requests in order, of each tenant until one does not fit.

        One that wants a turn gets it at a Tick only: between two ticks the shell serves others.
        """
        misfits: set[str] = set()
        while len(misfits) < MAX_MISFITS and (tenant := self._next(misfits)) is not None:
            may_go = is_tick or not self._queues[tenant][0].job.wants_turn
            if not (may_go and self._continue(tenant)):
                misfits.add(tenant)
        if is_tick:  # behind misfits, too, one has its turn: it would ask for a Tick after each without end
            others = {tenant for tenant, queue in self._queues.items() if not queue[0].job.wants_turn}
            if (tenant := self._next(misfits | others)) is not None:
                self._continue(tenant)

    def _continue(self, tenant: str) -> bool:
        """Continue the first request of a tenant; returns whether it is through."""
        queue = self._queues[tenant]
        job = queue[0].job
        is_through = job.is_done or job.advance()
        if is_through:
            heapq.heappop(queue)
            self._shares.give(tenant, 1)
        self._queues.move_to_end(tenant)
        if not queue:
            del self._queues[tenant]
        return is_through

    def _next(self, misfits: set[str]) -> str | None:
        """Return the tenant of the next request to try, None without any of others than `misfits`."""
        found, best = None, (len(Urgency), False)
        for tenant, queue in self._queues.items():
            rank = (int(queue[0].urgency), queue[0].turn_at > self._core.now)
            if rank < best and tenant not in misfits:
                found, best = tenant, rank
        return found

    def expire(self, now: float) -> None:
        """Let requests past their deadline settle for what they have."""
        for tenant, queue in list(self._queues.items()):
            expired = [entry for entry in queue if entry.deadline_at <= now or entry.job.is_done]
            if not expired:
                continue
            self._queues[tenant] = [e for e in queue if e.deadline_at > now and not e.job.is_done]
            heapq.heapify(self._queues[tenant])
            if not self._queues[tenant]:
                del self._queues[tenant]
            for entry in sorted(expired):
                self._shares.give(tenant, 1)
                if not entry.job.is_done:
                    entry.job.give_up()

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, None when no request waits."""
        return min((entry.deadline_at for queue in self._queues.values() for entry in queue), default=None)
