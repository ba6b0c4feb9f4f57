"""SourceSpeed: how fast bytes come from the store, or from other hosts, learnt of the fetches that ended.

One figure for all hosts: the planner does not know which one will answer. Tenants take turns, so of what
others have on their way only as much goes before a fetch as its own tenant has. A fetch that arrived moves it
by WEIGHT. One that was late says that the source is slower than expected, by how much says what did land in
its time; at most it halves the figure, and once only for fetches that were under way together, because they
were late for one reason. One that was given less time than MARGIN times what was expected of it says nothing:
the time is its caller's. Only where nothing is known it counts, so that a source is not tried again and
again.
"""

from collections import Counter
from typing import Final, NamedTuple

#: Assumed of a source until fetches were measured, and of a slower one when the last measurement is old.
DEFAULT_BYTES_PER_S = 200e6
STORE_LATENCY_S: Final = 0.03  # of a request
HOST_LATENCY_S: Final = 0.005
LEAST_BYTES_PER_S: Final = 1e6
#: How much sooner than computing a fetch has to be, and how much later than expected it may be.
MARGIN: Final = 1.5
WEIGHT: Final = 0.3  # of the latest measurement
TRUST_S: Final = 60.0
LEAST_ELAPSED_S: Final = 1e-3


class BegunFetch(NamedTuple):
    """What `SourceSpeed.ended` has to know of the time when a fetch began."""

    at: float
    tenant: str
    ahead_bytes: int  # on their way already, and going before its end
    landed_bytes: int  # that had ever landed
    tells: bool  # whether it was given so much time that its being late says something


class SourceSpeed:
    """Bytes per second of a source, and what is on its way. Times are those of the planner's clock.

    `latency_s`: until the first byte of a fetch."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._bytes_per_s = DEFAULT_BYTES_PER_S
        self._measured_at = self._slowed_at = float("-inf")
        self.on_their_way: Counter[str] = Counter()  # bytes, by tenant
        self._landed_bytes = 0

    def is_known(self, now: float, trust_s: float = TRUST_S) -> bool:
        """Return whether a fetch was measured in the last `trust_s` seconds."""
        return now - self._measured_at <= trust_s

    def bytes_per_s(self, now: float, trust_s: float = TRUST_S) -> float:
        """Return the speed to expect; what was slow once is tried again after `trust_s`."""
        is_known = self.is_known(now, trust_s)
        return self._bytes_per_s if is_known else max(self._bytes_per_s, DEFAULT_BYTES_PER_S)

    def fetch_s(self, num_bytes: int, now: float, tenant: str = "") -> float:
        """Return how long so many bytes of a tenant take beside all that is on its way."""
        return self._latency_s + (self._ahead_bytes(num_bytes, tenant) + num_bytes) / self.bytes_per_s(now)

    def alone_s(self, num_bytes: int, now: float, trust_s: float = TRUST_S) -> float:
        """Return how long so many bytes take alone, by what was measured in the last `trust_s` seconds."""
        return self._latency_s + num_bytes / self.bytes_per_s(now, trust_s)

    def _ahead_bytes(self, num_bytes: int, tenant: str) -> int:
        """Return what goes before the end of `num_bytes` more of a tenant: what it has on its way,
        and of each other one as much as all of that."""
        own = self.on_their_way[tenant] + num_bytes
        others = sum(min(held, own) for other, held in self.on_their_way.items() if other != tenant)
        return own - num_bytes + others

    def began(self, num_bytes: int, now: float, until: float = float("inf"), tenant: str = "") -> BegunFetch:
        """Count `num_bytes` as on their way, which are late after `until`; the result is for `ended`."""
        ahead_bytes = self._ahead_bytes(num_bytes, tenant)
        late_s = self._latency_s + MARGIN * (ahead_bytes + num_bytes) / self.bytes_per_s(now)
        tells = until - now >= late_s or not self.is_known(now)
        begun = BegunFetch(now, tenant, ahead_bytes, self._landed_bytes, tells)
        self.on_their_way[tenant] += num_bytes
        return begun

    def ended(self, begun: BegunFetch, num_bytes: int, landed_bytes: int, is_late: bool, now: float) -> None:
        """Take in the end of a fetch of `num_bytes`, of which `landed_bytes` arrived.

        `is_late`: time was over for the others. Of one that failed otherwise nothing is learnt."""
        self.on_their_way[begun.tenant] -= num_bytes
        if not self.on_their_way[begun.tenant]:
            del self.on_their_way[begun.tenant]
        self._landed_bytes += landed_bytes
        elapsed_s = max(now - begun.at - self._latency_s, LEAST_ELAPSED_S)
        before = self.bytes_per_s(now)
        if is_late:
            if begun.at < self._slowed_at or not begun.tells:
                return
            seen = (self._landed_bytes - begun.landed_bytes) / elapsed_s
            self._slowed_at = now
            self._measured(min(before, max(before / 2, seen)), now)
        elif landed_bytes == num_bytes:
            # Of others more may have gone before it: those that came later.
            gone_bytes = max(begun.ahead_bytes + num_bytes, self._landed_bytes - begun.landed_bytes)
            seen = gone_bytes / elapsed_s
            self._measured((1 - WEIGHT) * before + WEIGHT * seen, now)

    def tried(self, num_bytes: int, seconds: float, now: float) -> None:
        """Take in that so many bytes were read in so many seconds, with as many requests as fetches have."""
        self._measured(num_bytes / max(seconds - self._latency_s, LEAST_ELAPSED_S), now)

    def _measured(self, bytes_per_s: float, now: float) -> None:
        self._bytes_per_s, self._measured_at = max(bytes_per_s, LEAST_BYTES_PER_S), now
