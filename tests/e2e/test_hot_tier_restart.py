"""Blocks that are hot when the daemon is told to stop: in the hot tier and in dram, not on disk."""

import hashlib
from pathlib import Path

import numpy as np

from kvtier.clients import Client, Geometry, NamespaceIdentity, Tier

from ..daemon import PATIENT, Daemon

GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="float16", layers_per_group=2
)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"hot").digest(), GEOMETRY)
NAMES = [hashlib.sha256(bytes([i])).digest() for i in range(8)]
SETTINGS = (
    *("tiers.hbm.capacity=16MiB", "tiers.dram.capacity=16MiB", "tiers.dram.extent=16MiB"),
    *("tiers.nvme.capacity=64MiB", "tiers.nvme.segment=16MiB"),
)


def test_a_hot_block_survives_a_clean_restart(tmp_path: Path) -> None:
    data = np.random.default_rng(4).integers(0, 256, 8 * GEOMETRY.block_bytes, np.uint8)
    with Daemon(tmp_path, settings=(*SETTINGS, f"tiers.nvme.path={tmp_path / 'nvme'}")) as daemon:
        with Client(daemon.target, timeout=PATIENT) as client:
            namespace = client.register(IDENTITY)
            assert client.put(namespace, NAMES, data).complete
            assert client.prefetch(namespace, NAMES, Tier.HBM).num_promoted == 8
            assert client.pin(namespace, NAMES, ttl_s=60.0, floor=Tier.HBM).num_blocks == 8
            assert any(set(client.lookup(namespace, NAMES).tiers) == {Tier.HBM} for _ in range(10_000))
            assert daemon.stop() == 0
            daemon.start()
            assert client.lookup(namespace, NAMES).tiers == (Tier.NVME,) * 8
            np.testing.assert_array_equal(client.get(namespace, NAMES).data, data)
        assert daemon.stop() == 0
