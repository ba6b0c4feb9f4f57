"""DeviceCopier: copies between places that a device can address, one edge each, completed by events.

A batch is one call: its fragments become columns of addresses, neighbours become one piece, and the device's
own DMA does the rest while no thread of ours does anything. The order of things is what matters here:

    event taken -> order after every flight that touches the same places -> copy -> event recorded -> (told)
    -> identity of the source compared again -> (checksum of the landed copy) -> the future completes

The event is taken before anything is enqueued, so that nothing is ever under way of which nobody will be
told. The future completes only after the device said so; whoever owns a place gives it back after that and
not before (I-6). Cancelling the future has no effect, as in HostCopier and for the same reason."""

import logging
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ...v1.shm import extent_of
from ..base import Cause, CopyError, CopyItem, CopyOutcome
from ..block import FragmentLabel, Tier
from ..payload import checksum
from .device import DeviceError, DeviceFault, Event, Pieces, Stream
from .flights import Flight, keys
from .hbm import HbmEngine
from .pinned import Pinned, as_copy_error

log = logging.getLogger(__name__)


class End(Protocol):
    """A tier whose places the device addresses: pinned warm memory, or the device's own."""

    @property
    def tier(self) -> Tier:
        """Which tier it is."""
        ...

    def address_of(self, place: int) -> int:
        """Return where the slot at `place` begins. Raises CopyError."""
        ...

    def verify(self, place: int, label: FragmentLabel, generation: int | None = None) -> int:
        """Return the generation of what is published there under `label`. Raises CopyError."""
        ...


class _Batch:
    """One call of `start`: what is asked, what came of it, and which items were begun."""

    def __init__(self, items: Sequence[CopyItem]) -> None:
        self.items = items
        self.outcomes = [CopyOutcome(Cause.CANCELLED)] * len(items)
        self.opened: list[int] = []  # positions of items on their way
        self.generations: list[int] = []  # of their sources
        self.future: Future[list[CopyOutcome]] = Future()
        self.future.set_running_or_notify_cancel()  # from now on cancel() answers no

    @property
    def begun(self) -> list[CopyItem]:
        """The items on their way."""
        return [self.items[position] for position in self.opened]

    def end_all(self, cause: Cause) -> None:
        """What was on its way ends with `cause`; complete."""
        for position in self.opened:
            self.outcomes[position] = CopyOutcome(cause)
        self.future.set_result(self.outcomes)


class DeviceCopier:
    """Implements `Copier` for the edge from `source` to `target`, on the device of `engine`.

    `enqueuer` runs what a batch costs the host, tens of microseconds (milliseconds where warm memory must be
    registered first). With `hashers` every fragment that landed in `target`, which is warm memory then, is
    hashed there and compared before it counts. Keeps `num_streams` streams of the device until the engine is
    closed. Raises DeviceError (REFUSED) when there are none left."""

    def __init__(
        self,
        engine: HbmEngine,
        source: End,
        target: End,
        enqueuer: Executor,
        *,
        hashers: Executor | None = None,
        num_streams: int = 2,
    ) -> None:
        assert hashers is None or isinstance(target, Pinned), "only what lies in host memory can be hashed"
        self._engine = engine
        self._source = source
        self._target = target
        self._enqueuer = enqueuer
        self._hashers = hashers
        self._streams: list[Stream] = []
        self._next = 0
        engine.before_close.append(self._give_streams)
        for _ in range(num_streams):
            stream = engine.device.take_stream()
            if stream is None:
                raise DeviceError(
                    DeviceFault.REFUSED, "no streams left for this edge; ask the device for more"
                )
            self._streams.append(stream)

    def start(self, items: Sequence[CopyItem]) -> "Future[list[CopyOutcome]]":
        """Begin copying `items`; outcomes come in their order, on a thread of the device's."""
        batch = _Batch(items)
        try:
            self._enqueuer.submit(self._launch, batch)
        except RuntimeError:  # shut down: the daemon is going
            batch.future.set_result(batch.outcomes)
        return batch.future

    # ---------------------------------------------------------------------------------------- on its way

    def _launch(self, batch: _Batch) -> None:
        """Enqueue a batch. Every way out of here completes its future, now or when the device has."""
        try:
            pieces = self._open(batch)
            if pieces is None:
                batch.future.set_result(batch.outcomes)
                return
            stream = self._streams[self._next % len(self._streams)]
            self._next += 1
            self._enqueue(batch, stream, stream.record(), pieces)
        except DeviceError as error:
            self._fail(batch, error)
        except BaseException as bug:  # a programmer's error reaches the caller through the future
            batch.future.set_exception(bug)

    def _open(self, batch: _Batch) -> Pieces | None:
        """Compare identities and find addresses; None when no item is left."""
        columns: list[tuple[int, int, int, int, int]] = []
        for position, item in enumerate(batch.items):
            try:
                generation = self._source.verify(item.source, item.label)
                source = self._source.address_of(item.source)
                target = self._target.address_of(item.target)
            except CopyError as error:
                batch.outcomes[position] = CopyOutcome(error.cause)
                continue
            length = item.label.raw_length
            columns.append((source, target, length, extent_of(item.source), extent_of(item.target)))
            batch.opened.append(position)
            batch.generations.append(generation)
        return coalesce(np.array(columns, np.uint64)) if columns else None

    def _enqueue(self, batch: _Batch, stream: Stream, event: Event, pieces: Pieces) -> None:
        """From here on the device may touch the places; only `_landed` ends that."""
        device, flights, items = self._engine.device, self._engine.flights, batch.begun
        reads = keys(self._source.tier, (item.source for item in items))
        writes = keys(self._target.tier, (item.target for item in items))
        flight = Flight(stream, event, reads, writes)
        refused: DeviceError | None = None
        flights.begin(flight)
        try:
            try:
                stream.copy(pieces)
            except DeviceError as error:
                if error.fault is DeviceFault.LOST:
                    raise
                refused = error  # some pieces may be under way: wait for them all the same
            stream.record(event)
            device.when_done(event, partial(self._landed, batch, flight, refused))
        except BaseException:  # lost: nothing of it moves any more
            flights.end(flight)
            device.recycle(event)
            raise

    def _landed(
        self, batch: _Batch, flight: Flight, refused: DeviceError | None, error: DeviceError | None
    ) -> None:
        """The device is done with a flight, or will never say. On a thread of the device's."""
        self._engine.flights.end(flight)
        self._engine.device.recycle(flight.event)
        if error is not None or refused is not None:
            self._fail(batch, error or refused)
        elif self._hashers is None:
            self._settle(batch)
        else:
            try:
                self._hashers.submit(self._settle, batch)
            except RuntimeError:
                batch.end_all(Cause.CANCELLED)

    def _settle(self, batch: _Batch) -> None:
        """Take over what landed, after a second look at each source and, if wanted, at each copy."""
        try:
            num_bytes = 0
            for position, generation in zip(batch.opened, batch.generations, strict=True):
                source, target, label = batch.items[position]
                try:
                    self._source.verify(source, label, generation)
                    if self._hashers is not None:
                        landed = cast(Pinned, self._target).engine.view(target, label.raw_length)
                        if checksum(landed) != label.checksum:
                            raise CopyError(Cause.WRONG_CHECKSUM, f"hbm slot {source:#x}")
                    batch.outcomes[position] = CopyOutcome(None, label.checksum)
                    num_bytes += label.raw_length
                except CopyError as error:
                    log.warning("copy from or to hbm: %s", error)
                    batch.outcomes[position] = CopyOutcome(error.cause)
            if self._source.tier is Tier.HBM:
                self._engine.count_reads(len(batch.opened), num_bytes)
            if self._target.tier is Tier.HBM:
                self._engine.count_writes(len(batch.opened), num_bytes)
            batch.future.set_result(batch.outcomes)
        except BaseException as bug:
            batch.future.set_exception(bug)

    def _fail(self, batch: _Batch, error: DeviceError | None) -> None:
        assert error is not None
        if error.fault is DeviceFault.LOST:
            hot = [item.source for item in batch.begun if self._source.tier is Tier.HBM]
            hot += [item.target for item in batch.begun if self._target.tier is Tier.HBM]
            self._engine.lost(str(error), hot)
        else:
            log.warning("copy from or to hbm: %s", error)
        batch.end_all(as_copy_error(error).cause)

    def _give_streams(self) -> None:
        while self._streams:
            self._engine.device.give_stream(self._streams.pop())


def coalesce(columns: NDArray[np.uint64]) -> Pieces:
    """Merge neighbours: rows of (source, target, length, source extent, target extent) whose bytes follow
    each other in source *and* target become one piece, but never across extents, which are registered one by
    one."""
    source, target, length, *extents = columns[np.argsort(columns[:, 0], kind="stable")].T
    follows = (source[1:] == source[:-1] + length[:-1]) & (target[1:] == target[:-1] + length[:-1])
    for extent in extents:
        follows &= extent[1:] == extent[:-1]
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    lengths = np.add.reduceat(length, first).astype(np.int64)
    return Pieces(np.ascontiguousarray(source[first]), np.ascontiguousarray(target[first]), lengths)
