"""What one tenant's processes can take of connections and staging memory: never what the others need."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.appliance.errors import ApplianceError

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..appliance.raw_client import RawClient, Refused

MIB = 1 << 20
Record = Callable[[str, object], None]
TENANTS = {"acme": {"members": [f"uid:{os.getuid()}"]}, "bolt": {"members": ["uid:4711"]}}


def attach_until_refused(served: DaemonThread, clients: list[RawClient], staging_bytes: int) -> Refused:
    """Attach as acme; return why no more."""
    while True:
        client = RawClient(served.daemon.service.facts.local_socket_path)
        clients.append(client)
        try:
            client.attach(staging_bytes=staging_bytes)
        except Refused as refused:
            return refused


def test_clients_of_one_tenant_leave_the_others_their_share(tmp_path: Path, record_property: Record) -> None:
    """Before: one tenant opened all 256, and every other caller was refused."""
    settings = small_settings(tmp_path, tenants=TENANTS, limits={"max_clients": 8})
    with DaemonThread(settings) as served:
        clients: list[RawClient] = []
        refused = attach_until_refused(served, clients, 4096)
        assert refused.detail.reason == "TOO_MANY_CLIENTS"
        assert "limits.max_clients: the tenant has 4 clients open" in refused.detail.message
        registry = served.daemon.clients
        record_property("clients_of_a_tenant", len(registry))

        def open_as_bolt() -> int:
            return registry.open_remote("", "", 0.0, {}, "tenant:bolt", "uid 4711").id

        assert len({served.call(open_as_bolt) for _ in range(3)}) == 3
        with pytest.raises(ApplianceError, match="tenant has 3 clients"):
            served.call(open_as_bolt)
        for client in clients:
            client.close()


def test_a_client_too_many_without_tenants_is_told_so(tmp_path: Path) -> None:
    """Before: the channel took as many connections as clients, and closed the next one without a word."""
    with DaemonThread(small_settings(tmp_path, limits={"max_clients": 2})) as served:
        clients: list[RawClient] = []
        refused = attach_until_refused(served, clients, 4096)
        assert (len(clients), refused.detail.reason) == (3, "TOO_MANY_CLIENTS")
        for client in clients:
            client.close()


def test_staging_of_a_tenant_is_at_most_its_quota_of_dram(tmp_path: Path, record_property: Record) -> None:
    """Before: 2.5 GiB by a tenant with a quota of 32 MiB."""
    acme = {**TENANTS["acme"], "quota": {"dram": "6MiB"}}
    settings = small_settings(tmp_path, tenants={**TENANTS, "acme": acme})
    with DaemonThread(settings) as served:
        clients: list[RawClient] = []
        refused = attach_until_refused(served, clients, MIB)
        assert refused.detail.reason == "TOO_MANY_CLIENTS"
        assert "staging: the tenant's clients have" in refused.detail.message
        staging = served.daemon.clients.staging
        # dram is 8 MiB: two for each tenant, and of the rest as much as is left free
        assert served.call(lambda: staging.held("tenant:acme")) == 4 * MIB
        record_property("staging_mib", staging.held("tenant:acme") / MIB)
        clients[0].close()
        again = attach_until_refused(served, clients, MIB)  # what was given back is taken again
        assert again.detail.reason == "TOO_MANY_CLIENTS"
        assert served.call(lambda: staging.held("tenant:acme")) <= 4 * MIB
        for client in clients:
            client.close()


def test_a_client_gets_less_staging_than_it_wants_where_less_is_left(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, tenants=TENANTS)
    with DaemonThread(settings) as served, RawClient(served.daemon.service.facts.local_socket_path) as client:
        assert client.attach(staging_bytes=32 * MIB).staging_bytes == 4 * MIB


def test_without_tenants_every_client_gets_the_staging_it_wants(tmp_path: Path) -> None:
    with DaemonThread(small_settings(tmp_path)) as served:
        clients = [RawClient(served.daemon.service.facts.local_socket_path) for _ in range(4)]
        assert {client.attach(staging_bytes=8 * MIB).staging_bytes for client in clients} == {8 * MIB}
        for client in clients:
            client.close()
