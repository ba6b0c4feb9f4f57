"""Promotions: blocks that are used again come to rest in a faster memory tier.

Two kinds, counted apart. A block that is *delivered* on a device crosses the link each time, and for most
blocks that is right: a conversation's blocks are asked for once a turn, and the device is small. But the
beginning of many prompts, a system prompt, is delivered with every request: it goes up into the device tier.
A block in a memory tier below the put tier can be read in place, but that tier is slower, and the block was
demoted into it because it was the coldest: when requests use it again, it goes up into the put tier.

Both happen in the background at the second use, under the rules of promotion_rules.py: into free room or that
of a block that was not used since the first of these uses, parents first. So a set of hot blocks larger than
the tier does not turn over for ever. What is counted is bounded and forgotten oldest first: a block that is
not used again within as many others is no shared prefix.

Rejected: the tier's admission policy as the judge (by default it admits every block); promoting at the first
use (a scan of prompts that come once would exchange the contents of both tiers); evicting the copy below when
it has landed above (the next demotion would copy it again, and under pressure it is evicted anyhow).
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from ....policies.base import Use
from ....tiers.block import Tier, Urgency
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.policy_listeners import Listener
from .loads import Loads

MIN_USES: Final = 2
#: Blocks counted, and of those the ones of one request: shared beginnings are shorter.
MAX_COUNTED = 1 << 16
MAX_CHAIN = 1024
MAX_BYTES = 64 << 20  # under way at a time, per edge
#: Blocks considered per event; and waiting, beyond which the oldest are dropped.
MAX_STEPS: Final = 256
MAX_WAITING: Final = 4096
#: How long a block waits for the copy that makes room for it: what is being copied is no victim meanwhile,
#: and the block would be compared with a younger one.
ROOM_S: Final = 0.05


class _Candidate(NamedTuple):
    """A block that was used often enough to go up."""

    handle: int
    target: Tier
    first_at: float  # its first use, of those counted
    has_asked: bool = False  # for room: it does so twice, then it waits for its next use


class UseCounts:
    """How often blocks were used, by handle, and since when. Forgets the blocks used least recently."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, float]] = {}  # handle -> uses, time of the first one

    def add(self, handle: int, now: float) -> tuple[int, float]:
        """Count one use of a block; return how many there were, and when the first was."""
        count, first_at = self._counts.pop(handle, (0, now))
        self._counts[handle] = (count + 1, first_at)
        while len(self._counts) > MAX_COUNTED:
            del self._counts[next(iter(self._counts))]
        return count + 1, first_at


class Promotions:
    """Counts deliveries and uses; promotes. Without a device tier and slower memory it does nothing."""

    def __init__(self, core: CoreState, loads: Loads) -> None:
        self._core = core
        self._loads = loads
        ladder = core.ladder
        self._put_tier, self._device_tier = ladder.put_tier, ladder.device_tier
        slower = ladder.memory_tiers[ladder.memory_tiers.index(ladder.put_tier) + 1 :]
        self._slower = [tier for tier in slower if tier in core.rooms]
        self._deliveries, self._uses = UseCounts(), UseCounts()
        self._waiting: deque[_Candidate] = deque(maxlen=MAX_WAITING)
        self._room_asked_at = float("-inf")
        if self._slower:
            core.listeners.join(Listener(used=self._note_used))

    def delivered(self, rows: Sequence[int]) -> None:
        """Count that these blocks of one chain, its first ones first, are delivered on the device now."""
        if not rows or self._device_tier not in self._core.rooms:
            return
        catalog = self._core.catalog
        placed, num_groups = catalog.num_placed[self._device_tier], catalog.namespace_of(rows[0]).num_groups
        below = [row for row in rows[:MAX_CHAIN] if placed[row] < num_groups]
        self._count(below, self._device_tier, self._deliveries)

    def run(self) -> None:
        """Begin what waits, as far as the bounds allow. After answers: it could evict their blocks."""
        if not self._waiting or self._is_room_being_made():
            return
        core, catalog = self._core, self._core.catalog
        num_promoted = 0
        moving_bytes = {
            target: sum(core.bytes_in_flight.get((source, target), 0) for source in self._sources_of(target))
            for target in (self._put_tier, self._device_tier)
        }
        for _ in range(min(MAX_STEPS, len(self._waiting))):
            candidate = self._waiting.popleft()
            row, target = catalog.row_of(candidate.handle), candidate.target
            if row == NO_ROW or not self._is_whole_below(row, target):
                continue  # gone, or just coming up: the next use finds it there
            moving_bytes[target] += catalog.block_bytes(row)
            if moving_bytes[target] > MAX_BYTES:
                self._waiting.appendleft(candidate)
                break
            if self._loads.rules.admits(row, candidate.first_at, target):
                if not self._loads.promote(row, target, Urgency.WAITING, float("inf")):
                    if not candidate.has_asked:  # room is being made: its end is an event
                        self._waiting.appendleft(candidate._replace(has_asked=True))
                    self._room_asked_at = core.now
                    break
                num_promoted += 1
        if num_promoted:
            self._loads.start(Urgency.WAITING, float("inf"))
            core.story.count("blocks_promoted_on_use", num_promoted)

    def _note_used(self, rows: Sequence[int], use: Use) -> None:
        below = [row for row in rows[:MAX_CHAIN] if self._is_whole_below(row, self._put_tier)]
        self._count(below, self._put_tier, self._uses)

    def _count(self, rows: Sequence[int], target: Tier, counts: UseCounts) -> None:
        """Count one use of each block; let those wait that were used often enough."""
        for row in rows:
            handle = self._core.catalog.handle(row)
            count, first_at = counts.add(handle, self._core.now)
            if count >= MIN_USES:
                self._waiting.append(_Candidate(handle, target, first_at))

    def _is_room_being_made(self) -> bool:
        """Whether room was asked for a moment ago, and a copy leaves the target tier."""
        core = self._core
        return core.now < self._room_asked_at + ROOM_S and any(
            core.bytes_in_flight.get(edge) for edge in core.ladder.ways_down[self._waiting[0].target]
        )

    def _sources_of(self, target: Tier) -> Sequence[Tier]:
        """Return the memory tiers from which blocks are promoted into `target`."""
        return (self._put_tier,) if target == self._device_tier else self._slower

    def _is_whole_below(self, row: int, target: Tier) -> bool:
        """Whether a tier that `target` is promoted from has a block whole, and `target` has not."""
        catalog = self._core.catalog
        num_groups = catalog.namespace_of(row).num_groups
        if catalog.num_placed[target][row] >= (num_groups if target == self._device_tier else 1):
            return False
        return any(catalog.num_resident[source][row] == num_groups for source in self._sources_of(target))
