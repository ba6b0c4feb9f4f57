"""Mutants of what keeps tenants apart."""

from typing import Any

from kvtier.appliance.core import quotas
from kvtier.tiers import shares

Patch = tuple[Any, str, Any]


def quota_ignored() -> list[Patch]:
    """A tenant takes extents beyond its share."""
    return [(shares.Share, "is_used_up", property(lambda self: False))]


def pins_not_counted() -> list[Patch]:
    """What a tenant's other clients hold is not counted."""

    def reckless(self: Any, client: Any, leases: Any, pins: Any) -> int | None:
        quota = self._options.quotas.get(client.domain)
        return None if quota is None or quota.pinned_bytes is None else max(0, quota.pinned_bytes)

    return [(quotas.Quotas, "pinnable_bytes", reckless)]
