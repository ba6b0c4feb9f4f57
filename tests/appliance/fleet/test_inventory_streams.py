"""The streams of inventories: one for the namespaces that there are, and what a message of one may cost."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from kvtier.appliance.fleet import hosts
from kvtier.appliance.fleet.fleet_host import FleetHost
from kvtier.appliance.fleet.hosts import MAX_NAMES_AT_ONCE, Hosts
from kvtier.sources.peers.inventory import NAME_BYTES
from kvtier.v1 import peer_pb2 as pb
from kvtier.v1.peer_pb2_grpc import PeerServiceServicer, add_PeerServiceServicer_to_server
from kvtier.v1.types_pb2 import HostLoad

from ...waiting import until
from ..loops import run

Told = Callable[[], Iterator[pb.WatchInventoryResponse]]


class Teller(PeerServiceServicer):
    """Serves `told` as the inventory of each stream, then says that it lives.

    `streams`: the peer of each, and how many messages it was told."""

    def __init__(self, told: Told) -> None:
        self.streams: list[tuple[str, list[int]]] = []
        self._told = told
        self._ended = threading.Event()

    @contextmanager
    def at_work(self) -> Iterator[str]:
        """Yield the address at which it can be called."""
        server = grpc.server(ThreadPoolExecutor(8))
        add_PeerServiceServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            self._ended.set()
            server.stop(0).wait()

    def WatchInventory(  # noqa: N802
        self, request: pb.WatchInventoryRequest, context: Any
    ) -> Iterator[pb.WatchInventoryResponse]:
        """Tell, and count what was told."""
        num_told = [0]
        self.streams.append((context.peer(), num_told))
        while context.is_active() and not self._ended.is_set():
            for message in self._told() if not num_told[0] else [pb.WatchInventoryResponse(epoch=7)]:
                yield message
                num_told[0] += 1
            self._ended.wait(0.005)


def snapshot() -> Iterator[pb.WatchInventoryResponse]:
    """Yield a snapshot in several messages."""
    yield pb.WatchInventoryResponse(epoch=7, is_reset=True)
    for _ in range(3):
        yield pb.WatchInventoryResponse(epoch=7)
    yield pb.WatchInventoryResponse(epoch=7, is_complete=True)


def follow(told: Told, holds: Callable[[FleetHost, Teller], bool], digests: Callable[[], Any]) -> FleetHost:
    """Follow one host until something holds of it."""

    async def main() -> FleetHost:
        watched = Hosts(1, None, digests, lambda: None)
        watched.set_members([address])
        host = watched.by_address[address]
        try:
            await asyncio.to_thread(until, lambda: holds(host, teller))
        finally:
            load, problem = host.load, host.problem
            await watched.stop()
        host.load, host.problem = load, problem
        return host

    teller = Teller(told)  # type: ignore[abstract]  # nothing else of it is called
    with teller.at_work() as address:
        return run(main())


def test_namespaces_that_are_registered_at_any_pace_leave_the_streams_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: each one ended the channel with its fetches, and no snapshot came to its end."""
    monkeypatch.setattr(hosts, "RENEW_S", 1e9)  # but for the first time
    numbers = itertools.count()
    streams: list[tuple[str, list[int]]] = []

    def holds(host: FleetHost, teller: Teller) -> bool:
        streams[:] = teller.streams
        return host.is_live and len(streams) > 1 and streams[-1][1][0] > 50

    follow(snapshot, holds, lambda: frozenset(map(str.encode, map(str, range(next(numbers))))))
    assert len(streams) == 2
    assert len({peer for peer, _ in streams}) == 1, "on one channel"


def test_a_namespace_that_is_forgotten_begins_no_stream() -> None:
    left = iter(range(50, 0, -1))
    streams: list[tuple[str, list[int]]] = []

    def holds(host: FleetHost, teller: Teller) -> bool:
        streams[:] = teller.streams
        return next(left, None) is None and bool(streams) and streams[-1][1][0] > 20

    digests = iter([frozenset([b"a", b"b"])] * 4)
    follow(snapshot, holds, lambda: next(digests, frozenset([b"a"])))
    assert len(streams) == 1


@pytest.mark.parametrize(
    "changes",
    [
        [pb.InventoryChange()] * (MAX_NAMES_AT_ONCE + 1),
        [pb.InventoryChange(added_on_disk=bytes(NAME_BYTES * (MAX_NAMES_AT_ONCE + 1)))],
    ],
    ids=["empty changes", "blocks on disk"],
)
def test_more_than_a_host_sends_at_once_ends_its_stream(changes: list[pb.InventoryChange]) -> None:
    def told() -> Iterator[pb.WatchInventoryResponse]:
        yield pb.WatchInventoryResponse(epoch=7, is_reset=True, is_complete=True, changes=changes)

    host = follow(told, lambda host, _: bool(host.problem or host.is_live), frozenset)
    assert "in one message, which no host does" in host.problem


def test_what_a_host_says_of_itself_is_not_kept_at_any_length() -> None:
    unknown = b"\xfa\x7f" + b"\x80\x80\x04" + bytes(1 << 16)  # field 2047, of 64 KiB

    def told() -> Iterator[pb.WatchInventoryResponse]:
        load = HostLoad.FromString(HostLoad(max_tickets=9).SerializeToString() + unknown)
        name = "\0" * 64 + "x"
        message = pb.WatchInventoryResponse(epoch=7, host=name, is_reset=True, is_complete=True, load=load)
        yield from itertools.repeat(message)

    host = follow(told, lambda host, _: host.load.max_tickets == 9, frozenset)
    assert host.load.ByteSize() < 16
    assert host.name == ""
