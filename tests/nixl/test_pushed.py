"""Hosts that push by NIXL, the library itself over TCP: the same bytes, or the data connection, or a miss."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import grpc
import pytest

from kvtier.sources.peers.connection import TICKET_BYTES
from kvtier.sources.peers.nixl_child import NIXL_VERSION
from kvtier.sources.peers.nixl_process import MAX_METADATA_BYTES, NUM_SLOTS, SLOT_BYTES
from kvtier.v1 import peer_pb2 as pb
from kvtier.v1.peer_pb2_grpc import PeerServiceStub

from ..appliance.fleet.hostile_host import HostileHost
from ..appliance.fleet.test_hostile_fetcher import ticket_of
from ..appliance.fleet.test_hostile_host import beside
from ..e2e.fleet_hosts import CHAIN_BLOCKS, GEOMETRY, IDENTITY, Host, fleet, names_of
from ..ports import free_port
from ..waiting import until
from .writer import Writer, noise

READY = "moves blocks between hosts, process "
CHAINS = range(1, 4)


def pid_of_nixl(host: Host) -> int:
    """Return the id of the process that a host has for NIXL, once it can push."""
    host.daemon.wait_for_log(READY)
    return int(host.daemon.log.read_text().rpartition(READY)[2].split()[0])


@contextmanager
def pushing(folder: Path, num_hosts: int = 2) -> Iterator[list[Host]]:
    """Start hosts, and wait until they can push."""
    with fleet(folder, num_hosts, peers__transport="nixl") as hosts:
        for host in hosts:
            pid_of_nixl(host)
        yield hosts


@pytest.fixture
def writer() -> Iterator[Writer]:
    """What a host that does as it likes writes with."""
    made = Writer()
    yield made
    made.close()


def test_a_prompt_is_pushed_into_the_memory_of_the_host_that_asks(tmp_path: Path) -> None:
    with pushing(tmp_path) as (first, second):
        first.put(1)
        until(lambda: second.read(1) == CHAIN_BLOCKS)
        assert second.counter("peer_pushes_arrived") == second.counter("peer_fetches_arrived") > 0
        assert first.counter("peer_bytes_sent") == second.counter("peer_bytes_received")
        assert second.counter("peer_bytes_received") == CHAIN_BLOCKS * GEOMETRY.block_bytes
        assert first.counter("peer_tickets_issued") == first.counter("peer_tickets_sent")
        assert [host.daemon.stop() for host in (first, second)] == [0, 0]


@pytest.mark.parametrize("how", [SIGKILL, SIGSTOP])
@pytest.mark.parametrize("end", ["holder", "fetcher"])
def test_without_its_process_bytes_come_over_the_data_connection(end: str, how: int, tmp_path: Path) -> None:
    with pushing(tmp_path) as (first, second):
        for chain in CHAINS:
            first.put(chain)
        until(lambda: second.read(1) == CHAIN_BLOCKS)
        arrived, host = second.counter("peer_pushes_arrived"), first if end == "holder" else second
        pid = pid_of_nixl(host)
        os.kill(pid, how)
        until(lambda: second.read(2) == CHAIN_BLOCKS)
        assert second.counter("peer_fetches_arrived") > second.counter("peer_pushes_arrived") >= arrived
        if how == SIGSTOP:  # what was under way comes now, to where nothing is read any more
            with suppress(ProcessLookupError):  # it was ended, with too much in quarantine
                os.kill(pid, SIGCONT)
            assert second.counter("peer_pushes_failed") > 0
        else:  # there is another one soon
            until(lambda: host.daemon.log.read_text().count(READY) == 2)
        until(lambda: second.read(3) == CHAIN_BLOCKS)
        assert [second.read(chain) for chain in CHAINS] == [CHAIN_BLOCKS] * len(CHAINS)
        until(lambda: first.status().num_leases == 0)


def test_a_host_without_nixl_or_with_another_version_uses_the_data_connection(tmp_path: Path) -> None:
    """Versions mix: one host has `transport: tcp`. Another says that it has a later NIXL."""
    with fleet(tmp_path, 1, peers__transport="tcp") as (plain,):
        plain.put(1)
        late = HostileHost("closes at once", IDENTITY, names_of(2))
        late.nixl_version, asked = "9.9.9", []
        late.push = lambda request: asked.append(request) or pb.PushBlocksResponse()  # type: ignore[func-returns-value]
        with beside_pushing(tmp_path / "host", late, plain.address) as host:
            until(lambda: host.read(1) == CHAIN_BLOCKS)
            until(lambda: host.read(2) == 0 and late.num_connections > 0)
            assert not asked
            assert host.counter("peer_pushes_arrived") + host.counter("peer_pushes_failed") == 0


@contextmanager
def beside_pushing(folder: Path, hostile: HostileHost, *others: str) -> Iterator[Host]:
    """Start a host that knows the hostile one, and pushes."""
    with beside(folder, hostile, *others, transport="nixl") as host:
        pid_of_nixl(host)
        yield host


def lie(writer: Writer, request: pb.PushBlocksRequest) -> pb.PushBlocksResponse:
    return pb.PushBlocksResponse(is_over=True)


def other_bytes(writer: Writer, request: pb.PushBlocksRequest) -> pb.PushBlocksResponse:
    assert writer.write(request.metadata, request.address, noise(1, request.length)) == ""
    return pb.PushBlocksResponse(is_over=True)


def beyond(writer: Writer, request: pb.PushBlocksRequest) -> pb.PushBlocksResponse:
    """Write over all landing memory that a host of the fleet can know of."""
    for slot in range(-NUM_SLOTS, NUM_SLOTS):
        writer.write(request.metadata, request.address + slot * SLOT_BYTES, noise(slot + 9, SLOT_BYTES))
    return pb.PushBlocksResponse(is_over=True)


def late(writer: Writer, request: pb.PushBlocksRequest) -> pb.PushBlocksResponse:
    """Write when all is over, as it says."""

    def write() -> None:
        for number in range(20):
            writer.write(request.metadata, request.address, noise(number, request.length), 0.5)

    threading.Thread(target=write).start()
    return pb.PushBlocksResponse(problem="no", is_over=True)


def forged(writer: Writer, request: pb.PushBlocksRequest) -> pb.PushBlocksResponse:
    """Write where nothing was registered: here at addresses around the memory that was told."""
    told = (request.address & ~(SLOT_BYTES - 1)).to_bytes(8, "little")
    for place in (0x400000, request.address - (1 << 30)):
        metadata = request.metadata.replace(told, place.to_bytes(8, "little"))
        writer.write(metadata, place, noise(1, 1 << 20), 0.5)
    return pb.PushBlocksResponse(is_over=True)


def endless_words(writer: Writer, request: pb.PushBlocksRequest) -> pb.PushBlocksResponse:
    return pb.PushBlocksResponse(problem="x" * (1 << 20))


@pytest.mark.parametrize("trick", [lie, other_bytes, beyond, late, forged, endless_words])
def test_what_a_host_pushes_that_does_as_it_likes_is_a_miss(
    trick: Callable[[Writer, pb.PushBlocksRequest], pb.PushBlocksResponse], writer: Writer, tmp_path: Path
) -> None:
    names = [name for chain in CHAINS for name in names_of(chain)]
    hostile, asked = HostileHost("other bytes", IDENTITY, names), []
    hostile.nixl_version = NIXL_VERSION

    def push(request: pb.PushBlocksRequest) -> pb.PushBlocksResponse:
        asked.append(request)
        return trick(writer, request)

    hostile.push = push
    with beside_pushing(tmp_path / "host", hostile) as host:
        until(lambda: host.read(CHAINS[0]) == 0 and bool(asked))
        for chain in CHAINS:
            assert host.read(chain) == 0
        for chain in CHAINS:
            until(lambda chain=chain: host.stores(chain))  # type: ignore[misc]
            assert host.read(chain) == CHAIN_BLOCKS
        until(lambda: host.status().num_leases == 0)
        assert host.counter("peer_pushes_arrived") == host.counter("peer_pushes_wrong_bytes")


def test_a_host_that_writes_over_what_others_push_spoils_no_byte(writer: Writer, tmp_path: Path) -> None:
    """It learns where landing memory is by an honest request, and never stops writing there."""
    hostile, requests = HostileHost("closes at once", IDENTITY, names_of(9)), list[pb.PushBlocksRequest]()
    hostile.nixl_version = NIXL_VERSION

    def push(request: pb.PushBlocksRequest) -> pb.PushBlocksResponse:
        requests.append(request)
        return pb.PushBlocksResponse(problem="no", is_over=True)

    hostile.push, port = push, free_port()
    honest = Host(tmp_path / "honest", port, [f"127.0.0.1:{port}"], {"peers.transport": "nixl"})
    honest.daemon.start()
    ended = threading.Event()
    try:
        pid_of_nixl(honest)
        for chain in CHAINS:
            honest.put(chain)
        with beside_pushing(tmp_path / "host", hostile, honest.address) as host:
            until(lambda: host.read(9) == 0 and bool(requests))

            def scribble() -> None:
                told, payload = requests[0], noise(1, SLOT_BYTES)
                first = told.address - told.address % SLOT_BYTES
                while not (ended.is_set() or writer.process.ended.is_set()):
                    for slot in range(-NUM_SLOTS, NUM_SLOTS):  # each goes on when something is expected there
                        writer.write(told.metadata, first + slot * SLOT_BYTES, payload, 60.0)

            scribbling = threading.Thread(target=scribble)
            scribbling.start()
            try:
                for chain in CHAINS:
                    until(lambda chain=chain: host.read(chain) == CHAIN_BLOCKS)  # type: ignore[misc]
            finally:
                ended.set()
                writer.call(writer.process.kill)
                scribbling.join()
            assert host.counter("peer_fetches_arrived") > 0
    finally:
        honest.daemon.close()


def test_a_holder_refuses_what_makes_no_sense_and_the_ticket_stays_good(
    tmp_path: Path, writer: Writer
) -> None:
    with pushing(tmp_path) as (first, second), grpc.insecure_channel(first.address) as channel:
        first.put(1)
        stub, ticket = PeerServiceStub(channel), ticket_of(first, 1)
        assert ticket.nixl_version == NIXL_VERSION
        there, length = writer.process, CHAIN_BLOCKS * GEOMETRY.block_bytes
        good = pb.PushBlocksRequest(
            ticket=ticket.ticket,
            nixl_version=NIXL_VERSION,
            metadata=there.metadata,
            address=there.address,
            length=length,
        )
        wrong: dict[str, dict[str, Any]] = {
            "another version": {"nixl_version": "1.5.0"},
            "fewer bytes": {"length": length - 1},
            "too many bytes": {"length": 1 << 63},
            "nothing": {"length": 0},
            "too much": {"metadata": bytes(MAX_METADATA_BYTES + 1)},
            "beyond": {"address": there.address + (NUM_SLOTS - 1) * SLOT_BYTES + SLOT_BYTES - length + 1},
            "noise": {"metadata": noise(1, 400)},
        }
        for words, change in wrong.items():
            request = pb.PushBlocksRequest.FromString(good.SerializeToString())
            for field, value in change.items():
                setattr(request, field, value)
            answer = stub.PushBlocks(request, timeout=60)
            assert answer.problem, words
            assert answer.is_over, words
        expected = writer.call(there.expect)
        assert stub.PushBlocks(good, timeout=60).problem == ""
        writer.call(there.end, expected)
        assert writer.landed()[:length].any()
        for number in (ticket.ticket, bytes(TICKET_BYTES)):  # used, and none
            with pytest.raises(grpc.RpcError):
                stub.PushBlocks(pb.PushBlocksRequest(ticket=number), timeout=60)
        until(lambda: second.read(1) == CHAIN_BLOCKS)
        until(lambda: first.status().num_leases == 0)
