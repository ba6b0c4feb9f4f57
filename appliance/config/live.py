"""Which settings may change while the daemon runs, and which need another life of it.

LIVE lists what does; everything else is refused in a reload, with the word restart. That way round, because
a setting somebody adds and nobody thinks of must not look changed and be ignored. Whoever adds a section that
can be reloaded lists it here, and joins `Reload.parts` (reload.py) to hear of it.

`policy.allowed_modules` is not live on purpose: which code may run is decided at the start, not by a call.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from .settings import Settings

#: Keys, or sections with everything in them.
LIVE = (
    "tiers.hbm.capacity",
    "tiers.dram.capacity",
    "tiers.nvme.capacity",
    "tiers.nvme.write",
    "tiers.nvme.daily_writes",
    "policy.eviction",
    "policy.admission",
    "policy.prefetch",
    "policy.tiers",
    "policy.options",
    "watermarks",
    "prefetch",
    "compression",
    "leases",
    "limits.max_clients",
    "limits.staging_per_client",
    "limits.max_pinned",
    "tenants",
    "observe.readers",
)


class Change(NamedTuple):
    """One setting that would be another. `was` and `becomes` are as people write them."""

    key: str
    was: object
    becomes: object

    @property
    def is_live(self) -> bool:
        """Whether this needs no restart."""
        return is_live(self.key)


def is_live(key: str) -> bool:
    """Whether a setting, by its dotted key, may change while the daemon runs."""
    return any(key == live or key.startswith(f"{live}.") for live in LIVE)


def changes(old: Settings, new: Settings) -> list[Change]:
    """Return every setting that differs, in the order of the file."""
    return differences(old.canonical(), new.canonical())


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """The same for canonical forms. A tier that is there in one only is one change."""
    found = []
    for key in dict.fromkeys([*old, *new]):
        was, becomes = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(becomes, dict):
            found += [
                Change(f"{key}.{below.key}", below.was, below.becomes) for below in differences(was, becomes)
            ]
        elif was != becomes:
            found.append(Change(str(key), was, becomes))
    return found


def needing_restart(found: Iterable[Change]) -> list[Change]:
    """Return those of some changes that a reload cannot make."""
    return [change for change in found if not change.is_live]
