"""Pinned: the warm tier's extents, registered with the device so that its DMA engines reach them.

One registration per extent: that is the chunk in which the memory is made, prefaulted and closed anyway, no
slot crosses its border (CUDA refuses a copy that spans two registrations), and none is so large that
registering it holds up a thread for long. Registering the whole pool at once was rejected: it takes a second
per few gigabytes before anything is served, and extents are made when they are first needed.

Here they are registered for writing, because hbm is demoted into them; our mapping is older than the seal
that keeps all others from writing. A client can only map an extent read-only, and should not count on
pinning it: that needs a device with cudaDevAttrHostRegisterReadOnlySupported, and x86 machines answer 801
(vllm-project/vllm-omni#6240)."""

import logging
import resource
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...base import Cause, CopyError
from ...block import FragmentLabel, Tier
from ...memory.engine import ExtentEngine
from ...memory.headers import LabelColumns
from ...memory.places import addresses, column_of
from ...memory.slots import SlotPool
from .contract import Addresses, Device, DeviceError, DeviceFault

log = logging.getLogger(__name__)

_IOMMU_GROUPS = Path("/sys/kernel/iommu_groups")
_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


class Pinned:
    """Addresses of the places of `engine`, for `CopyPieces` of `device`. Thread-safe.

    Registers an extent when one of its places is first asked for, or ahead of that by `pin_all`; unregisters
    it before the engine unmaps it, when the tier shrinks or is closed. `close` comes before the device's end.
    """

    tier = Tier.DRAM

    def __init__(self, device: Device, engine: ExtentEngine, room: SlotPool) -> None:
        self.engine = engine
        self._device = device
        self._room = room
        self._addresses: dict[int, int] = {}  # extent -> where its data begins
        self._is_closed = False
        self._lock = threading.Lock()
        engine.before_unmap = self.unpin

    def verify(self, place: int, label: FragmentLabel, generation: int | None = None) -> int:
        """See ExtentEngine.verify."""
        return self.engine.verify(place, label, generation)

    def generations_of(self, places: NDArray[np.int64], labels: LabelColumns) -> NDArray[np.uint64] | None:
        """Return the generations (n,) uint64; see ExtentEngine.generations_of."""
        return self.engine.generations_of(places, labels)

    def addresses_of(self, places: Sequence[int] | NDArray[np.int64]) -> Addresses:
        """Return the addresses of the slots at `places`, (n,) uint64.

        May register their extents, which takes milliseconds. Raises CopyError."""
        return addresses(column_of(places), self._start_of, self._room.slot_bytes_of)

    def _start_of(self, number: int) -> int:
        """Return where the data of extent `number` begins, which is registered now if need be. Raises
        CopyError."""
        start = self._addresses.get(number)
        if start is not None:
            return start
        try:
            return self.pin(number)
        except DeviceError as error:
            raise as_copy_error(error) from error

    def pin(self, number: int) -> int:
        """Register extent `number` unless it is; return where its data begins.

        Raises DeviceError, CopyError."""
        with self._lock:
            if self._is_closed:
                raise CopyError(Cause.TIER_OFFLINE, "the warm tier is not pinned any more")
            address = self._addresses.get(number)
            if address is None:
                address = self._device.register_host(self.engine.data_of(number), is_read_only=False)
                self._addresses[number] = address
            return address

    def unpin(self, number: int) -> None:
        """Unregister extent `number`, of which no slot is taken. No effect when it is not registered."""
        with self._lock:
            address = self._addresses.pop(number, None)
            if address is not None:
                self._device.unregister_host(address)

    def pin_all(self) -> None:
        """Register every extent, in the order in which they come into use.

        Blocks; call it in a thread, after `prefault`. What the device refuses is logged once; copies to it
        will fail and be counted."""
        for number in self._room.extents():
            try:
                self.pin(number)
            except CopyError:
                return
            except DeviceError as error:
                log.error(
                    "warm memory is pinned up to extent %d only: %s; %s", number, error, "; ".join(limits())
                )
                return

    def close(self) -> None:
        """Unregister everything, for good. Idempotent. The caller knows that no stream touches it."""
        with self._lock:
            self._is_closed = True
            for address in self._addresses.values():
                self._device.unregister_host(address)
            self._addresses.clear()


def as_copy_error(error: DeviceError) -> CopyError:
    """Return the same failure in the words of the tiers."""
    causes = {DeviceFault.LOST: Cause.TIER_OFFLINE, DeviceFault.OUT_OF_MEMORY: Cause.NO_SPACE}
    return CopyError(causes.get(error.fault, Cause.IO_ERROR), str(error))


def limits() -> list[str]:
    """Say in words what limits pinned memory on this host."""
    found = []
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        found.append(f"memlock limit {soft >> 20} MiB (ulimit -l; containers: --ulimit memlock=-1)")
    if _IOMMU_GROUPS.is_dir() and any(_IOMMU_GROUPS.iterdir()):
        found.append(
            "an IOMMU translates device addresses (mapping is slower; iommu=pt if the host allows it)"
        )
    if any(mark.exists() for mark in _CONTAINER_MARKS):
        found.append("a container: its memory limit counts pinned pages, too")
    return found
