"""Assembly: from settings to tiers. Rooms for the planner, engines and routes for the shell.

Everything that may take seconds or fail for reasons of the host happens here, before the first call is
served: opening the cold store and recovering it, mapping the first extents. It blocks: `begin` runs it in a
thread, and a process that serves imports the rest meanwhile.

Threads: copies between memories, reads from the cold store and writes to it each have their own, so that
no load waits for a thread that a spill holds.
"""

import errno
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from ...tiers.base import ColdStoreError, CopyError, Engine, Room
from ...tiers.block import Tier
from ...tiers.cold.engine import ColdStore
from ...tiers.cold.log import SegmentLog
from ...tiers.cold.recovery import RecoveredStore
from ...tiers.copiers import HostCopier, make_pool
from ...tiers.edges import Viewable
from ...tiers.encryption.master_keys import MasterKeys, load_master_keys
from ...tiers.gpu.device.contract import Device
from ...tiers.gpu.device.links import LinkSpeed
from ...tiers.ladder import Ladder
from ...tiers.memory.engine import MAX_NUMBERS, ExtentEngine
from ...tiers.memory.extent import inherited_numbers, name_of_tier
from ...tiers.memory.former_views import FormerViews
from ...tiers.memory.index import Indexes
from ...tiers.memory.keeper import Keeper
from ...tiers.memory.memfd import SharedMemoryError
from ...tiers.memory.slots import SlotPool
from ...v1.shm import MIN_SLOT_BYTES
from ..backends import TierBackends
from ..compression.profiles import Profiles, read_profiles
from ..config import NvmeTier, Settings, Switch
from ..detached import apart
from ..errors import MemoryStartError, StartError
from ..gpu.hbm_tier import MAX_COLD_IN_FLIGHT, MAX_IN_FLIGHT, HotTier, open_device
from ..gpu.peer_devices import open_peers
from ..persisted.learned_file import read_learned, read_whole
from ..persisted.namespace_book import NamespaceBook
from ..persisted.writes_file import MAX_BYTES, STEM
from ..preflight.table import require
from ..transfer.forward import ForwardCopier
from ..transfer.lanes import MAX_BATCH_BYTES, Edge, Route

log = logging.getLogger(__name__)

#: Batches of copies in flight between one pair of tiers. With 8 an NVMe device has work queued while results
#: are handled; more only delay urgent copies, which cannot overtake what has started.
MAX_COPIES_PER_EDGE = 8
_IS_HUGE: dict[Switch, bool | None] = {"on": True, "off": False, "auto": None}  # pages of kept memory
MAX_MEMORY_THREADS = 4  # a few saturate the memory; more only take processors from the runtime


@dataclass(slots=True)
class Assembly:
    """The tiers of one daemon. `close` ends what `Appliance.stop` does not: threads and indexes."""

    epoch: int  # random
    ladder: Ladder  # every tier this daemon can have; rooms and engines are those that it has
    rooms: dict[Tier, Room]
    engines: dict[Tier, Engine]
    routes: dict[Edge, Route]
    max_in_flight: dict[Edge, int]
    memory_threads: ThreadPoolExecutor
    indexes: Indexes
    store: ColdStore | None = None
    master_keys: MasterKeys | None = None
    recovered: RecoveredStore | None = None
    profiles: Profiles = field(default_factory=dict)
    learned: bytes = b""  # what the policies of the last owner of the cold store knew
    written: bytes = b""  # how much it had written
    pools: list[ThreadPoolExecutor] = field(default_factory=list)
    hot: HotTier | None = None  # where hbm is a GPU's
    is_link_measured: bool = False  # not of a device that a test brings and drives
    link_speeds: dict[Edge, LinkSpeed] = field(default_factory=dict)  # known once memory is in place
    from_nvme: Switch = "off"  # whether what is in the cold store may go straight into hbm
    straight_codecs: frozenset[int] = frozenset()  # and of which codecs it does, known at the same time
    keeper: Keeper | None = None  # what holds memory over the death of this process
    book: NamespaceBook | None = None  # what its slots name
    former_views: FormerViews | None = None  # which of it clients view

    @property
    def dram(self) -> ExtentEngine:
        """The warm tier, where every put lands."""
        engine = self.engines[self.ladder.put_tier]
        assert isinstance(engine, ExtentEngine)
        return engine

    @property
    def backends(self) -> TierBackends:
        """What the appliance drives the tiers by."""
        return TierBackends(self.engines, self.routes, self.max_in_flight, self.store, self.ladder)

    def staging_routes(self, staging: Viewable) -> Mapping[Tier, Route]:
        """Return the ways out of a client's staging extent."""
        copier = HostCopier(staging, self.dram, self.memory_threads)
        return {self.ladder.put_tier: Route(copier, copier.run)}

    def prefault(self) -> None:
        """Allocate the memory tiers' pages, seconds per gigabyte. The daemon may serve meanwhile."""
        began_at = time.monotonic()
        for engine in self.engines.values():
            if isinstance(engine, ExtentEngine):
                try:
                    engine.prefault()
                except SharedMemoryError as problem:
                    log.error("tier %s: %s", engine.tier.label, problem)
        if self.hot is not None:
            self.hot.pinned.pin_all()
            if self.is_link_measured and not self.link_speeds:
                self.link_speeds = self.hot.measure_links()
            self.straight_codecs = self.hot.straight_codecs(self.from_nvme, self.store)
        log.info("memory in place after %.1f s", time.monotonic() - began_at)

    def end_prefault(self) -> None:
        """Let `prefault` end early: the daemon stops."""
        for engine in self.engines.values():
            if isinstance(engine, ExtentEngine):
                engine.end_prefault()

    def close(self) -> None:
        """End the threads, close what is still open. Idempotent."""
        for engine in self.engines.values():
            engine.close()
        for pool in self.pools:
            pool.shutdown()
        self.indexes.close()
        if self.book is not None and self.former_views is not None:
            self.book.close()
            self.former_views.close()


def begin(
    settings: Settings,
    device: Device | None = None,
    peers: Sequence[Device] = (),
    keeper: Keeper | None = None,
) -> "Future[Assembly]":
    """Return what will be the tiers that `settings` ask for, or StartError, naming the setting to change.

    hbm is in the memory of `device`, when one is given, with `peers` beside it. With a `keeper`, memory tiers
    are in memory that it holds, and begin with what it inherited.
    """
    return apart(lambda: _assemble(settings, device, peers, keeper), "kvtier-start")


def _assemble(
    settings: Settings, device: Device | None, peers: Sequence[Device], keeper: Keeper | None
) -> Assembly:
    held = (keeper.num_bytes, keeper.num_huge_bytes) if keeper is not None else ()
    for warning in require(settings, *held):
        if warning.setting:  # of the host the doctor tells more
            log.warning("%s", str(warning))
    epoch = secrets.randbits(63) | 1
    tiers = settings.tiers
    ladder = tiers.ladder if device is None else tiers.ladder.with_device()
    sizes = [size for tier, size in tiers.sizes.items() if tier in ladder.memory_tiers]
    num_places = sum(size.num_units * size.unit_bytes // MIN_SLOT_BYTES for size in sizes)
    num_threads = min(MAX_MEMORY_THREADS, os.cpu_count() or 1)
    threads = make_pool(num_threads)
    indexes = Indexes(num_places, epoch, keeper=keeper)
    assembly = Assembly(epoch, ladder, {}, {}, {}, {}, threads, indexes, pools=[threads])
    try:
        if keeper is not None:
            assembly.keeper, assembly.book = keeper, NamespaceBook(keeper)
            assembly.former_views = FormerViews(keeper)
        _open_memory(assembly, settings, device, peers)
        if keeper is not None:
            keeper.give_back([*keeper.inherited])  # of tiers, sizes and layouts that are no more
        assembly.profiles = read_profiles(settings.compression)
        if settings.encryption.master_key is not None:
            assembly.master_keys = load_master_keys(settings.encryption.master_key)
        if tiers.nvme is not None:
            _open_store(assembly, tiers.nvme)
        _connect(assembly, num_threads, MAX_COPIES_PER_EDGE)
    except (SharedMemoryError, CopyError) as problem:
        assembly.close()
        raise MemoryStartError(str(problem)) from problem
    except (ColdStoreError, OSError) as problem:
        assembly.close()
        is_memory = isinstance(problem, OSError) and problem.errno == errno.ENOMEM
        raise (MemoryStartError if is_memory else StartError)(str(problem)) from problem
    except StartError:
        assembly.close()
        raise
    return assembly


def _open_memory(
    assembly: Assembly, settings: Settings, device: Device | None, peers: Sequence[Device]
) -> None:
    tiers, ladder = settings.tiers, assembly.ladder
    hbm, dram = tiers.hbm, tiers.dram
    is_on_device = hbm is not None and (device is not None or tiers.is_on_device)
    for tier, size in tiers.sizes.items():
        if tier == ladder.log_tier or (tier == ladder.device_tier and is_on_device):
            continue
        memory = tiers.memory_of(tier)
        numa_nodes = memory.numa_nodes if memory is not None else []
        name, is_huge = name_of_tier(tier, size.unit_bytes, numa_nodes), _IS_HUGE[dram.hugepages]
        kept = inherited_numbers(assembly.keeper, name, is_huge) if assembly.keeper is not None else []
        room = SlotPool(size.num_units, size.unit_bytes, kept)
        engine = ExtentEngine(
            room,
            assembly.indexes,
            tier=tier,
            first_extent=tier * MAX_NUMBERS,
            huge_pages=dram.hugepages != "off",
            numa_nodes=numa_nodes,
            keeper=assembly.keeper,
        )
        room.hold(engine.inherited)
        assembly.rooms[tier], assembly.engines[tier] = room, engine
        if memory is not None and dram.hugepages == "on" and not engine.reports()[0].huge_pages:
            nodes = f" for {tier.label} on NUMA nodes {engine.numa_nodes}" if engine.numa_nodes else ""
            problem = f"tiers.dram.hugepages is on, but the host has too few free 2MiB pages{nodes}"
            raise MemoryStartError(f"{problem}; write auto")
    if hbm is not None and is_on_device:
        assembly.is_link_measured = device is None
        # Not of a device that a test brings and drives, unless it says so.
        assembly.from_nvme = "off" if device is not None and hbm.from_nvme == "auto" else hbm.from_nvme
        size = tiers.sizes[ladder.device_tier]
        _open_hot(assembly, device or open_device(hbm), SlotPool(size.num_units, size.unit_bytes))
        assert assembly.hot is not None
        assembly.hot.serve_peers(peers if device is not None else open_peers(hbm), is_tried=device is None)
        if advice := assembly.hot.advise_nodes(dram.numa_nodes):
            log.warning("%s", advice)


def _open_hot(assembly: Assembly, device: Device, room: SlotPool) -> None:
    """Open the hot tier on a device.

    It stands before dram, which it has pinned: what is closed goes in this order.
    """
    device_tier, dram_room = assembly.ladder.device_tier, assembly.rooms[assembly.ladder.put_tier]
    assert isinstance(dram_room, SlotPool)
    assembly.hot = hot = HotTier(device, room, assembly.dram, dram_room)
    assembly.rooms = {device_tier: room, **assembly.rooms}
    assembly.engines = {device_tier: hot.engine, **assembly.engines}
    assembly.pools.append(hot.enqueuer)


def _open_store(assembly: Assembly, nvme: NvmeTier) -> None:
    store = ColdStore.open(
        nvme.path, nvme.segment_bytes, nvme.num_segments, nvme.durability, master_keys=assembly.master_keys
    )
    store.codecs.adopt(assembly.profiles)
    log_tier = assembly.ladder.log_tier
    assembly.store = assembly.engines[log_tier] = store
    assembly.rooms[log_tier] = SegmentLog(nvme.num_segments, nvme.segment_bytes, store.footer_bytes)
    assembly.recovered = store.recover()
    assembly.learned = read_learned(nvme.path)
    assembly.written = read_whole(nvme.path / f"{STEM}.json", MAX_BYTES)


def _connect(assembly: Assembly, num_memory_threads: int, num_store_threads: int) -> None:
    """Set the route of every pair of tiers."""
    memories = [engine for engine in assembly.engines.values() if isinstance(engine, ExtentEngine)]
    routes, bounds = assembly.routes, assembly.max_in_flight
    device_tier, log_tier = assembly.ladder.device_tier, assembly.ladder.log_tier
    bounds[Edge(None, assembly.ladder.put_tier)] = num_memory_threads
    for source in memories:
        for target in memories:
            edge = Edge(source.tier, target.tier)  # inside one tier, too: when it shrinks
            routes[edge] = Route(HostCopier(source, target, assembly.memory_threads))
            bounds[edge] = num_memory_threads
    hot, store = assembly.hot, assembly.store
    if hot is not None:
        hot_routes = hot.routes(assembly.memory_threads)
        routes.update(hot_routes)
        bounds.update(dict.fromkeys(hot_routes, MAX_IN_FLIGHT))
    if store is None:
        return
    reading = make_pool(num_store_threads, "kvtier-load")
    writing = make_pool(num_store_threads, "kvtier-spill", in_background=True)
    forwarding = make_pool(1, "kvtier-forward", in_background=True)
    assembly.pools += [reading, writing, forwarding]
    for memory in memories:
        load, spill = Edge(log_tier, memory.tier), Edge(memory.tier, log_tier)
        routes[load] = Route(HostCopier(store, memory, reading))
        # What is spilled comes in many copies, each as large as a write should be.
        routes[spill] = Route(HostCopier(memory, store, writing), batch_bytes=MAX_BATCH_BYTES)
        bounds[load] = bounds[spill] = num_store_threads
    if hot is not None:
        spill = Edge(device_tier, log_tier)
        routes[spill], bounds[spill] = hot.spill_route(store, writing), num_store_threads
        if assembly.from_nvme != "off" and (route := hot.cold_route(store, reading)) is not None:
            load = Edge(log_tier, device_tier)
            routes[load], bounds[load] = route, MAX_COLD_IN_FLIGHT
    routes[Edge(log_tier, log_tier)] = Route(ForwardCopier(store, forwarding))
    bounds[Edge(log_tier, log_tier)] = 1
