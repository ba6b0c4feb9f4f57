"""What reaches a host's data port and is no host, or a bad one, costs other hosts nothing."""

import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.appliance.fleet import data_listener, fleet_host
from kvtier.appliance.fleet.data_listener import MAX_CONNECTIONS
from kvtier.appliance.fleet.tickets import MAX_TICKETS, SEND_S
from kvtier.sources.peers.connection import IDLE_S
from kvtier.sources.peers.receiving import PayloadReader
from kvtier.v1 import peer_pb2 as pb
from kvtier.v1.peer_pb2_grpc import PeerServiceStub

from ...e2e.fleet_hosts import CHAIN_BLOCKS, IDENTITY, Host, fleet, names_of
from ...waiting import until
from ..conftest import small_settings
from ..loops import DaemonThread
from ..raw_client import RawClient, chain


def ticket_of(
    host: Host, chain: int, num_blocks: int = CHAIN_BLOCKS, repeats: int = 1, codecs: Sequence[int] = ()
) -> pb.FetchBlocksResponse:
    """Return a ticket for blocks of a chain, as a host gets it."""
    digest = IDENTITY.digest
    with grpc.insecure_channel(host.address) as channel:
        stub = PeerServiceStub(channel)
        watch = stub.WatchInventory(pb.WatchInventoryRequest(namespace_digests=[digest]), timeout=60)
        epoch = next(watch).epoch
        watch.cancel()
        request = pb.FetchBlocksRequest(
            epoch=epoch,
            namespace_digest=digest,
            prefix_hashes=b"".join(names_of(chain, num_blocks)) * repeats,
            codecs=codecs,
            deadline_ms=60_000,
        )
        return stub.FetchBlocks(request, timeout=60)


def test_strangers_take_no_connection_of_a_host(tmp_path: Path) -> None:
    with fleet(tmp_path, 2) as (first, second), ExitStack() as open_ones:
        first.put(1)
        port = ticket_of(first, 1).data_port
        for _ in range(MAX_CONNECTIONS + MAX_TICKETS):
            open_ones.enter_context(socket.create_connection(("127.0.0.1", port), 60))
        until(lambda: second.read(1) == CHAIN_BLOCKS)
        assert second.counter("peer_fetches_broken") == 0


def test_strangers_that_begin_a_ticket_take_no_thread_of_a_host(tmp_path: Path) -> None:
    with fleet(tmp_path, 2) as (first, second), ExitStack() as open_ones:
        for chain in (1, 2):
            first.put(chain)
        until(lambda: second.read(1) == CHAIN_BLOCKS)  # its connections are known from now on
        port = ticket_of(first, 1).data_port
        for _ in range(8 * MAX_TICKETS):
            one = open_ones.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            one.sendall(b"k")
        assert second.read(2) == CHAIN_BLOCKS
        assert second.counter("peer_fetches_broken") == 0


def test_a_host_that_takes_nothing_is_left_before_its_ticket_ends(tmp_path: Path) -> None:
    with fleet(tmp_path, 1) as (host,):
        host.put(1)
        ticket = ticket_of(host, 1)
        began_at = time.monotonic()
        with socket.socket() as stopped:
            stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stopped.connect(("127.0.0.1", ticket.data_port))
            stopped.sendall(ticket.ticket)
            until(lambda: host.counter("peer_tickets_broken") == 1)
            assert time.monotonic() - began_at < SEND_S
            until(lambda: host.status().num_leases == 0)


def test_hosts_that_take_nothing_leave_threads_for_others(tmp_path: Path) -> None:
    """Before: eight tickets of such hosts had them all, and others gave this host up after a second."""
    with fleet(tmp_path, 2) as (first, second), ExitStack() as open_ones:
        first.put(1)
        first.put(2)
        until(lambda: second.read(1) == CHAIN_BLOCKS)  # its connections are known from now on
        for _ in range(MAX_TICKETS // 2):
            ticket = ticket_of(first, 2, num_blocks=5)
            stopped = open_ones.enter_context(socket.socket())
            stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stopped.connect(("127.0.0.1", ticket.data_port))
            stopped.sendall(ticket.ticket)
        assert second.read(2) == CHAIN_BLOCKS
        assert second.counter("peer_fetches_broken") == 0


@pytest.mark.parametrize(
    ("more", "words"), [({"repeats": 2}, "a block stands twice"), ({"codecs": range(65)}, "limit 64")]
)
def test_what_no_host_asks_for_is_refused(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    with fleet(tmp_path, 1) as (host,):
        host.put(1)
        with pytest.raises(grpc.RpcError, match=words):
            ticket_of(host, 1, **more)


def test_tickets_that_cannot_be_pushed_do_not_stay(tmp_path: Path) -> None:
    """Before: a push that this host cannot make kept its ticket, and after 16 of them no host got any."""
    with fleet(tmp_path, 1, peers__transport="tcp") as (host,):
        host.put(1)
        with grpc.insecure_channel(host.address) as channel:
            ticket = ticket_of(host, 1)
            with pytest.raises(grpc.RpcError, match="no such ticket"):
                PeerServiceStub(channel).PushBlocks(pb.PushBlocksRequest(ticket=ticket.ticket), timeout=60)
        with socket.create_connection(("127.0.0.1", ticket.data_port), 60) as connection:
            connection.sendall(ticket.ticket)
            assert connection.recv(4) == b"kvtr"


def test_a_ticket_is_good_once(tmp_path: Path) -> None:
    with fleet(tmp_path, 1) as (host,):
        host.put(1)
        ticket = ticket_of(host, 1)
        for is_good in (True, False):
            with socket.create_connection(("127.0.0.1", ticket.data_port), 60) as connection:
                connection.sendall(ticket.ticket)
                try:
                    answer = connection.recv(4)
                except ConnectionResetError:
                    answer = b""
                assert answer == (b"kvtr" if is_good else b"")


def test_a_connection_without_a_next_ticket_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: never; connections of hosts that had died kept all others out."""
    monkeypatch.setattr(data_listener, "IDLE_S", 0.05)
    sections: dict[str, Any] = {
        "listen": [f"unix://{tmp_path}/k.sock", "127.0.0.1:0"],
        "peers": {"hosts": ["127.0.0.1:1"]},
        "access": {"insecure": True},
    }
    settings = small_settings(tmp_path, **sections)
    with DaemonThread(settings) as served, RawClient(served.daemon.service.facts.local_socket_path) as raw:
        raw.attach()
        namespace, blocks = raw.register(), chain(1)
        raw.put(namespace, blocks, bytes(16384))
        asked = pb.FetchBlocksRequest(
            epoch=served.daemon.service.facts.epoch,
            namespace_digest=namespace.digest,
            prefix_hashes=blocks[0],
            deadline_ms=60_000,
        )
        with grpc.insecure_channel(served.daemon.grpc.addresses[1]) as channel:
            ticket = PeerServiceStub(channel).FetchBlocks(asked, timeout=60)
        with socket.create_connection(("127.0.0.1", ticket.data_port), 60) as connection:
            reader = PayloadReader(connection, time.monotonic, lambda silent_s: None)
            reader.begin(ticket.ticket, 2)
            reader.fill_many([memoryview(bytearray(8192)) for _ in range(2)])
            reader.end()
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""


def test_a_connection_that_was_idle_for_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end may be about to close it."""
    now = [0.0]
    monkeypatch.setattr(fleet_host, "monotonic", lambda: now[0])
    host = fleet_host.FleetHost("127.0.0.1:1")
    host.is_live = True
    for idle_s, is_used in ((IDLE_S / 2 - 1, True), (IDLE_S / 2 + 1, False)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            host.give_idle(ours)
            now[0] += idle_s
            assert (host.take_idle() is ours) == is_used


def test_strangers_of_one_address_take_no_place_of_another(tmp_path: Path) -> None:
    """Before: the oldest one went, whoever it was; a host has none but that while it connects."""
    with fleet(tmp_path, 1) as (host,), ExitStack() as open_ones:
        host.put(1)
        ticket = ticket_of(host, 1)
        address = ("127.0.0.1", ticket.data_port)
        first = open_ones.enter_context(socket.create_connection(address, 60, ("127.0.0.2", 0)))
        crowd = [
            open_ones.enter_context(socket.create_connection(address, 60))
            for _ in range(MAX_CONNECTIONS + MAX_TICKETS)
        ]
        with suppress(ConnectionResetError):  # it made room: the daemon has accepted as many as it holds
            assert crowd[0].recv(1) == b""
        first.sendall(ticket.ticket)
        assert first.recv(4) == b"kvtr"
