"""Bundles that wait for their export. Tenants take turns, and each has a share of the places.

A tenant's bundles are taken first come first served. One that failed waits for its time, and counts like the
others meanwhile. Without a place for one more the oldest of the tenant's own goes: that was put longest ago,
and is the first to have left memory.
"""

import heapq
from typing import NamedTuple

from ..shares import Shares
from ..turns import TenantTurns

MAX_QUEUED = 4096


class WaitingBundle(NamedTuple):
    """A bundle that waits for its turn."""

    last: int  # handle of its last block
    num_blocks: int = 0  # of the chain that was used; 0: not known
    num_failures: int = 0  # of its export so far


class ExportQueue:
    """Holds at most MAX_QUEUED bundles, of a tenant its share (shares.py)."""

    def __init__(self, num_tenants: int) -> None:
        self._shares = Shares(MAX_QUEUED, num_tenants)
        self._turns: TenantTurns[WaitingBundle] = TenantTurns()
        self._later: list[tuple[float, WaitingBundle, str]] = []  # a heap, by the time of each

    def __len__(self) -> int:
        return self._shares.taken

    @property
    def has_ready(self) -> bool:
        """Whether any bundle waits for nothing but its turn."""
        return len(self._turns) > 0

    def resize(self, num_tenants: int) -> None:
        """Share the places among another number of tenants. What waits stays."""
        self._shares.resize(MAX_QUEUED, num_tenants)

    def add(self, tenant: str, bundle: WaitingBundle) -> bool:
        """Let a bundle wait for its turn. Returns False when one of the tenant's was dropped."""
        if self.add_last(tenant, bundle):
            return True
        if self._turns.pop_of(tenant) is not None:
            self._turns.add(tenant, bundle)
        return False

    def add_last(self, tenant: str, bundle: WaitingBundle) -> bool:
        """Let a bundle wait for its turn, if the tenant has a place left. Returns whether it has."""
        if self._shares.take(tenant, 1):
            self._turns.add(tenant, bundle)
            return True
        return False

    def add_later(self, at: float, tenant: str, bundle: WaitingBundle) -> bool:
        """Let a bundle wait until a time, and then for its turn. Returns False when there is no place."""
        if self._shares.take(tenant, 1):
            heapq.heappush(self._later, (at, bundle, tenant))
            return True
        return False

    def next_time(self) -> float | None:
        """Return the earliest time that a bundle waits for."""
        return self._later[0][0] if self._later else None

    def bring_due(self, now: float) -> None:
        """Let bundles of which the time has come wait for their turn."""
        while self._later and self._later[0][0] <= now:
            _, bundle, tenant = heapq.heappop(self._later)
            self._turns.add(tenant, bundle)

    def pop(self) -> WaitingBundle:
        """Remove and return the next bundle of the tenant that has its turn. Raises KeyError without any."""
        tenant, bundle = self._turns.pop()
        self._shares.give(tenant, 1)
        return bundle

    def clear(self) -> None:
        """Forget all bundles."""
        for tenant, num_held in self._shares.holders().items():
            self._shares.give(tenant, num_held)
        self._turns = TenantTurns()
        self._later.clear()
