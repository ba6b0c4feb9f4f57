"""Mutants of what is copied into the cold store before its room is needed."""

from typing import Any

from kvtier.appliance.core.capacity import dirty, pressure
from kvtier.appliance.core.copying import write_budget

Patch = tuple[Any, str, Any]


def does_not_make_way() -> list[Patch]:
    """Idle copies begin whatever is on its way to or from the device."""
    return [(pressure.Pressure, "is_cold_edge_busy", lambda self: False)]


def budget_ignored() -> list[Patch]:
    """Idle copies write as much as there is."""
    return [(write_budget.WriteBudget, "allows", lambda self, num_bytes, now, tenant: True)]


def shares_of_writes_ignored() -> list[Patch]:
    """One tenant writes as much as all may."""

    def greedy(self: Any, num_bytes: int, now: float, tenant: str) -> int:
        self._leak(now)
        return int(max(0, self._bucket.taken + num_bytes - self._bucket.capacity))

    return [
        (write_budget.WriteBudget, "_lacking", greedy),
    ]


def budget_anew_after_a_restart() -> list[Patch]:
    """What was written before a restart is forgotten."""
    return [(write_budget.WriteBudget, "restore", lambda self, state, as_of: None)]


def lost_records_forgotten() -> list[Patch]:
    """A copy that failed is never made again."""
    return [(dirty.Dirty, "note_lost", lambda self, row: None)]


#: Name, what is broken, how.
PLANTED = [
    ("makes no way", "idle copies begin beside others", does_not_make_way),
    ("budget ignored", "idle copies exceed the daily budget", budget_ignored),
    ("budget of all", "a tenant exceeds its share of the daily budget", shares_of_writes_ignored),
    ("budget anew", "a restart gives another day's worth", budget_anew_after_a_restart),
    ("lost is forgotten", "what the cold store lost stays only in memory", lost_records_forgotten),
]
