"""A whole daemon whose blocks come from nvme straight into a (fake) GPU: encoded over the link, decoded and
delivered there; and what is left when the GPU is not."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.appliance.config import Settings
from kvtier.appliance.core.events import EvictRequested
from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.clients import Tier as Asked
from kvtier.tiers.block import Geometry as DaemonGeometry
from kvtier.tiers.block import Tier
from kvtier.tiers.codecs.base import Shape, shape_of
from kvtier.tiers.codecs.exact.exponents import Exponents
from kvtier.tiers.gpu.decode import digest_kernels, exponent_kernels, float8_kernels, quantised_kernels
from tests.fakes.gpu.device import FakeDevice

from ..appliance.loops import DaemonThread
from ..contracts.kv_values import values_like_kv
from ..tiers.gpu.host_kernels import on_host
from .direct_scene import Runtime, names, runtime_at
from .test_device_hbm import resident, wait_until

GEOMETRY = Geometry(4, 2, 64, 16, "bfloat16", layers_per_group=2)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"cold to hbm").digest(), GEOMETRY)
NUM_BLOCKS = 12
CHAIN = names("chain", NUM_BLOCKS)


def make_settings(folder: Path, codec: str = "exponents", **hbm: Any) -> Settings:
    tiers = {
        "hbm": {"capacity": "4MiB", "from_nvme": "on", **hbm},
        "dram": {"capacity": "4MiB", "extent": "2MiB"},
        "nvme": {
            "path": str(folder / "nvme"),
            "capacity": "64MiB",
            "segment": "1MiB",
            "write": "spill",  # the tests count bytes on the way
        },
    }
    compression = {"codec": codec}
    listen = [f"unix://{folder}/k.sock"]
    return Settings.model_validate({"listen": listen, "tiers": tiers, "compression": compression})


class Scene:
    """A daemon on a device, one client, and what moved over which edge."""

    def __init__(self, served: DaemonThread, device: FakeDevice) -> None:
        self.served, self.device, self.daemon = served, device, served.daemon
        self.until(lambda: bool(self.daemon.assembly.straight_codecs))

    def until(self, holds: Any) -> None:
        wait_until(self.served, holds)

    def moved(self, source: str, target: str) -> int:
        """Fragments that landed over an edge."""
        edges = self.daemon.appliance.mover.statistics()
        return sum(e.num_copies for e in edges if (e.source, e.target) == (source, target))

    def to_nvme_only(self, client: Client, namespace: Any, chain: list[bytes]) -> None:
        """Have a chain archived, and gone from everywhere else."""
        session = client.session("s")
        client.get(namespace, chain, session="s")
        session.end(archive=True)
        self.until(lambda: resident(self.daemon, Tier.NVME) == len(chain))
        for tier in (Tier.HBM, Tier.DRAM):
            self.leave(tier)

    def leave(self, tier: Tier) -> None:
        """Have everything leave a tier."""
        appliance = self.daemon.appliance
        self.served.call(lambda: appliance.ask(lambda call: EvictRequested(call, tier, 1 << 30)))
        self.until(lambda: resident(self.daemon, tier) == 0)

    def assert_well(self) -> None:
        assert self.served.call(self.daemon.check_integrity) == []
        assert self.device.check_integrity() == []


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Have the codec's loops and the kernels compiled before a daemon's clients wait for them."""
    shape = shape_of(DaemonGeometry(4, 2, 64, 16, "bfloat16", layers_per_group=2), 0)
    payload, codec = values_like_kv(shape, 1), Exponents()
    stored = bytearray(codec.stored_bound(shape))
    codec.encode(shape, payload.data, memoryview(stored))
    codec.decode(shape, memoryview(stored), memoryview(bytearray(shape.raw_bytes)))
    for source in (exponent_kernels, float8_kernels, quantised_kernels, digest_kernels):
        on_host(source.SOURCE, source.NAMES)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(is_live=True, num_streams=32, compiler=on_host)


@pytest.fixture
def codec() -> str:
    return "exponents"


@pytest.fixture
def scene(tmp_path: Path, device: FakeDevice, codec: str) -> Iterator[Scene]:
    with DaemonThread(make_settings(tmp_path, codec), device) as served:
        made = Scene(served, device)
        yield made
        made.assert_well()
    assert device.left_behind == [], "given back on the way out, by whoever took it"


@pytest.mark.parametrize(("codec", "dtype"), [("exponents", "bfloat16"), ("float8", "float8_e4m3fn")])
def test_encoded_blocks_are_decoded_on_the_device(scene: Scene, dtype: str) -> None:
    """What was prefetched into hbm crossed the link as it lay on the disk, and dram saw nothing of it."""
    shape = Shape(GEOMETRY.num_layers, 2, 16, 2, 64, dtype)
    data = np.concatenate([values_like_kv(shape, seed) for seed in range(NUM_BLOCKS)])
    with Client(scene.daemon.settings.listen[0]) as client:
        namespace = client.register(replace(IDENTITY, geometry=replace(GEOMETRY, dtype=dtype)))
        assert client.put(namespace, CHAIN, data).complete
        scene.to_nvme_only(client, namespace, CHAIN)
        assert client.prefetch(namespace, CHAIN, Asked.HBM).num_promoted == NUM_BLOCKS
        scene.until(lambda: resident(scene.daemon, Tier.HBM) == NUM_BLOCKS)
        num_fragments = NUM_BLOCKS * GEOMETRY.num_groups
        assert (scene.moved("nvme", "hbm"), scene.moved("nvme", "dram")) == (num_fragments, 0)
        assert scene.daemon.counters()["nvme_to_hbm_on_device"] == num_fragments
        found = client.get(namespace, CHAIN)  # from hbm, hashed on the way down
        assert found.num_blocks == NUM_BLOCKS
        np.testing.assert_array_equal(found.data, data)


def store_pages(scene: Scene, runtime: Runtime) -> bytes:
    """Put a chain from pages, have it in nvme only; return its bytes."""
    runtime.fill(1)
    pages = list(range(NUM_BLOCKS))
    assert runtime.pages.put(runtime.namespace, CHAIN, pages).num_stored == NUM_BLOCKS
    scene.to_nvme_only(runtime.client, runtime.namespace, CHAIN)
    wanted = runtime.read(pages)
    runtime.fill(2)
    return wanted


def test_a_get_into_pages_comes_by_hbm(scene: Scene) -> None:
    with runtime_at(scene.daemon.settings.listen[0]) as runtime:
        wanted = store_pages(scene, runtime)
        report = runtime.pages.get(runtime.namespace, CHAIN, list(range(NUM_BLOCKS)))
        assert report.num_loaded == NUM_BLOCKS
        assert runtime.read(list(range(NUM_BLOCKS))) == wanted
        assert scene.moved("nvme", "dram") == 0
        assert scene.moved("nvme", "hbm") == NUM_BLOCKS * 4  # layer groups
        again = runtime.pages.get(runtime.namespace, CHAIN, list(range(16, 16 + NUM_BLOCKS)))
        assert again.num_loaded == NUM_BLOCKS
        assert scene.moved("nvme", "hbm") == NUM_BLOCKS * 4, "it rests there now"


def test_many_gets_of_one_cold_chain_share_its_copies(scene: Scene) -> None:
    with runtime_at(scene.daemon.settings.listen[0]) as runtime:
        wanted = store_pages(scene, runtime)
        first = runtime.start(runtime.pages.get, runtime.namespace, CHAIN, list(range(NUM_BLOCKS)))
        with Client(scene.daemon.settings.listen[0]) as client:
            namespace = client.register(runtime.namespace.identity)
            assert client.get(namespace, CHAIN).num_blocks == NUM_BLOCKS, "a host's reader gets them in dram"
        assert first.result(60.0).num_loaded == NUM_BLOCKS
        assert runtime.read(list(range(NUM_BLOCKS))) == wanted
        assert scene.moved("nvme", "hbm") <= NUM_BLOCKS * 4


def test_a_device_that_is_lost_on_the_way_is_a_miss(tmp_path: Path, device: FakeDevice) -> None:
    with DaemonThread(make_settings(tmp_path), device) as served:
        scene = Scene(served, device)
        with Client(scene.daemon.settings.listen[0]) as client:
            namespace = client.register(IDENTITY)
            data = np.random.default_rng(1).integers(0, 256, NUM_BLOCKS * GEOMETRY.block_bytes, np.uint8)
            assert client.put(namespace, CHAIN, data).complete
            scene.to_nvme_only(client, namespace, CHAIN)
            client.prefetch(namespace, CHAIN, Asked.HBM)
            device.lose("test")
            scene.until(lambda: not scene.daemon.planner.statistics()["num_copies_in_flight"])
            client.get(namespace, CHAIN)  # a miss, should all have come up before: it meets the loss then
            scene.until(lambda: scene.daemon.counters()["hbm_lost"] == 1)
            found = client.get(namespace, CHAIN)
            assert found.num_blocks == NUM_BLOCKS, "no record was condemned for what a device did"
            np.testing.assert_array_equal(found.data, data)
        assert served.call(scene.daemon.check_integrity) == []


def test_off_is_off(tmp_path: Path, device: FakeDevice) -> None:
    with DaemonThread(make_settings(tmp_path, from_nvme="off"), device) as served:
        assert served.daemon.assembly.hot is not None
        assert served.daemon.assembly.hot.cold is None
        assert not any(
            (e.source, e.target) == ("nvme", "hbm") for e in served.daemon.appliance.mover.statistics()
        )
