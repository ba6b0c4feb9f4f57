"""Tenants with quotas: half of the seeds give each domain a share of memory and a limit on what is pinned.
Of those with two domains a half divide the limits of all together among them.

Drawn from a source of randomness of their own, so that a seed without quotas is the same seed as ever. A
policy that changes in the middle of everything may raise or lower them; what was taken under a larger one is
kept, so what counts is the largest that ever was in force.
"""

from dataclasses import replace
from random import Random

from kvtier.appliance.core.options import TenantQuota
from kvtier.appliance.core.planner import Planner
from kvtier.tiers.block import tenant_of
from kvtier.tiers.memory.slots import SlotPool

from .config import SLOT_BYTES, Config
from .ladder import MAPPED
from .world import Violation

UNLIMITED = 1 << 62


class Tenants:
    """Draws quotas, and checks after every operation that nobody has more than it ever might."""

    def __init__(self, seed: int, config: Config) -> None:
        rng = Random(f"tenants of {seed}")
        self._most: dict[tuple[str, str], int] = {}
        if rng.random() < 0.5:
            extent_bytes = config.slots_per_extent * SLOT_BYTES
            quotas = {
                f"domain-{number}": TenantQuota(
                    {tier: rng.choice((1, 1, 2)) * extent_bytes for tier in MAPPED.memory_tiers},
                    rng.choice((None, extent_bytes, 4 * extent_bytes)),
                    rng.choice((None, 0, extent_bytes, 4 * extent_bytes)),
                )
                for number in range(config.num_domains)
                if rng.random() < 0.8
            }
            config.options = replace(config.options, quotas=quotas)
        if config.num_domains > 1 and Random(f"shares of {seed}").random() < 0.5:
            num, most = config.num_domains, max(16, config.options.max_waiting_puts)  # a share of 1 is none
            config.options = replace(config.options, num_tenants=num, max_waiting_puts=most)

    def check(self, planner: Planner, *, counts_extents: bool) -> None:
        """Compare what every domain has with its quota, counted anew from the rooms, leases and pins.
        Extents only if none are taken over from an earlier life: these come on top of those begun before."""
        for domain in {namespace.identity.domain for namespace in planner.catalog.namespaces.values()}:
            quota = planner.core.options.quotas.get(tenant_of(domain), TenantQuota())
            number = planner.domain_number(domain)
            for tier, room in planner.rooms.items():
                if isinstance(room, SlotPool) and counts_extents:
                    found = sum(room.domain_of_extent(extent) == number for extent in room.extents())
                    limit = quota.memory_bytes.get(tier, UNLIMITED) // room.extent_bytes
                    self._compare(domain, f"{tier.label} extents", found, limit)
            cold = sum(
                planner.core.transitions.cold_bytes[namespace.id]
                for namespace in planner.catalog.namespaces.values()
                if namespace.identity.domain == domain
            )
            self._compare(domain, "cold bytes", cold, _or_unlimited(quota.cold_bytes))
            clients = [client for client in planner.leases.clients.values() if client.domain == domain]
            pinned = sum(client.held_bytes for client in clients) + planner.pins.bytes_of_tenant(domain)
            self._compare(domain, "pinned bytes", pinned, _or_unlimited(quota.pinned_bytes))

    def _compare(self, domain: str, what: str, found: int, limit: int) -> None:
        most = self._most[domain, what] = max(limit, self._most.get((domain, what), 0))
        if found > most:
            raise Violation("quotas", f"{domain} has {found} {what}, never more than {most} were granted")


def _or_unlimited(limit: int | None) -> int:
    return UNLIMITED if limit is None else limit
