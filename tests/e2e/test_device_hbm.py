"""A whole daemon whose hot tier is a (fake) GPU: put, promote, demote, read back; and what is left without
it."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.appliance.config import Settings
from kvtier.appliance.core.events import EvictRequested
from kvtier.appliance.errors import ApplianceError, StartError
from kvtier.appliance.host import assembly
from kvtier.appliance.host.assembly import begin
from kvtier.appliance.host.daemon import Daemon
from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.clients import Tier as Asked
from kvtier.tiers.block import Tier
from kvtier.tiers.gpu.device.contract import DeviceError
from kvtier.tiers.gpu.device.cuda import CudaDevice
from tests.fakes.gpu.device import FakeDevice

from ..appliance.loops import DaemonThread
from ..waiting import until
from .direct_scene import names, runtime_at

GEOMETRY = Geometry(4, 2, 64, 16, "float16", layers_per_group=2)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"device").digest(), GEOMETRY)
NUM_BLOCKS = 24
NAMES = [hashlib.sha256(bytes([i])).digest() for i in range(NUM_BLOCKS)]
DATA = np.random.default_rng(5).integers(0, 256, (NUM_BLOCKS, GEOMETRY.block_bytes), np.uint8)
BLOCKS = list(DATA)
WAIT_S = 60.0
TIERS = {"dram": {"capacity": "4MiB", "extent": "2MiB"}}


def make_settings(folder: Path, hbm: str = "4MiB") -> Settings:
    tiers = {
        "hbm": {"capacity": hbm},
        "dram": {"capacity": "4MiB", "extent": "2MiB"},
        "nvme": {
            "path": str(folder / "nvme"),
            "capacity": "64MiB",
            "segment": "1MiB",
            "write": "spill",  # what is archived from hbm must not be in nvme before
        },
    }
    compression = {"codec": "identity"}
    listen = [f"unix://{folder}/k.sock"]
    return Settings.model_validate({"listen": listen, "tiers": tiers, "compression": compression})


def wait_until(served: DaemonThread, holds: Callable[[], bool]) -> None:
    """Wait until something holds on the daemon's loop."""
    until(lambda: served.call(holds), lambda: served.call(served.daemon.planner.statistics))


def resident(daemon: Daemon, tier: Tier) -> int:
    """Blocks of the one namespace there is that are whole in a tier."""
    catalog = daemon.planner.catalog
    [namespace] = catalog.namespaces.values()
    return sum(catalog.num_resident[tier][row] == namespace.num_groups for row in namespace.rows.values())


class Scene:
    """A daemon on a device, with NUM_BLOCKS chains of one block stored (a chain's beginning cannot leave dram
    while the rest is in hbm), and one client."""

    def __init__(self, served: DaemonThread, device: FakeDevice, client: Client) -> None:
        self.served, self.device, self.client = served, device, client
        self.namespace = client.register(IDENTITY)
        self.put()

    def put(self) -> None:
        """Store every block."""
        for name, block in zip(NAMES, BLOCKS, strict=True):
            assert self.client.put(self.namespace, [name], block).complete

    def prefetch(self, tier: Asked) -> int:
        """Ask for every block in a tier; return how many are promoted for it."""
        return sum(self.client.prefetch(self.namespace, [name], tier).num_promoted for name in NAMES)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds on the daemon's loop."""
        wait_until(self.served, holds)

    def promote(self) -> None:
        """Bring all blocks into hbm and wait for them."""
        assert self.prefetch(Asked.HBM) == NUM_BLOCKS
        self.until(lambda: self.in_tier(Tier.HBM) == NUM_BLOCKS)

    def in_tier(self, tier: Tier) -> int:
        """Blocks that are whole in a tier."""
        return resident(self.served.daemon, tier)

    def leave_dram(self) -> None:
        """Evict from dram whatever can leave, and wait for the copies that this takes."""
        daemon = self.served.daemon
        self.served.call(lambda: daemon.appliance.ask(lambda call: EvictRequested(call, Tier.DRAM, 1 << 30)))
        self.until(lambda: not daemon.planner.statistics()["num_copies_in_flight"])

    def read(self) -> int:
        """Read every block in place, compare every byte of what is found, and return how many were found."""
        num_found = 0
        for name, block in zip(NAMES, BLOCKS, strict=True):
            found = self.client.get(self.namespace, [name])
            if found.num_blocks:
                num_found += 1
                np.testing.assert_array_equal(found.data, block)
        return num_found


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    device = FakeDevice(is_live=True)
    settings = make_settings(tmp_path)
    with DaemonThread(settings, device) as served, Client(settings.listen[0]) as client:
        yield Scene(served, device, client)
    assert device.check_integrity() == []
    assert device.left_behind == [], "given back on the way out, by whoever took it"


def test_up_down_and_read(scene: Scene) -> None:
    """What is read comes from the device, to the last byte: dram has nothing, and the cold store is
    slower."""
    scene.promote()
    scene.leave_dram()
    assert scene.in_tier(Tier.DRAM) == 0
    assert scene.read() == NUM_BLOCKS
    statistics = scene.served.daemon.appliance.engines[Tier.HBM].statistics()
    assert statistics.written_bytes == statistics.read_bytes == DATA.nbytes
    assert scene.served.daemon.counters()["hbm_lost"] == 0


def test_clients_see_no_place_in_hbm(scene: Scene) -> None:
    scene.promote()
    assert scene.client.lookup(scene.namespace, NAMES[:1]).num_blocks == 1
    with pytest.raises(ApplianceError, match="not one of"):
        scene.served.daemon.service.residences.descriptor_of(0, 0)
    assert scene.read() == NUM_BLOCKS


@pytest.mark.parametrize("when", ["quiet", "promoting", "demoting"])
def test_a_lost_device_is_a_lost_tier_and_nothing_else(scene: Scene, when: str) -> None:
    daemon = scene.served.daemon
    if when == "promoting":
        scene.prefetch(Asked.HBM)
    else:
        scene.promote()
        scene.leave_dram()
    reader = threading.Thread(target=scene.read)
    if when == "demoting":
        reader.start()
    scene.device.lose("test")
    if when == "demoting":
        reader.join()
    scene.read()  # fewer blocks at most, never other bytes, never an error
    scene.prefetch(Asked.HBM)
    scene.leave_dram()  # all may have come up before the device was lost, and a loss shows when it is used
    scene.read()
    scene.until(lambda: daemon.counters()["hbm_lost"] == 1)
    scene.until(lambda: scene.in_tier(Tier.HBM) == 0)
    scene.put()
    assert scene.read() == NUM_BLOCKS, "the daemon is alive"
    assert scene.prefetch(Asked.HBM) == 0
    assert scene.served.call(daemon.check_integrity) == []


def test_what_leaves_hbm_for_the_cold_store_goes_by_way_of_the_host(scene: Scene) -> None:
    """A session's blocks that are only in hbm are archived when it ends."""
    session = scene.client.session("s")
    for name in NAMES:
        scene.client.get(scene.namespace, [name], session="s")
    scene.promote()
    scene.leave_dram()
    session.end(archive=True)
    scene.until(lambda: scene.in_tier(Tier.NVME) == NUM_BLOCKS)
    daemon = scene.served.daemon
    [edge] = [e for e in daemon.appliance.mover.statistics() if (e.source, e.target) == ("hbm", "nvme")]
    assert edge.num_copies == NUM_BLOCKS * GEOMETRY.num_groups
    scene.device.lose("test")
    assert scene.read() >= NUM_BLOCKS - 1, "whoever meets the loss first gets a miss"
    scene.until(lambda: daemon.counters()["hbm_lost"] == 1)
    assert scene.read() == NUM_BLOCKS


def test_pages_are_filled_from_hbm_without_a_detour(tmp_path: Path) -> None:
    """The direct path reads the tier's own slots on the device: nothing comes down into dram for it."""
    settings = make_settings(tmp_path)
    device = FakeDevice(is_live=True, num_streams=32)
    with DaemonThread(settings, device) as served, runtime_at(settings.listen[0]) as runtime:
        daemon = served.daemon
        runtime.fill(1)
        chains = [names(f"chain {page}", 1) for page in range(8)]
        for page, chain in enumerate(chains):
            assert runtime.pages.put(runtime.namespace, chain, [page]).num_stored == 1
            assert runtime.client.prefetch(runtime.namespace, chain, Asked.HBM).num_promoted == 1
        wait_until(served, lambda: resident(daemon, Tier.HBM) == 8)
        served.call(lambda: daemon.appliance.ask(lambda call: EvictRequested(call, Tier.DRAM, 1 << 30)))
        wait_until(served, lambda: resident(daemon, Tier.DRAM) == 0)
        for page, chain in enumerate(chains):
            assert runtime.pages.get(runtime.namespace, chain, [16 + page]).num_loaded == 1
        assert runtime.read(list(range(16, 24))) == runtime.read(list(range(8)))
        assert resident(daemon, Tier.DRAM) == 0
    assert device.check_integrity() == []
    assert device.left_behind == []


def test_more_than_hbm_holds(scene: Scene) -> None:
    """Promotions make room as everybody's do; nothing is lost on the way."""
    more = [hashlib.sha256(b"more %d" % i).digest() for i in range(112)]  # 128 blocks fill hbm
    for name in more:
        assert scene.client.put(scene.namespace, [name], BLOCKS[name[0] % NUM_BLOCKS]).complete
        scene.client.prefetch(scene.namespace, [name], Asked.HBM)
    for name in more:
        found = scene.client.get(scene.namespace, [name])
        assert found.num_blocks == 1
        np.testing.assert_array_equal(found.data, BLOCKS[name[0] % NUM_BLOCKS])
    assert scene.served.call(scene.served.daemon.check_integrity) == []


def test_memory_that_does_not_fit(tmp_path: Path) -> None:
    device = FakeDevice(capacity_bytes=1 << 20)
    with pytest.raises(StartError, match=r"tiers\.hbm\.capacity: 4MiB do not fit on device 0"):
        begin(make_settings(tmp_path), device).result()
    assert not device.memory.regions


def test_memory_that_cannot_be_pinned(tmp_path: Path) -> None:
    device = FakeDevice(max_registered_bytes=5 << 20)  # the bounce buffer, and half an extent
    with pytest.raises(StartError, match=r"cannot be pinned.*memlock.*backend: host"):
        begin(make_settings(tmp_path), device).result()
    assert not device.memory.regions


def test_too_few_streams(tmp_path: Path) -> None:
    device = FakeDevice(num_streams=4)
    with pytest.raises(StartError, match="all 4 streams are taken"):
        begin(make_settings(tmp_path), device).result()
    assert not device.memory.regions


def test_without_a_gpu_the_error_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(DeviceError) as why:
        CudaDevice(255)  # there is no such one anywhere
    hbm = {"capacity": "2MiB", "backend": "cuda", "device": 255}
    tiers = {"hbm": hbm, "dram": {"capacity": "2MiB", "extent": "2MiB"}}
    settings = Settings.model_validate({"listen": [f"unix://{tmp_path}/k.sock"], "tiers": tiers})
    with pytest.raises(StartError) as caught:
        begin(settings).result()
    assert str(caught.value) == f"tiers.hbm.backend is cuda: {why.value}"


def test_what_the_link_makes_is_measured_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device that the settings ask for; the first copies are then decided on with it."""
    device = FakeDevice(is_live=True)
    monkeypatch.setattr(assembly, "open_device", lambda hbm: device)
    hbm = {"capacity": "4MiB", "backend": "cuda"}
    listen = [f"unix://{tmp_path}/k.sock"]
    settings = Settings.model_validate({"listen": listen, "tiers": {**TIERS, "hbm": hbm}})
    with DaemonThread(settings) as served:

        def measured() -> bool:
            edges = {(e.source, e.target): e for e in served.daemon.appliance.mover.statistics()}
            both = (edges["dram", "hbm"], edges["hbm", "dram"])
            return all(edge.bandwidth_bytes_per_s > 0 and edge.num_copies == 0 for edge in both)

        wait_until(served, measured)
        costs = served.daemon.planner.costs
        wait_until(served, lambda: costs.bandwidth_of(Tier.HBM) != costs.bandwidth_of(Tier.NVME))
    assert device.left_behind == []
    assert device.check_integrity() == []
