"""Daemons over Ceph's gateway that are killed in the middle of a step, and what works meanwhile."""

import contextlib
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import numpy as np
import pytest

from kvtier.clients import Client, KvtierError
from kvtier.sources.objects.store import ObjectStore
from tests.daemon import PATIENT, Daemon
from tests.e2e.test_coded_streams import counters
from tests.e2e.test_shared_store import (
    CHAIN_BLOCKS,
    DEADLINE_S,
    GEOMETRY,
    IDENTITY,
    NUM_CHAINS,
    STORED_BLOCKS,
    data_of,
    expect,
    fill,
    host,
    names_of,
)
from tests.e2e.test_store_deaths import read_what_is_there
from tests.sources.objects.bundles import verify_bundle
from tests.sources.objects.gateway import Gateway

from ..waiting import until
from .proxy import Answer, Proxy
from .test_faults import ceph, raw

__all__ = ["ceph"]

NUM_BUNDLES = NUM_CHAINS * STORED_BLOCKS // 4


@pytest.fixture
def proxy(ceph: Gateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that daemons use, before a gateway that runs."""
    assert ceph.cluster is not None
    ceph.cluster.start_gateway()
    made = Proxy(int(ceph.endpoint.rpartition(":")[2]))
    for name, value in ceph.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
    yield made
    made.close()


def new_url(ceph: Gateway) -> str:
    """Return the address of a new bucket."""
    ceph.make_bucket(bucket := f"deaths-{uuid.uuid4().hex[:12]}")
    return f"s3://{bucket}/kv"


def held_up(proxy: Proxy, operation: str) -> tuple[threading.Event, threading.Event]:
    """Hold requests of one kind; return what is set when the first one came, and what lets them go on."""
    came, go_on = threading.Event(), threading.Event()

    def on_request(one: str, path: str) -> Answer | None:
        if one == operation:
            came.set()
            go_on.wait(DEADLINE_S)
        return None

    proxy.on_request = on_request
    return came, go_on


def local_calls_work(daemon: Daemon, chain: int) -> None:
    """Put a chain and read it back."""
    with Client(daemon.target, timeout=PATIENT) as client:
        namespace = client.register(IDENTITY)
        assert client.put(namespace, names_of(chain), data_of(chain)).complete
        np.testing.assert_array_equal(client.get(namespace, names_of(chain)).data, data_of(chain))


def whole(ceph: Gateway, url: str) -> int:
    """Return the number of bundles in a store, each of which is whole."""
    store = ObjectStore(url, endpoint=ceph.endpoint)
    found = [one.key for one in store.objects("v1/b/")]
    for key in found:
        verify_bundle(memoryview(raw(store, key)))
    return len(found)


def fill_store(daemon: Daemon, ceph: Gateway, url: str) -> None:
    """Put every chain, and wait until all their bundles are stored.

    A gateway that is slow for a moment fails an export; the next use of its bundle queues it again."""
    fill(daemon)

    def is_stored() -> bool:
        if whole(ceph, url) == NUM_BUNDLES:
            return True
        expect(daemon, CHAIN_BLOCKS)
        return False

    until(is_stored)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("operation", ["head", "put"])
def test_a_daemon_that_is_killed_while_it_exports(
    operation: str, ceph: Gateway, proxy: Proxy, tmp_path: Path
) -> None:
    url = new_url(ceph)
    with host(tmp_path / "first", url, "eager") as first:
        came, go_on = held_up(proxy, operation)
        fill(first)
        assert came.wait(DEADLINE_S)
        local_calls_work(first, NUM_CHAINS)
        first.stop(SIGKILL)
        go_on.set()
        proxy.heal()
        first.start()
        first.wait_for_log(f"object store {url}: in use")
        read_what_is_there(first)
        fill(first)
        expect(first, CHAIN_BLOCKS)
        assert first.stop() == 0
    assert whole(ceph, url) >= 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("operation", ["head", "get"])
def test_a_daemon_that_is_killed_while_it_fetches(
    operation: str, ceph: Gateway, proxy: Proxy, tmp_path: Path
) -> None:
    url = new_url(ceph)
    with host(tmp_path / "first", url, "eager") as first:
        fill_store(first, ceph, url)
        first.stop(SIGKILL)
    shutil.rmtree(tmp_path / "first" / "nvme")
    with host(tmp_path / "second", url, "off") as second:
        came, go_on = held_up(proxy, operation)
        reading = threading.Thread(target=_read_and_fail, args=(second,))
        reading.start()
        assert came.wait(DEADLINE_S)
        local_calls_work(second, NUM_CHAINS)
        second.stop(SIGKILL)
        reading.join()
        go_on.set()
        proxy.heal()
        second.start()
        second.wait_for_log(f"object store {url}: in use")
        until(lambda: read_what_is_there(second) == NUM_CHAINS * STORED_BLOCKS)
        assert second.stop() == 0


@pytest.mark.timeout(600)
def test_a_request_ends_and_local_ones_work_while_the_gateway_is_stopped(
    ceph: Gateway, proxy: Proxy, tmp_path: Path
) -> None:
    """The gateway goes on after everything was asked, and answered."""
    url = new_url(ceph)
    assert ceph.cluster is not None
    with host(tmp_path / "first", url, "eager") as first, host(tmp_path / "second", url, "off") as second:
        fill_store(first, ceph, url)
        ceph.cluster.signal_gateway(SIGSTOP)
        try:
            assert read_what_is_there(second) < NUM_CHAINS * STORED_BLOCKS
            for daemon, chain in ((first, NUM_CHAINS), (second, NUM_CHAINS + 1)):
                local_calls_work(daemon, chain)
        finally:
            ceph.cluster.signal_gateway(SIGCONT)
        with Client(second.target, timeout=PATIENT) as client:
            namespace = client.register(IDENTITY)
            chain = 0
            until(lambda: client.get(namespace, names_of(chain)).num_blocks == STORED_BLOCKS)
            got = client.get(namespace, names_of(chain))
        np.testing.assert_array_equal(got.data, data_of(chain)[: STORED_BLOCKS * GEOMETRY.block_bytes])
        assert (first.stop(), second.stop()) == (0, 0)


def _read_and_fail(daemon: Daemon) -> None:
    with contextlib.suppress(KvtierError), Client(daemon.target, timeout=PATIENT) as client:
        client.get(client.register(IDENTITY), names_of(0))


@pytest.mark.timeout(600)
def test_hosts_that_export_the_same_at_the_same_instant_store_it_once(
    ceph: Gateway, proxy: Proxy, tmp_path: Path
) -> None:
    """PUTs are held until the gateway has two of one bundle, and then all come at once."""
    url = new_url(ceph)
    num_puts: Counter[str] = Counter()
    have_met = threading.Event()

    def on_request(one: str, path: str) -> Answer | None:
        if one == "put" and "/v1/b/" in path:
            num_puts[path] += 1
            if num_puts[path] == 2:
                have_met.set()
            have_met.wait(DEADLINE_S)
        return None

    with host(tmp_path / "first", url, "eager") as first, host(tmp_path / "second", url, "eager") as second:
        proxy.on_request = on_request
        fills = [threading.Thread(target=fill, args=(daemon,)) for daemon in (first, second)]
        for one in fills:
            one.start()
        for one in fills:
            one.join()
        for daemon in (first, second):
            fill_store(daemon, ceph, url)
        counted = [counters(daemon) for daemon in (first, second)]
        assert sum(one["bundles_exported"] for one in counted) <= NUM_BUNDLES
        assert sum(one["bundles_shared_already"] for one in counted) >= 1
        assert (first.stop(), second.stop()) == (0, 0)
    assert have_met.is_set()
