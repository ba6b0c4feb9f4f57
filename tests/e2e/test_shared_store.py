"""Hosts that share a store: what one computed another one reads, also when the first is gone."""

import hashlib
import importlib.util
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGHUP, SIGKILL
from typing import Any

import numpy as np
import pytest

from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.sources.objects.layout import unpack_head
from kvtier.sources.objects.store import ObjectStore
from kvtier.tiers.codecs.exact.planes import Planes
from tests.sources.objects.gateway import Gateway

from ..daemon import PATIENT, Daemon
from ..waiting import until

if importlib.util.find_spec("obstore") is None:
    pytest.skip("no object stores: `pip install obstore`", allow_module_level=True)

#: Four blocks a bundle, of two layer groups.
GEOMETRY = Geometry(
    num_layers=8, num_kv_heads=8, head_dim=64, block_tokens=64, dtype="float16", layers_per_group=4
)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"shared store").digest(), GEOMETRY)
BUNDLE_BLOCKS = 4
CHAIN_BLOCKS = 3 * BUNDLE_BLOCKS + 2  # the last two are no whole bundle
STORED_BLOCKS = 3 * BUNDLE_BLOCKS
NUM_CHAINS = 4
DEADLINE_S = 120.0


def names_of(chain: int) -> list[bytes]:
    """Return the names of a chain's blocks."""
    return [hashlib.sha256(bytes([chain, number])).digest() for number in range(CHAIN_BLOCKS)]


def data_of(chain: int) -> Any:
    """Return the bytes of a chain, uint8."""
    return np.random.default_rng(chain).integers(0, 256, CHAIN_BLOCKS * GEOMETRY.block_bytes, np.uint8)


@contextmanager
def host(folder: Path, url: str, share: str, policy: Path | None = None, **more: str) -> Iterator[Daemon]:
    """Start a daemon with memory and a disk of its own that uses the store at `url`."""
    folder.mkdir()
    values = {
        "tiers.dram.capacity": "256MiB",
        "tiers.dram.extent": "16MiB",
        "tiers.nvme.path": str(folder / "nvme"),
        "tiers.nvme.capacity": "128MiB",
        "tiers.nvme.segment": "16MiB",
        "observe.http": "off",
        "object.url": url,
        **({"object.share": share} if policy is None else {}),
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    with Daemon(folder, policy, settings=values) as daemon:
        daemon.wait_for_log(f"object store {url}: in use")
        yield daemon
        assert "Traceback" not in daemon.log.read_text()


def fill(daemon: Daemon) -> None:
    """Put every chain."""
    with Client(daemon.target, timeout=PATIENT) as client:
        namespace = client.register(IDENTITY)
        for chain in range(NUM_CHAINS):
            assert client.put(namespace, names_of(chain), data_of(chain)).complete


def expect(daemon: Daemon, num_blocks: int, chains: range = range(NUM_CHAINS)) -> None:
    """Read every chain: so many blocks of it, and each byte as it was put."""
    with Client(daemon.target, timeout=PATIENT) as client:
        namespace = client.register(IDENTITY)
        for chain in chains:
            got = client.get(namespace, names_of(chain))
            assert got.num_blocks == num_blocks
            np.testing.assert_array_equal(got.data, data_of(chain)[: num_blocks * GEOMETRY.block_bytes])


def bundles(folder: Path) -> dict[str, float]:
    """Return the bundles in a folder, with the time at which each was written."""
    return {path.name: path.stat().st_mtime for path in folder.glob("v1/b/*/*/*/*") if "#" not in path.name}


def test_a_host_that_is_gone_with_its_disk_is_read_by_another(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    url = f"file://{store}"
    with host(tmp_path / "first", url, "eager") as first:
        fill(first)
        until(lambda: len(bundles(store)) == NUM_CHAINS * STORED_BLOCKS // BUNDLE_BLOCKS)
        first.stop(SIGKILL)
    shutil.rmtree(tmp_path / "first" / "nvme")
    written = bundles(store)
    with host(tmp_path / "second", url, "eager") as second:
        expect(second, STORED_BLOCKS)
        shutil.rmtree(store)
        expect(second, STORED_BLOCKS)  # from here, now
        assert second.stop() == 0
    assert written.keys() == {names_of(c)[n].hex() for c in range(NUM_CHAINS) for n in (3, 7, 11)}


def test_a_lookup_marks_what_would_be_fetched(tmp_path: Path) -> None:
    """The first lookup waits for nothing, and begins the search that the next one tells of."""
    store = tmp_path / "store"
    store.mkdir()
    url = f"file://{store}"
    with host(tmp_path / "first", url, "eager") as first:
        fill(first)
        until(lambda: len(bundles(store)) == NUM_CHAINS * STORED_BLOCKS // BUNDLE_BLOCKS)
        assert first.stop() == 0
    with host(tmp_path / "second", url, "off") as second:
        with Client(second.target, timeout=PATIENT) as client:
            namespace = client.register(IDENTITY)
            assert client.lookup(namespace, names_of(0)).num_blocks == 0
            until(lambda: client.lookup(namespace, names_of(0)).num_fetchable == STORED_BLOCKS)
            found = client.lookup(namespace, names_of(0))
            assert (found.num_blocks, found.tiers) == (0, ())
            assert found.fetch_s > 0
        expect(second, STORED_BLOCKS, range(1))
        assert second.stop() == 0


def test_two_hosts_store_a_bundle_once(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    url = f"file://{store}"
    with host(tmp_path / "first", url, "eager") as first:
        fill(first)
        until(lambda: len(bundles(store)) == NUM_CHAINS * STORED_BLOCKS // BUNDLE_BLOCKS)
        written = bundles(store)
        with host(tmp_path / "second", url, "eager") as second:
            fill(second)
            assert second.stop() == 0
        assert first.stop() == 0
    assert bundles(store) == written


@pytest.mark.parametrize(
    "wanted",
    [
        "{share: worth}",
        f"{{share: 'off', namespaces: {{{IDENTITY.digest.hex()[:9]}: worth}}}}",
    ],
    ids=["of all", "of a namespace"],
)
def test_what_is_not_used_again_is_not_stored_and_the_setting_is_live(wanted: str, tmp_path: Path) -> None:
    store, policy = tmp_path / "store", tmp_path / "policy.yaml"
    store.mkdir()
    policy.write_text("object: {share: 'off'}\n")
    with host(tmp_path / "first", f"file://{store}", "", policy) as first:
        fill(first)
        expect(first, CHAIN_BLOCKS, range(1))
        policy.write_text(f"object: {wanted}\n")
        first.signal(SIGHUP)
        first.wait_for_log("policy generation 2: object.")
        until(lambda: bool(bundles(store)) or _read_again(first, range(1)))
        until(lambda: len(bundles(store)) == STORED_BLOCKS // BUNDLE_BLOCKS)
        assert bundles(store).keys() == {names_of(0)[number].hex() for number in (3, 7, 11)}
        assert first.stop() == 0


def _read_again(daemon: Daemon, chains: range = range(NUM_CHAINS)) -> bool:
    expect(daemon, CHAIN_BLOCKS, chains)
    return False


@pytest.mark.parametrize("damage", ["cut", "flipped", "swapped", "deleted"])
def test_a_damaged_object_is_a_miss(tmp_path: Path, damage: str) -> None:
    store = tmp_path / "store"
    store.mkdir()
    url = f"file://{store}"
    with host(tmp_path / "first", url, "eager") as first:
        fill(first)
        until(lambda: len(bundles(store)) == NUM_CHAINS * STORED_BLOCKS // BUNDLE_BLOCKS)
        assert first.stop() == 0
    second_bundle = next(store.glob(f"v1/b/*/*/*/{names_of(0)[7].hex()}"))
    whole = second_bundle.read_bytes()
    if damage == "cut":
        second_bundle.write_bytes(whole[: len(whole) * 2 // 3])
    elif damage == "flipped":
        second_bundle.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    elif damage == "swapped":
        other = next(store.glob(f"v1/b/*/*/*/{names_of(1)[7].hex()}"))
        second_bundle.write_bytes(other.read_bytes())
    else:
        second_bundle.unlink()
    with host(tmp_path / "second", url, "off") as second:
        expect(
            second, 7 if damage == "flipped" else BUNDLE_BLOCKS, range(1)
        )  # in the last fragment of block 7
        expect(second, STORED_BLOCKS, range(1, NUM_CHAINS))
        assert second.stop() == 0


def test_bundles_are_encoded_as_on_nvme(tmp_path: Path) -> None:
    store, url = tmp_path / "store", f"file://{tmp_path / 'store'}"
    store.mkdir()
    data, names = data_of(0) % 8, names_of(0)
    with host(tmp_path / "first", url, "eager", compression__codec="planes") as first:
        with Client(first.target, timeout=PATIENT) as client:
            assert client.put(client.register(IDENTITY), names, data).complete
        until(lambda: len(bundles(store)) == STORED_BLOCKS // BUNDLE_BLOCKS)
        assert first.stop() == 0
    heads = [unpack_head(path.read_bytes()) for path in store.glob("v1/b/*/*/*/*")]
    assert {int(codec) for head in heads for codec in head.entries["codec"]} == {Planes.codec_id}
    with host(tmp_path / "second", url, "off") as second:
        with Client(second.target, timeout=PATIENT) as client:
            got = client.get(client.register(IDENTITY), names)
            assert got.num_blocks == STORED_BLOCKS
            np.testing.assert_array_equal(got.data, data[: STORED_BLOCKS * GEOMETRY.block_bytes])
        assert second.stop() == 0


def test_without_its_store_a_daemon_serves(tmp_path: Path) -> None:
    """A folder that is not there is said, and looked for again; local puts and gets go on."""
    store = tmp_path / "store"
    folder = tmp_path / "host"
    folder.mkdir()
    with Daemon(folder, settings=(f"object.url=file://{store}", "observe.http=off")) as daemon:
        daemon.wait_for_log("is not used: the bucket or folder does not exist")
        fill(daemon)
        expect(daemon, CHAIN_BLOCKS)
        store.mkdir()
        daemon.wait_for_log("in use")
        assert daemon.stop() == 0


@pytest.mark.parametrize(("num_stored", "chains"), [(2, (1, 0)), (1, (1,))])
def test_sigterm_exports_what_is_worth_most(tmp_path: Path, num_stored: int, chains: tuple[int, ...]) -> None:
    """Of chains that were used while there was no store; the rest is beyond the day's budget."""
    store, policy = tmp_path / "store", tmp_path / "policy.yaml"
    num_bundles = STORED_BLOCKS // BUNDLE_BLOCKS
    budget = (num_stored * num_bundles * BUNDLE_BLOCKS + 1) * GEOMETRY.block_bytes
    folder = tmp_path / "first"
    folder.mkdir()
    policy.write_text(f"object: {{url: 'file://{store}', share: worth, daily_exports: {budget}}}\n")
    settings = ("observe.http=off", "tiers.dram.capacity=256MiB")
    with Daemon(folder, policy, settings=settings) as daemon:
        daemon.wait_for_log("is not used: the bucket or folder does not exist")
        fill(daemon)
        for num_uses, chain in ((1, 0), (2, 1)):
            for _ in range(num_uses):
                expect(daemon, CHAIN_BLOCKS, range(chain, chain + 1))
        store.mkdir()
        daemon.wait_for_log(f"object store file://{store}: in use")
        assert not bundles(store)
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log.read_text()
    assert bundles(store).keys() == {
        names_of(chain)[number].hex() for chain in chains for number in (3, 7, 11)
    }


def test_the_same_through_a_real_gateway(
    tmp_path: Path, s3: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    bucket = f"kv-{uuid.uuid4().hex[:12]}"
    s3.make_bucket(bucket)
    url = f"s3://{bucket}/fleet"
    with host(tmp_path / "first", url, "eager") as first:
        fill(first)
        store = ObjectStore(url)
        num_bundles = NUM_CHAINS * STORED_BLOCKS // BUNDLE_BLOCKS
        # What a slow gateway did not take in time is stored when it is used again.
        until(lambda: sum(1 for _ in store.objects("v1/b/")) == num_bundles or _read_again(first))
        first.stop(SIGKILL)
    shutil.rmtree(tmp_path / "first" / "nvme")
    with host(tmp_path / "second", url, "eager") as second:
        expect(second, STORED_BLOCKS)
        assert second.stop() == 0
