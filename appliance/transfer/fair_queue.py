"""FairQueue: which batch of an edge goes next. The most urgent; among equally urgent ones, tenants in turn.

Start-time fair queueing [Goyal, Vin, Cheng 1996], in its form for a server that does several things at once
[SFQ(D): Jin, Chase, Kaur 2004]. Every urgency is a class of its own, and more urgent classes go first. In a
class, each tenant that waits has a *start tag*: the virtual time from which it is due. The smallest goes
next; the tag of its tenant then moves on by bytes / weight, and the class's virtual time is the tag of what
was started last. A tenant that had nothing to do begins at the virtual time, not at its old tag: what was not
used is not saved up. A tenant that is alone gets everything.

How far two waiting tenants can be apart, in bytes per weight: one batch of each [theorem 1 of the paper]. A
batch costs the logarithm of the number of waiting tenants and of their batches.

Inside a tenant the order is what it was before there were any: deadline, layer group, arrival.

Rejected: tags for every batch at its arrival, as the paper writes it, because a batch can be hastened or
cancelled, and its tag is then a debt or a present; deficit round robin, where the latency of a small tenant
is a whole round of the large ones' quanta.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ...tiers.block import tenant_of

MAX_IDLE_TAGS = 64  # of tenants that have nothing waiting, remembered beyond those that have


class Queued(Protocol):
    """What can wait. `key` is (urgency, then the order within a tenant)."""

    key: tuple[int, float, int, int]
    tenant: str
    num_bytes: int


B = TypeVar("B", bound=Queued)


class BandwidthShares:
    """The tenant of each namespace, and the share of an edge that each tenant has.

    A share is a weight, 1 unless the policy sets it; a tenant's domains share one.
    """

    def __init__(self, domain_of: Callable[[int], str] = lambda namespace_id: "") -> None:
        self._domain_of = domain_of
        self._tenants: dict[int, str] = {}  # by namespace; those live as long as the daemon
        self._weights: Mapping[str, float] = {}

    def adopt(self, weights: Mapping[str, float]) -> None:
        """Replace the tenants' weights."""
        assert all(weight > 0 for weight in weights.values())
        self._weights = dict(weights)

    @property
    def named(self) -> frozenset[str]:
        """Tenants that the policy gives a weight, 1 included."""
        return frozenset(self._weights)

    def tenant(self, namespace_id: int) -> str:
        """Return the tenant of a namespace."""
        found = self._tenants.get(namespace_id)
        if found is None:
            found = self._tenants[namespace_id] = tenant_of(self._domain_of(namespace_id))
        return found

    def weight(self, tenant: str) -> float:
        """Return the weight of a tenant."""
        return self._weights.get(tenant, 1.0)


@dataclass(slots=True)
class _UrgencyClass(Generic[B]):
    """What waits at one urgency. `turns` has one entry per tenant that waits."""

    waiting: dict[str, list[tuple[tuple[int, float, int, int], B]]] = field(default_factory=dict)  # heaps
    turns: list[tuple[float, int, str]] = field(default_factory=list)  # start tag, begin of wait, tenant
    tags: dict[str, float] = field(default_factory=dict)  # from which virtual time a tenant is due
    virtual_time: float = 0.0
    num_turns: int = 0


class FairQueue(Generic[B]):
    """Batches that have not been started. Owned by the event loop; has no clock."""

    def __init__(self, shares: BandwidthShares) -> None:
        self._shares = shares
        self._classes: dict[int, _UrgencyClass[B]] = {}
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[B]:
        """Every batch, in no order."""
        for one in self._classes.values():
            for heap in one.waiting.values():
                yield from (batch for _, batch in heap)

    def push(self, batch: B) -> None:
        """Queue a batch by its key."""
        one = self._classes.setdefault(batch.key[0], _UrgencyClass())
        heap = one.waiting.get(batch.tenant)
        if heap is None:
            heap = one.waiting[batch.tenant] = []
            one.tags[batch.tenant] = max(one.virtual_time, one.tags.get(batch.tenant, 0.0))
            _await_turn(one, batch.tenant)
        heapq.heappush(heap, (batch.key, batch))
        self._len += 1

    def pop(self) -> B:
        """Remove and return the next batch. The queue must not be empty."""
        one = self._classes[min(urgency for urgency, one in self._classes.items() if one.waiting)]
        one.virtual_time, _, tenant = heapq.heappop(one.turns)
        heap = one.waiting[tenant]
        _, batch = heapq.heappop(heap)
        one.tags[tenant] += batch.num_bytes / self._shares.weight(tenant)
        if heap:
            _await_turn(one, tenant)
        else:
            del one.waiting[tenant]
            _rest(one)
        self._len -= 1
        return batch

    def refund(self, batch: B) -> None:
        """Charge a tenant nothing for a batch, the rest of one that was popped, which comes back."""
        one = self._classes[batch.key[0]]
        tag = one.tags.get(batch.tenant)
        if tag is None:
            return  # forgotten: nothing waits that it could be behind
        tag = max(one.virtual_time, tag - batch.num_bytes / self._shares.weight(batch.tenant))
        one.tags[batch.tenant] = tag
        if batch.tenant in one.waiting:
            one.turns = [(tag if turn[2] == batch.tenant else turn[0], *turn[1:]) for turn in one.turns]
            heapq.heapify(one.turns)

    def take(self, wanted: Callable[[B], bool]) -> list[B]:
        """Remove and return the wanted batches, by key. They cost their tenants nothing."""
        taken: list[B] = []
        for one in self._classes.values():
            for tenant, heap in list(one.waiting.items()):
                leaving = [batch for _, batch in heap if wanted(batch)]
                if not leaving:
                    continue
                taken += leaving
                heap[:] = [entry for entry in heap if not wanted(entry[1])]
                heapq.heapify(heap)
                if not heap:
                    del one.waiting[tenant]
                    one.turns = [turn for turn in one.turns if turn[2] != tenant]
                    heapq.heapify(one.turns)
        self._len -= len(taken)
        return sorted(taken, key=lambda batch: batch.key)

    def check_integrity(self) -> list[str]:
        """Return what is wrong: a waiting tenant has one turn, none before the virtual time; heaps hold."""
        problems = []
        for urgency, one in self._classes.items():
            if sorted(tenant for _, _, tenant in one.turns) != sorted(one.waiting):
                problems.append(f"urgency {urgency}: turns are not those of the tenants that wait")
            if any(tag < one.virtual_time for tag, _, _ in one.turns):
                problems.append(f"urgency {urgency}: a tenant is due before the virtual time")
            if any(not heap for heap in one.waiting.values()):
                problems.append(f"urgency {urgency}: a tenant waits with nothing")
        if self._len != sum(1 for _ in self):
            problems.append(f"{self._len} batches counted, {sum(1 for _ in self)} are there")
        return problems


def _await_turn(one: _UrgencyClass[B], tenant: str) -> None:
    one.num_turns += 1
    heapq.heappush(one.turns, (one.tags[tenant], one.num_turns, tenant))


def _rest(one: _UrgencyClass[B]) -> None:
    """Drop tags after a tenant has nothing waiting any more: all with the last one.

    Before that, tags not beyond the virtual time are dropped once there are many.
    """
    if not one.waiting:
        one.virtual_time = max(one.tags.values())
        one.tags.clear()
    elif len(one.tags) > MAX_IDLE_TAGS + 2 * len(one.waiting):
        one.tags = {
            tenant: tag for tenant, tag in one.tags.items() if tenant in one.waiting or tag > one.virtual_time
        }
