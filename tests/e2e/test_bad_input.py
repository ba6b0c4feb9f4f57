"""Bad requests and dying clients: the documented error over both transports, and nothing is lost.

Damaged files and full disks are in test_bad_disk.py; every row of the error table once more, one by one, in
tests/appliance/test_errors.py; broken framing in tests/appliance/server/test_local_server.py.
"""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.v1 import admin_pb2, types_pb2
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from kvtier.v1.local import HEADER, MAX_PAYLOAD_BYTES, Method

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..appliance.raw_client import RawClient, Refused, chain
from .scene import (
    BLOCK_BYTES,
    HEADS,
    NUM_STORED,
    Local,
    Remote,
    Request,
    Scene,
    Transport,
    read_in_place,
    repository,
)

TRANSPORTS = ("local", "grpc")
MAX_BLOCKS = 4096
NEW = chain(4, "new")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    settings = small_settings(tmp_path, nvme=True)
    with DaemonThread(settings) as served:
        yield Scene(served)


@pytest.fixture(params=TRANSPORTS)
def client(request: pytest.FixtureRequest, scene: Scene) -> Iterator[Transport]:
    """A client over each transport in turn."""
    made = scene.client(request.param)
    yield made
    made.close()


def requests(client: Transport, namespace_id: int, hashes: bytes) -> dict[str, Request]:
    """Return every call of this transport that names blocks."""
    who: dict[str, Any] = {
        "client_id": client.client_id,
        "namespace_id": namespace_id,
        "prefix_hashes": hashes,
    }
    reserve = pb.ReserveRequest(**who)
    found: dict[str, Request] = {
        "Lookup": pb.LookupRequest(namespace_id=namespace_id, prefix_hashes=hashes),
        "Acquire": pb.AcquireRequest(**who),
        "Touch": pb.TouchRequest(**who),
        "Reserve": reserve,
        "Commit": pb.CommitRequest(client_id=client.client_id, reserve=reserve),
        "Pin": pb.PinRequest(**who),
        "Prefetch": pb.PrefetchRequest(**who),
    }
    if isinstance(client, Remote):
        found["Put"] = iter([pb.PutRequest(header=reserve), pb.PutRequest(chunk=bytes(BLOCK_BYTES))])
        found["Get"] = pb.GetRequest(acquire=pb.AcquireRequest(**who))
    return found


def reasons(client: Transport, namespace_id: int, hashes: bytes, but: str = "") -> dict[str, str]:
    """Return why each call was refused, but for one that is not sent."""
    found = {}
    for name, request in requests(client, namespace_id, hashes).items():
        if name == but:
            continue
        with pytest.raises(Refused) as caught:
            client.call(name, request)
        assert caught.value.detail.message
        assert caught.value.detail.retry_after_ms == 0, "the same request can never succeed"
        found[name] = caught.value.detail.reason
    return found


# --------------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize("num_bytes", [0, 1, 31, 33, 65])
def test_malformed_keys_are_refused_by_every_call(scene: Scene, client: Transport, num_bytes: int) -> None:
    found = reasons(client, scene.namespace.namespace_id, (scene.blocks[0] * 3)[:num_bytes])
    assert set(found.values()) == {"BAD_KEY"}
    scene.assert_unharmed()


def test_oversized_batches_are_refused_by_every_call(scene: Scene, client: Transport) -> None:
    hashes = b"".join(chain(MAX_BLOCKS + 1, "many"))
    found = reasons(client, scene.namespace.namespace_id, hashes)
    assert set(found.values()) == {"TOO_MANY_BLOCKS"}
    largest = pb.LookupRequest(
        namespace_id=scene.namespace.namespace_id, prefix_hashes=hashes[: MAX_BLOCKS * 32]
    )
    assert client.call("Lookup", largest).num_blocks == 0, "one less is served"
    scene.assert_unharmed()


@pytest.mark.parametrize("namespace_id", [0, 99, (1 << 32) - 1])
def test_unknown_namespaces_are_refused_by_every_call(
    scene: Scene, client: Transport, namespace_id: int
) -> None:
    but = "" if namespace_id else "Prefetch"  # which looks in all of the caller's domain then
    found = reasons(client, namespace_id, b"".join(scene.blocks), but)
    assert set(found.values()) == {"UNKNOWN_NAMESPACE"}
    scene.assert_unharmed()


def test_a_message_beyond_the_limit_is_refused(scene: Scene) -> None:
    """gRPC refuses it by itself; on the local channel only the header is read, and the peer is cut off."""
    remote = scene.client("grpc")
    with pytest.raises(grpc.RpcError) as caught:
        remote.call(
            "Lookup", pb.LookupRequest(namespace_id=1, prefix_hashes=bytes(MAX_PAYLOAD_BYTES + 65536))
        )
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    remote.close()
    with RawClient(scene.local_path) as raw:
        raw.attach()
        raw.socket.sendall(HEADER.pack(MAX_PAYLOAD_BYTES + 1, Method.LOOKUP, 0, 1))
        with pytest.raises(ConnectionError):
            raw.receive()
    scene.assert_unharmed()


# ------------------------------------------------------------------------------- what belongs to others


@pytest.mark.parametrize("thief_by", TRANSPORTS)
@pytest.mark.parametrize("holder_by", TRANSPORTS)
def test_a_foreign_lease_can_be_neither_ended_nor_prolonged(
    scene: Scene, holder_by: str, thief_by: str
) -> None:
    holder, thief = scene.client(holder_by), scene.client(thief_by)
    held = pb.AcquireRequest(
        client_id=holder.client_id,
        namespace_id=scene.namespace.namespace_id,
        prefix_hashes=b"".join(scene.blocks),
    )
    lease_id = holder.call("Acquire", held).lease_id
    release = pb.ReleaseRequest(client_id=thief.client_id, lease_ids=[lease_id, lease_id + 1])
    assert thief.call("Release", release).num_unknown == 2
    keep = pb.KeepAliveRequest(client_id=thief.client_id, lease_ids=[lease_id], ttl_ms=60_000)
    assert list(thief.call("KeepAlive", keep).expired_lease_ids) == [lease_id]
    for name, request in (("Release", release), ("KeepAlive", keep)):
        request.client_id = holder.client_id  # as if it were the holder
        if thief_by == "local" or holder_by == "local":
            with pytest.raises(Refused) as caught:
                thief.call(name, request)
            assert caught.value.detail.reason == "UNKNOWN_CLIENT"
    with grpc.insecure_channel(scene.address) as channel:
        AdminServiceStub(channel).Evict(admin_pb2.EvictRequest(tier=types_pb2.TIER_DRAM))
    found = scene.served.call(scene.daemon.planner.inspection.statistics)["tiers"]
    dram = next(numbers for tier, numbers in found.items() if tier.label == "dram")
    assert dram["used_bytes"] == NUM_STORED * BLOCK_BYTES, "what is held stays in memory"
    mine = pb.ReleaseRequest(client_id=holder.client_id, lease_ids=[lease_id])
    assert holder.call("Release", mine).num_unknown == 0
    assert holder.call("Release", mine).num_unknown == 1
    scene.assert_unharmed()
    holder.close()
    thief.close()


def reserve(scene: Scene, client: Transport) -> int:
    """Hold room for NEW; return the reservation."""
    wanted = pb.ReserveRequest(
        client_id=client.client_id,
        namespace_id=scene.namespace.namespace_id,
        prefix_hashes=b"".join(NEW),
    )
    answer = client.call("Reserve", wanted)
    assert answer.outcomes == bytes([pb.PUT_OUTCOME_NEEDED]) * len(NEW)
    return int(answer.reservation_id)


@pytest.mark.parametrize("thief_by", TRANSPORTS)
def test_a_foreign_reservation_can_be_neither_aborted_nor_committed(scene: Scene, thief_by: str) -> None:
    holder, thief = Local(scene.local_path), scene.client(thief_by)
    reservation_id = reserve(scene, holder)
    thief.call("Abort", pb.AbortRequest(client_id=thief.client_id, reservation_id=reservation_id))
    spans = [types_pb2.StagingSpan(offset=n * BLOCK_BYTES, length=BLOCK_BYTES) for n in range(len(NEW))]
    commit = pb.CommitRequest(client_id=thief.client_id, reservation_id=reservation_id)
    if thief_by == "local":
        commit.spans.extend(spans)
    with pytest.raises(Refused) as caught:
        thief.call("Commit", commit)
    assert caught.value.detail.reason == "UNKNOWN_RESERVATION"
    commit = pb.CommitRequest(client_id=holder.client_id, reservation_id=reservation_id, spans=spans)
    assert holder.call("Commit", commit).outcomes == bytes([pb.PUT_OUTCOME_STORED]) * len(NEW)
    scene.assert_unharmed()
    holder.close()
    thief.close()


# ------------------------------------------------------------------------------ clients that die mid-put


def test_a_client_that_dies_after_reserving_gives_its_room_back(scene: Scene) -> None:
    client = Local(scene.local_path)
    reserve(scene, client)
    assert scene.served.call(scene.unrest)["num_reservations"] == 1
    client.raw.socket.close()
    scene.until(lambda: not scene.unrest())
    assert scene.lookup(NEW) == 0
    scene.assert_unharmed()


def test_a_remote_client_that_falls_silent_gives_everything_back(scene: Scene) -> None:
    client = scene.client("grpc", ttl_ms=2000)  # long enough to be served first
    reserve(scene, client)
    held = pb.AcquireRequest(
        client_id=client.client_id,
        namespace_id=scene.namespace.namespace_id,
        prefix_hashes=b"".join(scene.blocks),
    )
    client.call("Acquire", held)
    assert scene.served.call(scene.unrest)["num_leases"] == 1
    scene.until(lambda: not scene.unrest())
    with pytest.raises(Refused) as caught:
        client.call("Acquire", held)
    assert caught.value.detail.reason == "UNKNOWN_CLIENT"
    assert scene.lookup(NEW) == 0
    scene.assert_unharmed()
    client.close()


def test_half_a_commit_stores_nothing(scene: Scene) -> None:
    """The connection ends inside the frame."""
    with RawClient(scene.local_path) as raw:
        raw.attach()
        commit = pb.CommitRequest(
            reserve=pb.ReserveRequest(namespace_id=scene.namespace.namespace_id, prefix_hashes=b"".join(NEW)),
            spans=[types_pb2.StagingSpan(offset=0, length=len(NEW) * BLOCK_BYTES)],
        ).SerializeToString()
        raw.socket.sendall(HEADER.pack(len(commit), Method.COMMIT, 0, 9) + commit[: len(commit) // 2])
        raw.socket.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            raw.receive()
    assert scene.lookup(NEW) == 0
    scene.assert_unharmed()


def remote_put(scene: Scene, num_bytes: int) -> str:
    """A child that streams a put through gRPC and is killed after `num_bytes` of its payload."""
    return f"""
import os, signal
import grpc
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceStub
stub = KVCacheServiceStub(grpc.insecure_channel({scene.address!r}))
client = stub.OpenClient(pb.OpenClientRequest(name="doomed")).client_id
def parts():
    yield pb.PutRequest(header=pb.ReserveRequest(
        client_id=client, namespace_id={scene.namespace.namespace_id}, prefix_hashes={b"".join(NEW)!r}))
    for _ in range({num_bytes} // 4096):
        yield pb.PutRequest(chunk=b"d" * 4096)
    print("sent", flush=True)
    os.read(0, 1)
stub.Put(parts())
"""


def local_put(scene: Scene) -> str:
    """A child that sends a whole commit over the local channel and waits to be killed."""
    return f"""
import os
from kvtier.v1 import kvcache_pb2 as pb, types_pb2
from kvtier.v1.local import Method
from tests.appliance.raw_client import RawClient
client = RawClient({scene.local_path!r})
client.attach()
client.staging[: {len(NEW) * BLOCK_BYTES}] = b"d" * {len(NEW) * BLOCK_BYTES}
reserve = pb.ReserveRequest(namespace_id={scene.namespace.namespace_id}, prefix_hashes={b"".join(NEW)!r})
span = types_pb2.StagingSpan(offset=0, length={len(NEW) * BLOCK_BYTES})
client.send(Method.COMMIT, pb.CommitRequest(reserve=reserve, spans=[span]))
print("sent", flush=True)
os.read(0, 1)
"""


def kill_when_sent(code: str) -> None:
    """Run a child until it says that it has sent what it had to, then kill -9 it."""
    root = repository()
    search = f"import sys; sys.path[:0] = [{str(root / 'src')!r}, {str(root)!r}]\n"
    with subprocess.Popen(
        [sys.executable, "-c", search + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"sent\n"
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_a_process_killed_inside_a_streamed_put_stores_nothing(scene: Scene, num_blocks: int) -> None:
    kill_when_sent(remote_put(scene, num_blocks * BLOCK_BYTES))
    scene.until(lambda: not scene.unrest())
    assert scene.lookup(NEW) == 0
    scene.assert_unharmed()


def test_a_process_killed_behind_its_commit_has_stored_the_right_bytes_or_none(scene: Scene) -> None:
    kill_when_sent(local_put(scene))
    scene.until(lambda: not scene.unrest())
    num_stored = scene.lookup(NEW)
    with RawClient(scene.local_path) as reader:
        reader.attach()
        if num_stored:
            found = read_in_place(reader, reader.register(heads=HEADS), NEW)
            assert found == b"d" * (num_stored * BLOCK_BYTES)
    scene.assert_unharmed()
