"""Quotas: what one tenant may take of what all tenants share.

    memory    extents of the memory tiers, given out when a domain first needs them (tiers/memory/slots.py)
    pinned    bytes that leases and pins of all its clients hold together

A tenant is the first part of its isolation domains' names: `tenant:acme` and `tenant:acme/eu` share one
quota. A tenant at its limit makes room among its own blocks (victims.py), never at the cost of others.

Rejected: counting a tenant's bytes in use at every reservation and release. Extents never change their
domain, so the books of the room say it already, at no cost per block."""

from ....tiers.block import Tier, tenant_of
from ....tiers.memory.slots import Share, SlotPool
from ..catalog.core_state import CoreState
from .leases import ClientEntry, LeaseTable
from .pins import Pins


class Quotas:
    """Knows every tenant's quota; tells the rooms what each new domain may take."""

    def __init__(self, core: CoreState, leases: LeaseTable, pins: Pins) -> None:
        self._core = core
        self._leases = leases
        self._pins = pins
        self._shares: dict[tuple[Tier, str], Share] = {}

    def options_changed(self) -> None:
        """Let other quotas be in force, for what comes from now on."""
        for (tier, tenant), share in self._shares.items():
            room = self._core.rooms[tier]
            assert isinstance(room, SlotPool)
            share.max_extents = self._max_extents(tier, tenant, room)

    def introduce(self, domain: str, number: int) -> None:
        """A domain came into being: it takes part in its tenant's shares of the memory tiers."""
        tenant = tenant_of(domain)
        for tier, room in self._core.rooms.items():
            if isinstance(room, SlotPool):
                share = self._shares.get((tier, tenant))
                if share is None:
                    share = Share(self._max_extents(tier, tenant, room))
                    self._shares[tier, tenant] = share
                room.share(number, share)

    def forget(self, number: int) -> None:
        """A domain that has no extent and no namespace takes part in no share any more."""
        for room in self._core.rooms.values():
            if isinstance(room, SlotPool):
                room.unshare(number)

    def pinnable_bytes(self, client: ClientEntry) -> int | None:
        """Return how many more bytes the clients of a client's tenant may hold; None: no limit."""
        tenant = tenant_of(client.domain)
        quota = self._core.options.quotas.get(tenant)
        if quota is None or quota.pinned_bytes is None:
            return None
        mine = [one for one in self._leases.clients.values() if tenant_of(one.domain) == tenant]
        held = sum(one.held_bytes + one.promised_bytes for one in mine)
        return max(0, quota.pinned_bytes - held - self._pins.bytes_of_tenant(tenant))

    def check_integrity(self) -> list[str]:
        """Audit: every share counts exactly the extents that its domains have."""
        problems = []
        for (tier, tenant), share in self._shares.items():
            room = self._core.rooms[tier]
            assert isinstance(room, SlotPool)
            num_bound = room.num_extents_of(share)
            if num_bound != share.num_extents:
                problems.append(
                    f"{tier.label}: {tenant!r} has {num_bound} extents, counts {share.num_extents}"
                )
        return problems

    def _max_extents(self, tier: Tier, tenant: str, room: SlotPool) -> int:
        quota = self._core.options.quotas.get(tenant)
        if quota is None or tier not in quota.memory_bytes:
            return 1 << 62  # bounded by the tier
        return quota.memory_bytes[tier] // room.extent_bytes
