"""Delivery: one get straight into a runtime's pages, from the lease to the device's word that it is done.

    acquire (the registration's own client) -> the runtime's event, if it named one -> fragments as they
    become readable, first layers first -> scatter on the registration's stream, an event per whole layer
    group -> last event done -> release, reply

The lease ends when the device says so and not before: not when the copies were enqueued, not when the runtime
cancels, dies or is silent. A cancelled delivery enqueues nothing more and waits for what it has enqueued;
only then are its pages the runtime's again, and only then is it answered.

What the device did not confirm is not promised: a failed delivery brought no block.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from ...tiers.base import CopyError
from ...tiers.block import STANDARD_TIERS, Tier
from ...tiers.gpu.device.contract import CopyPieces, DeviceError, DeviceFault, Event
from ...tiers.gpu.pages.kernels import Way
from ...tiers.memory.places import I64
from ...v1 import direct_pb2
from ..appliance import Appliance
from ..core.events import ReleaseRequested
from ..core.results import AcquireResult
from ..errors import ApplianceError
from ..replies import AnswerQueue, Replies
from ..security.client_registry import ConnectedClient
from .mapping import PageMapping
from .runtime_events import has_happened

log = logging.getLogger(__name__)

CANCELLED, DEVICE_FAILED, EVENT_LATE = "cancelled", "device_failed", "event_late"


class Ready(NamedTuple):
    """Fragments that became readable, in columns (n,) int64."""

    blocks: I64
    groups: I64
    tiers: I64
    places: I64

    def runs(self, *, by_group: bool) -> Iterator[I64]:
        """Yield the rows of each tier, or of each layer group and tier; first layers first."""
        if not len(self.blocks):
            return
        major, minor = (self.groups, self.tiers) if by_group else (self.tiers, self.groups)
        order = np.lexsort((minor, major))
        is_last = np.diff(self.tiers[order]) != 0
        if by_group:
            is_last |= np.diff(self.groups[order]) != 0
        yield from np.split(order, np.flatnonzero(is_last) + 1)


class PageGet(NamedTuple):
    """What a runtime asked for: blocks of a chain, from `first_block` on, in pages of its own."""

    first_block: int
    ids: I64  # (blocks, pages per block)
    after: Event | None  # of the runtime, which uses the pages until it has happened
    event_set: int | None  # of ours, to tell when each layer group is complete
    pack_tiers: Callable[[bytes], bytes]  # to the wire's numbers


class PageDelivery:
    """One get. `task` returns its last answer when the pages are the runtime's again; `answers` the others.

    `client` is the registration's own."""

    def __init__(
        self,
        mapping: PageMapping,
        client: ConnectedClient,
        appliance: Appliance,
        replies: Replies[AcquireResult],
        asked: PageGet,
        counters: Counter[str],
    ) -> None:
        self.answers: AnswerQueue[direct_pb2.GetPagesResponse] = AnswerQueue()
        self.event_set = asked.event_set
        self._mapping = mapping
        self._client = client
        self._appliance = appliance
        self._replies = replies
        self._asked = asked
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._cancelled: asyncio.Future[None] = self._loop.create_future()
        self._given_up: asyncio.Future[None] = self._loop.create_future()
        self._result: AcquireResult | None = None  # the last one
        self._first: AcquireResult | None = None  # has what is known of the whole chain
        self._arrived = np.zeros((len(asked.ids), mapping.geometry.num_groups), bool)
        self._num_announced = 0  # layer groups
        self._done: Event | None = None  # taken before the stream gets work of ours
        self._may_write = asked.after is None  # whether the runtime is done with the pages
        self._has_lease = False  # fragments were reported under it
        self._failure = ""
        self.task = self._loop.create_task(self._run())

    def cancel(self) -> None:
        """Enqueue nothing more; it ends when the device is done with what it was given. Idempotent."""
        if not self._cancelled.done():
            self._cancelled.set_result(None)

    def give_up(self) -> None:
        """The device was shut down: nothing moves any more."""
        if not self._given_up.done():
            self._given_up.set_result(None)

    # ---------------------------------------------------------------------------------------- its life

    async def _run(self) -> direct_pb2.GetPagesResponse | ApplianceError:
        refusal: ApplianceError | None = None
        try:
            while (result := await self._next()) is not None:
                self._note(result)
                if not await self._pages_are_free():
                    break
                await self._take(result)
        except ApplianceError as problem:
            refusal = problem
        except DeviceError as problem:
            self._fail(problem)
        except CopyError as problem:  # a slot that cannot be pinned
            self._counters[f"direct_get_{problem.cause.value}"] += 1
            self._failure = DEVICE_FAILED
        except Exception:
            log.exception("delivery into %s failed", self._client.name)
            self._failure = DEVICE_FAILED
        is_quiet = True
        try:
            await self._device_done()
        except DeviceError as problem:
            self._fail(problem)
            is_quiet = problem.fault is DeviceFault.LOST
        except Exception:
            log.exception("it is not known when copies into %s end", self._client.name)
            is_quiet = False
        if not is_quiet:
            self._failure = DEVICE_FAILED
            self._counters["direct_gets_in_doubt"] += 1
            await self._given_up
        if self._cancelled.done():
            self._failure = self._failure or CANCELLED
        self._let_go()
        return refusal or self._last_answer()

    async def _next(self) -> AcquireResult | None:
        """Return the planner's next answer; None when there is none, or it is not wanted any more."""
        reply = asyncio.ensure_future(anext(self._replies, None))
        either: set[asyncio.Future[Any]] = {reply, self._cancelled}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._cancelled.done():
            if not reply.done():
                reply.cancel()
            elif reply.exception() is None:
                self._note(reply.result())
            return None
        return reply.result()

    async def _pages_are_free(self) -> bool:
        """Wait for the event that the runtime named; whether it has happened. Raises DeviceError."""
        if not self._may_write:
            assert self._asked.after is not None
            device = self._mapping.lane.device
            self._may_write = await has_happened(device, self._asked.after, self._cancelled)
            if not self._may_write and not self._cancelled.done():
                self._failure = EVENT_LATE
        return self._may_write

    def _note(self, result: AcquireResult | None) -> None:
        if result is not None:
            self._result = result
            self._first = self._first or result
            self._has_lease |= bool(result.ready)

    async def _take(self, result: AcquireResult) -> None:
        """Enqueue what became readable, tell which layer groups are under way as a whole."""
        found, first_block = result.ready, self._asked.first_block
        columns = (found.blocks, found.groups, found.tiers, found.places)
        ready = Ready(*(np.array(column, np.int64) for column in columns))
        self._arrived[ready.blocks - first_block, ready.groups] = True
        wanted = self._arrived[: max(0, result.num_blocks - first_block)]
        whole = [bool(column.all()) for column in wanted.T] if len(wanted) else []
        num_whole = (*whole, False).index(False)
        complete = range(self._num_announced, num_whole)
        if result.ready or (self.event_set is not None and len(complete)):
            await self._loop.run_in_executor(self._mapping.lane.enqueuer, self._enqueue, ready, complete)
        for group in complete:
            if self.event_set is None:
                break
            number = self.event_set * self._mapping.geometry.num_groups + group
            answer = direct_pb2.GetPagesResponse(num_blocks=result.num_blocks, group=group, event=number)
            self.answers.add(answer, is_last=False)
        self._num_announced = max(self._num_announced, num_whole)

    def _enqueue(self, ready: Ready, complete: range) -> None:
        """Scatter fragments, layer group after layer group. In the enqueuer's thread.

        Raises DeviceError, CopyError."""
        mapping, stream = self._mapping, self._mapping.loads
        copies = [self._pieces(ready, rows) for rows in ready.runs(by_group=self.event_set is not None)]
        if self._done is None:
            self._done = mapping.lane.device.take_event()
        events = mapping.event_sets[self.event_set] if self.event_set is not None else []
        waiting = list(complete) if events else []
        for group, tier, pieces in copies:
            while waiting and waiting[0] < group:
                stream.record(events[waiting.pop(0)])
            way = Way.WITHIN if tier is Tier.HBM else Way.UP
            mapping.lane.copier.copy(stream, pieces, way)
        for group in waiting:
            stream.record(events[group])

    def _pieces(self, ready: Ready, rows: I64) -> tuple[int, Tier, CopyPieces]:
        """Return the first layer group, the tier and the copies of rows of one tier. Raises CopyError."""
        groups, tier = ready.groups[rows], STANDARD_TIERS[int(ready.tiers[rows[0]])]
        sources = self._mapping.lane.slots[tier](ready.places[rows])
        ids = self._asked.ids[ready.blocks[rows] - self._asked.first_block]
        first, pages = int(groups[0]), self._mapping.pages
        has_one = self.event_set is not None  # layer group: the templates of others are not needed yet
        return first, tier, pages.scatter(first if has_one else groups, sources, ids)

    async def _device_done(self) -> None:
        """Wait until the device has done everything it was given.

        Raises DeviceError: a lost device moves no byte any more; with any other error that is not known, and
        the lease stays."""
        event, device = self._done, self._mapping.lane.device
        if event is None:
            return
        done: asyncio.Future[DeviceError | None] = self._loop.create_future()

        def tell(error: DeviceError | None) -> None:
            if error is None:
                device.recycle(event)
            self._loop.call_soon_threadsafe(done.set_result, error)

        def ask() -> None:
            self._mapping.loads.record(event)
            device.when_done(event, tell)

        await self._loop.run_in_executor(self._mapping.lane.enqueuer, ask)
        error = await done
        if error is not None:
            raise error

    def _let_go(self) -> None:
        """End the lease: nothing reads its slots any more."""
        with suppress(ApplianceError):  # answers that were not taken may name it
            for result in self._replies.take():
                self._note(result)
        if not self._replies.ended:
            self._appliance.abandon(self._replies)
        elif self._result is not None and self._has_lease:
            self._appliance.step(ReleaseRequested(None, self._client.id, [self._result.lease_id]))

    def _fail(self, problem: DeviceError) -> None:
        if self._failure != DEVICE_FAILED:
            log.error("delivery into %s: %s", self._client.name, problem)
            self._counters[f"direct_get_device_{problem.fault.value}"] += 1
        self._failure = DEVICE_FAILED

    def _last_answer(self) -> direct_pb2.GetPagesResponse:
        result, first = self._result, self._first
        answer = direct_pb2.GetPagesResponse(last=True)
        if result is None or first is None or self._failure:
            answer.reason = self._failure
            self._counters[f"direct_gets_{self._failure or 'unanswered'}"] += 1
            return answer
        answer.num_blocks = result.num_blocks
        answer.tiers = self._asked.pack_tiers(first.tiers)
        answer.num_stored = first.num_stored
        answer.reason = first.reason
        num_loaded = max(0, result.num_blocks - self._asked.first_block)
        self._counters["direct_gets"] += 1
        self._counters["direct_get_blocks"] += num_loaded
        self._counters["direct_get_bytes"] += num_loaded * self._mapping.geometry.block_bytes
        return answer
