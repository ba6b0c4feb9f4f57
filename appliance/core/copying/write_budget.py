"""WriteBudget: how many bytes a day may be written to the cold store's device for durability alone.

A leaky bucket on the planner's clock. Everything that is written to the device goes into it: spills and
records copied forward, which nothing can put off, and copies made while the device is idle, which wait until
there is room. It holds one day's worth of idle copies and leaks `daily_bytes` a day. What cannot be put off
may overfill it, by one day's worth, so that a busy day is followed by a quiet one. Hence idle copies never
write more than `daily_bytes` a day in the long run, nor twice as much in any one day. A failed copy is given
back.

Among tenants the bucket is divided (shares.py), and leaks in equal parts of those that have anything in it:
what a tenant does not use is lent. What is reserved for a tenant is there although spills of others overfill
the bucket.

Rejected: a sum that begins anew each day (a day's worth of copies just before midnight and another one just
after it); leaving spills out (a drive does not ask why it was written to).
"""

from typing import Any, Final

from ..shares import Shares

DAY_S: Final = 86_400.0
HOUR_S: Final = 3600.0
HOURS: Final = 24


class WriteBudget:
    """Counts bytes written to the cold store, by tenant. `daily_bytes` None: nothing ever waits."""

    def __init__(self, daily_bytes: int | None, num_tenants: int = 0) -> None:
        self.daily_bytes = daily_bytes
        self.num_tenants = num_tenants
        self._bucket = Shares(daily_bytes or 0, num_tenants)  # as of _as_of; empty without a limit
        self._as_of = 0.0
        #: Bytes by hour of the planner's clock, of the last HOURS hours in which something was written.
        self._hours: dict[int, int] = {}

    def limit(self, daily_bytes: int | None, now: float, num_tenants: int = 0) -> None:
        """Another limit may be in force. What was written under the old one counts."""
        if (daily_bytes, num_tenants) == (self.daily_bytes, self.num_tenants):
            return
        self._leak(now)
        written = {"": self.written(now)} if self.daily_bytes is None else self._bucket.holders()
        self.daily_bytes, self.num_tenants = daily_bytes, num_tenants
        self._fill(written)

    def wrote(self, num_bytes: int, now: float, tenant: str = "") -> None:
        """So many bytes of a tenant are being written."""
        hour = int(now // HOUR_S)
        if hour not in self._hours:
            self._hours = {h: n for h, n in self._hours.items() if h > hour - HOURS}
        self._hours[hour] = self._hours.get(hour, 0) + num_bytes
        self._leak(now)
        self._add(num_bytes, tenant)

    def not_written(self, num_bytes: int, now: float, tenant: str = "") -> None:
        """Give back what `wrote` was told and what failed."""
        self._leak(now)
        self._bucket.give(tenant, min(num_bytes, self._bucket.held(tenant)))
        for hour in sorted(self._hours, reverse=True):
            part = min(num_bytes, self._hours[hour])
            self._hours[hour] -= part
            num_bytes -= part

    def allows(self, num_bytes: int, now: float, tenant: str = "") -> bool:
        """Whether so many bytes of a tenant may be written that could as well wait."""
        return self.daily_bytes is None or not self._lacking(num_bytes, now, tenant)

    def allowed_at(self, num_bytes: int, now: float, tenant: str = "") -> float:
        """Return a time before which they may not; infinity: never.
        Without shares that is the time at which they may, if nothing is written meanwhile; with them it may
        be too early, as little as is lacking."""
        if not self.daily_bytes:
            return now if self.daily_bytes is None else float("inf")
        if num_bytes > self._bucket.largest(tenant):
            return float("inf")
        lacking = self._lacking(num_bytes, now, tenant)
        return self._as_of + lacking * DAY_S / self.daily_bytes if lacking else now

    def left_bytes(self, now: float) -> int | None:
        """Return what idle copies of all tenants together may write now; None: as much as there is."""
        if self.daily_bytes is None:
            return None
        self._leak(now)
        return max(0, self.daily_bytes - self._bucket.taken)

    def is_overdrawn(self, now: float) -> bool:
        """Whether more was written than the budget allows."""
        self._leak(now)
        return self.daily_bytes is not None and self._bucket.taken > self.daily_bytes

    def written(self, now: float) -> int:
        """Return the bytes written in the last 24 hours, by whole hours."""
        first = int(now // HOUR_S) - HOURS
        return sum(num_bytes for hour, num_bytes in self._hours.items() if hour > first)

    # ---------------------------------------------------------------------------- over a restart

    def state(self) -> dict[str, Any] | None:
        """Return what to keep over a restart, as of `as_of` on the planner's clock; None: nothing yet."""
        if not self._hours:
            return None
        bucket = None if self.daily_bytes is None else self._bucket.holders()
        return {"as_of": self._as_of, "bucket": bucket, "hours": dict(self._hours)}

    def restore(self, state: dict[str, Any], as_of: float) -> None:
        """Take over what `state` returned in an earlier life, maybe under another limit.
        `as_of`: its `as_of` on the present clock. Raises ValueError, KeyError or TypeError for what `state`
        never returned."""
        shift = round((as_of - float(state["as_of"])) / HOUR_S)
        hours = {int(hour) + shift: int(count) for hour, count in state["hours"].items()}
        if any(count < 0 for count in hours.values()) or len(hours) > 2 * HOURS:
            raise ValueError("hours")
        bucket = None  # there was no limit
        if state.get("bucket") is not None:
            bucket = {str(tenant): int(count) for tenant, count in state["bucket"].items()}
            if any(count < 0 for count in bucket.values()):
                raise ValueError("bucket")
        self._hours, self._as_of = hours, as_of
        self._fill({"": self.written(as_of)} if bucket is None else bucket)

    def _fill(self, written: dict[str, int]) -> None:
        """Begin with what was written under another limit, or in an earlier life."""
        self._bucket = Shares(self.daily_bytes or 0, self.num_tenants)
        for tenant, num_bytes in written.items():
            self._add(num_bytes, tenant if self.num_tenants else "")

    def _add(self, num_bytes: int, tenant: str) -> None:
        """Put bytes into the bucket, as far as it may be overfilled; all of what is reserved for a tenant."""
        bucket = self._bucket
        room = max(2 * bucket.capacity - bucket.taken, bucket.reserved - bucket.held(tenant), 0)
        bucket.add(tenant, min(num_bytes, room))

    def _lacking(self, num_bytes: int, now: float, tenant: str) -> int:
        """Return how much at least has to leak before so much may be added; 0: it may be now."""
        self._leak(now)
        lacking = self._bucket.lacking(tenant, num_bytes)
        if num_bytes <= self._bucket.reserved:
            lacking = min(lacking, max(0, self._bucket.held(tenant) + num_bytes - self._bucket.reserved))
        return lacking

    def _leak(self, now: float) -> None:
        """Let out of the bucket what leaked until `now`, in whole bytes."""
        if self._bucket.taken and self.daily_bytes:
            num_bytes = int(max(0.0, now - self._as_of) * self.daily_bytes / DAY_S)
            if num_bytes:
                self._bucket.drain(num_bytes)
                self._as_of += num_bytes * DAY_S / self.daily_bytes
        if not self._bucket.taken:
            self._as_of = now
