"""The room of the cold store: append-only segments, accounted for in plain lists.

Records are appended to the open segment and never overwritten; space comes back a whole segment at a
time. That removes in-place-update races and fragmentation, and keeps the device's write
amplification near one. A place is (segment, offset in pages); it names a record for the whole life of
the segment.

Life of a segment:

    free -> open (reserve) -> full (no more fits; copies still landing) -> sealed -> reclaiming -> free

The planner decides which segment to reclaim; this class says which may be.

The log can be resized while it is used. Segments keep their numbers, which are files, and a smaller log is
the first so many of them: the others are *leaving*, are emptied like any segment that is reclaimed, and are
then *gone*. A later, larger log has them again.
"""

from dataclasses import dataclass
from enum import Enum

from ...v1.shm import PAGE_BYTES, extent_of, place_of
from ..base import RoomStatistics


class SegmentState(Enum):
    """State of a segment in its life."""

    FREE = "free"
    OPEN = "open"
    FULL = "full"
    SEALED = "sealed"
    RECLAIMING = "reclaiming"
    GONE = "gone"
    UNREADABLE = "unreadable"  # at the start; used for nothing until the next


#: Of segments from which nothing can leave.
NOT_TO_EMPTY = (SegmentState.FREE, SegmentState.GONE, SegmentState.UNREADABLE)


@dataclass(slots=True)
class Segment:
    """Counters of one segment. Bytes are of records, header and padding included."""

    state: SegmentState = SegmentState.FREE
    next_page: int = 0
    num_landing: int = 0  # reserved, neither landed nor failed
    num_live: int = 0  # records a catalog entry points at, landing ones included
    live_bytes: int = 0
    sealed_order: int = 0  # position in the order of sealing; the oldest is the smallest


def record_bytes(length: int) -> int:
    """Return the bytes a record with `length` payload bytes takes: one header page, whole pages."""
    return PAGE_BYTES + -(-length // PAGE_BYTES) * PAGE_BYTES


class SegmentLog:
    """Allocates places in `num_segments` segments of `segment_bytes` each.

    `footer_bytes` at the end of every segment are kept for its footer. Records copied forward during
    reclaim (`forward=True`) go to an open segment of their own, and the last free segment is kept for
    them: one reclaimed segment never needs more than that, so reclaiming cannot deadlock.
    """

    def __init__(self, num_segments: int, segment_bytes: int, footer_bytes: int) -> None:
        assert num_segments >= 2, "one segment to fill, one to reclaim into"
        self.segment_bytes = segment_bytes
        self.data_pages = (segment_bytes - footer_bytes) // PAGE_BYTES
        self.segments = [Segment() for _ in range(num_segments)]
        self.num_segments = num_segments  # those from here on leave, or are gone
        self._free = list(range(num_segments - 1, -1, -1))
        self._leaving_free: list[int] = []
        self._open: dict[bool, int] = {}  # the segment being filled, by `forward`
        self._to_seal: list[int] = []
        self._num_sealed_ever = 0

    @property
    def num_free(self) -> int:
        """Number of segments that were not touched since they were freed."""
        return len(self._free)

    def can_hold(self, num_bytes: int) -> bool:
        """Whether a record of this payload size fits a segment."""
        return num_bytes > 0 and record_bytes(num_bytes) <= self.data_pages * PAGE_BYTES

    def has_free_room(self, num_bytes: int, min_free_segments: int) -> bool:
        """Whether records of so many bytes in all find room and leave so many segments free."""
        number = self._open.get(False)
        pages = -(-num_bytes // PAGE_BYTES)
        if number is not None and self.segments[number].next_page + pages <= self.data_pages:
            return True
        return len(self._free) > max(1, min_free_segments)

    def reserve(self, domain: int, num_bytes: int, *, forward: bool = False) -> int | None:
        """Append a record of `num_bytes` payload bytes; None when a segment must be reclaimed first.

        Domains share segments: records carry their namespace, and only the daemon reads them.
        """
        del domain
        pages = record_bytes(num_bytes) // PAGE_BYTES
        if pages > self.data_pages:
            return None
        number = self._open.get(forward)
        if number is not None and self.segments[number].next_page + pages > self.data_pages:
            self._close(forward)
            number = None
        if number is None:
            if len(self._free) > (0 if forward else 1):
                number = self._free.pop()
            elif forward and not self._free and self._leaving_free:
                number = self._leaving_free.pop()  # kept for this: what is reclaimed must find room somewhere
            else:
                return None
            self._open[forward] = number
            self.segments[number].state = SegmentState.OPEN
        segment = self.segments[number]
        place = place_of(number, segment.next_page)
        segment.next_page += pages
        segment.num_landing += 1
        segment.num_live += 1
        segment.live_bytes += pages * PAGE_BYTES
        return place

    def settle(self, place: int) -> None:
        """Mark the copy into `place` as ended, successful or not. A failed one must also be released."""
        segment = self.segments[extent_of(place)]
        assert segment.num_landing > 0
        segment.num_landing -= 1
        self._maybe_seal(extent_of(place))

    def release(self, place: int, num_bytes: int) -> None:
        """Forget a record. Its bytes stay on disk until the segment is reclaimed."""
        segment = self.segments[extent_of(place)]
        segment.num_live -= 1
        segment.live_bytes -= record_bytes(num_bytes)
        assert segment.num_live >= 0
        assert segment.live_bytes >= 0

    def close_open_segments(self) -> None:
        """Stop appending to the open segments; they are sealed once their copies have landed."""
        for forward in list(self._open):
            self._close(forward)

    def close_open_segment(self, *, forward: bool) -> None:
        """Stop appending to one of the open segments.
        The one for copies forward may only be closed while another segment is free: what is reclaimed must
        find room somewhere."""
        if forward in self._open and (not forward or self._free):
            self._close(forward)

    def open_segment(self, *, forward: bool) -> int | None:
        """Return the segment that is being filled."""
        return self._open.get(forward)

    def take_segments_to_seal(self) -> list[int]:
        """Return the segments that became ready to seal since the last call; they count as sealed."""
        ready, self._to_seal = self._to_seal, []
        for number in ready:
            self._num_sealed_ever += 1
            self.segments[number].state = SegmentState.SEALED
            self.segments[number].sealed_order = self._num_sealed_ever
        return ready

    def begin_reclaim(self, number: int) -> None:
        """Mark a sealed segment as being emptied; it no longer counts as a candidate."""
        assert self.segments[number].state is SegmentState.SEALED
        self.segments[number].state = SegmentState.RECLAIMING

    def finish_reclaim(self, number: int) -> None:
        """Return an emptied segment to the free ones, after the store has forgotten it durably."""
        segment = self.segments[number]
        assert segment.state is SegmentState.RECLAIMING
        assert segment.num_live == 0, f"segment {number} still has {segment.num_live} live records"
        self.segments[number] = Segment()
        (self._free if number < self.num_segments else self._leaving_free).append(number)

    def resize(self, num_segments: int) -> None:
        """Set the number of segments. The files of those that are new must be there already.
        Afterwards segments may be ready to seal."""
        assert num_segments >= 2
        self.num_segments = num_segments
        while len(self.segments) < num_segments:
            self.segments.append(Segment(SegmentState.GONE))
        for number, segment in enumerate(self.segments[:num_segments]):
            if segment.state is SegmentState.GONE:
                self.segments[number] = Segment()
                self._free.insert(0, number)
        free = self._free + self._leaving_free
        self._free = [number for number in free if number < num_segments]
        self._leaving_free = [number for number in free if number >= num_segments]
        for forward, number in list(self._open.items()):
            if number >= num_segments:
                self._close(forward)

    def take_gone(self) -> list[int]:
        """Return the leaving segments that are empty and no longer needed: their files may go."""
        spare = [] if self._free else self._leaving_free[:1]
        gone, self._leaving_free = self._leaving_free[len(spare) :], spare
        for number in gone:
            self.segments[number] = Segment(SegmentState.GONE)
        return gone

    @property
    def num_leaving_in_use(self) -> int:
        """Number of segments that have still to be emptied before they leave."""
        return sum(s.state not in NOT_TO_EMPTY for s in self.segments[self.num_segments :])

    @property
    def is_shrinking(self) -> bool:
        """Whether some segment has still to leave, and can."""
        left = (SegmentState.GONE, SegmentState.UNREADABLE)
        return any(s.state not in left for s in self.segments[self.num_segments :])

    def adopt(self, number: int, next_page: int, num_live: int, live_bytes: int) -> None:
        """Take over a segment found sealed at start, in order of sealing, with its live records.

        `live_bytes` is the sum of `record_bytes` over them.
        """
        assert self.segments[number].state is SegmentState.FREE
        self._free.remove(number)
        segment = self.segments[number]
        segment.state = SegmentState.SEALED
        segment.next_page = next_page
        self._num_sealed_ever += 1
        segment.sealed_order = self._num_sealed_ever
        segment.num_live = num_live
        segment.live_bytes = live_bytes

    def keep_out(self, number: int) -> None:
        """Use a segment that could not be read at start for nothing."""
        self._free.remove(number)
        self.segments[number] = Segment(SegmentState.UNREADABLE)

    def sealed_segments(self) -> list[int]:
        """Return the segments that may be reclaimed, oldest first.
        Those that leave before the others, as long as there is room to copy forward into."""
        sealed = [n for n, s in enumerate(self.segments) if s.state is SegmentState.SEALED]
        leaves_first = bool(self._free)
        return sorted(
            sealed, key=lambda n: ((n < self.num_segments) is leaves_first, self.segments[n].sealed_order)
        )

    def statistics(self) -> RoomStatistics:
        """Return the present numbers; dead records and holes count as wasted."""
        capacity = self.num_segments * self.segment_bytes
        empty = (SegmentState.FREE, SegmentState.GONE)
        taken = sum(s.state not in empty for s in self.segments) * self.segment_bytes
        free = len(self._free) * self.segment_bytes
        for number in self._open.values():
            left_bytes = (self.data_pages - self.segments[number].next_page) * PAGE_BYTES
            taken -= left_bytes
            free += left_bytes if number < self.num_segments else 0
        live = sum(s.live_bytes for s in self.segments)
        return RoomStatistics(capacity, free, taken, taken - live)

    def check_integrity(self) -> list[str]:
        """Audit: states agree with lists and counts. (Live records against the catalog:
        planner.)"""
        problems = []
        for number, segment in enumerate(self.segments):
            is_free = number in (self._free if number < self.num_segments else self._leaving_free)
            if (segment.state is SegmentState.FREE) != is_free:
                problems.append(f"segment {number}: state {segment.state.value}, free list disagrees")
            if segment.state is SegmentState.GONE and (segment.num_live or number < self.num_segments):
                problems.append(f"segment {number}: gone with {segment.num_live} live records")
            if segment.live_bytes > segment.next_page * PAGE_BYTES:
                problems.append(f"segment {number}: {segment.live_bytes} live bytes past its end")
            if segment.num_landing > segment.num_live:
                problems.append(f"segment {number}: more copies landing than live records")
            if segment.state in (SegmentState.FREE, SegmentState.SEALED) and segment.num_landing:
                problems.append(f"segment {number}: {segment.state.value} with copies landing")
        return problems

    def _close(self, forward: bool) -> None:
        number = self._open.pop(forward)
        self.segments[number].state = SegmentState.FULL
        self._maybe_seal(number)

    def _maybe_seal(self, number: int) -> None:
        segment = self.segments[number]
        if segment.state is SegmentState.FULL and segment.num_landing == 0:
            self._to_seal.append(number)
