"""Mover: executes the planner's copies, the most urgent first, a bounded number at a time.

Every Copy ends in exactly one CopyFinished, outcomes in the order of its items, however its batches were
cut and whatever became of them. Completions arrive on worker threads and are handed to the event loop
together: one wake-up for as many as have gathered, because a wake-up costs more than settling a batch.
"""

import asyncio
import errno
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from ...tiers.base import Cause, CopyItem, CopyOutcome
from ...tiers.block import Tier
from ..core.events import CopyFinished, EdgeMeasured, Event
from ..core.instructions import CancelCopy, Copy, HastenCopy
from .fair_queue import BandwidthShares
from .lanes import (
    MAX_WRITES_BESIDE_READS,
    CopyBatch,
    Edge,
    EdgeQueue,
    EdgeStatistics,
    Inline,
    QueuedCopy,
    Route,
)

log = logging.getLogger(__name__)

MEASUREMENT_INTERVAL_S = 0.5  # the planner hears about an edge at most this often

#: Small puts are copied at once, on the event loop: copy and hash of 256 KiB take 15 us here and of 4 MiB
#: 240 us, less than planning such a batch takes. The way through worker threads and back costs 30 to 60 us a
#: task, and what is left in Python contends for the interpreter: 64 fragments of 64 KiB took 1.3 instead
#: of 0.9 ms.
INLINE_BYTES = 4 << 20

#: Where processors are few, larger ones are, too, one batch in each turn of the loop: 16 MiB took 1.7 ms
#: with two threads beside the loop and its interpreter's lock, 0.9 ms on it. More processors than this copy
#: quicker than one does, and leave the loop to others. Either way a step ends TURN_S after its first piece
#: began: 8 MiB took up to 14 ms beside exports, of processor time.
FEW_PROCESSORS = 3
#: Of one turn: others wait for a millisecond, and for two where one fragment has twice as much. A longer one
#: goes to the threads. Fewer bytes go in a turn where they lately took longer than TURN_S.
TURN_BYTES, TURN_S = 16 << 20, 0.002
INLINE_S = 0.0015  # of a copy in the step that planned it; planning takes up to 3 ms more beside exports
PIECE_BYTES = 1 << 20  # copied between two looks at the clock


class Mover:
    """Executes copies between tiers. Owned by the event loop.

    `deliver` receives CopyFinished and EdgeMeasured; it is called on the loop, from `start` itself when a
    copy was short enough to run at once.
    """

    def __init__(
        self,
        routes: Mapping[Edge, Route],
        deliver: Callable[[Event], None],
        *,
        max_in_flight: Mapping[Edge, int],
        clock: Callable[[], float],
        takes_turns: bool | None = None,
        shares: BandwidthShares | None = None,
        device: Tier | None = None,
    ) -> None:
        """`device`: the tier of which reads and writes share a device."""
        self._loop = asyncio.get_running_loop()
        self._routes = dict(routes)
        self._deliver = deliver
        self._clock = clock
        self._device = device
        self._takes_turns = num_processors() <= FEW_PROCESSORS if takes_turns is None else takes_turns
        self.shares = shares or BandwidthShares()
        self._lanes = {edge: EdgeQueue(edge, bound, self.shares) for edge, bound in max_in_flight.items()}
        self._jobs: dict[int, QueuedCopy] = {}
        self._stagings: dict[int, Mapping[Tier, Route]] = {}
        self._held: set[Tier] = set()
        self._refused: dict[Tier, Cause] = {}
        self._sequence = itertools.count()
        # Filled by worker threads; deque.append is atomic.
        self._ended: deque[tuple[EdgeQueue, CopyBatch, float, Future[list[CopyOutcome]]]] = deque()
        self._wake_up_sent = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_stopping = False

    # ------------------------------------------------------------------------------ instructions

    def start(self, copy: Copy) -> None:
        """Queue `copy`, or run it at once when it is a short one.

        Ends in exactly one CopyFinished; one that comes when the mover is stopping in none.
        """
        if self._is_stopping:  # an end of it would let the planner begin another one, and so on
            return
        edge = Edge(copy.source, copy.target)
        lane = self._lanes[edge]
        assert copy.items
        assert copy.copy not in self._jobs
        route = self._route(edge, copy.client)
        cause = Cause.SOURCE_GONE if route is None else self._refusal(edge)
        if route is not None and route.inline is not None and copy.target not in self._refused:
            num_bytes = bytes_of(copy.items)
            if num_bytes <= self._inline_bytes(lane, len(copy.items)):
                self._run_inline(lane, copy, route, route.inline, num_bytes)
                return
        job = QueuedCopy(copy, [CopyOutcome(Cause.CANCELLED)] * len(copy.items))
        self._jobs[copy.copy] = job
        self._idle.clear()
        if cause is not None:  # without a route the client died while the planner was deciding
            job.num_open = 1
            self._end(lane, lane.batch(job, 0, len(copy.items), 0, self._sequence), cause)
        else:
            assert route is not None
            self._enqueue(lane, job, route, 0)

    def cancel(self, instruction: CancelCopy) -> None:
        """Drop what is still queued of a copy; what is in flight completes. Unknown copies are ignored:
        they have ended already and their CopyFinished is on its way."""
        job = self._jobs.get(instruction.copy)
        if job is not None:
            lane = self._lanes[Edge(job.copy.source, job.copy.target)]
            for batch in lane.queue.take(lambda batch: batch.job is job):
                self._end(lane, batch, Cause.CANCELLED)

    def hasten(self, instruction: HastenCopy) -> None:
        """Move the queued batches of a copy to their place under this urgency and deadline."""
        job = self._jobs.get(instruction.copy)
        if job is not None:
            job.copy.urgency, job.copy.deadline_at = instruction.urgency, instruction.deadline_at
            lane = self._lanes[Edge(job.copy.source, job.copy.target)]
            lane.put_back(lane.queue.take(lambda batch: batch.job is job))

    # ------------------------------------------------------------------------- staging, pauses, end

    def attach(self, client: int, routes: Mapping[Tier, Route]) -> None:
        """Make a client's staging extent a source, with one route per tier it may be copied to."""
        assert client not in self._stagings
        self._stagings[client] = routes

    def detach(self, client: int) -> None:
        """Forget a client's staging extent.

        Its queued copies end as SOURCE_GONE; those in flight hold a view of the extent, which therefore may
        be closed at once. Idempotent.
        """
        if self._stagings.pop(client, None) is None:
            return
        for edge, lane in self._lanes.items():
            if edge.source is None:
                for batch in lane.queue.take(lambda batch: batch.job.copy.client == client):
                    self._end(lane, batch, Cause.SOURCE_GONE)

    def assume(self, edge: Edge, bandwidth_bytes_per_s: float, latency_s: float, now: float) -> None:
        """Begin with this measurement of an edge, unless copies have been measured already."""
        lane = self._lanes[edge]
        if lane.meter.assume(bandwidth_bytes_per_s, latency_s):
            self._report(lane, now)

    def hold(self, target: Tier) -> None:
        """Start nothing into `target` until `resume`."""
        self._held.add(target)

    def resume(self, target: Tier) -> None:
        """End `hold`."""
        self._held.discard(target)
        self._fill_all()

    def refuse(self, target: Tier, cause: Cause = Cause.TIER_OFFLINE) -> None:
        """End every copy into `target` for this cause until `admit`; those in flight may still land.
        Copies inside a tier that can be read wait: ended so, they would say that what they read is lost."""
        self._refused[target] = cause
        for edge, lane in self._lanes.items():
            if edge.target is target and self._refusal(edge) is not None:
                for batch in lane.queue.take(lambda batch: True):
                    self._end(lane, batch, cause)

    def admit(self, target: Tier) -> None:
        """End `refuse`."""
        self._refused.pop(target, None)
        self._fill_all()

    @property
    def is_busy(self) -> bool:
        """Whether a copy has not ended."""
        return bool(self._jobs)

    async def idle(self) -> None:
        """Wait until every copy has ended."""
        await self._idle.wait()

    async def stop(self) -> None:
        """Cancel what is queued and wait for what is in flight. Nothing starts any more. Idempotent."""
        self._is_stopping = True
        for lane in self._lanes.values():
            for batch in lane.queue.take(lambda batch: True):
                self._end(lane, batch, Cause.CANCELLED)
        await self._idle.wait()

    # --------------------------------------------------------------------------------- what is known

    def statistics(self) -> list[EdgeStatistics]:
        """Return one row per edge."""
        return [lane.statistics() for lane in self._lanes.values()]

    def check_integrity(self) -> list[str]:
        """Audit: in-flight counts within bounds, no lane idle with work, no job forgotten."""
        problems = []
        num_queued: dict[int, int] = {}
        for lane in self._lanes.values():
            name = f"edge {lane.edge.source_label}->{lane.edge.target.label}"
            if not 0 <= lane.num_in_flight <= lane.max_in_flight:
                problems.append(f"{name}: {lane.num_in_flight} batches in flight")
            for batch in lane.queue:
                number = batch.job.copy.copy
                num_queued[number] = num_queued.get(number, 0) + 1
            problems += [f"{name}: {problem}" for problem in lane.queue.check_integrity()]
            if lane.queue and lane.num_in_flight == 0 and not self._is_waiting(lane.edge.target):
                problems.append(f"{name}: {len(lane.queue)} batches queued, none in flight")
        for number, job in self._jobs.items():
            if job.num_open <= 0:
                problems.append(f"copy {number}: ended but not delivered")
            if num_queued.get(number, 0) > job.num_open:
                problems.append(f"copy {number}: more batches queued than open")
        for number in num_queued.keys() - self._jobs.keys():
            problems.append(f"copy {number}: delivered with batches still queued")
        if self._idle.is_set() != (not self._jobs):
            problems.append(f"idle={self._idle.is_set()} with {len(self._jobs)} copies")
        return problems

    # ------------------------------------------------------------------------------------- private

    def _route(self, edge: Edge, client: int) -> Route | None:
        if edge.source is not None:
            return self._routes[edge]
        routes = self._stagings.get(client)
        return None if routes is None else routes[edge.target]

    def _inline_bytes(self, lane: EdgeQueue, num_items: int) -> int:
        """Return how much a copy may have that runs at once: more if it is one fragment, which would have a
        turn of the loop for itself."""
        if not self._takes_turns:
            return INLINE_BYTES
        return _turn_bytes(lane) * (2 if num_items == 1 else 1)

    def _run_inline(self, lane: EdgeQueue, copy: Copy, route: Route, run: Inline, num_bytes: int) -> None:
        """Copy here and now, without a queue: for small puts its books cost more than the copy. What is left
        after INLINE_S is queued."""
        items = copy.items[:]
        began_at = self._clock()
        lane.meter.began(began_at)
        outcomes = self._in_time(items, run, began_at + INLINE_S)
        ended_at, num_done = self._clock(), len(outcomes)
        tenant = self.shares.tenant(items[0].label.namespace_id)
        if num_done < len(items):
            num_bytes = bytes_of(items[:num_done])
        if lane.count(outcomes, tenant, began_at, ended_at, num_bytes):
            self._report(lane, ended_at)
        if num_done == len(items):
            self._deliver(CopyFinished(copy.copy, outcomes))
            return
        left = [CopyOutcome(Cause.CANCELLED)] * (len(items) - num_done)
        job = self._jobs[copy.copy] = QueuedCopy(copy, outcomes + left)
        self._idle.clear()
        self._enqueue(lane, job, route, num_done)

    def _in_time(self, items: Sequence[CopyItem], run: Inline, until: float) -> list[CopyOutcome]:
        """Copy items here and now, a piece at least, and no more after `until`. Returns their outcomes."""
        outcomes: list[CopyOutcome] = []
        while len(outcomes) < len(items):
            start = end = len(outcomes)
            num_bytes = 0
            while end < len(items) and num_bytes < PIECE_BYTES:
                num_bytes += items[end].label.raw_length
                end += 1
            outcomes += run(items[start:end])
            if self._clock() >= until:
                break
        return outcomes

    def _enqueue(self, lane: EdgeQueue, job: QueuedCopy, route: Route, start: int) -> None:
        """Queue what a copy has from item `start` on."""
        is_in_turns = self._takes_turns and route.inline is not None
        lane.enqueue(job, self._sequence, _turn_bytes(lane) if is_in_turns else route.batch_bytes, start)
        self._fill(lane)

    def _refusal(self, edge: Edge) -> Cause | None:
        """Return why copies of an edge end before they start; None: they do not, or wait inside a tier."""
        cause = self._refused.get(edge.target)
        return cause if edge.source is not edge.target or cause is Cause.TIER_OFFLINE else None

    def _is_waiting(self, target: Tier) -> bool:
        """Whether nothing is started into a tier. What is queued while it is refused is of itself."""
        return target in self._held or target in self._refused

    def _fill_all(self) -> None:
        for lane in self._lanes.values():
            self._fill(lane)

    def _fill(self, lane: EdgeQueue) -> None:
        """Start queued batches while the lane has room."""
        bound = lane.max_in_flight
        if self._is_read_for_a_request(lane.edge.target):
            bound = min(bound, MAX_WRITES_BESIDE_READS)
        while lane.queue and lane.num_in_flight < bound and not self._is_waiting(lane.edge.target):
            batch = lane.queue.pop()
            route = self._route(lane.edge, batch.job.copy.client)
            assert route is not None, "detach takes what is queued"
            lane.begin(batch, self._clock())
            if self._takes_turns and route.inline is not None and _fits_turns(lane, batch):
                self._loop.call_soon(self._take_turn, lane, batch, route.inline)
                return
            future = route.copier.start(batch.items)
            future.add_done_callback(partial(self._on_done, lane, batch))

    def _is_read_for_a_request(self, tier: Tier) -> bool:
        """Whether this is the device that does reads and writes, and it reads what a request waits for."""
        return tier is self._device and any(
            lane.num_waited_for for edge, lane in self._lanes.items() if edge.source is tier
        )

    def _take_turn(self, lane: EdgeQueue, batch: CopyBatch, copy: Inline) -> None:
        """On the loop: copy one batch here and now, as far as TURN_S goes; others are served before more."""
        items = batch.items
        try:
            outcomes = self._in_time(items, copy, self._clock() + TURN_S)
        except Exception as failure:
            outcomes = _of_defect(batch, failure)
        if len(outcomes) < len(items):
            middle = batch.start + len(outcomes)
            left_bytes = bytes_of(items[len(outcomes) :])
            left = replace(batch, start=middle, num_bytes=left_bytes)
            batch.job.num_open += 1
            batch.stop, batch.num_bytes = middle, batch.num_bytes - left_bytes
            self._put_back(lane, left)
        self._settle(lane, batch, outcomes, self._clock())
        self._fill(lane)

    def _put_back(self, lane: EdgeQueue, batch: CopyBatch) -> None:
        """Queue what is left of a batch, unless what ends queued ones came while it was in flight."""
        if self._route(lane.edge, batch.job.copy.client) is None:
            self._end(lane, batch, Cause.SOURCE_GONE)
        elif (cause := self._refusal(lane.edge)) is not None:
            self._end(lane, batch, cause)
        elif self._is_stopping:
            self._end(lane, batch, Cause.CANCELLED)
        else:
            lane.queue.refund(batch)
            lane.put_back([batch])

    def _on_done(self, lane: EdgeQueue, batch: CopyBatch, future: "Future[list[CopyOutcome]]") -> None:
        """Called by a worker thread: remember the completion, wake the loop once for all of them."""
        self._ended.append((lane, batch, self._clock(), future))
        if not self._wake_up_sent:
            self._wake_up_sent = True
            self._loop.call_soon_threadsafe(self._gather)

    def _gather(self) -> None:
        """On the loop: settle every batch that has ended since the last time, then start others."""
        self._wake_up_sent = False  # before looking: a completion after this line sends its own wake-up
        try:
            while self._ended:
                lane, batch, ended_at, future = self._ended.popleft()
                failure = future.exception()
                outcomes = future.result() if failure is None else _of_defect(batch, failure)
                self._settle(lane, batch, outcomes, ended_at)
        except BaseException:  # of a planner that failed: `stop` waits for the others all the same
            self._loop.call_soon(self._gather)
            raise
        self._fill_all()  # the end of reads lets others begin

    def _settle(
        self, lane: EdgeQueue, batch: CopyBatch, outcomes: list[CopyOutcome], ended_at: float
    ) -> None:
        """Record the outcomes of a batch that was in flight."""
        assert len(outcomes) == batch.stop - batch.start
        lane.end(batch)
        batch.job.outcomes[batch.start : batch.stop] = outcomes
        if lane.count(outcomes, batch.tenant, batch.began_at, ended_at, batch.num_bytes):
            self._report(lane, ended_at)
        self._close(batch.job)

    def _end(self, lane: EdgeQueue, batch: CopyBatch, cause: Cause) -> None:
        """End a batch that was never started."""
        num_items = batch.stop - batch.start
        batch.job.outcomes[batch.start : batch.stop] = [CopyOutcome(cause)] * num_items
        lane.num_failed += num_items
        self._close(batch.job)

    def _close(self, job: QueuedCopy) -> None:
        """Count a batch of `job` as ended; deliver the job when it was the last."""
        job.num_open -= 1
        if job.num_open == 0:
            del self._jobs[job.copy.copy]
            if not self._jobs:
                self._idle.set()
            self._deliver(CopyFinished(job.copy.copy, job.outcomes))

    def _report(self, lane: EdgeQueue, now: float) -> None:
        """Tell the planner what an edge between tiers does lately."""
        source, target = lane.edge
        if source is not None and now - lane.measured_at >= MEASUREMENT_INTERVAL_S:
            lane.measured_at = now
            meter = lane.meter
            self._deliver(EdgeMeasured(source, target, meter.bandwidth_bytes_per_s, meter.latency_s))


def _turn_bytes(lane: EdgeQueue) -> int:
    """Return what is copied in one turn of the loop: others copy, too, and memory is shared with them."""
    speed = lane.meter.bandwidth_bytes_per_s or TURN_BYTES / TURN_S
    return max(INLINE_BYTES, min(TURN_BYTES, int(speed * TURN_S)))


def _fits_turns(lane: EdgeQueue, batch: CopyBatch) -> bool:
    """Return whether each item of a batch is short enough for the loop: at least one goes in a turn."""
    return max([item.label.raw_length for item in batch.items]) <= 2 * _turn_bytes(lane)


def bytes_of(items: Sequence[CopyItem]) -> int:
    """Return the raw bytes of items."""
    return sum([item.label.raw_length for item in items])  # a generator takes a call each


def num_processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def _of_defect(batch: CopyBatch, failure: BaseException) -> list[CopyOutcome]:
    """Return the outcome of an engine that raised what it must not: for the planner, a failed copy.

    What it read from is not to be tried again, unless it was only memory that was short.
    """
    log.error("copy %d: the copier raised", batch.job.copy.copy, exc_info=failure)
    is_short = isinstance(failure, MemoryError) or getattr(failure, "errno", 0) == errno.ENOMEM
    return [CopyOutcome(Cause.NO_SPACE if is_short else Cause.IO_ERROR)] * (batch.stop - batch.start)
