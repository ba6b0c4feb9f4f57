"""Measures whether encoding a stream pays, by sending runs raw and encoded in turns.

    a raw run, an encoded run, ... -> seconds per byte of each -> verdict -> hold -> again

A comparison is rounds of eight runs, judged by the median of their ratios, because a neighbour on the
machine, or on the network, changes any single run by half; it ends early when there is no doubt. Runs take
turns as in the sequence of Thue and Morse, ABBABAAB: in plain turns one way may have the beginning of every
call to itself, when buffers are empty and everything is taken at once. Encoding has to win by a margin: equal
is decided for less work. A verdict that is confirmed holds twice as long, so that in the end a hundredth of
what is sent goes the other way.

A formula was there before, share / bandwidth + time of encoding, and lost: the bytes that a
transport accepts at once are no bandwidth (it has buffers), and encoding saves not only the wire but every
copy that gRPC makes on both sides, on processors that encoding needs too. Between two processes on two
processors it declined what gained a third. Seconds per byte, start to end, contain all of this. More than two
ways were tried: codec `planes` saves a twenty-fifth more than `exponents` at most, and measuring it cost
more.
"""

import statistics
import threading
from collections.abc import Sequence

RUN_BYTES = 16 << 20  # of payload
SETTLE_BYTES = 8 << 20  # at the beginning of a run: what buffers still hold went the other way
MARGIN = 1.04  # what encoding has to win by
ROUND_RUNS = 8
#: A comparison ends after so many rounds when the median ratio is so far from 1; after the last in any case.
ENOUGH = {1: 1.2, 2: 1.1, 3: 1.0}
MIN_HOLD, MAX_HOLD = 32, 256  # runs between two comparisons


class EncodingContest:
    """Decides whether to encode a stream. Thread-safe."""

    def __init__(self) -> None:
        self._pays = False
        self._is_comparing = False
        self._costs: list[float] = []  # seconds a byte of the comparison's runs, in turns
        self._hold = MIN_HOLD
        self._num_left = 1  # runs before the next comparison; the first of a connection is like no other
        self._bytes = self._counted_bytes = 0
        self._counted_s = 0.0
        self._lock = threading.Lock()

    @property
    def is_coded(self) -> bool:
        """Whether to encode what is sent now."""
        return _is_coded_in(len(self._costs)) if self._is_comparing else self._pays

    def sent(self, is_coded: bool, num_bytes: int, seconds: float) -> None:
        """Add payload bytes that were sent, encoded or not, and the seconds that sending them took."""
        with self._lock:
            if is_coded != self.is_coded:
                return  # it set off before the run did
            if self._bytes >= SETTLE_BYTES:
                self._counted_bytes += num_bytes
                self._counted_s += seconds
            self._bytes += num_bytes
            if self._bytes >= RUN_BYTES and self._counted_bytes:
                self._end_run(self._counted_s / self._counted_bytes)
                self._bytes = self._counted_bytes = 0
                self._counted_s = 0.0

    def _end_run(self, cost: float) -> None:
        if not self._is_comparing:
            self._num_left -= 1
            self._is_comparing = self._num_left == 0
            return
        self._costs.append(cost)
        gain = _gain(self._costs)
        if gain is not None:
            self._judge(gain > MARGIN)

    def _judge(self, pays: bool) -> None:
        self._hold = min(2 * self._hold, MAX_HOLD) if pays == self._pays else MIN_HOLD
        self._pays, self._num_left, self._is_comparing = pays, self._hold, False
        self._costs.clear()


def _is_coded_in(run: int) -> bool:
    """Whether what is sent is encoded in this run of a comparison, counted from 0."""
    return run.bit_count() % 2 == 1


def _gain(costs: Sequence[float]) -> float | None:
    """Return the ratio of seconds per byte, raw to encoded; None while it is not certain."""
    num_rounds, num_beyond = divmod(len(costs), ROUND_RUNS)
    enough = ENOUGH.get(num_rounds)
    if num_beyond or enough is None:
        return None
    gains = []
    for start in range(0, len(costs), ROUND_RUNS):
        taken = [0.0, 1e-15]  # as it is, encoded
        for run in range(start, start + ROUND_RUNS):
            taken[_is_coded_in(run)] += costs[run]
        gains.append(taken[0] / taken[1])
    gain = statistics.median(gains)
    return gain if gain >= enough or gain * enough <= 1 else None
