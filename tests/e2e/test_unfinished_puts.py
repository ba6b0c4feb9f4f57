"""Streamed puts that never end hold nothing that another caller needs: not the buffers, not the calls."""

import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.appliance.host import daemon
from kvtier.appliance.server import streams
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1 import types_pb2
from kvtier.v1.errors import DETAIL_KEY

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..appliance.raw_client import Refused, chain
from .scene import BLOCK_BYTES, WAIT_S, Remote, Scene

NUM_BLOCKS = 8
NEW = chain(NUM_BLOCKS, "announced")
NEVER_S = 1e6
Record = Callable[[str, object], None]


class OpenPut:
    """A streamed put that sends only what it is told to."""

    def __init__(self, client: Remote, *parts: pb.PutRequest) -> None:
        self._parts: queue.SimpleQueue[pb.PutRequest | None] = queue.SimpleQueue()
        for part in parts:
            self._parts.put(part)
        self._call: Any = client.stub.Put.future(iter(self._parts.get, None), timeout=WAIT_S)

    def reason(self) -> str:
        """Wait until the daemon refuses the put; return why."""
        beside: Any = self._call.exception(WAIT_S).trailing_metadata()
        self._parts.put(None)
        return types_pb2.ErrorDetail.FromString(dict(beside)[DETAIL_KEY]).reason

    def cancel(self) -> None:
        """Give up."""
        self._call.cancel()
        self._parts.put(None)


@pytest.fixture
def idle_s(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(streams, "IDLE_S", request.param)
    return float(request.param)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """A daemon whose buffers hold the payload of one put, and that takes two puts at a time."""
    monkeypatch.setattr(daemon, "MAX_STREAM_PUT_BYTES", NUM_BLOCKS * BLOCK_BYTES)
    monkeypatch.setattr(streams, "MAX_STREAM_PUTS", 2)
    with DaemonThread(small_settings(tmp_path)) as served:
        yield Scene(served)


@pytest.fixture
def client(scene: Scene) -> Iterator[Remote]:
    remote = Remote(scene.address)
    yield remote
    remote.close()


def header(scene: Scene, client: Remote) -> pb.PutRequest:
    """Announce NUM_BLOCKS blocks."""
    return pb.PutRequest(
        header=pb.ReserveRequest(
            client_id=client.client_id,
            namespace_id=scene.namespace.namespace_id,
            prefix_hashes=b"".join(NEW),
        )
    )


def whole_put(scene: Scene, client: Remote) -> bytes:
    """Put everything that `header` announces; return the outcomes."""
    chunks = [pb.PutRequest(chunk=b"d" * BLOCK_BYTES)] * NUM_BLOCKS
    answer: pb.PutResponse = client.call("Put", iter([header(scene, client), *chunks]))
    return answer.outcomes


def puts_in_progress(scene: Scene) -> Callable[[], int]:
    return lambda: scene.daemon.put_buffers.calls.taken


@pytest.mark.parametrize("idle_s", [NEVER_S], indirect=True)
def test_an_announced_put_takes_no_space_before_its_bytes(
    idle_s: float, scene: Scene, client: Remote, record_property: Record
) -> None:
    announced = OpenPut(client, header(scene, client))
    scene.until(lambda: puts_in_progress(scene)() == 1)
    record_property("announced_put_bytes", scene.daemon.put_buffers.taken_bytes)
    assert whole_put(scene, client) == bytes([pb.PUT_OUTCOME_STORED]) * NUM_BLOCKS
    announced.cancel()
    scene.assert_unharmed()


@pytest.mark.parametrize("idle_s", [0.05], indirect=True)
@pytest.mark.parametrize("sends_header", [False, True])
def test_a_silent_put_ends(
    idle_s: float, sends_header: bool, scene: Scene, client: Remote, record_property: Record
) -> None:
    parts = [header(scene, client), pb.PutRequest(chunk=b"d")] if sends_header else []
    began_at = time.monotonic()
    silent = OpenPut(client, *parts)
    assert silent.reason() == "UNKNOWN_RESERVATION"
    record_property("silent_put_s", time.monotonic() - began_at)
    scene.assert_unharmed()


@pytest.mark.parametrize("idle_s", [NEVER_S], indirect=True)
def test_a_put_ends_with_its_client(idle_s: float, scene: Scene, client: Remote) -> None:
    filling = OpenPut(client, header(scene, client), pb.PutRequest(chunk=b"d"))
    scene.until(lambda: scene.daemon.put_buffers.taken_bytes > 0)
    client.stub.CloseClient(pb.CloseClientRequest(client_id=client.client_id))
    assert filling.reason() == "UNKNOWN_RESERVATION"
    scene.assert_unharmed()


@pytest.mark.parametrize("idle_s", [NEVER_S], indirect=True)
def test_puts_without_a_header_leave_calls_for_others(
    idle_s: float, scene: Scene, client: Remote, record_property: Record
) -> None:
    silent = [OpenPut(client) for _ in range(2)]
    scene.until(lambda: puts_in_progress(scene)() == 2)
    assert OpenPut(client).reason() == "TOO_MANY_IN_FLIGHT"
    record_property("puts_without_a_header", puts_in_progress(scene)())
    client.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=WAIT_S)
    for put in silent:
        put.cancel()
    scene.until(lambda: not puts_in_progress(scene)())
    assert whole_put(scene, client) == bytes([pb.PUT_OUTCOME_STORED]) * NUM_BLOCKS
    scene.assert_unharmed()


def test_a_tenant_may_fill_half_of_the_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "MAX_STREAM_PUT_BYTES", NUM_BLOCKS * BLOCK_BYTES)
    settings = small_settings(tmp_path, tenants={"acme": {"members": [f"uid:{os.getuid()}"]}})
    with DaemonThread(settings) as served:
        scene = Scene(served)
        remote = Remote(scene.address)
        with pytest.raises(Refused, match="TOO_LARGE"):
            whole_put(scene, remote)
        remote.close()
        scene.assert_unharmed()


@pytest.mark.parametrize("idle_s", [NEVER_S], indirect=True)
def test_a_tenant_may_make_half_of_the_calls(
    idle_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_STREAM_PUTS", 2)
    settings = small_settings(tmp_path, tenants={"acme": {"members": [f"uid:{os.getuid()}"]}})
    with DaemonThread(settings) as served:
        scene = Scene(served)
        remote = Remote(scene.address)
        silent = OpenPut(remote)
        scene.until(lambda: puts_in_progress(scene)() == 1)
        assert OpenPut(remote).reason() == "TOO_MANY_IN_FLIGHT"
        silent.cancel()
        scene.until(lambda: not puts_in_progress(scene)())
        remote.close()
        scene.assert_unharmed()
