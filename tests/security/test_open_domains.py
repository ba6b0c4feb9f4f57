"""Isolation domains that local clients name: each tenant has a share, and unused ones are given back."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.appliance.server import open_domains
from kvtier.tiers.block import Tier

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..appliance.raw_client import RawClient, Refused, chain
from ..waiting import until

Record = Callable[[str, object], None]
ACME = {"members": [f"uid:{os.getuid()}"]}


def wait_until_alone(served: DaemonThread) -> None:
    """Wait until the daemon has noticed that all clients left."""
    until(lambda: not served.call(lambda: len(served.daemon.clients)), "clients stayed")


def attach(served: DaemonThread, domain: str, staging_bytes: int = 4096) -> RawClient:
    client = RawClient(served.daemon.service.facts.local_socket_path)
    try:
        client.attach(domain=domain, staging_bytes=staging_bytes)
    except Refused:
        client.close()
        raise
    return client


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonThread]:
    """A daemon for eight domains: acme can have two and, of the other four, as many as it leaves free."""
    monkeypatch.setattr(open_domains, "MAX_DOMAINS", 8)
    settings = small_settings(tmp_path, tenants={"acme": ACME, "bolt": {"members": ["uid:4711"]}})
    with DaemonThread(settings) as running:
        yield running


def test_domains_of_one_tenant_leave_the_others_their_share(
    served: DaemonThread, record_property: Record
) -> None:
    """Before: one tenant took all 256, until the daemon was restarted."""
    clients = [attach(served, name) for name in "abcd"]
    with pytest.raises(Refused, match="the tenant uses 4 isolation domains") as refused:
        attach(served, "e")
    assert refused.value.detail.reason == "TOO_MANY_CLIENTS"
    record_property("domains_of_a_tenant", len(clients))
    clients.append(attach(served, "a"))  # a name in use goes on
    for client in clients:
        client.close()


def test_an_unused_domain_is_given_back(served: DaemonThread, record_property: Record) -> None:
    for number in range(20):
        attach(served, f"part-{number}").close()
        wait_until_alone(served)
    indexes = served.daemon.service.memory(Tier.DRAM).indexes
    record_property("domains_left", num_left := served.call(lambda: len(indexes)))
    assert num_left <= 4


def test_a_domain_with_memory_stays_and_its_blocks_are_read_by_no_other(served: DaemonThread) -> None:
    blocks = chain(1)
    with attach(served, "kept", 1 << 20) as client:
        namespace = client.register()
        assert client.put(namespace, blocks, bytes(sum(namespace.fragment_bytes)))
        client.acquire(namespace, blocks)
    wait_until_alone(served)
    for number in range(8):
        attach(served, f"part-{number}").close()
        wait_until_alone(served)
    with attach(served, "kept") as client:
        assert client.acquire(client.register(), blocks)[-1].num_blocks == 1
    with attach(served, "part-1") as client:
        assert client.acquire(client.register(), blocks)[-1].num_blocks == 0
