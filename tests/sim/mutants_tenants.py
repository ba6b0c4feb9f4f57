"""Mutants of what keeps tenants apart."""

from typing import Any

from kvtier.appliance.core.copying import copies
from kvtier.appliance.core.requests import erasing, quotas
from kvtier.tiers.memory import slots

Patch = tuple[Any, str, Any]


def quota_ignored() -> list[Patch]:
    """A tenant takes extents beyond its share."""
    return [(slots.Share, "is_used_up", property(lambda self: False))]


def pins_not_counted() -> list[Patch]:
    """What a tenant's other clients hold is not counted."""

    def reckless(self: Any, client: Any) -> int | None:
        quota = self._core.options.quotas.get(client.domain)
        return None if quota is None or quota.pinned_bytes is None else max(0, quota.pinned_bytes)

    return [(quotas.Quotas, "pinnable_bytes", reckless)]


def erased_lands() -> list[Patch]:
    """What was on its way when a tenant was erased counts as landed."""
    return [(copies.Copies, "disown", lambda self, namespace_ids: None)]


def erased_waits_for_nobody() -> list[Patch]:
    """The answer does not wait for copies from before: the tenant gets a new key, and they are written with
    it."""
    return [
        (copies.Copies, "is_disowning", lambda self, namespace_ids: False),
    ]


def erased_on_disk_only() -> list[Patch]:
    """What is in memory stays."""
    return [(erasing.Erasing, "_forget", lambda self, row, reason: None)]


ERASING = (
    ("erased lands", "a load ends after its tenant was erased, and counts", erased_lands),
    ("erased is spilled", "a spill from before is written under the new key", erased_waits_for_nobody),
    ("erased from disk only", "memory keeps what was erased", erased_on_disk_only),
)
