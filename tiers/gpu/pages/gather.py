"""GatherCopier: puts from a runtime's pages. Implements `Copier` for the edge from there to
dram.

To the planner the pages are one more staging extent of a client: a copy's source is a number, here of a put
and an offset in its bytes, which `open_put` hands out. The device copies from the pages straight into the
reserved, pinned slot; when its event says so, host threads hash *the slot*, so what was hashed is what is
stored, whatever the runtime does meanwhile. Hashing on the device was rejected: xxh3 is made for wide CPU
registers, and the bytes come by here anyway.

A lost device moves no byte any more: its copies have failed. Any other way of never hearing of a copy leaves
a question, whether the device still writes. Such slots are kept, their futures open, until it is shut down
(`give_up`); the planner then hears of a failed copy and reuses them.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from itertools import count
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ...base import Cause, CopyError, CopyItem, CopyOutcome, MemoryEngine, landed
from ...block import Tier
from ...memory.places import I64, column_of
from ...payload import checksum
from ..device.contract import Addresses, CopyPieces, Device, DeviceError, DeviceFault, Event, Stream
from .kernels import PieceCopier, Way
from .pages import RegisteredPages

log = logging.getLogger(__name__)

PUT_BYTES = 1 << 44  # offsets that belong to one put

AddressesOf = Callable[[Sequence[int] | I64], Addresses]

_group_and_length = attrgetter("group", "raw_length")


class _GatherBatch:
    """One call of `start`, in columns: (n,) each."""

    def __init__(self, items: Sequence[CopyItem]) -> None:
        sources, self.places, labels = zip(*items, strict=True)
        groups, self.lengths = zip(*map(_group_and_length, labels), strict=True)
        self.numbers, self.offsets = np.divmod(column_of(sources), PUT_BYTES)
        self.targets, self.groups = column_of(self.places), column_of(groups)
        self.ids: dict[int, I64] = {}  # pages of each put, by its number
        self.future: Future[list[CopyOutcome]] = Future()
        self.future.set_running_or_notify_cancel()

    def end_all(self, cause: Cause) -> None:
        """Complete: every item ends with `cause`."""
        self.future.set_result([CopyOutcome(cause)] * len(self.places))


class PageLane(NamedTuple):
    """A device with what copies from and to pages need there.

    `enqueuer` is the one thread that gives the device work. `slots` return its addresses of places, by tier.
    """

    device: Device
    enqueuer: Executor
    slots: Mapping[Tier, AddressesOf]
    copier: PieceCopier


class GatherCopier:
    """Puts of one registration into `memory`, which is dram, in the order of their batches on `stream`.

    `hashers` are shared. `on_trouble` hears of a broken device, on any thread.
    """

    def __init__(
        self,
        pages: RegisteredPages,
        lane: PageLane,
        stream: Stream,
        memory: MemoryEngine,
        hashers: Executor,
        on_trouble: Callable[[DeviceError], None],
    ) -> None:
        self._pages = pages
        self._lane = lane
        self._stream = stream
        self._memory = memory
        self._hashers = hashers
        self._on_trouble = on_trouble
        self._puts: dict[int, I64] = {}
        self._numbers = count(1)
        self._in_doubt: list[_GatherBatch] = []
        self.is_closed = False

    def open_put(self, ids: I64) -> int:
        """Return the source of byte 0 of a put from pages `ids` (num_blocks, pages_per_block).

        They may be read from now on, until `close_put`."""
        number = next(self._numbers)
        self._puts[number] = ids
        return number * PUT_BYTES

    def close_put(self, source: int) -> None:
        """Nothing more will be copied from this put."""
        self._puts.pop(source // PUT_BYTES, None)

    def start(self, items: Sequence[CopyItem]) -> "Future[list[CopyOutcome]]":
        """Begin copying `items`; outcomes come in their order, with the checksums of what landed."""
        batch = _GatherBatch(items)
        puts = set(batch.numbers.tolist())
        if self.is_closed or not puts <= self._puts.keys():
            batch.end_all(Cause.SOURCE_GONE)
        else:
            batch.ids = {number: self._puts[number] for number in puts}
            self._lane.enqueuer.submit(self._enqueue, batch)
        return batch.future

    def give_up(self) -> None:
        """The device was shut down: nothing writes any more. What was in doubt has failed."""
        in_doubt, self._in_doubt = self._in_doubt, []
        for batch in in_doubt:
            batch.end_all(Cause.IO_ERROR)

    # ---------------------------------------------------------------------------- the enqueuer's thread

    def _enqueue(self, batch: _GatherBatch) -> None:
        """Give the stream the copies of a batch, and ask to be told when they have landed."""
        is_under_way = False
        try:
            if self.is_closed:
                return batch.end_all(Cause.SOURCE_GONE)
            pieces = self._pieces(batch)
            event = self._lane.device.take_event()
            is_under_way = True
            self._lane.copier.copy(self._stream, pieces, Way.DOWN)
            self._stream.record(event)
            self._lane.device.when_done(event, partial(self._landed, batch, event))
        except DeviceError as error:
            self._broke(batch, error, is_under_way)
        except CopyError as error:  # a slot that cannot be pinned
            batch.end_all(error.cause)
        except Exception:  # a defect; the memory is what matters now
            log.exception("put from registered pages failed")
            if is_under_way:
                self._in_doubt.append(batch)
            else:
                batch.end_all(Cause.IO_ERROR)
        return None

    def _pieces(self, batch: _GatherBatch) -> CopyPieces:
        """Return the copies of a batch. Raises CopyError."""
        targets = self._lane.slots[Tier.DRAM](batch.targets)
        blocks = batch.offsets // self._pages.table.geometry.block_bytes
        if len(batch.ids) == 1:
            [ids] = batch.ids.values()
            ids = ids[blocks]
        else:
            ids = np.empty((len(blocks), self._pages.table.pages_per_block), np.int64)
            for number, of_put in batch.ids.items():
                rows = np.flatnonzero(batch.numbers == number)
                ids[rows] = of_put[blocks[rows]]
        return self._pages.gather(batch.groups, targets, ids)

    def _broke(self, batch: _GatherBatch, error: DeviceError, may_write: bool) -> None:
        """The device failed. Keep the slots where it may still write them."""
        self._on_trouble(error)
        if may_write and error.fault is not DeviceFault.LOST:
            self._in_doubt.append(batch)
        else:
            batch.end_all(Cause.SOURCE_GONE)

    def _landed(self, batch: _GatherBatch, event: Event, error: DeviceError | None) -> None:
        """On a thread of the device's: hand what landed to the hashers."""
        if error is not None:
            return self._broke(batch, error, may_write=True)
        self._lane.device.recycle(event)
        try:
            self._hashers.submit(self._hash, batch)
        except RuntimeError:  # shut down: the daemon is going
            batch.end_all(Cause.TIER_OFFLINE)
        return None

    def _hash(self, batch: _GatherBatch) -> None:
        """Take the checksum of every slot, which nothing else reads or writes yet."""
        try:
            views = map(self._memory.view, batch.places, batch.lengths)
            batch.future.set_result(landed([*map(checksum, views)]))
        except Exception as defect:  # reaches the mover through the future
            batch.future.set_exception(defect)
