"""The client against the real daemon in another process: one-sided reads, death, restart."""

import hashlib
import random
import signal
import threading

import numpy as np

from kvtier.clients import Client, Geometry, NamespaceIdentity

from ..daemon import PATIENT, Daemon

GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=2, head_dim=128, block_tokens=16, dtype="bfloat16", layers_per_group=2
)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"e2e").digest(), GEOMETRY)
NAMES = [hashlib.sha256(bytes([i])).digest() for i in range(16)]


def test_what_is_in_memory_is_read_without_a_call(daemon: Daemon) -> None:
    data = np.random.default_rng(2).integers(0, 256, 16 * GEOMETRY.block_bytes, np.uint8)
    with Client(daemon.target, timeout=PATIENT) as client:
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
    with Client(daemon.target, timeout=PATIENT) as client:
        namespace = client.register(IDENTITY)
        client.put(namespace, NAMES, data)
        epoch = client.info.epoch
        daemon.stop(signal.SIGKILL)
        daemon.start()
        assert client.lookup(namespace, NAMES).num_blocks == 0
        assert client.info.epoch != epoch
        assert client.put(namespace, NAMES, data).complete
        np.testing.assert_array_equal(client.get(namespace, NAMES).data, data)


def test_reads_during_an_eviction_storm_are_right_or_missing(shared_daemon: Daemon) -> None:
    """One client keeps storing far more than fits, another one reads: every block carries its number."""
    seed, num_blocks = 11, 1500  # of 64 KiB, in 16 MiB
    print(f"seed {seed}")
    identity = NamespaceIdentity(hashlib.sha256(b"storm").digest(), GEOMETRY)
    names = [hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(num_blocks)]
    words = GEOMETRY.block_bytes // 8
    newest, ended = [0], threading.Event()
    problems: list[BaseException] = []

    def write() -> None:
        try:
            with Client(shared_daemon.target, timeout=PATIENT) as client:
                namespace = client.register(identity)
                for _ in range(2):
                    for number, name in enumerate(names):
                        client.put(namespace, [name], np.full(words, number, np.uint64))
                        newest[0] = number
        except BaseException as problem:
            problems.append(problem)
        finally:
            ended.set()

    chance = random.Random(seed)
    num_read = num_one_sided = 0
    writer = threading.Thread(target=write)
    with Client(shared_daemon.target, timeout=PATIENT) as client:
        namespace = client.register(identity)
        target = np.zeros(words, np.uint64)
        writer.start()
        while not ended.is_set():
            number = max(0, newest[0] - chance.randrange(300)) % num_blocks
            report = client.get(namespace, [names[number]], target)
            if report.num_blocks:
                num_read += 1
                num_one_sided += report.num_one_sided
                assert (target == number).all(), f"block {number} holds {set(target.tolist())}"
        writer.join()
    assert problems == []
    assert num_one_sided > 100
    print(f"{num_read} reads, {num_one_sided} one-sided")
