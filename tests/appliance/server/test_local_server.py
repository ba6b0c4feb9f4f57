"""The local channel against peers that lie, stall, flood and die."""

import asyncio
import contextlib
import fcntl
import os
import random
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvtier.appliance.server import local_connection, local_server
from kvtier.appliance.server.call_latency import CallLatencies
from kvtier.appliance.server.local_connection import LocalConnection
from kvtier.appliance.server.local_turns import Turns
from kvtier.tiers.base import Cause, CopyError
from kvtier.tiers.block import Tier
from kvtier.tiers.memory.staging import StagingExtent
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1 import local_pb2
from kvtier.v1.local import HEADER, MAX_DESCRIPTORS, MAX_PAYLOAD_BYTES, Flag, Frame, Method, encode
from kvtier.v1.residence import RESIDENCE_EXTENT

from ...waiting import until
from ..conftest import small_settings
from ..loops import DaemonThread, run
from ..raw_client import RawClient, Refused, chain


def path_of(served: DaemonThread) -> str:
    return served.daemon.service.facts.local_socket_path


def ends(served: DaemonThread) -> dict[str, int]:
    """How connections ended so far."""
    assert served.daemon.local is not None
    return dict(served.daemon.local.counters)


def expect_closed(client: RawClient) -> None:
    with pytest.raises(ConnectionError):
        client.receive()


def as_much_as_it_takes(to: socket.socket, data: memoryview) -> int:
    """Send until the other side has taken nothing for a while; return how many bytes went."""
    to.settimeout(0.5)
    num_sent = 0
    with contextlib.suppress(TimeoutError):
        while num_sent < len(data):
            num_sent += to.send(data[num_sent:])
    return num_sent


def read_all(client: RawClient) -> None:
    while True:
        client.receive()


def attach_frame() -> bytes:
    return encode(Frame(Method.ATTACH, Flag.NONE, 1, local_pb2.AttachRequest().SerializeToString()))


@pytest.mark.parametrize(
    ("attached", "data", "reason"),
    [
        (True, HEADER.pack(MAX_PAYLOAD_BYTES + 1, Method.LOOKUP, 0, 1), "malformed frame"),
        (True, HEADER.pack(0xFFFF_FFFF, Method.LOOKUP, 0, 1), "malformed frame"),
        (True, HEADER.pack(0, 9999, 0, 1), "malformed frame"),
        (True, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "malformed frame"),
        (True, attach_frame(), "attached twice"),
        (False, HEADER.pack(0, Method.LOOKUP, 0, 1), "call before attach"),
        (False, random.Random(1).randbytes(4096), "malformed frame"),
    ],
)
def test_who_breaks_the_framing_is_cut_off(
    served: DaemonThread, raw: RawClient, attached: bool, data: bytes, reason: str
) -> None:
    with RawClient(path_of(served)) as bad:
        if attached:
            bad.attach()
        bad.socket.sendall(data)
        expect_closed(bad)
    until(lambda: served.call(lambda: ends(served) == {reason: 1}))
    assert len(raw.register().digest) == 32, "others are served as before"


def test_an_undecodable_message_is_an_answer_not_an_end(raw: RawClient) -> None:
    raw.socket.sendall(encode(Frame(Method.LOOKUP, Flag.NONE, 77, b"\xff\xff\xff")))
    frame = raw.receive()
    assert frame.call == 77
    assert frame.flags == Flag.LAST | Flag.ERROR
    assert raw.register().namespace_id == 1


def test_frames_may_arrive_byte_by_byte_or_many_at_once(raw: RawClient) -> None:
    request = pb.LookupRequest(namespace_id=raw.register().namespace_id, prefix_hashes=b"x" * 32)
    data = encode(Frame(Method.LOOKUP, Flag.NONE, 5, request.SerializeToString()))
    for position in range(len(data)):
        raw.socket.sendall(data[position : position + 1])
    assert raw.receive().call == 5
    raw.socket.sendall(
        b"".join(
            encode(Frame(Method.LOOKUP, Flag.NONE, n, request.SerializeToString())) for n in range(100, 200)
        )
    )
    assert [raw.receive().call for _ in range(100)] == list(range(100, 200))


def test_nobody_waits_for_a_frame_without_reply(raw: RawClient) -> None:
    raw.send(Method.RELEASE, pb.ReleaseRequest(lease_ids=[1]), Flag.NO_REPLY)
    raw.send(Method.LOOKUP, pb.LookupRequest(namespace_id=99, prefix_hashes=b"x" * 32), Flag.NO_REPLY)
    number = raw.send(Method.RELEASE, pb.ReleaseRequest(lease_ids=[1]))
    assert raw.receive().call == number


def test_who_does_not_read_is_not_read_from(served: DaemonThread, raw: RawClient) -> None:
    """Answers to a peer that never reads are bounded: its requests stay in its own socket buffer."""
    with RawClient(path_of(served)) as mute:
        mute.attach()
        ids = pb.KeepAliveRequest(lease_ids=list(range(1, 4001)))  # each answer as large as the request
        flood = memoryview(encode(Frame(Method.KEEP_ALIVE, Flag.NONE, 1, ids.SerializeToString())) * 10_000)
        local = served.daemon.local
        choked: list[LocalConnection] = []
        assert local is not None
        while not choked:  # a daemon that is only slow takes more after a while
            flood = flood[as_much_as_it_takes(mute.socket, flood) :]
            assert flood, "all of it was read"
            choked = served.call(lambda: [c for c in local.connections if c._unsent])
        assert [c._num_unsent_bytes <= local_connection.RECEIVE_BYTES * 2 for c in choked] == [True]
        assert raw.register().namespace_id == 1, "others are served meanwhile"


def test_descriptors_that_are_not_received_are_bounded(served: DaemonThread) -> None:
    """Before: 64 in each of as many answers as the socket held, 17,000, and no connection got any more."""
    num_calls, local = 3 * MAX_DESCRIPTORS, served.daemon.local
    with RawClient(path_of(served)) as mute:
        mute.attach()
        request = local_pb2.MapExtentsRequest(extents=[RESIDENCE_EXTENT]).SerializeToString()
        frames = [encode(Frame(Method.MAP_EXTENTS, Flag.NONE, 100 + n, request)) for n in range(num_calls)]
        served.call(lambda: mute.socket.sendall(b"".join(frames)))  # one wake-up finds them all
        assert local is not None
        (connection,) = local.connections
        until(lambda: _num_unread_bytes(mute) > 0 and served.call(lambda: not connection.is_waiting))
        assert _num_unread_bytes(mute) <= (MAX_DESCRIPTORS + 1) * len(frames[0])
        assert [mute.receive().call for _ in frames] == list(range(100, 100 + num_calls))
        assert len(mute.descriptors) == 2 + num_calls


def test_a_client_that_receives_descriptors_is_soon_read_from_again(
    served: DaemonThread, raw: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gets that begin together map extents with many calls. Before: 10 ms for each 64 descriptors."""
    delays: list[float] = []
    loop = served.call(asyncio.get_running_loop)
    call_later = loop.call_later

    def recorded(delay: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        if getattr(callback, "__func__", None) is LocalConnection._look_received:
            delays.append(delay)
        return call_later(delay, callback, *args)

    monkeypatch.setattr(loop, "call_later", recorded)
    request = local_pb2.MapExtentsRequest(extents=[RESIDENCE_EXTENT])
    numbers = [raw.send(Method.MAP_EXTENTS, request) for _ in range(2 * MAX_DESCRIPTORS)]
    until(lambda: bool(delays))  # that many are not sent without a look
    assert [raw.receive().call for _ in numbers] == numbers
    assert delays[0] <= 0.001


def _num_unread_bytes(client: RawClient) -> int:
    return int.from_bytes(fcntl.ioctl(client.socket, termios.FIONREAD, bytes(4)), "little")


def test_who_never_attaches_is_cut_off(
    served: DaemonThread, raw: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "ATTACH_TIMEOUT_S", 0.05)
    with RawClient(path_of(served)) as silent:
        expect_closed(silent)
    until(lambda: served.call(lambda: ends(served) == {"did not attach": 1}))


def test_who_is_being_attached_is_not_cut_off(
    served: DaemonThread, raw: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making its staging extent may take longer than a peer has to ask for it."""
    is_asked, may_go_on = threading.Event(), threading.Event()

    class SlowExtent(StagingExtent):
        def prefault(self) -> Callable[[], None]:
            allocate = super().prefault()

            def slowly() -> None:
                is_asked.set()
                assert may_go_on.wait(60.0)
                allocate()

            return slowly

    monkeypatch.setattr(local_server, "StagingExtent", SlowExtent)
    with RawClient(path_of(served)) as patient:
        attaching = threading.Thread(target=patient.attach)
        attaching.start()
        assert is_asked.wait(60.0)
        local = served.daemon.local
        assert local is not None
        for connection in list(local.connections):
            served.call(partial(local._expect_attached, connection))
        may_go_on.set()
        attaching.join()
        assert patient.register().namespace_id == 1
        assert ends(served) == {}


def test_a_connection_whose_attach_was_refused_is_closed(tmp_path: Path) -> None:
    """Before: it stayed for ever when it was being attached after 5 s, and took the place of another one."""
    with DaemonThread(small_settings(tmp_path, limits={"max_clients": 2})) as served:
        for _ in range(3):
            with RawClient(path_of(served)) as refused:
                with pytest.raises(Refused, match="may not have a ':'"):
                    refused.attach("a:b")
                expect_closed(refused)
        until(lambda: served.call(lambda: ends(served) == {"not attached": 3}))
        with RawClient(path_of(served)) as another:
            another.attach()


def test_connections_are_bounded(tmp_path: Path) -> None:
    with DaemonThread(small_settings(tmp_path, limits={"max_clients": 2})) as served:
        with RawClient(path_of(served)) as one, RawClient(path_of(served)) as two:
            one.attach()
            two.attach()
            with RawClient(path_of(served)) as three:
                expect_closed(three)
        until(lambda: served.call(lambda: len(served.daemon.clients) == 0))
        with RawClient(path_of(served)) as again:
            again.attach()


def test_a_closed_connection_gives_everything_back(served: DaemonThread, raw: RawClient) -> None:
    with RawClient(path_of(served)) as holder:
        holder.attach()
        namespace = holder.register()
        holder.put(namespace, chain(3), bytes(3 * 16384))
        assert holder.acquire(namespace, chain(3))[-1].num_blocks == 3
        assert served.call(served.daemon.planner.statistics)["num_leases"] == 1
    until(lambda: served.call(lambda: len(served.daemon.clients) == 1))
    assert served.call(served.daemon.planner.statistics)["num_leases"] == 0


DIES_WHILE_ITS_CHILD_LIVES = """
import os, socket, sys, time
sys.path.insert(0, {src!r})
from tests.appliance.raw_client import RawClient
client = RawClient({path!r})
client.attach()
if os.fork() == 0:
    os.read(0, 1)          # the child keeps the connection open until the test ends
    os._exit(0)
os.kill(os.getpid(), 9)
"""


def test_a_killed_process_is_noticed_although_its_child_keeps_the_socket(served: DaemonThread) -> None:
    root = Path(__file__).parents[3]
    code = DIES_WHILE_ITS_CHILD_LIVES.format(src=str(root / "src"), path=path_of(served))
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=root)
    assert process.wait(60) == -9
    until(lambda: served.call(lambda: ends(served) == {"process died": 1}))
    assert len(served.daemon.clients) == 0
    assert process.stdin is not None
    process.stdin.close()


def test_extents_of_another_domain_do_not_exist(served: DaemonThread) -> None:
    with RawClient(path_of(served)) as alice, RawClient(path_of(served)) as bob:
        alice.attach("alice")
        bob.attach("bob")
        namespace = alice.register()
        alice.put(namespace, chain(1), os.urandom(16384))
        extent = alice.acquire(namespace, chain(1))[0].ready.extent[0]
        assert len(alice.map_extents([extent])) == 1
        for number in (extent, extent + 1, 4_000_000_000):
            with pytest.raises(Refused) as caught:
                bob.map_extents([number])
            assert caught.value.detail.reason == "UNKNOWN_EXTENT"
        with pytest.raises(Refused) as caught:
            bob.acquire(namespace, chain(1))
        assert caught.value.detail.reason == "UNKNOWN_NAMESPACE"
        request = pb.LookupRequest(namespace_id=namespace.namespace_id, prefix_hashes=chain(1)[0])
        with pytest.raises(Refused) as caught:
            bob.call(Method.LOOKUP, request, pb.LookupResponse)
        assert caught.value.detail.reason == "UNKNOWN_NAMESPACE"
        assert bob.register().digest != namespace.digest, "the same model, but another domain"


def test_an_extent_that_no_memory_was_found_for_does_not_exist(
    served: DaemonThread, raw: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be named before anything was written into it."""

    def fail(number: int) -> int:
        raise CopyError(Cause.NO_SPACE, "no memory")

    namespace = raw.register()
    raw.put(namespace, chain(1), os.urandom(16384))
    extent = raw.acquire(namespace, chain(1))[0].ready.extent[0]
    monkeypatch.setattr(served.daemon.appliance.engines[Tier.DRAM], "descriptor", fail)
    with pytest.raises(Refused, match="no memory") as caught:
        raw.map_extents([extent])
    assert caught.value.detail.reason == "UNKNOWN_EXTENT"


def test_descriptors_are_read_only_where_they_must_be(raw: RawClient) -> None:
    namespace = raw.register()
    data = os.urandom(16384)
    raw.put(namespace, chain(1), data)
    ready = raw.acquire(namespace, chain(1))[0].ready
    [extent] = raw.map_extents([ready.extent[0]])
    found = b"".join(extent[o : o + n] for o, n in zip(ready.offset, ready.length, strict=True))
    assert found == data
    for descriptor in raw.descriptors[1:]:  # index, extent; the first is the client's own staging
        with pytest.raises(PermissionError):
            os.write(descriptor, b"x")
    assert os.pwrite(raw.descriptors[0], b"x", 0) == 1


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_never_hurt_the_daemon(
    served: DaemonThread, raw: RawClient, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        with RawClient(path_of(served)) as fuzzer:
            if rng.random() < 0.7:
                fuzzer.attach(staging_bytes=4096)
            for _ in range(rng.randint(1, 6)):
                payload = rng.randbytes(rng.randint(0, 200))
                method = rng.choice([m for m in Method if m is not Method.ATTACH])
                header = HEADER.pack(len(payload), method, rng.choice([0, 4, 65535]), rng.getrandbits(64))
                noise = rng.randbytes(rng.randint(0, 40)) if rng.random() < 0.3 else b""
                try:
                    fuzzer.socket.sendall(header + payload + noise)
                except (BrokenPipeError, ConnectionResetError):
                    break
            fuzzer.socket.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionError):
                read_all(fuzzer)
    assert len(raw.register().digest) == 32
    assert not served.daemon.appliance.failed.done()
    assert "Traceback" not in caplog.text, "a handler met what its checks let through"


def test_descriptors_that_wait_to_be_sent_stay_what_they_were() -> None:
    """A peer reads late; meanwhile the extent is given back, and its number is another file's."""

    async def main() -> None:
        ours, peer = socket.socketpair()
        ours.setblocking(False)
        connection = LocalConnection(ours, lambda *_: None, lambda *_: None, CallLatencies(), Turns())
        frame = Frame(Method.MAP_EXTENTS, Flag.NONE, 1, b"")
        connection.reply(frame, pb.GetServerInfoResponse(version="x" * (2 << 20)), last=False)
        connection.flush()
        extent, other = os.memfd_create("kvtier-right"), os.memfd_create("kvtier-wrong")
        connection.reply(frame, local_pb2.MapExtentsResponse(extents=[0]), fds=(extent,))
        os.dup2(other, extent)
        peer.settimeout(60.0)
        received = await asyncio.to_thread(_descriptors_of, peer)
        assert [os.readlink(f"/proc/self/fd/{one}") for one in received] == ["/memfd:kvtier-right (deleted)"]
        assert not connection._unsent
        connection.close("done")
        for one in (*received, extent, other):
            os.close(one)
        peer.close()

    run(main())


def _descriptors_of(peer: socket.socket) -> list[int]:
    """Read until descriptors have come."""
    while True:
        _, fds, _, _ = socket.recv_fds(peer, 1 << 16, 4)
        if fds:
            return list(fds)


def _num_open(name: str) -> int:
    """How many descriptors of this process are of the memfd `name`."""
    links = []
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{one}"))
    return links.count(f"/memfd:{name} (deleted)")


def test_descriptors_that_were_never_sent_are_closed() -> None:
    async def main() -> None:
        ours, peer = socket.socketpair()
        ours.setblocking(False)
        connection = LocalConnection(ours, lambda *_: None, lambda *_: None, CallLatencies(), Turns())
        frame = Frame(Method.MAP_EXTENTS, Flag.NONE, 1, b"")
        extent = os.memfd_create("kvtier-unsent")
        for _ in range(3):
            connection.reply(frame, local_pb2.MapExtentsResponse(extents=[0]), fds=(extent,))
        assert _num_open("kvtier-unsent") == 4
        connection.close("gone")
        assert _num_open("kvtier-unsent") == 1
        os.close(extent)
        peer.close()

    run(main())
