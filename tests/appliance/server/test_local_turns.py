"""Turns on the local channel: one tenant's flood does not stop the daemon for the others.

No test looks at a clock. The event loop is stopped until all frames lie in the sockets; what counts is the
order in which they are answered afterwards.
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.appliance.server import local_connection, local_turns
from kvtier.appliance.server.local_connection import LocalConnection
from kvtier.appliance.server.local_server import LocalServer
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.local import Decoder, Flag, Frame, Method, encode

from ..conftest import small_settings
from ..loops import DaemonThread
from ..raw_client import RawClient, chain

WAIT_S = 60.0
NUM_FRAMES = 1000

Answered = list[tuple[LocalConnection, Method]]


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Answered:
    """What the daemon answered, in this order: connection and method."""
    seen: Answered = []
    answer = LocalServer._answer

    def noting(self: LocalServer, connection: LocalConnection, frame: Frame) -> None:
        seen.append((connection, frame.method))
        answer(self, connection, frame)

    monkeypatch.setattr(LocalServer, "_answer", noting)
    monkeypatch.setattr(local_turns, "BUDGET_S", 0.0)  # each call is more than a stretch
    return seen


@pytest.fixture
def served(answered: Answered, tmp_path: Path) -> Iterator[DaemonThread]:
    with DaemonThread(small_settings(tmp_path)) as running:
        yield running


@contextlib.contextmanager
def stopped(served: DaemonThread) -> Iterator[None]:
    """Stop the daemon's event loop meanwhile."""
    is_stopped, may_go_on = threading.Event(), threading.Event()

    def stop() -> None:
        is_stopped.set()
        assert may_go_on.wait(WAIT_S)

    stopping = threading.Thread(target=served.call, args=(stop,))
    stopping.start()
    try:
        assert is_stopped.wait(WAIT_S)
        yield
    finally:
        may_go_on.set()
        stopping.join()


def attached(served: DaemonThread, domain: str) -> RawClient:
    client = RawClient(served.daemon.service.facts.local_socket_path)
    client.attach(domain, staging_bytes=4096)
    return client


def updates(number: int = NUM_FRAMES) -> bytes:
    """Frames without an answer, about a session that is not there."""
    payload = pb.UpdateSessionRequest(session_id="S").SerializeToString()
    return b"".join(encode(Frame(Method.UPDATE_SESSION, Flag.NO_REPLY, n, payload)) for n in range(number))


def expect_lookup(client: RawClient) -> None:
    """Wait for the answer to a lookup in a namespace that is not there."""
    frame = client.receive()
    assert frame.method is Method.LOOKUP
    assert frame.flags & Flag.ERROR


LOOKUP = pb.LookupRequest(namespace_id=9, prefix_hashes=chain(1)[0])


def position(answered: Answered, method: Method) -> int:
    return [of for _, of in answered].index(method)


def test_a_flood_of_one_tenant_is_answered_in_turn_with_others(
    served: DaemonThread, answered: Answered
) -> None:
    """Before: all 1,000 frames first, in one wake-up."""
    with attached(served, "flood") as flood, attached(served, "victim") as victim:
        with stopped(served):
            answered.clear()
            flood.socket.sendall(updates())
            victim.send(Method.LOOKUP, LOOKUP)
        expect_lookup(victim)
        assert position(answered, Method.LOOKUP) <= 2
        flood.send(Method.RELEASE, pb.ReleaseRequest())
        assert flood.receive().method is Method.RELEASE, "the flood is answered, too"
        assert [of for _, of in answered].count(Method.UPDATE_SESSION) <= NUM_FRAMES


def test_many_connections_of_one_tenant_have_its_turns_together(
    served: DaemonThread, answered: Answered
) -> None:
    with contextlib.ExitStack() as undo:
        floods = [undo.enter_context(attached(served, "flood")) for _ in range(16)]
        victim = undo.enter_context(attached(served, "victim"))
        with stopped(served):
            answered.clear()
            for flood in floods:
                flood.socket.sendall(updates(50))
            for _ in range(10):
                victim.send(Method.LOOKUP, LOOKUP)
        for _ in range(10):
            expect_lookup(victim)
        last = max(n for n, (_, method) in enumerate(answered) if method is Method.LOOKUP)
        assert last <= 2 * 10 + 2
        others = [connection for connection, method in answered[:last] if method is Method.UPDATE_SESSION]
        assert len(set(others)) >= min(len(others), 16) - 1, "the tenant's connections take turns, too"


def test_a_client_attaches_while_another_tenant_floods(served: DaemonThread, answered: Answered) -> None:
    with attached(served, "flood") as flood:
        with stopped(served):
            answered.clear()
            flood.socket.sendall(updates())
            late = RawClient(served.daemon.service.facts.local_socket_path)
            late.socket.sendall(encode(Frame(Method.ATTACH, Flag.NONE, 1, b"")))
        with late:
            assert late.receive().method is Method.ATTACH
            assert position(answered, Method.ATTACH) <= 4


def test_nothing_is_read_from_a_connection_that_waits(
    served: DaemonThread, answered: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_connection, "RECEIVE_BYTES", 1024)
    kept: list[int] = []
    take = Decoder.take

    def noting(self: Any) -> Frame | None:
        kept.append(self.num_bytes)
        return take(self)

    with attached(served, "flood") as flood:
        monkeypatch.setattr(Decoder, "take", noting)
        with stopped(served):
            answered.clear()
            flood.socket.sendall(updates())
        flood.send(Method.RELEASE, pb.ReleaseRequest())
        while not flood.receive().flags & Flag.LAST:
            pass
    assert max(kept) <= 2 * 1024
