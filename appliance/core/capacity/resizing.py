"""Resizing: a tier gets more room or less while it is in use.

Growing is a matter of the books. Shrinking a memory tier has to empty whole extents, and no reader may
notice:

    choose    the extents that hold least leave; nothing new comes into them
    make room the coldest blocks go, as whenever room is needed (pressure.py): spilled first where they are
              nowhere else
    move      what is left in a leaving extent is copied to another place of the same tier, published there
              and retracted here, in one step
    give back an empty extent's memory goes back to the host

Evicting what happens to lie in the leaving extents was rejected: a shared beginning of prompts may leave only
after all that continues it, so one unlucky extent would empty the cache. What is held stays where it
is until the hold ends.

The cold store shrinks by reclaiming (reclaim.py): leaving segments first, before the oldest.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from ....tiers.base import Cause
from ....tiers.block import NO_PLACE, Tier, Urgency
from ....tiers.cold.log import SegmentLog
from ....tiers.memory.slots import SlotPool
from ....v1.shm import extent_of
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..catalog.runs import column
from ..catalog.states import State
from ..copying.copies import Copies, Move
from ..instructions import GiveBack
from .pressure import Pressure

#: Fragments looked at per event, and bytes being moved at one time.
MAX_STEPS = 64
#: After a copy failed (the host has no memory to give, say), before the next one is tried.
PAUSE_S = 1.0
MAX_MOVING_BYTES = 64 << 20


class Resizing:
    """Carries out changes of capacity, a bounded step per event. Implements copies.Owner."""

    def __init__(self, core: CoreState, residency: Residency, copies: Copies, pressure: Pressure) -> None:
        self._core = core
        self._residency = residency
        self._copies = copies
        self._pressure = pressure
        #: Per shrinking memory tier: handles (block) and groups of the fragments that have to move.
        self._to_move: dict[Tier, deque[tuple[int, int]]] = {}
        #: Whether work was left over only because there was much of it.
        self.is_busy = False
        self._not_before = 0.0

    @property
    def is_active(self) -> bool:
        """Whether some tier has not its new size yet."""
        return bool(self._to_move) or self._is_log_shrinking()

    def next_deadline(self) -> float | None:
        """When a pause after a failed copy ends."""
        return self._not_before if self._to_move and self._not_before > self._core.now else None

    def landed(self, fragments: Sequence[int], cause: Cause | None) -> None:
        """Pause before the next moves when some failed."""
        if cause is not None:
            self._not_before = self._core.now + PAUSE_S

    def resize(self, tier: Tier, num_units: int) -> None:
        """Give a tier `num_units` extents or segments from now on; what is too many leaves step by step."""
        room = self._core.rooms[tier]
        if isinstance(room, SegmentLog):
            if num_units != room.num_segments:
                room.resize(num_units)
                self._residency.seal_full_segments(room)
                self._pressure.reclaim.try_again()
        elif isinstance(room, SlotPool):
            if num_units > room.num_extents:
                room.grow(num_units)
            elif num_units < room.num_extents:
                room.retire(_emptiest(room, room.num_extents - num_units))
                self._to_move.setdefault(tier, deque())
        else:
            raise AssertionError(f"{tier.label} has a room of fixed size")

    def run(self) -> None:
        """Go on with what is shrinking."""
        self.is_busy = False
        for tier in list(self._to_move):
            room = self._core.rooms[tier]
            assert isinstance(room, SlotPool)
            is_shedding = _excess(room) > 0 and self._shed(tier, room)
            # A fragment moved too early might belong to a block that is evicted next.
            if self._core.now >= self._not_before and not (is_shedding and _excess(room) > 0):
                self._move(tier, room)
            for number in room.take_gone():
                self._core.outbox.emit(GiveBack(tier, number))
            if not room.leaving:
                del self._to_move[tier]
                self._pressure.reclaim.try_again()
        self.is_busy = self.is_busy and bool(self._to_move)
        log = self._core.log
        if log is not None and log.is_shrinking:
            for number in log.take_gone():
                self._core.outbox.emit(GiveBack(self._core.ladder.log_tier, number))

    def _shed(self, tier: Tier, room: SlotPool) -> bool:
        """Evict or spill what is too much. Returns whether that is under way.

        A cold store that is full of what memory continues gives room a few records at a time, with a pause
        after each segment; the rest would wait for minutes. So blocks that it does not take are evicted.
        """
        if self._pressure.shed(tier, _excess(room)):
            return True
        refusals = self._pressure.refusals
        if self._pressure.reclaim.is_stuck and not refusals.is_pausing:
            refusals.full()
            self.is_busy = True
        return False

    def _is_log_shrinking(self) -> bool:
        log = self._core.log
        return log is not None and log.is_shrinking

    def _move(self, tier: Tier, room: SlotPool) -> None:
        """Begin to move some fragments out of leaving extents."""
        queue = self._to_move[tier]
        if not queue:
            queue.extend(self._inhabitants(tier, room.leaving))
        num_noted = len(queue)
        moves: list[Move] = []
        moving_bytes = self._core.bytes_in_flight.get((tier, tier), 0)
        for _ in range(min(MAX_STEPS, len(queue))):
            if moving_bytes >= MAX_MOVING_BYTES:
                break
            move = self._next_move(tier, room, queue)
            if move is None:
                continue
            if move.target == NO_PLACE:
                break  # no room for it yet; what makes some is an event
            moves.append(move)
            moving_bytes += self._core.catalog.length_of(move.fragment)
        if moves:
            self._copies.start(tier, tier, moves, Urgency.ENDED, owner=self)
            for move in moves:
                self._residency.drop(move.fragment, tier)
            self.is_busy |= bool(queue) and moving_bytes < MAX_MOVING_BYTES
        elif len(queue) < num_noted:  # some of what was noted has been evicted: look at what is behind it
            self.is_busy = True

    def _next_move(self, tier: Tier, room: SlotPool, queue: deque[tuple[int, int]]) -> Move | None:
        """Take the first of the queue; None when it is gone or busy, a target of NO_PLACE when nothing is
        free.

        The fragment of a move is held, until the copy holds it itself.
        """
        core, catalog = self._core, self._core.catalog
        handle, group = queue.popleft()
        row = catalog.row_of(handle)
        if row == NO_ROW:
            return None
        fragment = catalog.first_fragment[row] + group
        if extent_of(catalog.place[tier][fragment]) not in room.leaving:
            return None
        if catalog.state[tier][fragment] != State.RESIDENT or catalog.holds[tier][fragment]:
            queue.append((handle, group))  # it is being read or written; that ends with an event
            return None
        namespace = catalog.namespace_of(row)
        length = namespace.fragment_bytes[group]
        target = self._pressure.place_for(tier, namespace.domain, length)
        if target is None:
            queue.appendleft((handle, group))
            return Move(fragment, NO_PLACE, NO_PLACE)
        is_there = catalog.row_of(handle) == row and catalog.state[tier][fragment] == State.RESIDENT
        if not is_there or catalog.holds[tier][fragment]:  # it was itself the coldest: gone, or being spilled
            room.release(target, length)
            return None
        core.transitions.hold(fragment, tier)
        return Move(fragment, catalog.place[tier][fragment], target)

    def _inhabitants(self, tier: Tier, numbers: set[int]) -> list[tuple[int, int]]:
        """Return (block's handle, group) of every fragment that has a place in these extents."""
        catalog = self._core.catalog
        places = column(catalog.place[tier])
        if not len(places):
            return []
        inside = np.flatnonzero((places >= 0) & np.isin(places >> 32, sorted(numbers)))
        fragments = [int(fragment) for fragment in inside]
        rows = [catalog.block_of[fragment] for fragment in fragments]
        return [
            (catalog.handle(row), fragment - catalog.first_fragment[row])
            for row, fragment in zip(rows, fragments, strict=True)
        ]

    def check_integrity(self) -> list[str]:
        """Audit: a tier with leaving extents is being worked on."""
        rooms = self._core.rooms
        return [
            f"{tier.label}: {sorted(room.leaving)} leave, and are not worked on"
            for tier in self._core.ladder.memory_tiers
            if isinstance(room := rooms.get(tier), SlotPool) and room.leaving and tier not in self._to_move
        ]


def _excess(room: SlotPool) -> int:
    """Return by how many bytes what is taken exceeds the new size."""
    books = room.statistics()
    return books.taken_bytes - books.capacity_bytes


def _emptiest(room: SlotPool, count: int) -> list[int]:
    """Return `count` staying extents that hold least; of equal ones those that would be begun last."""
    staying = [number for number in room.extents() if number not in room.leaving]
    return sorted(staying, key=lambda number: (room.taken_slots(number), -number))[:count]
