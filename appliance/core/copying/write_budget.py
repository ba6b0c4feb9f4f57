"""WriteBudget: how many bytes a day may be written to the cold store's device for durability alone.

A token bucket on the planner's clock. It fills at `daily_bytes` a day, holds one day's worth at most, and
everything that is written to the device is taken out of it: spills and records copied forward, which nothing
can put off, and copies made while the device is idle, which wait until there is enough. What cannot be put
off may leave the bucket in debt, of one day at most, so that a busy day is followed by a quiet one. Hence
idle copies never write more than `daily_bytes` a day in the long run, nor twice as much in any one day.

Rejected: a sum that begins anew each day (a day's worth of copies just before midnight and another one just
after it); leaving spills out (a drive does not ask why it was written to).
"""

from typing import Any, Final

DAY_S: Final = 86_400.0
HOUR_S: Final = 3600.0
HOURS: Final = 24


class WriteBudget:
    """Counts bytes written to the cold store. `daily_bytes` None: nothing ever waits."""

    def __init__(self, daily_bytes: int | None) -> None:
        self.daily_bytes = daily_bytes
        self._left = float(daily_bytes or 0)  # at _as_of
        self._as_of = 0.0
        #: Bytes by hour of the planner's clock, of the last HOURS hours in which something was written.
        self._hours: dict[int, int] = {}

    def limit(self, daily_bytes: int | None, now: float) -> None:
        """Another limit is in force. What was written under the old one counts."""
        if daily_bytes == self.daily_bytes:
            return
        spent = self.daily_bytes - self._left_at(now) if self.daily_bytes is not None else self.written(now)
        self.daily_bytes = daily_bytes
        self._left, self._as_of = max(-float(daily_bytes or 0), (daily_bytes or 0) - spent), now

    def wrote(self, num_bytes: int, now: float) -> None:
        """So many bytes are being written."""
        hour = int(now // HOUR_S)
        if hour not in self._hours:
            self._hours = {h: n for h, n in self._hours.items() if h > hour - HOURS}
        self._hours[hour] = self._hours.get(hour, 0) + num_bytes
        if self.daily_bytes is not None:
            self._left = max(-float(self.daily_bytes), self._left_at(now) - num_bytes)
            self._as_of = now

    def allows(self, num_bytes: int, now: float) -> bool:
        """Whether so many bytes may be written that could as well wait."""
        return self.daily_bytes is None or num_bytes <= self._left_at(now)

    def allowed_at(self, num_bytes: int, now: float) -> float:
        """Return when that will be, if nothing is written meanwhile; infinity: never."""
        if self.daily_bytes is None:
            return now
        if num_bytes > self.daily_bytes:
            return float("inf")
        return now + max(0.0, num_bytes - self._left_at(now)) / self.daily_bytes * DAY_S

    def left_bytes(self, now: float) -> int | None:
        """Return what idle copies may write now; None: as much as there is."""
        return None if self.daily_bytes is None else max(0, int(self._left_at(now)))

    def is_overdrawn(self, now: float) -> bool:
        """Whether more was written than the budget allows."""
        return self.daily_bytes is not None and self._left_at(now) < 0

    def written(self, now: float) -> int:
        """Return the bytes written in the last 24 hours, by whole hours."""
        first = int(now // HOUR_S) - HOURS
        return sum(num_bytes for hour, num_bytes in self._hours.items() if hour > first)

    # ---------------------------------------------------------------------------- over a restart

    def state(self) -> dict[str, Any] | None:
        """Return what to keep over a restart, as of `as_of` on the planner's clock; None: nothing yet."""
        if not self._hours:
            return None
        return {"as_of": self._as_of, "left_bytes": int(self._left), "hours": dict(self._hours)}

    def restore(self, state: dict[str, Any], as_of: float) -> None:
        """Take over what `state` returned in an earlier life. `as_of`: its `as_of` on the present clock.
        Raises ValueError, KeyError or TypeError for what `state` never returned."""
        shift = round((as_of - float(state["as_of"])) / HOUR_S)
        hours = {int(hour) + shift: int(count) for hour, count in state["hours"].items()}
        if any(count < 0 for count in hours.values()) or len(hours) > 2 * HOURS:
            raise ValueError("hours")
        left = float(state["left_bytes"])
        self._hours = hours
        if self.daily_bytes is not None:
            self._left = min(max(left, -float(self.daily_bytes)), float(self.daily_bytes))
            self._as_of = as_of

    def _left_at(self, now: float) -> float:
        assert self.daily_bytes is not None
        filled = max(0.0, now - self._as_of) * self.daily_bytes / DAY_S
        return min(float(self.daily_bytes), self._left + filled)
