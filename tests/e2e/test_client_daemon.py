"""The client against the real daemon in another process: one-sided reads, death, restart."""

import hashlib
import signal

import numpy as np

from kvtier.clients import Client, Geometry, NamespaceIdentity

from ..daemon import Daemon

GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=2, head_dim=128, block_tokens=16, dtype="bfloat16", layers_per_group=2
)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"e2e").digest(), GEOMETRY)
NAMES = [hashlib.sha256(bytes([i])).digest() for i in range(16)]


def test_what_is_in_memory_is_read_without_a_call(daemon: Daemon) -> None:
    data = np.random.default_rng(2).integers(0, 256, 16 * GEOMETRY.block_bytes, np.uint8)
    with Client(daemon.target) as client:
        namespace = client.register(IDENTITY)
        assert client.info.transport == "local"
        assert client.put(namespace, NAMES, data).complete
        report = client.get(namespace, NAMES)
        np.testing.assert_array_equal(report.data, data)
        assert report.num_one_sided == 16
        target = np.zeros(GEOMETRY.block_bytes, np.uint8)
        assert client.get(namespace, NAMES[:1], target).num_one_sided == 1
        np.testing.assert_array_equal(target, data[: GEOMETRY.block_bytes])


def test_death_and_restart_cost_a_miss(daemon: Daemon) -> None:
    data = np.random.default_rng(3).integers(0, 256, 16 * GEOMETRY.block_bytes, np.uint8)
    with Client(daemon.target) as client:
        namespace = client.register(IDENTITY)
        client.put(namespace, NAMES, data)
        epoch = client.info.epoch
        daemon.stop(signal.SIGKILL)
        daemon.start()
        assert client.lookup(namespace, NAMES).num_blocks == 0
        assert client.info.epoch != epoch
        assert client.put(namespace, NAMES, data).complete
        np.testing.assert_array_equal(client.get(namespace, NAMES).data, data)
