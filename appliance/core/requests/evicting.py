"""Evicting: blocks are evicted from a tier because an administrator asks for it.

Memory evicts its coldest blocks, or all of a namespace. The cold store gives up whole
segments, oldest first, because space there comes back by the segment, and because a start finds every record
in the segments that are still there. So of the blocks in those segments all that may be evicted is, ends of
chains first; what has to stay is copied forward and the segments are freed by reclaim (reclaim.py). The
answer waits until the segments are forgotten durably: what was evicted is not found again by a restart. (Of a
namespace only the segments in which nothing lives any more are freed: what it shared one with may be found
again.)

A block in memory stays there, and is readable from there. It is dirty again: it is written to the cold store
once more before it is evicted from memory, or by a drain.

All of it in steps of bounded size: a tier may hold a million blocks. Chains are walked from a block down to
their ends, and decided on the way back.

Rejected: emptying segments without asking what continues their blocks (what they hold of a chain would go,
and the rest would be dead weight); copying forward what memory has, as reclaim does (no block would leave a
store with all its chains in memory, too)."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from ....tiers.block import NO_PLACE, Tier
from ....tiers.cold.log import NOT_TO_EMPTY, Segment, SegmentLog, SegmentState
from ..capacity.pressure import Pressure
from ..capacity.reclaim import Reclaim
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import INCOMPLETE, Residency
from ..catalog.rules import ADMINISTRATOR, CONTINUED, KEPT, PINNED, READ
from ..catalog.runs import column
from ..catalog.table import NUM_PARTS
from ..events import EvictRequested
from ..results import EvictResult
from .request_registry import RequestRegistry

#: A request is refused when no segment became free for so long: one is read, or its blocks find no room.
PATIENCE_S = 15.0
#: Blocks decided in one step: a few milliseconds.
STEP_BLOCKS = 256


@dataclass(slots=True)
class _Eviction:
    """One request that takes many steps: segments of the cold store, or a namespace's blocks in a tier."""

    call: int
    tier: Tier
    num_bytes: int  # to be freed; 0: all
    namespace_id: int = 0
    segments: dict[int, Segment] = field(default_factory=dict)  # that were chosen
    #: The segment that takes what is copied forward when this begins: emptied after all others.
    last_segment: int | None = None
    #: Of blocks to decide, with all that continues them; None: not begun.
    handles: Iterator[int] | None = None
    #: Blocks waiting for their continuations, the next one last: (handle, whether those were decided).
    stack: list[tuple[int, bool]] = field(default_factory=list)
    decided: bytearray = field(default_factory=bytearray)  # by row, 1: was decided, or came since
    passed_over: list[int] = field(default_factory=list)  # handles: they stay, to be offered again
    is_swept: bool = False
    num_to_empty: int = 0  # segments, when it was looked last
    given_up_at: float = float("inf")
    num_blocks: int = 0
    freed_bytes: int = 0
    num_readable: int = 0
    num_kept: Counter[str] = field(default_factory=Counter)

    def result(self) -> EvictResult:
        """Return the answer."""
        return EvictResult(self.num_blocks, self.freed_bytes, self.num_readable, dict(self.num_kept))


class Evicting:
    """Carries out EvictRequested. Requests for the cold store wait for each other."""

    def __init__(
        self,
        core: CoreState,
        requests: RequestRegistry,
        residency: Residency,
        pressure: Pressure,
        reclaim: Reclaim,
    ) -> None:
        self._requests = requests
        self._core = core
        self._log_tier = core.ladder.log_tier
        self._residency = residency
        self._pressure = pressure
        self._reclaim = reclaim
        self._jobs: deque[_Eviction] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether there are blocks left to decide: a Tick is due at once.
        False while segments are freed: that ends with events anyway."""
        return bool(self._jobs) and (not self._jobs[0].is_swept or bool(self._jobs[0].passed_over))

    def begin(self, event: EvictRequested) -> None:
        """Queue a request, or refuse it."""
        if event.tier not in self._core.rooms:
            self._requests.refuse(event.call, "BAD_TIER", f"this daemon has no tier {event.tier.label}")
        elif event.namespace_id and event.namespace_id not in self._core.catalog.namespaces:
            message = f"there is no namespace {event.namespace_id}"
            self._requests.refuse(event.call, "UNKNOWN_NAMESPACE", message)
        else:
            job = _Eviction(event.call, event.tier, event.num_bytes, event.namespace_id)
            is_quick = event.tier != self._log_tier and not event.namespace_id  # waits for no segment
            (self._jobs.appendleft if is_quick else self._jobs.append)(job)

    def namespaces(self) -> set[int]:
        """Return the namespaces of evictions that are not answered yet."""
        return {job.namespace_id for job in self._jobs}

    def run(self) -> None:
        """Decide about the next blocks; answer when all segments are free."""
        if not self._jobs:
            return
        job = self._jobs[0]
        if job.tier in self._core.offline:
            if job.tier == self._log_tier and job.is_swept:
                self._reclaim.to_empty.clear()
            self._jobs.popleft()
            self._requests.refuse(job.call, "BAD_TIER", f"{job.tier.label} is offline: nothing can leave it")
            return
        if job.tier != self._log_tier and not job.namespace_id:
            self._evict_coldest(job)
            return
        if job.handles is None:
            self._choose(job)
        if not job.is_swept and self._decide(job):
            job.is_swept = True
            if job.tier == self._log_tier:  # a restart would find what lived in dead ones
                dead = self._reclaim.dead_segments() if job.namespace_id else self._still_chosen(job)
                self._reclaim.to_empty |= {*dead} - {job.last_segment}
            self._reclaim.keep_free_segments()
        if job.is_swept and not self._reclaim.to_empty and not self._begin_last(job):
            self._requests.reply(job.call, job.result())
            self._jobs.popleft()
        elif job.is_swept:
            self._wait(job)

    def next_deadline(self) -> float | None:
        """When a request is given up at which nothing goes on."""
        return self._jobs[0].given_up_at if self._jobs and self._jobs[0].is_swept else None

    # -------------------------------------------------------------------------------------- memory

    def _evict_coldest(self, job: _Eviction) -> None:
        """Evict the next unpinned blocks of a memory tier, coldest first, until `job.num_bytes` were freed
        (0: all). Dirty blocks go too: an administrator asked for it."""
        catalog, residency, victims = self._core.catalog, self._residency, self._pressure.victims
        for _ in range(0 if job.is_swept else STEP_BLOCKS):
            is_enough = 0 < job.num_bytes <= job.freed_bytes
            victim = None if is_enough else victims.choose(job.tier, domain=None)
            if victim is None:
                job.is_swept = True
                if not is_enough:
                    job.num_kept.update(self._kept_in_memory(job.tier))
                break
            handle = catalog.handle(victim.row)
            if residency.may_leave(victim.row, job.tier):
                job.freed_bytes += residency.evict(victim.row, job.tier, ADMINISTRATOR)
                job.num_blocks += 1
                job.num_readable += self._is_readable(handle)
            else:  # a block in a slower tier continues it: it is spilled when its room is needed
                job.passed_over.append(handle)
        if not job.is_swept:
            return
        for handle in job.passed_over[-STEP_BLOCKS:]:
            if (row := catalog.row_of(handle)) != NO_ROW:
                residency.offer(row, job.tier)
        del job.passed_over[-STEP_BLOCKS:]
        if not job.passed_over:
            self._requests.reply(job.call, job.result())
            self._jobs.popleft()

    def _kept_in_memory(self, tier: Tier) -> dict[str, int]:
        """Count the blocks of a memory tier that could not leave, by reason."""
        catalog = self._core.catalog
        rows = np.flatnonzero(column(catalog.num_placed[tier]))
        is_open = np.ones(len(rows), bool)
        is_pinned = np.isin(rows, np.fromiter(self._core.pin_floors, np.int64))
        reasons = (
            (READ, column(catalog.num_holds[tier])[rows] > 0),
            (KEPT, column(catalog.num_keepers)[rows] > 0),
            (PINNED, is_pinned),
            (CONTINUED, is_open),
        )
        counts = {}
        for reason, applies in reasons:
            if count := int((is_open & applies).sum()):
                counts[reason] = count
            is_open = is_open & ~applies
        return counts

    def _why_in_memory(self, row: int, tier: Tier) -> str:
        """Return why a block has to stay in a memory tier; empty: it may leave."""
        core = self._core
        residency, catalog = self._residency, self._core.catalog
        if residency.may_leave(row, tier):
            return ""
        if catalog.num_holds[tier][row]:
            return READ
        if catalog.num_keepers[row]:
            return KEPT
        return PINNED if row in core.pin_floors else CONTINUED

    def _is_readable(self, handle: int) -> bool:
        catalog = self._core.catalog
        row = catalog.row_of(handle)
        return row != NO_ROW and catalog.tier_of(row) is not None

    # ---------------------------------------------------------------------------------- cold store

    def _choose(self, job: _Eviction) -> None:
        """Choose the segments, oldest first, and the blocks that would have to leave with them; or those of a
        namespace."""
        log, catalog = self._core.log, self._core.catalog
        job.decided = bytearray(len(catalog.prefix_hash))
        if job.namespace_id:
            rows = catalog.namespaces[job.namespace_id].rows
            job.handles = chain.from_iterable(map(self._handles_of, map(rows.part, range(NUM_PARTS))))
            return
        assert isinstance(log, SegmentLog)
        chosen: list[int] = []
        found_bytes = 0
        for number in log.sealed_segments():
            if job.num_bytes and found_bytes >= job.num_bytes:
                break
            chosen.append(number)
            found_bytes += log.segments[number].live_bytes
        if not job.num_bytes or found_bytes < job.num_bytes:  # also what is being written, and emptied
            log.close_open_segment(forward=False)
            self._residency.seal_full_segments(log)
            chosen = [number for number, one in enumerate(log.segments) if one.state not in NOT_TO_EMPTY]
            job.last_segment = log.open_segment(forward=True)
        job.segments = {number: log.segments[number] for number in chosen}
        job.handles = chain.from_iterable(map(self._handles_in, self._still_chosen(job)))

    def _still_chosen(self, job: _Eviction) -> Iterator[int]:
        """Iterate over the chosen segments that were not freed by then: others may hold new records."""
        log = self._core.log
        assert log is not None
        for number, one in job.segments.items():
            if log.segments[number] is one:
                yield number

    def _handles_in(self, segment: int) -> list[int]:
        """Return handles of the blocks with a record in a segment."""
        catalog = self._core.catalog
        places = catalog.place[self._log_tier]
        listed = self._core.transitions.in_segment.get(segment, ())
        rows = {catalog.block_of[f] for f in listed if places[f] != NO_PLACE and places[f] >> 32 == segment}
        return self._handles_of(rows)

    def _handles_of(self, rows: Iterable[int]) -> list[int]:
        return list(map(self._core.catalog.handle, rows))

    def _decide(self, job: _Eviction) -> bool:
        """Decide the next blocks, what continues a block before the block. Whether none are left."""
        catalog, stack, decided = self._core.catalog, job.stack, job.decided
        assert job.handles is not None
        for _ in range(STEP_BLOCKS):
            if not stack:
                handle = next(job.handles, None)
                if handle is None:
                    return True
                stack.append((handle, False))
            handle, is_walked = stack.pop()
            row = catalog.row_of(handle)
            if row == NO_ROW or row >= len(decided) or decided[row]:
                continue
            children = [] if is_walked else catalog.children(row)
            if children:
                stack.append((handle, True))
                stack += [(catalog.handle(child), False) for child in children]
            else:
                decided[row] = 1
                self._leave(job, row)
        return False

    def _wait(self, job: _Eviction) -> None:
        """Let a request wait for its segments, as long as one after the other becomes free."""
        now, num_left = self._core.now, len(self._reclaim.to_empty)
        if num_left != job.num_to_empty:
            job.num_to_empty, job.given_up_at = num_left, now + PATIENCE_S
        elif now >= job.given_up_at:
            self._reclaim.to_empty.clear()
            self._jobs.popleft()
            words = f"{job.num_blocks} blocks left {self._log_tier.label}, "
            words += f"but {num_left} of its segments cannot be freed: "
            words += "what stays finds no room, or is being read; a restart would find the blocks again"
            self._requests.refuse(job.call, "TIER_FULL", words, PATIENCE_S)

    def _begin_last(self, job: _Eviction) -> bool:
        """Empty the segment that took what was copied forward. False: there is none, or it must stay because
        no other one is free."""
        log, number = self._core.log, job.last_segment
        job.last_segment = None
        if number is None:
            return False
        assert isinstance(log, SegmentLog)
        if log.open_segment(forward=True) == number:
            log.close_open_segment(forward=True)
            self._residency.seal_full_segments(log)
        if number not in self._still_chosen(job) or log.segments[number].state is SegmentState.OPEN:
            return False
        self._reclaim.to_empty.add(number)
        self._reclaim.keep_free_segments()
        return True

    def _leave(self, job: _Eviction, row: int) -> None:
        """Let a block leave its tier, or count why it stays."""
        residency, catalog = self._residency, self._core.catalog
        if not catalog.num_placed[job.tier][row]:
            return
        reason = (
            residency.why_in_store(row) if job.tier == self._log_tier else self._why_in_memory(row, job.tier)
        )
        handle = catalog.handle(row)
        if reason:
            job.num_kept[reason] += 1
            return
        job.freed_bytes += residency.evict(row, job.tier, ADMINISTRATOR)
        job.num_blocks += 1
        job.num_readable += self._is_readable(handle)
        for tier in self._core.ladder.memory_tiers:  # a part that cannot be read
            row = catalog.row_of(handle)
            if row != NO_ROW and catalog.tier_of(row) is None and residency.may_leave(row, tier):
                residency.evict(row, tier, INCOMPLETE)
