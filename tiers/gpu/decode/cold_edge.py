"""ColdCopier: from the cold store straight into hbm, encoded bytes over the link, decoded where they arrive.

    record -> pinned chunk, checked on the host -> the device's half -> decoded into the slot -> hashed there
    record -> the device's half, by GPUDirect Storage -> its header back to the host -> decoded, or copied,
              into the slot -> hashed there

What becomes readable is what was put: the checksum of the slot, taken on the device, is that of the record,
and the host has verified its header. So no byte counts as right by a disk, a link or a kernel alone.
A record that is not encoded and came by the host was hashed there, and needs nothing but the copy.

Everything can be done on the host instead, and is: fragments that the device does not decode or finds no
scratch for, larger ones than a chunk, and all that it found to be wrong. The host's word is final, so a fault
of a kernel costs time and never a record; after the first such fault nothing is decoded there any more.

Rejected: decoding into a chunk and copying from there (a second pass over the bytes, for nothing: a slot is
not read before its copy has landed); hashing samples only (a digest costs the device less than the decoder).
Never ran on a GPU.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial

from ....v1.shm import PAGE_BYTES
from ...base import Buffer, Cause, CopyError, CopyItem, CopyOutcome
from ...block import Tier
from ...codecs.base import Codec, CodecError, Shape
from ...cold.engine import ColdStore
from ...cold.log import record_bytes
from ...cold.record_io import stored_bytes
from ..device.contract import Device, DeviceError, DeviceFault, DeviceMemory, Stream, pieces_of
from ..device.flights import NOTHING, TouchedPlaces
from ..device.slabs import Slab, Slabs
from ..hbm import HbmEngine
from . import gds
from .decoding import DecodeItem, DeviceDecoding, Digests
from .records import Record

log = logging.getLogger(__name__)

CHUNK_BYTES = 16 << 20
NUM_CHUNKS = 4  # batches under way: more find none, and are done by the host


@dataclass(slots=True)
class _Load:
    """One item on its way through a chunk."""

    position: int
    item: CopyItem
    area: int  # in the chunk
    codec: Codec | None
    shape: Shape
    checksum: bytes = b""  # of its payload, by the record; empty: its header is still to be looked at


@dataclass(slots=True, eq=False)
class _ColdBatch:
    """One call of `start`."""

    items: Sequence[CopyItem]
    outcomes: list[CopyOutcome]
    future: "Future[list[CopyOutcome]]" = field(default_factory=Future)
    chunk: Slab | None = None
    loads: list[_Load] = field(default_factory=list)  # what goes through the chunk
    on_host: list[int] = field(default_factory=list)  # positions of what the host does
    disputed: set[int] = field(default_factory=set)  # of them what the device found to be wrong
    is_direct: bool = False  # read by GPUDirect Storage
    digests: Digests | None = None  # of the device, once it was asked

    @property
    def targets(self) -> list[int]:
        """The places in hbm of what goes through the chunk."""
        return [load.item.target for load in self.loads]


class ColdCopier:
    """Implements `Copier` for the edge from the cold store to hbm.

    Takes a stream and chunks of the engine's device until the engine is closed. `readers` wait for the disk,
    and decode what the device does not; `enqueuer` is the one thread that gives the device work. Raises
    DeviceError when there is no stream or no memory for the chunks."""

    def __init__(
        self,
        engine: HbmEngine,
        store: ColdStore,
        enqueuer: Executor,
        readers: Executor,
        decoding: DeviceDecoding,
        chunk_bytes: int = CHUNK_BYTES,
        num_chunks: int = NUM_CHUNKS,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.direct: gds.Records | None = None  # once it was found to be quicker
        self._engine = engine
        self._store = store
        self._enqueuer = enqueuer
        self._readers = readers
        self.decoding = decoding
        self._is_trusted = True  # until a kernel made something wrong of a good record
        self._stream: Stream = engine.device.take_stream()
        # Every record has an area of whole pages at the same offset of both halves: header page, payload.
        self.chunks = Slabs(engine.device, {"records": chunk_bytes}, {}, num_chunks)
        engine.before_close.append(self._give_back)

    @property
    def device(self) -> Device:
        """The device of hbm."""
        return self._engine.device

    def start(self, items: Sequence[CopyItem]) -> "Future[list[CopyOutcome]]":
        """Begin copying `items`; outcomes come in their order, on a thread of `readers`."""
        batch = _ColdBatch(items, [CopyOutcome(Cause.CANCELLED)] * len(items))
        batch.future.set_running_or_notify_cancel()
        self._hand(self._readers, batch, self._read)
        return batch.future

    def _hand(self, executor: Executor, batch: _ColdBatch, step: Callable[[_ColdBatch], None]) -> None:
        """Go on with a batch on another thread. Every way out completes its future."""

        def run() -> None:
            try:
                step(batch)
            except BaseException as bug:  # a programmer's error reaches the caller through the future
                batch.future.set_exception(bug)

        try:
            executor.submit(run)
        except RuntimeError:  # shut down: the daemon is going
            batch.future.set_result(batch.outcomes)

    # ---------------------------------------------------------------------------------- a reader's thread

    def _read(self, batch: _ColdBatch) -> None:
        """Bring the records into a chunk, as they are stored."""
        self._lay_out(batch)
        if batch.chunk is None:
            return self._settle(batch)
        if self.direct is not None:
            batch.is_direct = self._read_directly(batch, self.direct)
        if not batch.is_direct:
            self._read_by_host(batch, batch.chunk)
        self._hand(self._enqueuer, batch, self._launch)
        return None

    def _lay_out(self, batch: _ColdBatch) -> None:
        """Give every item that the device can take an area of a chunk; the host does the others."""
        end = 0
        for position, item in enumerate(batch.items):
            num_bytes = record_bytes(stored_bytes(item.label))
            load = self._load(position, item, end)
            if load is not None and end + num_bytes <= self.chunks.shared_bytes:
                batch.loads.append(load)
                end += num_bytes
            else:
                batch.on_host.append(position)
        batch.chunk = self.chunks.take() if batch.loads else None
        if batch.chunk is None:
            batch.on_host, batch.loads = list(range(len(batch.items))), []

    def _load(self, position: int, item: CopyItem, area: int) -> _Load | None:
        """Return how an item goes by the device; None: it does not."""
        codecs, label = self._store.codecs, item.label
        try:
            shape = codecs.shape(label)
            codec = codecs.codec_to_write(label) if label.codec_id else None
        except CodecError:  # the host says what is wrong
            return None
        needs_kernels = codec is not None or self.direct is not None
        if shape.raw_bytes != label.raw_length:
            return None
        if needs_kernels and not (
            self._is_trusted and self.decoding.takes(codec, shape, stored_bytes(label))
        ):
            return None
        return _Load(position, item, area, codec, shape)

    def _read_by_host(self, batch: _ColdBatch, chunk: Slab) -> None:
        """Read, and compare the hashes of what is stored."""
        transfers = []
        for load in batch.loads:
            source, _, label = load.item
            payload = chunk.view[load.area + PAGE_BYTES :][: stored_bytes(label)]
            transfers.append((source, label, payload))
        good = []
        outcomes = self._store.read_batch(transfers, as_stored=True)
        for load, outcome in zip(batch.loads, outcomes, strict=True):
            batch.outcomes[load.position] = outcome
            if outcome.cause is None:
                load.checksum = outcome.checksum
                if load.checksum:
                    good.append(load)
                else:  # encrypted: what lies there is nothing to a device
                    batch.on_host.append(load.position)
        batch.loads = good

    def _read_directly(self, batch: _ColdBatch, direct: gds.Records) -> bool:
        """Let the disk write into the device; False, and never again, when that fails."""
        assert batch.chunk is not None
        try:
            for load in batch.loads:
                num_bytes = record_bytes(stored_bytes(load.item.label))
                direct.read(load.item.source, DeviceMemory(batch.chunk.device + load.area, num_bytes))
        except DeviceError as error:
            if error.fault is not DeviceFault.LOST:
                log.error("GPUDirect Storage is not used any more: %s", error)
            self.direct = None
            self.counters["direct_reads_failed"] += 1
            return False
        self.counters["direct_reads"] += len(batch.loads)
        return True

    # -------------------------------------------------------------------------------- the enqueuer's thread

    def _launch(self, batch: _ColdBatch) -> None:
        """Enqueue what brings the loads into their slots, and ask to be told."""
        if not batch.loads:
            return self._hand(self._readers, batch, self._settle)
        try:
            targets = self._engine.addresses_of(batch.targets).tolist()
            writes = TouchedPlaces(Tier.HBM, batch.targets)
            enqueue, landed = partial(self._enqueue, batch, targets), partial(self._landed, batch)
            self._engine.flights.launch(self._stream, NOTHING, writes, enqueue, landed)
        except (CopyError, DeviceError) as error:
            self._broke(batch, error)
        return None

    def _enqueue(self, batch: _ColdBatch, targets: Sequence[int]) -> None:
        """Give the stream what brings the loads to `targets`, their slots' addresses. Raises DeviceError."""
        chunk, stream = batch.chunk, self._stream
        assert chunk is not None
        copies: list[tuple[int, int, int]] = []
        moves: list[tuple[int, int, int]] = []
        works = []
        for load, target in zip(batch.loads, targets, strict=True):
            num_bytes = stored_bytes(load.item.label)
            payload = load.area + PAGE_BYTES
            if batch.is_direct:
                copies.append((chunk.device + load.area, chunk.host + load.area, PAGE_BYTES))
                if load.codec is None:
                    moves.append((chunk.device + payload, target, num_bytes))
            elif load.codec is None:
                copies.append((chunk.host + payload, target, num_bytes))
            else:
                copies.append((chunk.host + payload, chunk.device + payload, num_bytes))
            if load.codec is not None or batch.is_direct:
                works.append(
                    DecodeItem(load.codec, load.shape, Record(chunk.device + payload, num_bytes, target))
                )
        for columns in (copies, moves):
            if columns:
                stream.copy(pieces_of(columns))
        batch.digests = self.decoding.enqueue(stream, works)

    def _broke(self, batch: _ColdBatch, error: CopyError | DeviceError) -> None:
        """Nothing of a batch is under way, and nothing will be: its slots are as they were."""
        positions = [load.position for load in batch.loads]
        if isinstance(error, DeviceError) and error.fault is not DeviceFault.LOST:
            log.warning("from nvme to hbm: %s", error)
            batch.on_host += positions
        else:  # hbm is gone
            if isinstance(error, DeviceError):
                self._engine.lost(str(error))
            for position in positions:
                batch.outcomes[position] = CopyOutcome(Cause.TIER_OFFLINE)
        batch.loads = []
        self._hand(self._readers, batch, self._settle)

    def _landed(self, batch: _ColdBatch, error: DeviceError | None) -> None:
        """The device is done with a batch, or will never say. On a thread of the device's."""
        if error is not None:
            self._broke(batch, error)
        else:
            self._hand(self._readers, batch, self._judge)

    # ----------------------------------------------------------------------------- a reader's thread, again

    def _judge(self, batch: _ColdBatch) -> None:
        """Believe what has the checksum that its record says; have the host do the rest again."""
        chunk = batch.chunk
        assert chunk is not None
        assert batch.digests is not None
        digests = iter(batch.digests())
        num_landed = num_bytes = 0
        for load in batch.loads:
            item = load.item
            if batch.is_direct:
                outcome = self._store.confirm(item.source, item.label, chunk.view[load.area :][:PAGE_BYTES])
            else:
                outcome = CopyOutcome(None, load.checksum)
            digest = next(digests) if load.codec is not None or batch.is_direct else load.checksum
            if outcome.cause is None and outcome.checksum and digest == outcome.checksum:
                batch.outcomes[load.position] = outcome
                num_landed, num_bytes = num_landed + 1, num_bytes + item.label.raw_length
                self.counters["on_device" if load.codec is not None else "as_they_are"] += 1
                continue
            batch.on_host.append(load.position)
            is_encrypted = outcome.cause is None and not outcome.checksum
            if digest is not None and not is_encrypted:
                batch.disputed.add(load.position)
        self._engine.count_writes(num_landed, num_bytes)
        self._settle(batch)

    def _settle(self, batch: _ColdBatch) -> None:
        """Do what is left on the host; complete."""
        if batch.chunk is not None:
            self.chunks.give(batch.chunk)
            batch.chunk = None
        self._by_host(batch)
        if any(batch.outcomes[position].cause is None for position in batch.disputed):
            self.counters["device_faults"] += 1
            self._is_trusted, self.direct = False, None
            log.error("what the device made of a record is not what was put; from now on the host decodes")
        batch.future.set_result(batch.outcomes)

    def _by_host(self, batch: _ColdBatch) -> None:
        """Read, decode and verify on the host; then the synchronous way into hbm."""
        for position in batch.on_host:
            source, target, label = batch.items[position]
            payload: Buffer = memoryview(bytearray(label.raw_length))
            outcome = self._store.read_batch([(source, label, payload)])[0]
            if outcome.cause is None:
                try:
                    self._engine.write(target, label, payload)
                    self.counters["on_host"] += 1
                except CopyError as error:
                    # Whatever the device did, the record is as good as it was.
                    lost = error.cause is Cause.TIER_OFFLINE
                    outcome = CopyOutcome(Cause.TIER_OFFLINE if lost else Cause.NO_SPACE)
            batch.outcomes[position] = outcome

    def _give_back(self) -> None:
        self._engine.device.give_stream(self._stream)
        self.chunks.close()
        self.decoding.close()
