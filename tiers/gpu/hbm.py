"""HbmEngine: the engine of a GPU's memory. One slab, slots by the room's arithmetic, identity kept on the
host.

Nothing about a fragment is written into device memory but its bytes: labels and generations are here, so that
a publish costs no copy and a lost device loses no books. Clients on the host cannot read this tier
(`is_shared` is False: no extents, no index); they get its blocks by way of dram, or on the device through the
direct path.

The slab is one plain allocation, made at start: a pool of the library's would hand out what another process
cannot open, and one allocation per slot would cost a synchronisation of the device each. Extents that a
growing tier adds later are allocations of their own; those of the slab stay until the end, also of a tier
that shrank.

Bytes move by DeviceCopier, asynchronously. `write` and `read` are the contract's synchronous ways, through a
small pinned bounce buffer; the rare edge from hbm straight to nvme uses them."""

import itertools
import logging
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...v1.shm import CHECKSUM_BYTES
from ..base import Buffer, Cause, CopyError, EngineStatistics
from ..block import FragmentLabel, Tier
from ..memory.headers import LabelColumns
from ..memory.places import addresses, column_of
from ..memory.slots import SlotPool
from ..payload import checksum
from .device.bounce import Bounce
from .device.contract import Addresses, Device, DeviceError, DeviceFault, DeviceMemory
from .device.flights import Flights
from .device.pinned import as_copy_error

log = logging.getLogger(__name__)

QUIET_S = 10.0  # how long `close` waits for copies under way


class HbmEngine:
    """Implements `Engine` over the places of `room`, in the memory of `device`, which it owns from now on.

    Raises DeviceError (OUT_OF_MEMORY) when the slab does not fit. `on_lost` is called once, from any thread,
    when the device turns out to be lost."""

    tier = Tier.HBM
    is_shared = False

    def __init__(self, device: Device, room: SlotPool) -> None:
        self.device = device
        self.flights = Flights(device)
        self.on_lost: Callable[[str], object] | None = None
        self.before_close: list[Callable[[], None]] = []  # frees resources of the device
        self._room = room
        self._slab = device.allocate(room.num_extents * room.extent_bytes)
        self._num_in_slab = room.num_extents
        self._grown: dict[int, DeviceMemory] = {}  # extent -> its own allocation
        self._published: dict[int, tuple[int, FragmentLabel]] = {}  # place -> generation, label
        self._generations = itertools.count(2, 2)
        self._statistics = EngineStatistics(f"device memory ({device.name})")
        self._lost = ""
        self._is_closed = False
        self._lock = threading.Lock()
        try:
            self._bounce = Bounce(device)
        except DeviceError:
            device.free(self._slab)
            raise

    # ------------------------------------------------------------------------------ bytes (any thread)

    def addresses_of(self, places: Sequence[int] | NDArray[np.int64]) -> Addresses:
        """Return the device addresses of the slots at `places`, (n,) uint64.

        Raises CopyError when the tier is gone."""
        if self._lost or self._is_closed:
            raise CopyError(Cause.TIER_OFFLINE, self._lost or "the tier is closed")
        return addresses(column_of(places), self._start_of, self._room.slot_bytes_of)

    def _address_of(self, place: int) -> int:
        return int(self.addresses_of([place])[0])

    def _start_of(self, number: int) -> int:
        """Return where extent `number` begins; one that came later is allocated now."""
        if number < self._num_in_slab:
            return self._slab.address + number * self._room.extent_bytes
        with self._lock:
            memory = self._grown.get(number)
            if memory is None:
                try:
                    memory = self._grown[number] = self.device.allocate(self._room.extent_bytes)
                except DeviceError as error:
                    raise as_copy_error(error) from error
            return memory.address

    def write(self, place: int, label: FragmentLabel, payload: Buffer) -> bytes:
        """Store `payload` and wait until it is there; see Engine.write."""
        assert len(payload) == label.raw_length
        assert place not in self._published, "a published slot must be retracted before it is written"
        try:
            digest = self._bounce.store(self._address_of(place), payload)
        except DeviceError as error:
            raise self._failed(as_copy_error(error), error) from error
        except CopyError as error:
            raise self._failed(error) from error
        self.count_writes(1, len(payload))
        return label.checksum or digest

    def read(self, place: int, label: FragmentLabel, into: Buffer) -> None:
        """Fetch the fragment at `place`, its identity compared before and after, and its checksum.

        A device may have lost a bit that no ECC noticed. Raises CopyError."""
        assert len(into) == label.raw_length
        generation = self.verify(place, label)
        self.fetch(place, into)
        self.verify(place, label, generation)
        if label.checksum and checksum(into) != label.checksum:
            raise self._failed(CopyError(Cause.WRONG_CHECKSUM, f"slot {place:#x}"))

    def fetch(self, place: int, into: Buffer) -> None:
        """Fill `into` with what is at `place`, whatever it is. Blocks. Raises CopyError."""
        try:
            self._bounce.fetch(self._address_of(place), into)
        except DeviceError as error:
            raise self._failed(as_copy_error(error), error) from error
        except CopyError as error:
            raise self._failed(error) from error
        self.count_reads(1, len(into))

    def view(self, place: int, length: int) -> Buffer:
        """Return a copy of the `length` bytes at `place`, page-aligned, as the cold store likes them. Blocks.

        Raises CopyError."""
        into: Buffer = memoryview(mmap.mmap(-1, length))
        self.fetch(place, into)
        return into

    def verify(self, place: int, label: FragmentLabel, generation: int | None = None) -> int:
        """Return the generation of the published fragment at `place`.

        Raises CopyError (WRONG_IDENTITY) when it is not that of `label`, not published, or not of
        `generation` any more."""
        found = self._published.get(place)
        if found is None or not _is_same(found[1], label):
            raise self._failed(
                CopyError(Cause.WRONG_IDENTITY, f"slot {place:#x} holds another fragment or none")
            )
        if generation is not None and found[0] != generation:
            raise self._failed(
                CopyError(Cause.WRONG_IDENTITY, f"slot {place:#x} was recycled during the copy")
            )
        return found[0]

    def generations_of(self, places: NDArray[np.int64], labels: LabelColumns) -> NDArray[np.uint64] | None:
        """Return the generations (n,) uint64; see ExtentEngine.generations_of."""
        held = list(map(self._published.get, places.tolist()))
        if not all(
            one is not None and (one[1] is label or _is_same(one[1], label))
            for one, label in zip(held, labels.labels, strict=True)
        ):
            return None
        return np.array([one[0] for one in held if one is not None], np.uint64)

    # --------------------------------------------------------------------------- labels (event loop only)

    def publish_run(self, places: Sequence[int], labels: Sequence[FragmentLabel]) -> None:
        """Make fragments readable under their labels."""
        for place, label in zip(places, labels, strict=True):
            assert place not in self._published, "published twice"
            assert len(label.checksum) == CHECKSUM_BYTES, "published before its bytes were hashed"
            self._published[place] = (next(self._generations), label)

    def retract(self, place: int) -> None:
        """Make `place` unreadable. No effect when it is not published."""
        self._published.pop(place, None)

    def give_back(self, number: int) -> None:
        """Free an extent that the room has no use for any more. Waits for the device: call it in a thread."""
        with self._lock:
            memory = self._grown.pop(number, None)
        if memory is not None:
            self.device.free(memory)

    # ------------------------------------------------------------------------------------------- failure

    def lost(self, detail: str) -> None:
        """The device is lost: no place of this tier is read or written any more. Idempotent."""
        with self._lock:
            is_news, self._lost = not self._lost, self._lost or detail
        if is_news:
            log.error("hbm is lost: %s", detail)
            if self.on_lost is not None:
                self.on_lost(detail)

    def count_reads(self, num_reads: int, num_bytes: int) -> None:
        """Add reads of fragments, and their bytes, to the counters."""
        with self._lock:
            self._statistics.num_reads += num_reads
            self._statistics.read_bytes += num_bytes

    def count_writes(self, num_writes: int, num_bytes: int) -> None:
        """Add writes of fragments, and their bytes, to the counters."""
        with self._lock:
            self._statistics.num_writes += num_writes
            self._statistics.written_bytes += num_bytes

    def _failed(self, error: CopyError, device_error: DeviceError | None = None) -> CopyError:
        """Count a failure; return it."""
        with self._lock:
            failures = self._statistics.failures
            failures[error.cause] = failures.get(error.cause, 0) + 1
        if device_error is not None and device_error.fault is DeviceFault.LOST:
            self.lost(str(device_error))
        return error

    # ------------------------------------------------------------------------------------------ the rest

    def statistics(self) -> EngineStatistics:
        """Return counters; a copy."""
        with self._lock:
            return replace(self._statistics, failures=dict(self._statistics.failures))

    def check_integrity(self) -> list[str]:
        """Return what is wrong: published slots that are free, too small, or not told apart; flights."""
        problems = self.flights.check_integrity()
        seen: set[int] = set()
        for place, (generation, label) in self._published.items():
            if not self._room.is_taken(place):
                problems.append(f"slot {place:#x} is published and free")
            elif label.raw_length > self._room.slot_bytes_of(place):
                problems.append(f"slot {place:#x}: {label.raw_length} bytes are more than it has")
            if generation in seen:
                problems.append(f"slot {place:#x}: generation {generation} is not unique")
            seen.add(generation)
        return problems

    def close(self) -> None:
        """Wait for what is under way, then give everything back and shut the device down. Idempotent.

        Must come before the warm tier's: it unpins that tier's memory. What a device does not end in time
        keeps its memory, pinned and mapped, until the process ends: freeing it would let the device write
        into memory of others."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self.flights.wait_until_quiet(QUIET_S):
            log.error("hbm: copies are still under way after %.0f s; their memory is not given back", QUIET_S)
            return
        for close in self.before_close:
            close()
        self._bounce.close()
        self._published.clear()
        for memory in (self._slab, *self._grown.values()):
            self.device.free(memory)
        self.device.shut_down()


def _is_same(held: FragmentLabel, asked: FragmentLabel) -> bool:
    """Whether two labels name the same fragment."""
    return (
        held.prefix_hash == asked.prefix_hash
        and held.group == asked.group
        and held.namespace_digest == asked.namespace_digest
        and held.raw_length == asked.raw_length
    )
