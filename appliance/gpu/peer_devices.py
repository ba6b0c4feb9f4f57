"""Peer devices: the other GPUs of the host, so that runtimes on them are served straight, too.

A peer has no slab. It reads what lies elsewhere: pinned dram, which is registered once and for every device
of the process, and the slots of the hot tier's device where it can reach them (NVLink, or PCIe without an
IOMMU between). A copy into a runtime's pages is work of the runtime's own device; so a peer that is lost ends
its own lane and nothing else, and no device waits for the streams of another.

Whether a peer can reach the hot tier is not taken from the driver's word: behind an IOMMU it may say yes and
read something else (CUDA C++ Programming Guide, "Peer-to-Peer Memory Access": IOMMU on Linux). A few
kilobytes that come back different, or not at all, close that way. Rejected: a daemon per GPU as the only
answer (dram would be cut into parts that do not share blocks); a slab on every GPU (the planner's hbm is one
tier, and where in it a block is read from would have to be a question of its own); copies without peer
access (CUDA passes them through host memory of its own, which dram already is).
"""

import logging
import mmap
from collections.abc import Sequence

import numpy as np

from ...tiers.block import Tier
from ...tiers.gpu.device.contract import Addresses, Device, DeviceError, DeviceFault, Event, pieces_of
from ...tiers.gpu.device.cuda import CudaDevice, num_devices
from ...tiers.gpu.device.pinned import as_copy_error
from ...tiers.gpu.device.waiting import copy_and_wait
from ...tiers.gpu.hbm import HbmEngine
from ...tiers.gpu.pages.gather import AddressesOf
from ...tiers.memory.places import I64
from ..config import HbmTier
from .page_service import DirectDevice

log = logging.getLogger(__name__)

TRIAL_BYTES = 256 << 10
TRIAL_S = 5.0


def open_peers(hbm: HbmTier) -> list[Device]:
    """Open every visible GPU beside `hbm.device`. Leaves out, with a warning, a GPU that cannot be opened."""
    peers: list[Device] = []
    try:
        indices = [index for index in range(num_devices()) if index != hbm.device]
    except DeviceError as problem:
        log.warning("runtimes are served straight on device %d only: %s", hbm.device, problem)
        return peers
    for index in indices:
        try:
            peers.append(CudaDevice(index))
        except DeviceError as problem:
            log.warning("runtimes on device %d are not served straight: %s", index, problem)
    return peers


class Peers:
    """Devices beside the one that holds `engine`'s slab. Owns them; `close` comes before that device's end.

    `is_tried`: whether the way to each is tried with real bytes, which needs devices that run by themselves.
    """

    def __init__(
        self, engine: HbmEngine, pinned: AddressesOf, devices: Sequence[Device], *, is_tried: bool
    ) -> None:
        self.direct: list[DirectDevice] = []
        self._engine = engine
        self._devices = list(devices)
        self._probe: Event | None = None
        for device in self._devices:
            slots = {Tier.DRAM: pinned}
            if self._can_read(device, is_tried):
                slots[Tier.HBM] = self._addresses_of
            else:
                log.warning(
                    "device %d does not reach hbm; blocks there go to it by way of dram", device.index
                )
            self.direct.append(DirectDevice(device, slots))

    def _can_read(self, device: Device, is_tried: bool) -> bool:
        home = self._engine.device
        try:
            if self._probe is None:
                self._probe = home.take_event()
            return device.reach(home) and (not is_tried or carries(device, home))
        except DeviceError as problem:
            log.warning("device %d cannot be a peer: %s", device.index, problem)
            return False

    def _addresses_of(self, places: Sequence[int] | I64) -> Addresses:
        """Return the addresses of hbm's slots for a peer.

        Raises CopyError; also when the hot tier's device is lost and that was not noticed yet: it is asked
        before anything is read from it."""
        assert self._probe is not None
        try:
            self._probe.is_done()
        except DeviceError as problem:
            if problem.fault is DeviceFault.LOST:
                self._engine.lost(str(problem))
            raise as_copy_error(problem) from problem
        return self._engine.addresses_of(places)

    def close(self) -> None:
        """Shut the peers down. The caller knows that no registration uses them. Idempotent."""
        for device in self._devices:
            device.shut_down()
        if self._probe is not None:
            self._engine.device.recycle(self._probe)
            self._probe = None


def carries(device: Device, home: Device) -> bool:
    """Whether `device` reads from the memory of `home`, which it reaches, what was written there.

    Blocks for milliseconds. Raises DeviceError."""
    host = mmap.mmap(-1, 2 * TRIAL_BYTES)
    whole = np.frombuffer(host, np.uint8)
    sent, came = whole[:TRIAL_BYTES], whole[TRIAL_BYTES:]
    sent[:] = np.random.default_rng(TRIAL_BYTES).integers(0, 256, TRIAL_BYTES, np.uint8)
    there = home.register_host(memoryview(host), is_read_only=False)
    at_home, at_peer = home.allocate(TRIAL_BYTES), device.allocate(TRIAL_BYTES)
    to_home, to_peer = home.take_stream(), device.take_stream()
    for on, stream, source, target in (
        (home, to_home, there, at_home.address),
        (device, to_peer, at_home.address, at_peer.address),
        (device, to_peer, at_peer.address, there + TRIAL_BYTES),
    ):
        copy_and_wait(on, stream, pieces_of([(source, target, TRIAL_BYTES)]), TRIAL_S)
    home.give_stream(to_home)
    device.give_stream(to_peer)
    home.free(at_home)
    device.free(at_peer)
    home.unregister_host(there)
    return bool((sent == came).all())
