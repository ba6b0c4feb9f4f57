"""The hot tier on a GPU: its device, its engine, warm memory pinned for it, and the ways to and from it.

Beside assembly.py, which knows nothing of devices: a daemon without a GPU imports this and no driver. The
device comes from the settings, or from a test that brings its own.

Two things are different from the host-memory hot tier. Clients on the host cannot read it, so it is no shared
tier. And the cold store cannot write it: a block comes up by way of dram, or straight, through a chunk of its
own and the device's decoder, where a trial at start found that quicker (tiers/gpu/decode/cold_edge.py). The
rare block that is archived from hbm is fetched into host memory first."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...tiers.base import CopyError
from ...tiers.block import Tier
from ...tiers.cold.engine import ColdStore
from ...tiers.cold.mounts import filesystem_of
from ...tiers.copiers import HostCopier
from ...tiers.gpu.copier import DeviceCopier, DeviceEnd
from ...tiers.gpu.decode import gds
from ...tiers.gpu.decode.cold_edge import NUM_CHUNKS, ColdCopier
from ...tiers.gpu.decode.cold_trial import quicker_codecs, trial_codecs
from ...tiers.gpu.decode.decoding import load_decoding
from ...tiers.gpu.device.contract import Device, DeviceError, DeviceFault
from ...tiers.gpu.device.cuda import CudaDevice
from ...tiers.gpu.device.links import LinkSpeed, measure
from ...tiers.gpu.device.pinned import Pinned, limits
from ...tiers.gpu.device.topology import describe, gpus, place_of
from ...tiers.gpu.hbm import HbmEngine
from ...tiers.memory.engine import ExtentEngine
from ...tiers.memory.slots import SlotPool
from ..config import HbmTier, Switch
from ..config.units import format_bytes
from ..errors import StartError
from ..transfer.lanes import DEVICE_BATCH_BYTES, MAX_BATCH_BYTES, Edge, Route
from .page_service import DirectDevice
from .peer_devices import Peers

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 4  # batches per edge: two streams that never run dry
MAX_COLD_IN_FLIGHT = NUM_CHUNKS


def open_device(hbm: HbmTier) -> Device:
    """Return the device that `hbm` asks for. Raises StartError."""
    try:
        return CudaDevice(hbm.device)
    except DeviceError as problem:
        raise StartError(f"tiers.hbm.backend is {hbm.backend}: {problem}") from problem


class HotTier:
    """Owns `device` from the start: it is shut down with the engine, or here when that cannot be made.

    Raises StartError, naming the setting to change.
    """

    def __init__(self, device: Device, room: SlotPool, dram: ExtentEngine, dram_room: SlotPool) -> None:
        self.device = device
        self.enqueuer = ThreadPoolExecutor(1, "kvtier-gpu")
        self.cold: ColdCopier | None = None  # from nvme, when there is that edge
        self._readers: ThreadPoolExecutor | None = None
        self._measuring = threading.Lock()
        self._is_closing = False
        self._peers: Peers | None = None
        try:
            self.engine = HbmEngine(device, room)
            self.pinned = Pinned(device, dram, dram_room)
            self.engine.before_close += [self._end_measuring, self.pinned.close]
            self.pinned.pin(0)  # what is refused now would be refused for ever
        except (DeviceError, CopyError) as problem:
            device.shut_down()
            self.enqueuer.shutdown()
            raise StartError(_advice(problem, room, device)) from problem

    def measure_links(self) -> dict[Edge, LinkSpeed]:
        """Return the speed of both directions between dram and hbm; empty where that cannot be measured.

        Blocks for some milliseconds."""
        with self._measuring:
            if self._is_closing:
                return {}
            try:
                up, down = measure(self.device)
            except DeviceError as problem:
                log.warning("the link to hbm was not measured: %s", problem)
                return {}
        log.info(
            "link to hbm: %.1f GB/s up, %.1f GB/s down",
            up.bandwidth_bytes_per_s / 1e9,
            down.bandwidth_bytes_per_s / 1e9,
        )
        return {Edge(Tier.DRAM, Tier.HBM): up, Edge(Tier.HBM, Tier.DRAM): down}

    def _end_measuring(self) -> None:
        with self._measuring:
            self._is_closing = True

    def advise_nodes(self, numa_nodes: Sequence[int]) -> str:
        """Return what is wrong with the NUMA nodes that dram is taken from; empty: nothing that is known."""
        place = place_of(self.device, gpus())
        if place is None or place.numa_node is None or place.numa_node in numa_nodes:
            return ""
        near = place.numa_node
        return f"the GPU is {describe(place)}; copies are quicker with tiers.dram.numa_nodes: [{near}]"

    def routes(self, hashers: ThreadPoolExecutor) -> dict[Edge, Route]:
        """Return the ways between hbm and dram, and inside hbm, for a tier that shrinks.

        Raises StartError."""

        def copier(source: DeviceEnd, target: DeviceEnd, **options: ThreadPoolExecutor) -> DeviceCopier:
            try:
                return DeviceCopier(self.engine, source, target, self.enqueuer, **options)
            except DeviceError as problem:
                raise StartError(f"tiers.hbm: {problem}") from problem

        hbm, dram = self.engine, self.pinned
        return {
            Edge(Tier.DRAM, Tier.HBM): Route(copier(dram, hbm), batch_bytes=DEVICE_BATCH_BYTES),
            # Hashing is work of ours, which several threads share: batches as anywhere else.
            Edge(Tier.HBM, Tier.DRAM): Route(copier(hbm, dram, hashers=hashers)),
            Edge(Tier.HBM, Tier.HBM): Route(copier(hbm, hbm), batch_bytes=DEVICE_BATCH_BYTES),
        }

    def spill_route(self, store: ColdStore, threads: ThreadPoolExecutor) -> Route:
        """Return the way from hbm straight to the cold store."""
        return Route(HostCopier(self.engine, store, threads), batch_bytes=MAX_BATCH_BYTES)

    def cold_route(self, store: ColdStore, readers: ThreadPoolExecutor) -> Route | None:
        """Return the way from the cold store straight into hbm.

        None where the device has no memory left for it, or cannot decode: everything comes by way of dram.
        """
        try:
            decoding = load_decoding(self.device)
            if decoding is None:
                return None
            self.cold = ColdCopier(self.engine, store, self.enqueuer, readers, decoding)
        except DeviceError as problem:
            log.warning("tiers.hbm.from_nvme: %s; everything comes by way of dram", problem)
            return None
        self._readers = readers
        return Route(self.cold)

    def straight_codecs(self, wanted: Switch, store: ColdStore | None) -> frozenset[int]:
        """Return the codecs of records that come straight from nvme from now on.

        They are those of `on`, or those that a trial found to be quicker. Blocks for some tenths of a second.
        """
        if self.cold is None or self._readers is None or store is None or wanted == "off":
            return frozenset()
        if getattr(store, "is_encrypted", False):  # what lies there is nothing to a device
            return frozenset()
        if wanted == "on":
            return frozenset({0, *(codec.codec_id for codec in trial_codecs())})
        with self._measuring:
            if self._is_closing:
                return frozenset()
            mounts = Path("/proc/self/mountinfo").read_text()
            reasons = gds.why_not(gds.look(), filesystem_of(store.directory.resolve(), mounts))
            disk = None if reasons else (store.directory, gds.Reader)
            found = quicker_codecs(self.cold, self._readers, disk)
        if 0 in found:
            self.cold.direct = gds.Records(store.whereabouts, gds.Reader)
        return found

    def serve_peers(self, devices: Sequence[Device], *, is_tried: bool) -> None:
        """Serve runtimes on these devices, too, which are the tier's from now on.

        To be called once. Blocks for milliseconds."""
        self._peers = Peers(self.engine, self.pinned.addresses_of, devices, is_tried=is_tried)
        self.engine.before_close.insert(0, self._peers.close)

    @property
    def direct(self) -> list[DirectDevice]:
        """The devices and where the slots are for each, for the direct path; the tier's own is the first."""
        slots = {Tier.HBM: self.engine.addresses_of, Tier.DRAM: self.pinned.addresses_of}
        peers = self._peers.direct if self._peers is not None else []
        return [DirectDevice(self.device, slots), *peers]


def _advice(problem: Exception, room: SlotPool, device: Device) -> str:
    """Return what an administrator can do about a hot tier that cannot be made."""
    capacity = format_bytes(room.num_extents * room.extent_bytes)
    if isinstance(problem, DeviceError) and problem.fault is DeviceFault.OUT_OF_MEMORY:
        return (
            f"tiers.hbm.capacity: {capacity} do not fit on device {device.index} ({device.name}), {problem}; "
            "lower it, or the share that the runtime takes (vLLM: --gpu-memory-utilization)"
        )
    hints = "; ".join(limits()) or "no limit of the host was found"
    return f"tiers.hbm: warm memory cannot be pinned, {problem} ({hints}); use backend: host"
