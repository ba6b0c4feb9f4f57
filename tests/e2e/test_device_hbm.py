"""A whole daemon whose hot tier is a (fake) GPU: put, promote, demote, read back; and what is left without
it."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.appliance.settings import Settings
from kvtier.clients import Client, Geometry, NamespaceIdentity, Tier
from kvtier.tiers.gpu.fake import FakeDevice

from ..appliance.loops import DaemonThread

GEOMETRY = Geometry(4, 2, 64, 16, "float16", layers_per_group=2)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"device").digest(), GEOMETRY)
NUM_BLOCKS = 24
NAMES = [hashlib.sha256(bytes([i])).digest() for i in range(NUM_BLOCKS)]
DATA = np.random.default_rng(5).integers(0, 256, NUM_BLOCKS * GEOMETRY.block_bytes, np.uint8)
WAIT_S = 20.0


def make_settings(folder: Path, hbm: str = "4MiB") -> Settings:
    tiers = {
        "hbm": {"capacity": hbm, "extent": "2MiB"},
        "dram": {"capacity": "4MiB", "extent": "2MiB"},
        "nvme": {"path": str(folder / "nvme"), "capacity": "64MiB", "segment": "1MiB"},
    }
    return Settings.model_validate({"listen": [f"unix://{folder}/k.sock"], "tiers": tiers})


class Scene:
    """A daemon on a device, with one chain stored, and one client."""

    def __init__(self, served: DaemonThread, device: FakeDevice, client: Client) -> None:
        self.served, self.device, self.client = served, device, client
        self.namespace = client.register(IDENTITY)
        assert client.put(self.namespace, NAMES, DATA).complete

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds on the daemon's loop."""
        pause, deadline_at = threading.Event(), time.monotonic() + WAIT_S
        while not self.served.call(holds):
            assert time.monotonic() < deadline_at, self.served.call(self.served.daemon.planner.statistics)
            pause.wait(0.002)

    def promote(self) -> None:
        """Bring the chain into hbm and wait for it."""
        assert self.client.prefetch(self.namespace, NAMES, Tier.HBM).num_promoted == NUM_BLOCKS
        self.until(lambda: self.in_tier(Tier.HBM) == NUM_BLOCKS)

    def in_tier(self, tier: Tier) -> int:
        """Blocks of the chain that are whole in a tier."""
        catalog = self.served.daemon.planner.catalog
        [namespace] = catalog.namespaces.values()
        num_groups = GEOMETRY.num_groups
        return sum(catalog.num_resident[tier][row] == num_groups for row in namespace.rows.values())

    def leave_dram(self) -> None:
        """Evict from dram whatever can leave, and wait for the copies that this takes."""
        admin = self.served.daemon
        from kvtier.appliance.core.events import EvictRequested

        self.served.call(lambda: admin.appliance.ask(lambda call: EvictRequested(call, Tier.DRAM, 1 << 30)))
        self.until(lambda: not admin.planner.statistics()["num_copies_in_flight"])

    def read(self) -> None:
        """Read the chain in place and compare every byte."""
        np.testing.assert_array_equal(self.client.get(self.namespace, NAMES).data, DATA)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    device = FakeDevice(is_live=True)
    settings = make_settings(tmp_path)
    with DaemonThread(settings, device) as served, Client(settings.listen[0]) as client:
        yield Scene(served, device, client)
    assert device.check_integrity() == []
    assert not device.memory.regions, "given back on the way out"


def test_up_down_and_read(scene: Scene) -> None:
    scene.promote()
    scene.read()
    scene.leave_dram()
    scene.read()
    statistics = scene.served.daemon.appliance.engines[Tier.HBM].statistics()
    assert statistics.written_bytes >= len(DATA)
    assert scene.served.call(scene.served.daemon.check_integrity) == []
