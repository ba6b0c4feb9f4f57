"""Waiting for room: what a tier has found and the primary pool cannot take now is worth a bounded wait.

vLLM asks a tier, then takes a row of its pool, and computes what has no row. A pool is full for as long as
others load through it, often milliseconds, and computing what is found takes seconds. So while no row is free
or can be evicted the tier answers "later", for one request no longer than

    wait_for_room_s, and no longer than computing what it asked for takes

at the speed at which this engine was last seen to compute: what it offers for storing in a step, over the
time between two ends of steps. Before the first such step only the setting counts.

A row that was loaded for the request itself is no room for its next chunk: the pool would evict it, the
request would ask for it again, and a prompt larger than the pool would go round for ever. Rejected: a queue
of its own, because vLLM asks again in the order in which requests came; asking the pool to keep rows, because
a tier has no say in it.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

SPEED_MEMORY = 0.8  # of the last speed, where a step was slower: steps that compute little say little


class RoomWait:
    """Which requests may wait. For one thread; `clock` in seconds."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens_per_s = 0.0  # 0: not known
        self._limit_s = limit_s
        self._clock = clock
        self._began: dict[str, float] = {}
        self._arrived: defaultdict[str, set[bytes]] = defaultdict(set)  # in the pool, not read yet
        self._num_offered = 0
        self._step_ended_at: float | None = None

    def may_wait(self, request: str, num_tokens: int) -> bool:
        """Whether a request that asked for `num_tokens` tokens may wait on.

        Its time begins with the first call, and does not begin again."""
        now = self._clock()
        limit_s = self._limit_s
        if self.tokens_per_s:
            limit_s = min(limit_s, num_tokens / self.tokens_per_s)
        return now - self._began.setdefault(request, now) < limit_s

    def arrived(self, request: str, keys: Iterable[bytes]) -> None:
        """Note that chunks were loaded into the pool for a request."""
        self._arrived[request].update(keys)

    def num_kept(self, request: str, asked: bytes) -> int:
        """Return how many rows the request waits with; `asked`, which the pool has not, is none of them."""
        arrived = self._arrived.get(request)
        if not arrived:
            return 0
        arrived.discard(asked)
        return len(arrived)

    def offered(self, num_tokens: int) -> None:
        """Note that so many tokens were computed in this step."""
        self._num_offered += num_tokens

    def step_ended(self, scheduled: Iterable[str] = ()) -> None:
        """Note the end of a step in which these requests began to read what was loaded for them."""
        for request in scheduled:
            self._arrived.pop(request, None)
        now = self._clock()
        if self._num_offered and self._step_ended_at is not None and now > self._step_ended_at:
            speed = self._num_offered / (now - self._step_ended_at)
            self.tokens_per_s = max(speed, SPEED_MEMORY * self.tokens_per_s)
        self._num_offered, self._step_ended_at = 0, now

    def forget(self, request: str) -> None:
        """A request has ended."""
        self._began.pop(request, None)
        self._arrived.pop(request, None)
