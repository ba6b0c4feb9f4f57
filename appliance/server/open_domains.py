"""OpenDomains: the isolation domains that local clients named, of which each tenant has a share.

Each has an index of its own that its clients map. A domain is given back when another one is wanted and
nothing needs its index: no client, and no extent of a memory tier is bound to it. Its number is derived from
its name, so no other domain ever gets it; one that is named again begins with an empty index.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator

from ...tiers.block import tenant_of
from ...tiers.memory.slots import SlotPool
from ..core.shares import Shares
from ..errors import error
from .cache_service import CacheService

MAX_DOMAINS = 256


class OpenDomains:
    """Counts the domains in use. Lives on the event loop."""

    def __init__(self, service: CacheService) -> None:
        self._service = service
        self._names: set[str] = set()
        self._attaching: Counter[str] = Counter()  # clients that are not registered yet, by domain
        self._shares = Shares(MAX_DOMAINS, 0)

    def __len__(self) -> int:
        return len(self._names)

    @contextlib.contextmanager
    def attaching(self, domain: str) -> Iterator[None]:
        """Keep `domain` in use while a client attaches to it. Raises BusyError beyond the tenant's share."""
        self._take(domain)
        self._attaching[domain] += 1
        try:
            yield
        finally:
            self._attaching[domain] -= 1
            if not self._attaching[domain]:
                del self._attaching[domain]

    def _take(self, domain: str) -> None:
        if domain in self._names:
            return
        tenant = tenant_of(domain)
        self._shares.resize(MAX_DOMAINS, self._service.options.num_tenants)
        if not self._shares.may_take(tenant, 1):
            self._give_back_unused()
        if not self._shares.take(tenant, 1):
            held = self._shares.held(tenant)
            message = f"the tenant uses {held} isolation domains, its share of {MAX_DOMAINS}; share some"
            raise error("TOO_MANY_CLIENTS", message, retry_after_s=1.0)
        self._names.add(domain)

    def _give_back_unused(self) -> None:
        service = self._service
        used = {client.domain for client in service.clients} | self._attaching.keys()
        pools = [room for room in service.planner.rooms.values() if isinstance(room, SlotPool)]
        bound = {number for pool in pools for number in pool.bound_domains()}
        indexes = service.memory(service.ladder.put_tier).indexes
        unused = [name for name in self._names - used if service.domain_number(name) not in bound]
        for name in unused:
            indexes.drop(service.domain_number(name))
            self._names.discard(name)
            self._shares.give(tenant_of(name), 1)
        service.residences.drop(map(service.domain_number, unused))
        service.planner.requests.forget_domains(unused)
