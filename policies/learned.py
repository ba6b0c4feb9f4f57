"""State of learners over a restart, as JSON: hours of traffic in some tens of kilobytes.

    {"format": 1, "learners": {"forecast": {...}}}

A learner takes part by having `dump` and `load`; an administrator's own may. Only what holds for any
blocks is kept (which kinds are used again, and when), never where blocks are: after a crash that would be
wrong.

Text rather than pickled objects or zip archives, because whatever stands in the file, reading it must
neither run code nor fail in more ways than one. A learner that does not understand its part starts without
it. The part of a learner that does not run now stays what it was (`absent`): after a day with another
policy, the first one continues as it was.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

FORMAT = 1


@runtime_checkable
class Learner(Protocol):
    """A learner under `Surroundings.shared` with state that outlives the process."""

    def dump(self) -> dict[str, Any]:
        """Return what was learned, made of what JSON has: finite numbers, texts, lists, dicts."""
        ...

    def load(self, saved: Mapping[str, Any]) -> None:
        """Replace the state by what `dump` returned. Raises ValueError, and changes nothing, if damaged."""
        ...


def pack(shared: Mapping[str, Any], absent: Mapping[str, Any] | None = None) -> bytes:
    """Return the state of all learners, with that kept for absent ones; empty when there is no learner."""
    parts: dict[str, Any] = {}
    for name, one in shared.items():
        if isinstance(one, Learner):
            with contextlib.suppress(Exception):  # it may be an administrator's own
                if _can_be_kept(part := one.dump()):
                    parts[name] = part
    if parts:
        parts = {**(absent or {}), **parts}
    return json.dumps({"format": FORMAT, "learners": parts}, allow_nan=False).encode() if parts else b""


def unpack(data: bytes, shared: Mapping[str, Any], absent: dict[str, Any] | None = None) -> dict[str, str]:
    """Hand every learner its part of `data`. Returns what was ignored: why, by name. Never raises.

    Parts of learners that do not run now go to `absent`, if there is one.
    """
    try:
        saved = json.loads(data)
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            return {"all": "of another version of kvtier"}
        parts = saved["learners"].items()
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        return {"all": f"damaged: {error!r}"}
    ignored = {}
    for name, part in parts:
        learner = shared.get(name)
        if not isinstance(learner, Learner):
            if absent is None or not _can_be_kept(part):
                ignored[name] = "no policy that runs now learns this"
            else:
                absent[name] = part
            continue
        try:
            learner.load(part)
        except Exception as error:  # it may be an administrator's own, and start anyhow
            ignored[name] = f"{type(error).__name__}: {error}"
    return ignored


def hand_over(old: Mapping[str, Any], new: Mapping[str, Any], absent: dict[str, Any]) -> None:
    """Move state when policies change. Mutates `absent` and `new`'s learners.

    State of learners only in `old` goes into `absent`, and out of it into learners that are new.
    """
    for name, learner in old.items():
        if name not in new and isinstance(learner, Learner):
            with contextlib.suppress(Exception):  # it may be an administrator's own
                absent[name] = learner.dump()
    for name, learner in new.items():
        if name in absent and isinstance(learner, Learner):
            with contextlib.suppress(Exception):
                learner.load(absent.pop(name))


def _can_be_kept(part: object) -> bool:
    try:
        return bool(json.dumps(part, allow_nan=False))
    except (ValueError, RecursionError):
        return False
