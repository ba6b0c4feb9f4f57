"""Leases: pins with a deadline and an owner.

A lease holds fragments in memory tiers. What it holds is given back by its release, by the end of its
client, or, for clients that do not read shared memory, by its deadline. A local client that lets the
deadline pass may still be reading; its lease is *overdue*: no longer extended, counted, alarmed, but its
memory is not reused until it releases or dies (invariant 6). The peer that force-unpins after a timeout
serves other people's bytes.
"""

import heapq
from dataclasses import dataclass, field
from itertools import repeat

from ....tiers.block import Tier
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..secret_ids import SecretIds

SLACK = 1024  # deadlines that do not count any more, not worth a new heap


@dataclass(slots=True)
class ClientEntry:
    """A client, with the leases it holds."""

    id: int
    name: str
    local: bool
    domain: str
    ttl_s: float | None
    silent_at: float  # when it counts as gone unless it says something; inf for connected clients
    leases: dict[int, "LeaseEntry"] = field(default_factory=dict)
    held_bytes: int = 0
    promised_bytes: int = 0  # of acquires under way: held when they arrive


@dataclass(slots=True)
class LeaseEntry:
    """A pin on fragments, readable by its client until it is released."""

    id: int
    client: ClientEntry
    deadline_at: float
    held: list[tuple[int, Tier]] = field(default_factory=list)  # (fragment, tier)
    is_overdue: bool = False


class LeaseTable:
    """Clients and their leases."""

    def __init__(self, core: CoreState, residency: Residency) -> None:
        self._core = core
        self._residency = residency
        self.clients: dict[int, ClientEntry] = {}
        self._leases: dict[int, LeaseEntry] = {}
        self._deadlines: list[tuple[float, int]] = []  # lazy heap of (deadline, lease)
        self._ids = SecretIds(core.secret, "lease")

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, lease_id: int) -> LeaseEntry | None:
        """Return a live lease, None when it is unknown or over."""
        return self._leases.get(lease_id)

    @property
    def overdue_bytes(self) -> int:
        """Bytes held by leases past their deadline: memory in quarantine."""
        length_of = self._core.catalog.length_of
        overdue = (lease for lease in self._leases.values() if lease.is_overdue)
        return sum(length_of(fragment) for lease in overdue for fragment, _ in lease.held)

    def grant(self, client: ClientEntry, ttl_s: float) -> LeaseEntry:
        """Create an empty lease."""
        lease_id = self._ids.draw(self._leases)
        lease = LeaseEntry(lease_id, client, self._core.now + (ttl_s or self._core.options.lease_ttl_s))
        self._leases[lease.id] = client.leases[lease.id] = lease
        self._note_deadline(lease)
        return lease

    def hold(self, lease: LeaseEntry, fragment: int, tier: Tier) -> None:
        """The lease holds one more fragment."""
        self._core.transitions.hold(fragment, tier)
        lease.held.append((fragment, tier))
        lease.client.held_bytes += self._core.catalog.length_of(fragment)

    def hold_block(self, lease: LeaseEntry, row: int, fragments: range, tier: Tier) -> None:
        """The lease holds all fragments of a block."""
        self._core.transitions.hold_block(row, fragments, tier)
        lease.held.extend(zip(fragments, repeat(tier)))
        lease.client.held_bytes += self._core.catalog.block_bytes(row)

    def release(self, lease_id: int) -> bool:
        """End a lease; False when it is unknown (which is not an error)."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        del lease.client.leases[lease_id]
        self.let_go(lease, lease.held)
        lease.held = []
        return True

    def let_go(self, lease: LeaseEntry, held: list[tuple[int, Tier]]) -> None:
        """Give back some of what a lease holds, deepest first, so that tails become candidates first."""
        catalog, end = self._core.catalog, len(held)
        while end:
            fragment, tier = held[end - 1]
            row = catalog.block_of[fragment]
            fragments = catalog.fragments(row)
            start = end - len(fragments)
            # A block that was held at once lies here at once; one that arrived in parts, as they arrived.
            is_last = fragment == fragments.stop - 1
            if is_last and start >= 0 and held[start:end] == list(zip(fragments, repeat(tier))):
                lease.client.held_bytes -= catalog.block_bytes(row)
                self._residency.drop_block(row, fragments, tier)
                end = start
            else:
                lease.client.held_bytes -= catalog.length_of(fragment)
                self._residency.drop(fragment, tier)
                end -= 1

    def extend(self, client: ClientEntry, lease_ids: list[int], ttl_s: float) -> list[int]:
        """Move deadlines; returns the leases that are not this client's or not alive any more."""
        now = self._core.now
        lost = []
        for lease_id in lease_ids:
            lease = client.leases.get(lease_id)
            if lease is None or lease.is_overdue:
                lost.append(lease_id)
            else:
                lease.deadline_at = now + (ttl_s or self._core.options.lease_ttl_s)
                self._note_deadline(lease)
        return lost

    def expire(self, now: float) -> None:
        """End leases past their deadline and grace; those of local clients become overdue."""
        while self._deadlines and self._deadlines[0][0] + self._core.options.lease_grace_s <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._leases.get(lease_id)
            if lease is None or lease.is_overdue:
                continue
            if lease.deadline_at + self._core.options.lease_grace_s > now:
                continue  # extended meanwhile
            self._core.story.count("leases_expired")
            if lease.client.local:
                lease.is_overdue = True
            else:
                self.release(lease_id)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do at the earliest."""
        return self._deadlines[0][0] + self._core.options.lease_grace_s if self._deadlines else None

    def client_gone(self, client_id: int) -> ClientEntry | None:
        """Forget a client and everything it holds."""
        client = self.clients.pop(client_id, None)
        if client is not None:
            for lease_id in list(client.leases):
                self.release(lease_id)
        return client

    def _note_deadline(self, lease: LeaseEntry) -> None:
        """Remember when to look at a lease; forget, when there are many, the deadlines that have moved."""
        heapq.heappush(self._deadlines, (lease.deadline_at, lease.id))
        if len(self._deadlines) > 2 * len(self._leases) + SLACK:
            living = (one for one in self._leases.values() if not one.is_overdue)
            self._deadlines = sorted((one.deadline_at, one.id) for one in living)

    def check_integrity(self) -> list[str]:
        """Audit: the sum of holds of all leases per client, and that every lease has a living owner."""
        problems = []
        for client in self.clients.values():
            length_of = self._core.catalog.length_of
            held = sum(length_of(f) for lease in client.leases.values() for f, _ in lease.held)
            if held != client.held_bytes:
                problems.append(f"client {client.id}: held_bytes {client.held_bytes} != {held}")
        for lease in self._leases.values():
            if self.clients.get(lease.client.id) is not lease.client:
                problems.append(f"lease {lease.id}: its client {lease.client.id} is gone")
        return problems
