"""What FakeAppliance offers to test authors beyond the client's contract."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtier.clients import (
    Client,
    Geometry,
    Namespace,
    NamespaceIdentity,
    NotFound,
    Overloaded,
    Retry,
    Unavailable,
    prefix_hashes,
)
from kvtier.testing import FakeAppliance

GEOMETRY = Geometry(num_layers=2, num_kv_heads=1, head_dim=64, block_tokens=16, dtype="float16")
BLOCK = GEOMETRY.block_bytes


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns after microseconds: what they do to each other shows."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual_s)


def start(appliance: FakeAppliance, **settings: Any) -> tuple[Client, Namespace]:
    client = appliance.client(**settings)
    return client, client.register(NamespaceIdentity(bytes(16), GEOMETRY))


def test_fails_on_request() -> None:
    appliance = FakeAppliance()
    client, namespace = start(appliance)
    appliance.fail_next(Overloaded("full", reason="TIER_FULL", retry_after_s=0.5), num_calls=2)
    for _ in range(2):
        with pytest.raises(Overloaded):
            client.lookup(namespace, bytes(32))
    assert client.lookup(namespace, bytes(32)).num_blocks == 0
    assert appliance.calls == ["RegisterNamespace", "Lookup", "Lookup", "Lookup"]


def test_switched_off_and_on() -> None:
    appliance = FakeAppliance()
    client, namespace = start(appliance)
    names = prefix_hashes(GEOMETRY, range(16))
    client.put(namespace, names, bytes(BLOCK))
    lease = client.acquire(namespace, names)
    appliance.unavailable = True
    with pytest.raises(Unavailable):
        client.lookup(namespace, names)
    with pytest.raises(Unavailable):
        appliance.client().register(NamespaceIdentity(bytes(16), GEOMETRY))
    lease.release()
    appliance.unavailable = False
    assert client.get(namespace, names).num_blocks == 1
    assert appliance.check_integrity() == []


def connect_together(appliance: FakeAppliance, num_clients: int = 8) -> list[tuple[Client, Namespace]]:
    clients: list[tuple[Client, Namespace]] = []
    together = threading.Barrier(num_clients)

    def connect() -> None:
        together.wait()
        clients.append(start(appliance))

    threads = [threading.Thread(target=connect) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clients


def test_clients_that_connect_on_many_threads_are_all_cut_off(quick_switches: None) -> None:
    """A connection that was not noted down would go on working after "unavailable"."""
    for _ in range(100):
        appliance = FakeAppliance(capacity_bytes=1 << 20, staging_bytes=1 << 16)
        clients = connect_together(appliance)
        assert {namespace.id for _, namespace in clients} == {1}
        appliance.unavailable = True
        for client, namespace in clients:
            with pytest.raises(Unavailable):
                client.lookup(namespace, bytes(32))


def test_restart_forgets_and_the_client_does_not_notice() -> None:
    appliance = FakeAppliance()
    client, namespace = start(appliance)
    names = prefix_hashes(GEOMETRY, range(16))
    client.put(namespace, names, bytes(BLOCK))
    lease = client.acquire(namespace, names)
    lease.wait()
    epoch = client.info.epoch
    appliance.restart()
    assert client.get(namespace, names).num_blocks == 0
    assert client.info.epoch > epoch
    with pytest.raises(NotFound):
        lease.extend(1.0)
    assert client.put(namespace, names, bytes(BLOCK)).num_stored == 1


def test_leases_expire_by_the_given_clock() -> None:
    now = [0.0]
    appliance = FakeAppliance(capacity_bytes=2 * BLOCK, clock=lambda: now[0])
    client, namespace = start(appliance)
    names = prefix_hashes(GEOMETRY, range(32))
    client.put(namespace, names, bytes(2 * BLOCK))
    lease = client.acquire(namespace, names, ttl_s=10.0)
    assert lease.wait() == 2
    other = prefix_hashes(GEOMETRY, range(16), extra_keys=["other"])
    assert client.put(namespace, other, bytes(BLOCK)).num_refused == 1
    now[0] = 9.0
    lease.extend(10.0)
    now[0] = 18.0
    assert client.put(namespace, other, bytes(BLOCK)).num_refused == 1
    now[0] = 20.0
    assert client.put(namespace, other, bytes(BLOCK)).num_stored == 1
    assert not lease.still_valid(), "one of its slots was recycled"
    with pytest.raises(NotFound):
        lease.extend(10.0)
    assert appliance.check_integrity() == []


def test_children_go_before_their_parents() -> None:
    appliance = FakeAppliance(capacity_bytes=4 * BLOCK)
    client, namespace = start(appliance)
    names = prefix_hashes(GEOMETRY, range(64))
    client.put(namespace, names, bytes(4 * BLOCK))
    client.put(namespace, prefix_hashes(GEOMETRY, range(16), extra_keys=["x"]), bytes(BLOCK))
    assert client.lookup(namespace, names).num_blocks == 3
    assert appliance.evict_all() == 4
    assert appliance.num_blocks == appliance.used_bytes == 0


def test_a_client_that_closes_gives_its_leases_back() -> None:
    appliance = FakeAppliance()
    client, namespace = start(appliance)
    names = prefix_hashes(GEOMETRY, range(16))
    client.put(namespace, names, bytes(BLOCK))
    client.acquire(namespace, names)
    assert appliance.evict_all() == 0
    client.close()
    assert appliance.evict_all() == 1


def test_threads_share_one_client() -> None:
    appliance = FakeAppliance()
    client, namespace = start(appliance, retry=Retry(num_attempts=1))
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            names = prefix_hashes(GEOMETRY, range(64), extra_keys=[str(number)])
            data = np.full(4 * BLOCK, number, np.uint8)
            for _ in range(30):
                client.put(namespace, names, data)
                report = client.get(namespace, names)
                assert report.num_blocks == 4
                assert (report.data == number).all()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert appliance.check_integrity() == []
