"""DRAM, a second memory and nvme in one daemon, as on a host with a CXL memory node."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGHUP
from typing import Any

import numpy as np
import pytest

from kvtier.clients import Client, Geometry, NamespaceIdentity, Tier
from kvtier.clients.values.namespace import Namespace
from kvtier.v1.types import TierKind

from ..cli.conftest import run
from ..daemon import PATIENT, Daemon
from ..waiting import until
from .test_evict import status, used_bytes

GEOMETRY = Geometry(
    num_layers=8, num_kv_heads=8, head_dim=64, block_tokens=64, dtype="float16", layers_per_group=4
)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"second memory").digest(), GEOMETRY)
CHAIN_BLOCKS = 8
NUM_CHAINS = 40  # 320 MiB: more than both memories hold
CXL = "{kind: memory, capacity: 128MiB}"


def capacity_bytes(daemon: Daemon) -> dict[str, int]:
    """Return what each tier can hold."""
    return {tier["tier"]: tier["capacity_bytes"] for tier in status(daemon)["tiers"]}


def names_of(chain: int) -> list[bytes]:
    """Return the names of a chain's blocks."""
    return [hashlib.sha256(bytes([chain, number])).digest() for number in range(CHAIN_BLOCKS)]


def data_of(chain: int) -> Any:
    """Return the bytes of a chain, uint8."""
    return np.random.default_rng(chain).integers(0, 256, CHAIN_BLOCKS * GEOMETRY.block_bytes, np.uint8)


def labels(client: Client, namespace: Namespace, chain: int) -> list[str]:
    """Return the names of the tiers that a chain's blocks are in."""
    return [tier.label for tier in client.lookup(namespace, names_of(chain)).tiers]


def chain_in_cxl(client: Client, namespace: Namespace) -> int:
    """Return a chain that is whole in the second memory; reads of earlier tests bring chains up."""
    for further in range(NUM_CHAINS, 256):
        for chain in range(further):
            if set(labels(client, namespace, chain)) == {"cxl"}:
                return chain
        assert client.put(namespace, names_of(further), data_of(further)).complete  # pushes others down
    raise AssertionError("no chain is whole in the second memory")


@contextmanager
def daemon_of(folder: Path, policy: Path | None = None, **changed: str) -> Iterator[Daemon]:
    """Start a daemon with a second memory; check at the end that it said nothing of a bug."""
    values = {
        "tiers.dram.capacity": "64MiB",
        "tiers.dram.extent": "16MiB",
        "tiers.cxl": CXL,
        "tiers.nvme.path": str(folder / "nvme"),
        "tiers.nvme.capacity": "512MiB",
        "tiers.nvme.segment": "16MiB",
        "observe.http": "off",
        **changed,
    }
    values = {key: value for key, value in values.items() if value}
    with Daemon(folder, policy, settings=values) as daemon:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log.read_text()


def fill(client: Client, namespace: Namespace) -> None:
    """Put every chain."""
    for chain in range(NUM_CHAINS):
        assert client.put(namespace, names_of(chain), data_of(chain)).complete


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon_of(tmp_path_factory.mktemp("second")) as daemon:
        with Client(daemon.target, timeout=PATIENT) as client:
            fill(client, client.register(IDENTITY))
        yield daemon


def test_blocks_go_down_one_memory_at_a_time_and_are_read_from_all_tiers(filled: Daemon) -> None:
    with Client(filled.target, timeout=PATIENT) as client:
        namespace = client.register(IDENTITY)
        where = {label for chain in range(NUM_CHAINS) for label in labels(client, namespace, chain)}
        assert where == {"dram", "cxl", "nvme"}
        assert used_bytes(filled)["cxl"] > 64 << 20
        for chain in range(NUM_CHAINS):
            got = client.get(namespace, names_of(chain))
            assert got.num_blocks == CHAIN_BLOCKS
            np.testing.assert_array_equal(got.data, data_of(chain))


def test_the_second_memory_is_read_in_place_without_a_call(filled: Daemon) -> None:
    with Client(filled.target, timeout=PATIENT, shared_memory=True) as client:
        namespace = client.register(IDENTITY)
        in_cxl = [chain_in_cxl(client, namespace)]
        in_cxl += [c for c in range(NUM_CHAINS) if set(labels(client, namespace, c)) == {"cxl"}]
        for chain in in_cxl:
            got = client.get(namespace, names_of(chain))
            assert got.num_one_sided == CHAIN_BLOCKS
            np.testing.assert_array_equal(got.data, data_of(chain))
        with client.acquire(namespace, names_of(in_cxl[0])) as lease:
            whole = b"".join(bytes(part.view) for part in sorted(lease, key=lambda f: (f.block, f.group)))
            assert {tier.label for tier in lease.tiers} <= {"dram", "cxl"}
        assert whole == data_of(in_cxl[0]).tobytes()


def test_a_chain_that_is_read_again_in_the_second_memory_comes_up_to_dram(filled: Daemon) -> None:
    with Client(filled.target, timeout=PATIENT, shared_memory=False) as client:
        namespace = client.register(IDENTITY)
        chain = chain_in_cxl(client, namespace)

        def is_in_dram_when_read() -> bool:
            np.testing.assert_array_equal(client.get(namespace, names_of(chain)).data, data_of(chain))
            return set(labels(client, namespace, chain)) == {"dram"}

        until(is_in_dram_when_read)


def test_a_client_without_shared_memory_learns_the_same_tiers(filled: Daemon) -> None:
    with Client(filled.target, timeout=PATIENT, shared_memory=False) as client:
        assert [(info.tier.label, info.kind) for info in client.info.ladder] == [
            ("hbm", TierKind.DEVICE),
            ("dram", TierKind.MEMORY),
            ("cxl", TierKind.MEMORY),
            ("nvme", TierKind.SEGMENTS),
        ]
        namespace = client.register(IDENTITY)
        chain = chain_in_cxl(client, namespace)
        got = client.get(namespace, names_of(chain))
        np.testing.assert_array_equal(got.data, data_of(chain))


def test_tiers_are_given_by_name(filled: Daemon) -> None:
    with Client(filled.target, timeout=PATIENT) as client:
        namespace = client.register(IDENTITY)
        found = {chain: labels(client, namespace, chain) for chain in range(NUM_CHAINS)}
        chain = next(c for c, tiers in found.items() if "nvme" in tiers and len(tiers) == CHAIN_BLOCKS)
        with client.pin(namespace, names_of(chain), ttl_s=60.0, floor="cxl") as pin:
            assert pin.num_blocks == CHAIN_BLOCKS
            until(lambda: not {"nvme"} & set(labels(client, namespace, chain)))
            run("evict", "cxl", "all", target=filled.target)
            assert not {"nvme"} & set(labels(client, namespace, chain)), "a pin keeps them in memory"
        assert used_bytes(filled)["cxl"] < CHAIN_BLOCKS * GEOMETRY.block_bytes + 1
        refused = run("evict", "far", "all", target=filled.target)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "tier must be one of hbm, dram, cxl, nvme, is 'far'" in refused.stderr
        run("evict", "dram", "32MiB", target=filled.target)
        assert client.prefetch(namespace, names_of(chain), "dram").num_blocks == CHAIN_BLOCKS
        until(lambda: set(labels(client, namespace, chain)) == {Tier.DRAM.label})


def test_a_restart_finds_what_nvme_has(tmp_path: Path) -> None:
    with daemon_of(tmp_path) as daemon, Client(daemon.target, timeout=PATIENT) as client:
        namespace = client.register(IDENTITY)
        fill(client, namespace)
        assert daemon.stop() == 0  # a drain writes all of both memories to nvme
        daemon.start()
        assert used_bytes(daemon)["cxl"] == 0
        for chain in range(NUM_CHAINS):
            assert set(labels(client, namespace, chain)) == {"nvme"}
            np.testing.assert_array_equal(client.get(namespace, names_of(chain)).data, data_of(chain))


def test_the_second_memory_is_resized_by_a_reload(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"tiers: {{cxl: {CXL}}}")
    with (
        daemon_of(tmp_path, policy, **{"tiers.cxl": ""}) as daemon,
        Client(daemon.target, timeout=PATIENT) as client,
    ):
        namespace = client.register(IDENTITY)
        fill(client, namespace)
        for capacity in (32 << 20, 192 << 20):
            policy.write_text(f"tiers: {{cxl: {{kind: memory, capacity: {capacity}}}}}")
            daemon.signal(SIGHUP)
            until(lambda size=capacity: capacity_bytes(daemon)["cxl"] == size)  # type: ignore[misc]
            until(lambda size=capacity: used_bytes(daemon)["cxl"] <= size)  # type: ignore[misc]
            for chain in range(NUM_CHAINS):
                np.testing.assert_array_equal(client.get(namespace, names_of(chain)).data, data_of(chain))


def test_a_quota_of_the_second_memory_is_kept(tmp_path: Path) -> None:
    tenants = json.dumps({"one": {"members": [f"uid:{os.getuid()}"], "quota": {"cxl": "32MiB"}}})
    with (
        daemon_of(tmp_path, tenants=tenants) as daemon,
        Client(daemon.target, timeout=PATIENT) as client,
    ):
        namespace = client.register(IDENTITY)
        fill(client, namespace)
        assert 0 < used_bytes(daemon)["cxl"] <= 32 << 20
        for chain in range(0, NUM_CHAINS, 7):
            np.testing.assert_array_equal(client.get(namespace, names_of(chain)).data, data_of(chain))
