"""Meter: what one edge moves per second and how long it takes to begin, as lately measured.

Bandwidth is bytes over *busy* time (the time at least one batch was in flight), not over the duration
of single batches: several batches share the device, and an idle edge is not a slow one. Both numbers are
exponential averages, so one slow batch does not turn a loading decision, and a device that becomes
slow is noticed within a few windows.
"""

WINDOW_BYTES = 4 << 20  # enough to be a sample
WINDOW_BUSY_S = 0.05  # or this long, however little was moved
WEIGHT = 0.25  # of the newest sample


class ThroughputMeter:
    """Measures one edge. Times are the caller's, in seconds, and must not run backwards between calls."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.num_bytes = 0
        self.bandwidth_bytes_per_s = 0.0  # 0 until the first sample
        self.latency_s = 0.0
        self._num_in_flight = 0
        self._busy_since = 0.0
        self._window_bytes = 0
        self._window_busy_s = 0.0

    def assume(self, bandwidth_bytes_per_s: float, latency_s: float) -> bool:
        """Take over a given measurement unless there is one already; returns whether it was taken."""
        if self.bandwidth_bytes_per_s:
            return False
        self.bandwidth_bytes_per_s, self.latency_s = bandwidth_bytes_per_s, latency_s
        return True

    def began(self, now: float) -> None:
        """Count a batch that was handed to the device."""
        if self._num_in_flight == 0:
            self._busy_since = now
        self._num_in_flight += 1

    def ended(self, began_at: float, ended_at: float, num_bytes: int) -> bool:
        """Count a batch that ended after moving `num_bytes`; returns whether an estimate changed."""
        assert self._num_in_flight > 0
        num_sharing = self._num_in_flight
        self._num_in_flight -= 1
        self._window_busy_s += max(0.0, ended_at - self._busy_since)
        self._busy_since = max(self._busy_since, ended_at)
        self._window_bytes += num_bytes
        self.num_batches += 1
        self.num_bytes += num_bytes
        if num_bytes and self.bandwidth_bytes_per_s:
            # What the bytes do not explain is the time to begin.
            explained_s = num_bytes * num_sharing / self.bandwidth_bytes_per_s
            sample_s = max(0.0, ended_at - began_at - explained_s)
            self.latency_s += WEIGHT * (sample_s - self.latency_s)
        if self._window_bytes < WINDOW_BYTES and self._window_busy_s < WINDOW_BUSY_S:
            return False
        return self._close_window()

    def _close_window(self) -> bool:
        if not self._window_bytes or self._window_busy_s <= 0.0:
            return False  # batches that end together: these bytes belong to the time that follows
        sample = self._window_bytes / self._window_busy_s
        self._window_bytes, self._window_busy_s = 0, 0.0
        if self.bandwidth_bytes_per_s:
            self.bandwidth_bytes_per_s += WEIGHT * (sample - self.bandwidth_bytes_per_s)
        else:
            self.bandwidth_bytes_per_s = sample
        return True
