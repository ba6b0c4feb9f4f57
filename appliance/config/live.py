"""Lists the settings that a reload may change; a reload refuses a change of any other, and says restart.

Live settings are listed, not those that need a restart, so that a new setting is refused until it is handled,
not reported as changed and ignored. To add one: list it here and apply it in a part of `Reload.parts`
(reload.py).

`policy.allowed_modules` is not live on purpose: which code may run is decided at the start, not by a call.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from .settings import Settings

#: Keys, or sections with everything in them; `*` is any one key.
LIVE = (
    "tiers.*.capacity",
    "tiers.nvme.write",
    "tiers.nvme.daily_writes",
    "policy.eviction",
    "policy.admission",
    "policy.prefetch",
    "policy.options",
    "compression",
    "object.share",
    "object.namespaces",
    "object.daily_exports",
    "object.price",
    "leases",
    "limits.max_clients",
    "limits.staging_per_client",
    "limits.max_pinned",
    "tenants",
    "observe.readers",
)


class Change(NamedTuple):
    """A changed setting; `was` and `becomes` are values as written in the file."""

    key: str
    was: object
    becomes: object

    @property
    def is_live(self) -> bool:
        """Return whether this needs no restart."""
        return is_live(self.key)


def is_live(key: str) -> bool:
    """Return whether a reload may change the setting at a dotted key."""
    return any(fnmatchcase(f"{key}.", f"{live}.*") for live in LIVE)


def changes(old: Settings, new: Settings) -> list[Change]:
    """Return every setting that differs, in the order of the file. The order of tiers is one, too."""
    found = differences(old.canonical(), new.canonical())
    orders = [list(settings.tiers.further) for settings in (old, new)]
    if sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]:
        found.append(Change("tiers", *(f"order {', '.join(names)}" for names in orders)))
    return found


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Return every setting that differs between two canonical forms. A tier in one only is one change."""
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
