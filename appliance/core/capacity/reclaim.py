"""Reclaim: space in the cold store comes back a whole segment at a time.

The oldest sealed segment is emptied: what is worth keeping is copied forward, the rest is dropped, and the
segment is forgotten durably before it is reused. Worth is decided per block by its last use, up to a
budget; blocks that must not go (pinned, decoding, a child in a faster tier) are copied whatever the budget.
Beyond the budget what several chains begin with is copied, too, where more than a segment hangs on it: as
many bytes as reclaim has won before, and up to MAX_SPARE_SEGMENTS, so that each byte that is written for it
frees another.
When that goes for every segment, the store is full for good and says so (`Refusals.full`): memory goes on
without it, the coldest blocks leave, and with the last child in memory a parent in the store may go, too.

A dropped block takes its descendants with it (subtrees.py): without it no lookup can reach them. The work is
cut into steps of bounded size, so that no request waits for a whole segment.
"""

import math
from collections import deque

from ....tiers.block import NO_PLACE, Urgency
from ....tiers.cold.log import SegmentLog, record_bytes
from ....v1.shm import PAGE_BYTES, extent_of
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..catalog.states import State
from ..copying.copies import Copies, Move
from ..copying.refusals import Refusals
from ..instructions import FreeSegment
from .subtrees import Fate, Subtree

#: Blocks looked at in one step: about a millisecond.
STEP_BLOCKS = 256
#: A segment of which more than this is still wanted (copied forward, or part of a block that did
#: not fit and will be spilled again) won no room; wait before trying the next, or a cold store full
#: of such blocks would write itself in circles.
FRUITLESS_FRACTION = 0.9
FRUITLESS_PAUSE_S = 1.0
#: Segments being forgotten at a time, and one for so many in all: the device makes each wait for a flush.
MAX_FREEING, SEGMENTS_A_FREEING = 3, 16
#: Once no segment in turn won room the pauses double, up to this: each try writes a segment in vain.
MAX_FRUITLESS_PAUSE_S = 60.0
#: Beginnings that are copied forward before the next segment becomes free: a second of a slow device.
MAX_SPARE_SEGMENTS = 16


class Reclaim:
    """Empties one segment at a time."""

    def __init__(self, core: CoreState, residency: Residency, copies: Copies, refusals: Refusals) -> None:
        self._core = core
        self._residency = residency
        self._copies = copies
        self._refusals = refusals
        self._log = core.log
        self._log_tier, self._memory_tiers = core.ladder.log_tier, core.ladder.memory_tiers
        #: Segments to be emptied and freed whether room is short or not; evicting.py.
        self.to_empty: set[int] = set()
        self._segment: int | None = None  # being emptied
        self._rows: deque[int] = deque()  # handles of blocks still to decide, most recently used first
        self._subtree: Subtree | None = None  # of the first of them, while it is looked at or dropped
        self._num_steps = 0  # left of this event's
        self._beginning: set[int] = set()  # handles of blocks that were found to be SHARED, also elsewhere
        self._spare_bytes = self._most_spare_bytes()  # that may be copied forward for being so
        self._forward_bytes = 0
        self._copied_bytes = 0  # of this segment, copied forward
        self._wanted_bytes = 0  # of this segment, copied forward or to be spilled again
        self._used_bytes = 0  # of this segment, ever appended
        #: Emptied, being forgotten: whether that won no room, and the bytes it won.
        self._freeing: dict[int, tuple[bool, int]] = {}
        self._is_blocked = False
        self._is_wanted = False  # a record found no room, however many segments should be free
        self._not_before = 0.0
        self._fewest_leaving = math.inf  # segments that had still to be emptied to leave, since `try_again`
        self._num_in_vain = 0  # segments in a row that were emptied and won no room
        self._pause_s = FRUITLESS_PAUSE_S  # after the next one

    @property
    def is_busy(self) -> bool:
        """Whether blocks can be decided now: a Tick is due at once.
        False while it waits for a copy or for room, which end with an event: ticking meanwhile would spin."""
        is_stopped = self._is_blocked or self._refusals.is_stopped or self._log_tier in self._core.offline
        return self._segment is not None and bool(self._rows) and not is_stopped

    @property
    def is_in_vain(self) -> bool:
        """Whether the segment that was emptied last won no room."""
        return self._num_in_vain > 0

    @property
    def is_stuck(self) -> bool:
        """Whether a record found no room since, too."""
        return self._num_in_vain > 0 and self._is_wanted

    def next_deadline(self) -> float | None:
        """When a pause ends that a record without room waits for."""
        is_awaited = self._is_wanted or (self._log is not None and self._log.is_shrinking)
        return self._not_before if is_awaited and self._not_before > self._core.now else None

    def try_again(self) -> None:
        """End a pause: the log has another size, or memory left what kept blocks here."""
        self._not_before, self._pause_s, self._fewest_leaving = self._core.now, FRUITLESS_PAUSE_S, math.inf

    def place_for(self, domain: int, num_bytes: int) -> int | None:
        """Reserve a record; None when a segment must be reclaimed first (which is begun)."""
        if self._log is None:
            return None
        place = self._reserve(domain, num_bytes)
        if place is None:
            self._is_wanted = True
            self.keep_free_segments()
            place = self._reserve(domain, num_bytes)
        return place

    def _reserve(self, domain: int, num_bytes: int, *, forward: bool = False) -> int | None:
        assert self._log is not None
        place = self._log.reserve(domain, num_bytes, forward=forward)
        self._residency.seal_full_segments(self._log)
        return place

    def keep_free_segments(self) -> None:
        """Begin or continue emptying a segment while fewer than `min_free_segments` are free."""
        if self._log is None or self._refusals.is_stopped or self._log_tier in self._core.offline:
            return
        is_short = self._log.num_free + len(self._freeing) < self._core.options.min_free_segments
        may_begin = self._core.now >= self._not_before
        if self._segment is None and self.to_empty:
            self._begin(self.to_empty)
        if self._segment is None and may_begin and self._may_free_more(self._log, is_short):
            self._begin()
        elif self._segment is None and may_begin and self._log.is_shrinking:
            self._begin_leaving(self._log)
        if self._segment is not None:
            self._step()

    def _may_free_more(self, log: SegmentLog, is_short: bool) -> bool:
        """Whether another segment may be emptied although some are being forgotten."""
        at_a_time = max(1, min(MAX_FREEING, log.num_segments // SEGMENTS_A_FREEING))
        return len(self._freeing) < at_a_time and (self._is_wanted or is_short)

    def dead_segments(self) -> set[int]:
        """Return the sealed segments in which nothing lives any more."""
        if self._log is None:
            return set()
        return {number for number in self._log.sealed_segments() if not self._log.segments[number].num_live}

    def free_dead_segments(self) -> None:
        """Begin to free them."""
        if not self.to_empty:
            self.to_empty |= self.dead_segments()
        self.keep_free_segments()

    def segment_freed(self, segment: int) -> None:
        """The cold store has durably forgotten the segment."""
        assert self._log is not None
        is_fruitless, won_bytes = self._freeing.pop(segment)
        self._log.finish_reclaim(segment)
        self._core.transitions.forget_segment(segment)
        self._is_wanted = False
        # Of segments that an administrator empties there are ever fewer. So of those that leave, unless more
        # must stay than those that stay hold: it would be copied to and fro for ever.
        num_leaving = self._log.num_leaving_in_use
        is_fewer = segment >= self._log.num_segments and num_leaving < self._fewest_leaving
        if is_fewer:
            self._fewest_leaving = num_leaving
        is_needed = not is_fewer and segment not in self.to_empty
        self.to_empty.discard(segment)
        if is_needed and is_fruitless:
            self._num_in_vain += 1
            self._not_before = self._core.now + self._pause_s
            if self._num_in_vain >= self._log.num_segments:
                self._refusals.full(self._pause_s)
                self._pause_s = min(2 * self._pause_s, MAX_FRUITLESS_PAUSE_S)
        else:
            self._num_in_vain = 0
            self._pause_s = FRUITLESS_PAUSE_S
        self._spare_bytes = min(self._spare_bytes + won_bytes, self._most_spare_bytes())
        self._core.story.count("segments_reclaimed")

    def _most_spare_bytes(self) -> int:
        """Return what beginnings may take before any segment was freed, or after many were."""
        if self._log is None:
            return 0
        num_segments = self._core.options.max_forward_fraction * self._log.num_segments
        return int(min(MAX_SPARE_SEGMENTS, num_segments) * self._log.segment_bytes)

    def _begin(self, chosen: set[int] | None = None) -> None:
        """Begin with the oldest segment that may be emptied, of those that were chosen if some were."""
        assert self._log is not None
        catalog = self._core.catalog
        for segment in self._log.sealed_segments():
            if segment in self._copies.num_reads_of_segment or (chosen is not None and segment not in chosen):
                continue
            self._log.begin_reclaim(segment)
            self._segment = segment
            rows = {catalog.block_of[f] for f in self._live(segment)}
            newest_first = sorted(rows, key=lambda row: -catalog.last_used[row])
            self._rows = deque(catalog.handle(row) for row in newest_first)
            self._forward_bytes = int(self._core.options.max_forward_fraction * self._log.segment_bytes)
            self._wanted_bytes = self._copied_bytes = 0
            self._subtree = None
            self._beginning.clear()
            self._used_bytes = self._log.segments[segment].next_page * PAGE_BYTES
            return

    def _begin_leaving(self, log: SegmentLog) -> None:
        """Begin with a segment that leaves. What stays is not reclaimed for that while there is room."""
        number = log.open_segment(forward=True)
        if number is not None and number >= log.num_segments:
            log.close_open_segment(forward=True)
            self._residency.seal_full_segments(log)
        self._begin(set(range(log.num_segments, len(log.segments))))

    def _live(self, segment: int) -> list[int]:
        """Return the fragments with a record in this segment now."""
        place = self._core.catalog.place[self._log_tier]
        listed = self._core.transitions.in_segment.get(segment, ())
        return [f for f in set(listed) if place[f] != NO_PLACE and extent_of(place[f]) == segment]

    def _step(self) -> None:
        self._is_blocked, self._num_steps = False, STEP_BLOCKS
        while self._num_steps > 0 and self._rows:
            self._num_steps -= 1
            row = self._core.catalog.row_of(self._rows[0])
            if row != NO_ROW and not self._decide(row):
                self._is_blocked = self._subtree is None  # no room to copy forward yet
                return
            self._rows.popleft()
            self._subtree = None
        if not self._rows:
            self._finish_when_quiet()

    def _decide(self, row: int) -> bool:
        """Copy one block's records forward or drop it; False when it must be tried again later."""
        catalog = self._core.catalog
        here = [f for f in catalog.fragments(row) if self._is_here(f)]
        if not here:  # it was condemned since; what memory has of it may be held
            return True
        if catalog.num_holds[self._log_tier][row]:
            self._subtree = None
            return False  # being read, or copied forward already
        assert all(catalog.state[self._log_tier][f] == State.RESIDENT for f in here)
        num_bytes = sum(record_bytes(catalog.stored_length(f, self._log_tier)) for f in here)
        is_elsewhere = self._residency.is_elsewhere(row, self._log_tier)
        is_worth = catalog.num_uses[row] > 0 and num_bytes <= self._forward_bytes and not is_elsewhere
        is_partial = catalog.num_resident[self._log_tier][row] < catalog.namespace_of(row).num_groups
        comes_again = is_partial and any(catalog.num_resident[tier][row] for tier in self._memory_tiers)
        fate = Fate.SHARED if is_worth else self._fate(row, num_bytes, is_elsewhere)
        if fate in (Fate.SHARED, Fate.STAYS):
            if self._forward(row, here):
                self._copied_bytes += num_bytes
                if fate is Fate.SHARED and not is_worth:
                    self._spare_bytes -= num_bytes
                else:
                    self._forward_bytes -= num_bytes
                    self._wanted_bytes += num_bytes
                return True
            if fate is Fate.SHARED:
                fate = self._fate(row, None, is_elsewhere)
        if fate is Fate.STAYS:
            self._subtree = None
            self._refusals.full()
        if fate is Fate.DROPPED and comes_again:
            self._wanted_bytes += num_bytes
        return fate is Fate.DROPPED

    def _fate(self, row: int, num_bytes: int | None, is_elsewhere: bool) -> Fate:
        """Look at what continues a block, or drop it. `num_bytes`: of its records here; None: they find no
        room."""
        assert self._log is not None
        may_forward = num_bytes is not None and num_bytes <= self._spare_bytes and not is_elsewhere
        if may_forward and self._core.catalog.handle(row) in self._beginning:
            return Fate.SHARED
        if self._subtree is None:
            self._subtree = Subtree(self._core, self._residency, row)
        if is_elsewhere and self._residency.may_leave(row, self._log_tier):
            self._subtree.drop(row)
            return Fate.DROPPED
        shared_bytes = self._log.segment_bytes if may_forward else None
        fate, self._num_steps = self._subtree.step(self._num_steps, shared_bytes)
        if fate is Fate.SHARED:
            self._beginning.update(self._subtree.beginning())
        return fate

    def _is_here(self, fragment: int) -> bool:
        place = self._core.catalog.place[self._log_tier][fragment]
        return place != NO_PLACE and extent_of(place) == self._segment

    def _forward(self, row: int, fragments: list[int]) -> bool:
        assert self._log is not None
        catalog = self._core.catalog
        domain = catalog.namespace_of(row).domain
        moves = []
        for fragment in fragments:
            place = self._reserve(domain, catalog.stored_length(fragment, self._log_tier), forward=True)
            if place is None:
                break
            moves.append(Move(fragment, catalog.place[self._log_tier][fragment], place))
        if moves:
            self._copies.start(self._log_tier, self._log_tier, moves, Urgency.ENDED)
        return len(moves) == len(fragments)

    def _finish_when_quiet(self) -> None:
        """Free the segment once it has no readers and no live records."""
        assert self._segment is not None
        quiet = self._segment not in self._copies.num_reads_of_segment
        if quiet:
            left = self._live(self._segment)
            if left:  # a copy forward failed; decide about those blocks again
                catalog = self._core.catalog
                self._rows.extend(catalog.handle(catalog.block_of[f]) for f in left)
                return
            is_fruitless = self._wanted_bytes > FRUITLESS_FRACTION * self._used_bytes
            self._freeing[self._segment] = is_fruitless, max(0, self._used_bytes - self._copied_bytes)
            self._core.outbox.emit(FreeSegment(self._segment))
            self._segment = None
