"""Requests that wait for room: a bounded queue, most urgent first, with a deadline each.

Of equally urgent ones a read goes before the puts of the last READS_FIRST_S: a prefill waits for it, and
seldom for a put. Always before them was rejected: while there are reads no put would get room.

A put or an acquire that finds a tier full is not refused at once: spills are on their way, and the caller
said how long it can wait. When room appears every waiting request is tried again in order; one that
still does not fit stops the queue, so that a large request is not starved by small ones.
"""

import heapq
from dataclasses import dataclass, field
from typing import Final, Protocol

from ....tiers.block import Urgency
from ..catalog.core_state import CoreState
from ..shares import Shares

#: The start that a read has over a put.
READS_FIRST_S: Final = 0.5


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
    tenant: str = field(compare=False)


class Waiting:
    """The queue, in which each tenant has a share.

    `retry` is called by the planner after anything that may have freed a place.
    """

    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._heap: list[_Entry] = []
        self._order = 0
        self._shares = Shares(core.options.max_waiting_puts, core.options.num_tenants)

    def __len__(self) -> int:
        return len(self._heap)

    def is_full(self, tenant: str) -> bool:
        """Whether one more request of a tenant must be refused with TOO_MANY_IN_FLIGHT."""
        if not self._heap:
            return False
        self._shares.resize(self._core.options.max_waiting_puts, self._core.options.num_tenants)
        return not self._shares.may_take(tenant, 1)

    def held(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""
        return self._shares.held(tenant)

    @property
    def wants_turn(self) -> bool:
        """Whether the first in the queue waits for nothing but a Tick."""
        return bool(self._heap) and self._heap[0].job.wants_turn

    def add(self, job: Job, urgency: Urgency, deadline_at: float, tenant: str, behind_s: float = 0.0) -> None:
        """Let a request of a tenant wait until room appears or its deadline passes.
        Those as urgent that come within `behind_s` go before it."""
        self._order += 1
        self._shares.add(tenant, 1)
        turn_at = self._core.now + behind_s
        heapq.heappush(self._heap, _Entry(urgency, turn_at, self._order, job, deadline_at, tenant))

    def retry(self, is_tick: bool) -> None:
        """Continue the waiting requests in order until one does not fit.

        One that wants a turn gets it at a Tick only: between two ticks the shell serves others.
        """
        while self._heap:
            job = self._heap[0].job
            if job.wants_turn and not is_tick:
                return
            if not job.is_done and not job.advance():
                return
            self._shares.give(heapq.heappop(self._heap).tenant, 1)

    def expire(self, now: float) -> None:
        """Let requests past their deadline settle for what they have."""
        expired = [entry for entry in self._heap if entry.deadline_at <= now or entry.job.is_done]
        if not expired:
            return
        self._heap = [e for e in self._heap if e.deadline_at > now and not e.job.is_done]
        heapq.heapify(self._heap)
        for entry in sorted(expired):
            self._shares.give(entry.tenant, 1)
            if not entry.job.is_done:
                entry.job.give_up()

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, None when no request waits."""
        return min((entry.deadline_at for entry in self._heap), default=None)
