"""Health: whether planner, copies and cold store make progress.

A daemon that answers is not yet one that works: if the timer behind evictions stopped, or a device lost a
copy, calls would still be answered, only ever worse. So each is checked the same way: has it work, and has
it done any since the last check? One that had work for longer than its patience and did none is stalled, and
the daemon is not ready until it makes progress. It is not restarted: that cures no hung device.

The look is taken on the event loop, once a second. A loop that stands still answers no probe at all, which
is what their timeouts are for; a thread that watches the loop was rejected for that reason.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..appliance import Appliance

PLANNER_PATIENCE_S = 5.0  # its deadlines are kept to a tenth of a second
COPY_PATIENCE_S = 30.0  # the kernel's own for an NVMe command
STORE_PATIENCE_S = 60.0  # sealing waits for the device, and comes after making segment files


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One thing that must make progress: whether it has work, and a count that grows when it does some."""

    name: str
    has_work: bool
    num_done: int
    patience_s: float


class Health:
    """Remembers since when each check found work and no progress."""

    def __init__(self) -> None:
        self.stalled: tuple[str, ...] = ()
        self._idle_since: dict[str, tuple[int, float]] = {}  # num_done and when that was first seen

    def look(self, checks: Iterable[HealthCheck], now: float) -> None:
        """Update `stalled` from the checks at `now` (seconds, any origin)."""
        stalled, seen = [], {}
        for check in checks:
            if not check.has_work:
                continue
            num_done, since = self._idle_since.get(check.name, (check.num_done, now))
            seen[check.name] = (check.num_done, since if num_done == check.num_done else now)
            if now - seen[check.name][1] >= check.patience_s:
                stalled.append(check.name)
        self.stalled, self._idle_since = tuple(stalled), seen


def health_checks(appliance: Appliance, now: float) -> Iterator[HealthCheck]:
    """Yield the checks of an appliance: the planner's clock, every edge, the cold store's tasks."""
    deadline = appliance.planner.next_deadline()
    is_due = deadline is not None and deadline <= now
    yield HealthCheck("planner", is_due, appliance.num_ticks, PLANNER_PATIENCE_S)
    for edge in appliance.mover.statistics():
        name = f"copies {edge.source}>{edge.target}"
        has_work = edge.num_in_flight > 0 or edge.num_queued > 0
        yield HealthCheck(name, has_work, edge.num_copies + edge.num_failed, COPY_PATIENCE_S)
    has_work = appliance.store_tasks.num_running > 0
    yield HealthCheck("cold store", has_work, appliance.store_tasks.num_done, STORE_PATIENCE_S)
