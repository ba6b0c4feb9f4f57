"""DeviceCopier: copies between places that a device can address, one edge each, completed by events.

A batch is one call: its fragments become columns of addresses, neighbours become one piece, and the device's
own DMA does the rest while no thread of ours does anything. The order of things is what matters here:

    order after every flight that touches the same places (flights.py) -> copy -> (told)
    -> identity of the source compared again -> (checksum of the landed copy) -> the future completes

The future completes only after the device said so; the planner gives a place back after that and not before
(I-6). Cancelling the future has no effect, as in HostCopier and for the same reason."""

import logging
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ..base import Cause, CopyError, CopyItem, CopyOutcome, landed
from ..block import Tier
from ..memory.headers import LabelColumns
from ..memory.places import I64, column_of, extents_of
from ..payload import checksum
from .device.contract import Addresses, CopyPieces, DeviceError, DeviceFault, Stream
from .device.flights import TouchedPlaces
from .device.pinned import Pinned, as_copy_error
from .hbm import HbmEngine

log = logging.getLogger(__name__)

NUM_STREAMS = 2  # of an edge: one copies while the other is given its next batch


#: A tier with places that the device addresses: its own memory, or pinned host memory.
DeviceEnd: TypeAlias = HbmEngine | Pinned


class _DeviceBatch:
    """One call of `start`: what is asked, what came of it, and which items were begun."""

    def __init__(self, items: Sequence[CopyItem]) -> None:
        self.items = items
        self.outcomes = [CopyOutcome(Cause.CANCELLED)] * len(items)
        self.opened: Sequence[int] = ()  # positions of items on their way
        self.generations: Sequence[int] | NDArray[np.uint64] = ()  # of their sources
        self.columns: _Columns | None = None  # of the items on their way
        self.future: Future[list[CopyOutcome]] = Future()
        self.future.set_running_or_notify_cancel()  # from now on cancel() answers no

    def end_all(self, cause: Cause) -> None:
        """What was on its way ends with `cause`; complete."""
        for position in self.opened:
            self.outcomes[position] = CopyOutcome(cause)
        self.future.set_result(self.outcomes)


class _Columns:
    """The items of a batch in columns: places as they came, too, for what looks them up in dicts."""

    def __init__(self, items: Sequence[CopyItem]) -> None:
        self.read, self.written, labels = zip(*items, strict=True)
        self.sources, self.targets = column_of(self.read), column_of(self.written)
        self.identities = LabelColumns(labels)

    def pieces(self, sources: Addresses, targets: Addresses) -> CopyPieces:
        """Return the copies of the items; their slots begin at `sources` and `targets`, (n,)."""
        extents = extents_of(self.sources), extents_of(self.targets)
        return coalesce(sources, targets, self.identities.lengths, *extents)


class DeviceCopier:
    """Implements `Copier` for the edge from `source` to `target`, on the device of `engine`.

    `enqueuer` runs what a batch costs the host, tens of microseconds (milliseconds where warm memory must be
    registered first). With `hashers` every fragment that landed in `target`, which is warm memory then, is
    hashed there and compared before it counts. Keeps two streams of the device until the engine is
    closed. Raises DeviceError (OCCUPIED) when there are none left."""

    def __init__(
        self,
        engine: HbmEngine,
        source: DeviceEnd,
        target: DeviceEnd,
        enqueuer: Executor,
        *,
        hashers: Executor | None = None,
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
        for _ in range(NUM_STREAMS):
            self._streams.append(engine.device.take_stream())

    def start(self, items: Sequence[CopyItem]) -> "Future[list[CopyOutcome]]":
        """Begin copying `items`; outcomes come in their order, on a thread of the device's."""
        batch = _DeviceBatch(items)
        try:
            self._enqueuer.submit(self._launch, batch)
        except RuntimeError:  # shut down: the daemon is going
            batch.future.set_result(batch.outcomes)
        return batch.future

    # ---------------------------------------------------------------------------------------- on its way

    def _launch(self, batch: _DeviceBatch) -> None:
        """Enqueue a batch. Every way out of here completes its future, now or when the device has."""
        try:
            pieces = self._open_whole(batch) or self._open_each(batch)
            if pieces is None or batch.columns is None:
                batch.future.set_result(batch.outcomes)
                return
            stream = self._streams[self._next % len(self._streams)]
            self._next += 1
            reads = TouchedPlaces(self._source.tier, batch.columns.read)
            writes = TouchedPlaces(self._target.tier, batch.columns.written)
            enqueue, landed = partial(stream.copy, pieces), partial(self._landed, batch)
            self._engine.flights.launch(stream, reads, writes, enqueue, landed)
        except DeviceError as error:
            self._fail(batch, error)
        except BaseException as bug:  # a programmer's error reaches the caller through the future
            batch.future.set_exception(bug)

    def _open_whole(self, batch: _DeviceBatch) -> CopyPieces | None:
        """Compare identities and find addresses of all items at once.

        None, and nothing done, where that is not possible for one of them."""
        if not batch.items:
            return None
        columns = _Columns(batch.items)
        generations = self._source.generations_of(columns.sources, columns.identities)
        if generations is None:
            return None
        try:
            sources = self._source.addresses_of(columns.sources)
            targets = self._target.addresses_of(columns.targets)
        except CopyError:
            return None
        batch.opened, batch.generations, batch.columns = range(len(batch.items)), generations, columns
        return columns.pieces(sources, targets)

    def _open_each(self, batch: _DeviceBatch) -> CopyPieces | None:
        """Do it item by item: those with which something is wrong end with their cause. None: no item is
        left."""
        sources, targets, opened, generations = [], [], [], []
        for position, item in enumerate(batch.items):
            try:
                generation = self._source.verify(item.source, item.label)
                source = self._source.addresses_of([item.source])
                target = self._target.addresses_of([item.target])
            except CopyError as error:
                batch.outcomes[position] = CopyOutcome(error.cause)
                continue
            sources.append(source)
            targets.append(target)
            opened.append(position)
            generations.append(generation)
        if not opened:
            return None
        batch.opened, batch.generations = opened, generations
        batch.columns = _Columns([batch.items[position] for position in opened])
        return batch.columns.pieces(np.concatenate(sources), np.concatenate(targets))

    def _landed(self, batch: _DeviceBatch, error: DeviceError | None) -> None:
        """The device is done with a batch, or will never say. On a thread of the device's."""
        if error is not None:
            self._fail(batch, error)
        elif self._hashers is None:
            self._settle(batch)
        else:
            try:
                self._hashers.submit(self._settle, batch)
            except RuntimeError:
                batch.end_all(Cause.CANCELLED)

    def _settle(self, batch: _DeviceBatch) -> None:
        """Take over what landed, after a second look at each source and, if wanted, at each copy."""
        try:
            num_bytes = self._settle_whole(batch)
            if num_bytes is None:
                num_bytes = self._settle_each(batch)
            if self._source.tier is Tier.HBM:
                self._engine.count_reads(len(batch.opened), num_bytes)
            if self._target.tier is Tier.HBM:
                self._engine.count_writes(len(batch.opened), num_bytes)
            batch.future.set_result(batch.outcomes)
        except BaseException as bug:
            batch.future.set_exception(bug)

    def _settle_whole(self, batch: _DeviceBatch) -> int | None:
        """Settle all items at once and return their bytes.

        None, and nothing done, where that is not possible."""
        columns = batch.columns
        if columns is None or len(batch.opened) < len(batch.items) or self._hashers is not None:
            return None
        generations = self._source.generations_of(columns.sources, columns.identities)
        if generations is None or not np.array_equal(generations, batch.generations):
            return None
        batch.outcomes = landed(columns.identities.checksums)
        return int(columns.identities.lengths.sum())

    def _settle_each(self, batch: _DeviceBatch) -> int:
        """Settle item by item; return the bytes that landed."""
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
        return num_bytes

    def _fail(self, batch: _DeviceBatch, error: DeviceError) -> None:
        if error.fault is DeviceFault.LOST:
            self._engine.lost(str(error))
        else:
            log.warning("copy from or to hbm: %s", error)
        batch.end_all(as_copy_error(error).cause)

    def _give_streams(self) -> None:
        while self._streams:
            self._engine.device.give_stream(self._streams.pop())


def coalesce(
    sources: Addresses, targets: Addresses, lengths: I64, source_extents: I64, target_extents: I64
) -> CopyPieces:
    """Return the pieces of copies with neighbours merged.

    Those are adjacent in source *and* target, and in one extent each: extents are registered one by one. All
    arguments: (n,), n > 0."""
    if bool((sources[1:] < sources[:-1]).any()):
        order = np.argsort(sources, kind="stable")
        sources, targets, lengths = sources[order], targets[order], lengths[order]
        source_extents, target_extents = source_extents[order], target_extents[order]
    ends = lengths[:-1].view(np.uint64)
    follows = (sources[1:] == sources[:-1] + ends) & (targets[1:] == targets[:-1] + ends)
    follows &= (source_extents[1:] == source_extents[:-1]) & (target_extents[1:] == target_extents[:-1])
    if not follows.any():
        return CopyPieces(sources, targets, lengths)
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    return CopyPieces(sources[first], targets[first], np.add.reduceat(lengths, first))
