"""Victims: the next block to be evicted when a domain needs room.

An extent belongs to one isolation domain for its whole life, so once all extents are given out, an eviction
makes room for the block's own domain only: evicting the coldest block of all would cost one tenant its blocks
and help no other. Policies know nothing of domains; so candidates of other domains that they name meanwhile
are set aside here, each in its own domain's queue, cheapest first, and are taken from there when it is their
turn. Each is named once, so a choice costs a constant on average.

What clients say of retention orders the blocks of their own tenant only: while any is stated, room that no
domain asked for is made by the tenant that holds the most.

With one domain this is the policy itself. Rejected: a policy per domain. What they learn (and what is kept
over a restart) would fall apart, and every restart of a domain would begin anew."""

import heapq
from collections import Counter
from typing import NamedTuple

from ....policies.base import Newcomer, Victim
from ....tiers.block import NO_SESSION, Tier, Urgency, tenant_of
from ....tiers.memory.slots import SlotPool
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency


def newcomer_of(core: CoreState, row: int) -> Newcomer:
    """Return what a tier's admission is told of a block that comes from a faster tier."""
    catalog = core.catalog
    urgency = catalog.urgency[row]
    return Newcomer(
        core.now,
        catalog.parent[row],
        catalog.position[row],
        num_blocks=1,
        session=0,
        urgency=urgency if urgency != NO_SESSION else Urgency.QUEUED,
        prefix_hashes=(core.facts.prefix_hash[row],),
        row=row,
        priority=catalog.retention(row, core.now),
    )


class _Aside(NamedTuple):
    """A candidate that its policy named when another domain needed room."""

    price: float
    handle: int
    last_used: float
    victim: Victim


class Victims:
    """Chooses the next victim of a memory tier; stands between pressure and the policies."""

    def __init__(self, core: CoreState, residency: Residency) -> None:
        self._core = core
        self._residency = residency
        self._aside: dict[tuple[Tier, int], list[_Aside]] = {}
        self._num_changes = 0  # of namespaces, that _is_divided saw
        self._tenants: dict[int, str] = {}  # by number of isolation domain

    def choose(self, tier: Tier, domain: int | None) -> Victim | None:
        """Return the next candidate of `domain` (None: of any) in `tier`, None when there is none.
        Like a policy's answer it may be out of date; the caller checks."""
        policy, now = self._core.policies.evictions[tier], self._core.now
        if not self._is_divided() and not self._aside:
            return policy.choose(now)
        if domain is None:
            crowding = self._crowding(tier) if self._core.catalog.retained else None
            if crowding is not None and (found := self._choose_of(tier, crowding)) is not None:
                return found
            if (victim := policy.choose(now)) is not None:
                self._set_aside(tier, victim)
            queues = [self._settled(tier, number) for number in self._domains_of(tier)]
            queue = min((q for q in queues if q), key=lambda q: q[0].price, default=None)
            return self._take(queue) if queue else None
        return self._choose_of(tier, domain)

    def _choose_of(self, tier: Tier, domain: int) -> Victim | None:
        policy, now = self._core.policies.evictions[tier], self._core.now
        if queue := self._settled(tier, domain):
            return self._take(queue)
        while (victim := policy.choose(now)) is not None:
            if self._domain_of(victim.row) == domain:
                return victim
            self._set_aside(tier, victim)
        return None

    def forget(self, tier: Tier) -> None:
        """Another policy names the victims of a tier from now on, by prices of its own, and hears of all."""
        for key in [key for key in self._aside if key[0] is tier]:
            del self._aside[key]

    def _is_divided(self) -> bool:
        """Whether there is more than one domain."""
        catalog = self._core.catalog
        if catalog.num_namespace_changes != self._num_changes:
            self._num_changes, namespaces = catalog.num_namespace_changes, catalog.namespaces.values()
            self._tenants = {one.domain: tenant_of(one.identity.domain) for one in namespaces}
        return len(self._tenants) > 1

    def _crowding(self, tier: Tier) -> int | None:
        """Return the largest domain of the tenant with the most of a tier; None: all have as much."""
        room = self._core.rooms[tier]
        if not isinstance(room, SlotPool):
            return None
        taken, of_tenant = room.taken_by_domain(), Counter[str]()
        for domain, num_bytes in taken.items():
            of_tenant[self._tenants.get(domain, "")] += num_bytes
        tenant = max(of_tenant, key=of_tenant.__getitem__, default="")
        if of_tenant[tenant] * len(of_tenant) <= sum(taken.values()):
            return None
        own = [domain for domain in taken if self._tenants.get(domain, "") == tenant]
        return max(own, key=taken.__getitem__)

    def _domains_of(self, tier: Tier) -> list[int]:
        return [number for one, number in self._aside if one is tier]

    def _domain_of(self, row: int) -> int:
        return self._core.catalog.namespace_of(row).domain

    def _set_aside(self, tier: Tier, victim: Victim) -> None:
        catalog = self._core.catalog
        if not catalog.prefix_hash[victim.row]:
            return
        row = victim.row
        entry = _Aside(victim.price, catalog.handle(row), catalog.last_used[row], victim)
        heapq.heappush(self._aside.setdefault((tier, self._domain_of(victim.row)), []), entry)

    def _settled(self, tier: Tier, domain: int) -> list[_Aside]:
        """Return a domain's queue; its first candidate was not used since it was set aside.
        Those that were go back to the policy, which knows what that is worth."""
        queue = self._aside.get((tier, domain), [])
        catalog = self._core.catalog
        while queue:
            row = catalog.row_of(queue[0].handle)
            if row != NO_ROW and catalog.last_used[row] == queue[0].last_used:
                return queue
            heapq.heappop(queue)
            if row != NO_ROW:
                self._residency.offer(row, tier)
        return queue

    @staticmethod
    def _take(queue: list[_Aside]) -> Victim:
        return heapq.heappop(queue).victim
