"""StoreUsage: requests that one store was asked, and the bytes that travelled. Thread-safe.

Counts since the start, and the last 24 hours by whole hours: a bill is by the day.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

OPERATIONS: Final = ("get", "head", "put", "copy", "list", "delete")
SENT, RECEIVED = "sent_bytes", "received_bytes"
_HOUR_S: Final = 3600.0
_HOURS: Final = 24


@dataclass(slots=True)
class StoreRequest:
    """One request; `outcome` is ok, missing, exists, or the name of a StoreProblem in lower case."""

    operation: str
    outcome: str = "ok"
    sent_bytes: int = 0
    received_bytes: int = 0


class StoreUsage:
    """Counts requests by operation and outcome, their seconds, and bytes in both directions."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[str] = Counter({SENT: 0, RECEIVED: 0})
        self._seconds: dict[str, float] = {}
        self._hours: dict[int, Counter[str]] = {}  # operations and bytes

    def add(self, request: StoreRequest, seconds: float) -> None:
        """Count a request that has ended. Retries inside the client are not seen."""
        moved = {SENT: request.sent_bytes, RECEIVED: request.received_bytes}
        hour = int(self._clock() // _HOUR_S)
        with self._lock:
            self._requests[request.operation, request.outcome] += 1
            self._bytes.update(moved)
            self._seconds[request.operation] = self._seconds.get(request.operation, 0.0) + seconds
            if hour not in self._hours:
                self._hours = {one: count for one, count in self._hours.items() if one > hour - _HOURS}
            self._hours.setdefault(hour, Counter()).update({request.operation: 1, **moved})

    def requests(self) -> Mapping[tuple[str, str], int]:
        """Return the number of requests by (operation, outcome)."""
        with self._lock:
            return dict(self._requests)

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds that requests took, by operation; of a get with the landing of its bytes."""
        with self._lock:
            return dict(self._seconds)

    def bytes(self) -> Mapping[str, int]:
        """Return `sent_bytes` and `received_bytes` of payload."""
        with self._lock:
            return dict(self._bytes)

    def last_day(self) -> Counter[str]:
        """Return the requests by operation, SENT and RECEIVED of the last 24 hours, by whole hours."""
        first = int(self._clock() // _HOUR_S) - _HOURS
        with self._lock:
            return sum((count for hour, count in self._hours.items() if hour > first), Counter())
