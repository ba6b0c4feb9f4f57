"""OrderAudit: tells an ordered program from one that was lucky.

Late streams show a missing wait only in schedules that happen to be bad. This audit finds it in every run:
each stream, and the host, has a vector clock; an event carries its stream's, a wait joins it, and the host
joins it when it learns that the event is done. Two copies that share a byte, one of them writing, must be
ordered by these clocks (happens-before, Lamport 1978; the method of race detectors for threads). The host's
clock is one for all threads, so order between threads is taken on trust: a race may be missed, none is made
up.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.gpu.device.contract import CopyPieces

from .memory import Bounds, bounds_of

Clock = dict[int, int]  # stream -> how many of its copies are known to be done


def overlaps(mine: Bounds, theirs: Bounds) -> bool:
    """Whether a range of one shares a byte with a range of the other."""
    order = np.argsort(theirs[0], kind="stable")
    starts, reach = theirs[0][order], np.maximum.accumulate(theirs[1][order])
    before = np.searchsorted(starts, mine[1], side="left")  # how many begin before mine ends
    some = before > 0
    return bool((reach[before[some] - 1] > mine[0][some]).any())


def overlap_themselves(ranges: Bounds) -> bool:
    """Whether two of the ranges share a byte."""
    order = np.argsort(ranges[0], kind="stable")
    starts: NDArray[np.uint64] = ranges[0][order]
    return bool((np.maximum.accumulate(ranges[1][order])[:-1] > starts[1:]).any())


def join(into: Clock, other: Clock) -> None:
    """Know what the other knows, too."""
    for stream, count in other.items():
        into[stream] = max(into.get(stream, 0), count)


@dataclass(slots=True)
class _Touch:
    """A copy that the host does not know to be done."""

    stream: int
    count: int
    sources: Bounds
    targets: Bounds


class OrderAudit:
    """Clocks of the streams of one device, or of all that stand beside each other. Not thread-safe: the
    device holds its lock."""

    def __init__(self) -> None:
        self._host: Clock = {}
        self._streams: dict[int, Clock] = {}
        self._open: list[_Touch] = []

    def copy(self, stream: int, pieces: CopyPieces) -> str:
        """Enter a copy; return what is wrong with its order, empty when nothing is."""
        mine = _Touch(
            stream,
            0,
            bounds_of(pieces.sources, pieces.lengths),
            bounds_of(pieces.targets, pieces.lengths),
        )
        if overlap_themselves(mine.targets):
            return "two targets of one call overlap"
        if overlaps(mine.targets, mine.sources):
            return "a target of a call is a source of it, too"
        clock = self._streams.setdefault(stream, {})
        join(clock, self._host)
        self._open = [touch for touch in self._open if touch.count > self._host.get(touch.stream, 0)]
        for other in self._open:
            if other.stream == stream or other.count <= clock.get(other.stream, 0):
                continue
            if overlaps(mine.targets, other.targets):
                return f"streams {other.stream} and {stream} write the same bytes in no order"
            if overlaps(mine.targets, other.sources):
                return f"stream {stream} writes what stream {other.stream} may not have read yet"
            if overlaps(mine.sources, other.targets):
                return f"stream {stream} reads what stream {other.stream} may not have written yet"
        clock[stream] = mine.count = clock.get(stream, 0) + 1
        self._open.append(mine)
        return ""

    def record(self, stream: int) -> Clock:
        """Return what an event recorded now on `stream` will vouch for."""
        clock = self._streams.setdefault(stream, {})
        join(clock, self._host)
        return dict(clock)

    def wait(self, stream: int, clock: Clock) -> None:
        """`stream` waits for an event with this clock."""
        join(self._streams.setdefault(stream, {}), clock)

    def learn(self, clock: Clock) -> None:
        """The host knows that an event with this clock is done."""
        join(self._host, clock)

    def touching(self, start: int, end: int) -> bool:
        """Whether a copy that the host does not know to be done touches [start, end)."""
        here = np.array([start], np.uint64), np.array([end], np.uint64)
        return any(
            overlaps(here, touch.sources) or overlaps(here, touch.targets)
            for touch in self._open
            if touch.count > self._host.get(touch.stream, 0)
        )

    def forget(self, streams: Collection[int]) -> None:
        """Nothing is under way on these any more: their device was lost."""
        self._open = [touch for touch in self._open if touch.stream not in streams]
