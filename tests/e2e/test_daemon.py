"""The whole daemon: real tiers, real sockets, real processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvtier.appliance.compression.codec_choice import CodecSelection
from kvtier.appliance.core.events import DrainStarted
from kvtier.appliance.host import daemon as daemon_module
from kvtier.appliance.host import process
from kvtier.tiers.block import Tier
from kvtier.v1 import admin_pb2, events_pb2, types_pb2
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from kvtier.v1.events_pb2_grpc import EventsServiceStub
from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceStub
from kvtier.v1.local import Method

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..appliance.raw_client import RawClient, chain, identity
from ..daemon import Daemon

if TYPE_CHECKING:
    from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceAsyncStub

HEADS = 4  # fragments of 16 KiB: slots without waste
BLOCK_BYTES = 32 << 10
SERVE = (sys.executable, "-m", "kvtier.appliance.cli", "serve", "--set", "tiers.dram.capacity=64MiB")


def read(client: RawClient, namespace: pb.RegisterNamespaceResponse, blocks: list[bytes]) -> bytes:
    """Acquire a chain, wait until it is up, read it in place, release it."""
    answers = client.acquire(namespace, blocks)
    parts: dict[tuple[int, int], bytes] = {}
    for answer in answers:
        ready = answer.ready
        for row in range(len(ready.block)):
            [extent] = client.map_extents([ready.extent[row]])
            start = ready.offset[row]
            parts[ready.block[row], ready.group[row]] = extent[start : start + ready.length[row]]
    release = pb.ReleaseRequest(lease_ids=[answers[0].lease_id])
    client.call(Method.RELEASE, release, pb.ReleaseResponse)
    num_blocks = answers[-1].num_blocks
    return b"".join(parts[key] for key in sorted(parts) if key[0] < num_blocks)


def test_what_does_not_fit_dram_comes_back_from_disk_even_after_a_restart(tmp_path: Path) -> None:
    """12 MiB into 8 MiB of dram; every chain is read back, before and after a restart."""
    settings = small_settings(tmp_path, nvme=True)
    chains = {f"c{n}": os.urandom(16 * BLOCK_BYTES) for n in range(24)}
    with (
        DaemonThread(settings) as served,
        RawClient(served.daemon.service.facts.local_socket_path) as client,
    ):
        client.attach()
        namespace = client.register(heads=HEADS)
        for name, data in chains.items():
            outcomes = client.put(namespace, chain(16, name), data)
            assert outcomes == bytes([pb.PUT_OUTCOME_STORED]) * 16
        for name, data in chains.items():
            assert read(client, namespace, chain(16, name)) == data
        edges = {(e.source, e.target): e for e in served.call(served.daemon.appliance.mover.statistics)}
        assert edges["dram", "nvme"].num_copies > 0
        assert edges["nvme", "dram"].num_copies > 0
        assert sum(edge.num_failed for edge in edges.values()) == 0
        served.wait(served.daemon.drain(60.0))
        states = {served.daemon.planner.inspection.segment(n)["state"] for n in range(32)}  # type: ignore[index]
        assert states == {"free", "sealed"}, "the next start needs no scan"
    with (
        DaemonThread(settings) as served,
        RawClient(served.daemon.service.facts.local_socket_path) as client,
    ):
        client.attach()
        namespace = client.register(heads=HEADS)
        found = {name: read(client, namespace, chain(16, name)) for name in chains}
        assert found == chains


def test_a_drain_that_runs_out_of_time_says_what_it_wrote(tmp_path: Path) -> None:
    """Before: the blocks that it had queued, or none while it was still looking for them."""
    settings = small_settings(tmp_path, nvme=True)
    with DaemonThread(settings) as served, RawClient(served.daemon.service.facts.local_socket_path) as client:
        client.attach()
        namespace, mover = client.register(heads=HEADS), served.daemon.appliance.mover
        served.wait(served.daemon.appliance.settled())  # the namespace is stored, which holds copies, too
        served.call(lambda: mover.hold(Tier.NVME))
        client.put(namespace, chain(16), os.urandom(16 * BLOCK_BYTES))
        assert served.wait(served.daemon.drain(0.05)).num_blocks_flushed == 0
        served.call(lambda: mover.resume(Tier.NVME))
        assert served.wait(served.daemon.drain(60.0)).num_blocks_flushed == 16


def test_a_stream_reports_fragments_as_they_arrive_in_layer_order(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, nvme=True)
    data = os.urandom(16 * BLOCK_BYTES)
    with DaemonThread(settings) as served, RawClient(served.daemon.service.facts.local_socket_path) as client:
        client.attach()
        client.put(client.register(heads=HEADS), chain(16), data)
        served.wait(served.daemon.drain(60.0))
    with (
        DaemonThread(settings) as served,
        RawClient(served.daemon.service.facts.local_socket_path) as client,
    ):
        client.attach()
        namespace = client.register(heads=HEADS)
        answers = client.acquire(namespace, chain(16))
        assert len({answer.lease_id for answer in answers}) == 1
        assert answers[0].tiers == bytes([types_pb2.TIER_NVME]) * 16
        assert [answer.last for answer in answers] == [False] * (len(answers) - 1) + [True]
        rows = [row for a in answers for row in zip(a.ready.block, a.ready.group, strict=True)]
        assert sorted(rows) == [(block, group) for block in range(16) for group in range(2)]


# ------------------------------------------------------------------------------------- over gRPC


def over_grpc(tmp_path: Path) -> str:
    return f"unix://{tmp_path}/k.sock"


async def opened(stub: "KVCacheServiceAsyncStub") -> tuple[int, pb.RegisterNamespaceResponse]:
    client = await stub.OpenClient(pb.OpenClientRequest(name="grpc", request_id="once"))
    again = await stub.OpenClient(pb.OpenClientRequest(name="grpc", request_id="once"))
    assert client.client_id == again.client_id, "a retry is the same client"
    request = pb.RegisterNamespaceRequest(identity=identity(heads=HEADS))
    return client.client_id, await stub.RegisterNamespace(request)


def test_put_and_get_without_shared_memory(tmp_path: Path) -> None:
    data = os.urandom(40 * BLOCK_BYTES)

    async def main(address: str) -> bytes:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = KVCacheServiceStub(channel)
            client, namespace = await opened(stub)
            blocks = b"".join(chain(40))

            async def parts() -> AsyncIterator[pb.PutRequest]:
                yield pb.PutRequest(
                    header=pb.ReserveRequest(
                        client_id=client, namespace_id=namespace.namespace_id, prefix_hashes=blocks
                    )
                )
                for start in range(0, len(data), 100_000):  # chunks that fit nothing
                    yield pb.PutRequest(chunk=data[start : start + 100_000])

            assert (await stub.Put(parts())).outcomes == bytes([pb.PUT_OUTCOME_STORED]) * 40
            found = bytearray(len(data))
            request = pb.AcquireRequest(
                client_id=client, namespace_id=namespace.namespace_id, prefix_hashes=blocks
            )
            answers = [answer async for answer in stub.Get(pb.GetRequest(acquire=request))]
            for answer in answers[:-1]:
                start = answer.block * BLOCK_BYTES + answer.group * BLOCK_BYTES // 2 + answer.offset
                found[start : start + len(answer.chunk)] = answer.chunk
            assert [answer.last for answer in answers] == [False] * (len(answers) - 1) + [True]
            assert answers[-1].num_blocks == 40
            return bytes(found)

    with DaemonThread(small_settings(tmp_path)) as served:
        assert served.wait(main(over_grpc(tmp_path))) == data
        assert served.call(served.daemon.planner.statistics)["num_leases"] == 0, "Get releases its lease"


def test_a_cancelled_acquire_keeps_nothing(tmp_path: Path) -> None:
    async def main(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = KVCacheServiceStub(channel)
            client, namespace = await opened(stub)
            request = pb.AcquireRequest(
                client_id=client, namespace_id=namespace.namespace_id, prefix_hashes=b"".join(chain(4))
            )
            call = stub.Acquire(request)
            [answer] = [answer async for answer in call]
            assert (answer.num_blocks, answer.last) == (4, True)
            await stub.CloseClient(pb.CloseClientRequest(client_id=client))
            await stub.CloseClient(pb.CloseClientRequest(client_id=client))

    with (
        DaemonThread(small_settings(tmp_path)) as served,
        RawClient(served.daemon.service.facts.local_socket_path) as raw,
    ):
        raw.attach()
        raw.put(raw.register(heads=HEADS), chain(4), bytes(4 * BLOCK_BYTES))
        served.wait(main(over_grpc(tmp_path)))
        assert served.call(served.daemon.planner.statistics)["num_leases"] == 0


def test_status_says_how_quick_codecs_are_when_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To find out takes ten seconds of a core, once per machine: not here."""

    async def main(address: str) -> list[tuple[str, str, float]]:
        async with grpc.aio.insecure_channel(address) as channel:
            status = await AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest())
        return [(one.codec, one.dtype, one.decode_bytes_per_s) for one in status.codec_speeds]

    known = {("bfloat16", "planes"): 0.0, ("bfloat16", "exponents"): 2e9}
    with DaemonThread(small_settings(tmp_path, nvme=True)) as served:
        assert served.wait(main(over_grpc(tmp_path))) == []
        monkeypatch.setattr(CodecSelection, "speeds", property(lambda self: known))
        assert served.wait(main(over_grpc(tmp_path))) == [
            ("exponents", "bfloat16", 2e9),
            ("planes", "bfloat16", 0.0),
        ]


def test_watchers_see_blocks_come_and_health_goes_down_with_a_drain(tmp_path: Path) -> None:
    async def main(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            check = health_pb2.HealthCheckRequest(service="kvtier.v1.KVCacheService")
            serving, not_serving = (
                health_pb2.HealthCheckResponse.SERVING,
                health_pb2.HealthCheckResponse.NOT_SERVING,
            )
            assert (await health.Check(check)).status == serving
            call = EventsServiceStub(channel).Watch(events_pb2.WatchRequest(after_sequence=1 << 60))
            watching = aiter(call)
            begin = await anext(watching)
            assert (begin.kind, begin.sequence) == (events_pb2.BLOCK_EVENT_KIND_UNSPECIFIED, 1)
            stored: list[bytes] = []
            async for event in watching:
                assert event.kind == events_pb2.BLOCK_EVENT_KIND_STORED
                stored += [event.prefix_hashes[n : n + 32] for n in range(0, len(event.prefix_hashes), 32)]
                if len(stored) == 3:
                    break
            assert sorted(stored) == sorted(chain(3))
            admin = AdminServiceStub(channel)
            status = await admin.GetStatus(admin_pb2.GetStatusRequest())
            assert (status.num_blocks, status.num_clients) == (3, 1)
            assert (await admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest())).problems == []
            await admin.Drain(admin_pb2.DrainRequest(grace_ms=100))
            assert (await health.Check(check)).status == not_serving
            assert (await admin.GetStatus(admin_pb2.GetStatusRequest())).draining

    with (
        DaemonThread(small_settings(tmp_path)) as served,
        RawClient(served.daemon.service.facts.local_socket_path) as raw,
    ):
        raw.attach()
        raw.put(raw.register(heads=HEADS), chain(3), bytes(3 * BLOCK_BYTES))
        served.wait(main(over_grpc(tmp_path)))


def test_reflection_describes_every_service(tmp_path: Path) -> None:
    with DaemonThread(small_settings(tmp_path)), grpc.insecure_channel(over_grpc(tmp_path)) as channel:
        names = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert {f"kvtier.v1.{name}" for name in ("KVCacheService", "AdminService", "EventsService")} <= names


# ----------------------------------------------------------------------------------- as a process


def test_a_signal_drains_and_the_next_life_remembers(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "tiers:\n  dram: {capacity: 8MiB, extent: 2MiB}\n"
        f"  nvme: {{path: {tmp_path}/nvme, capacity: 16MiB, segment: 1MiB}}\n"
    )
    data = os.urandom(8 * BLOCK_BYTES)
    with Daemon(tmp_path, policy) as running:
        with RawClient(f"{running.path}.local") as client:
            client.attach()
            client.put(client.register(heads=HEADS), chain(8), data)
            assert running.stop(signal.SIGTERM) == 0
        assert not running.path.with_name("kvtier.sock.local").exists()
        running.start()
        with RawClient(f"{running.path}.local") as client:
            client.attach()
            assert read(client, client.register(heads=HEADS), chain(8)) == data
        with subprocess.Popen(
            [*SERVE, "--listen", running.target],
            stderr=subprocess.PIPE,
            text=True,
        ) as second:
            assert second.stderr is not None
            message = second.stderr.read()
            assert second.wait(60) == process.EXIT_CANNOT_START
        assert "another daemon listens" in message
        assert running.stop(signal.SIGINT) == 0
        assert " ready at " in running.log.read_text()
        assert "Traceback" not in running.log.read_text()


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal; without one it would be killed by it."""
    (mask,) = (
        line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line
    )
    return bool(int(mask, 16) & 1 << number - 1)


@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_while_it_starts_is_no_violent_end(tmp_path: Path, times: int) -> None:
    command = [*SERVE, "--listen", f"unix://{tmp_path}/k.sock"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as starting:
        while not handles(starting.pid, signal.SIGTERM):
            assert starting.poll() is None
        for _ in range(times):
            starting.send_signal(signal.SIGTERM)
        assert starting.wait(60) == 0


def test_a_daemon_whose_planner_failed_ends_with_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong books are worse than no cache: fail, loudly, and be restarted empty-handed."""

    async def main() -> int:
        made: list[daemon_module.Daemon] = []
        serve = daemon_module.Daemon.serve

        async def remember(*parts: Any) -> daemon_module.Daemon:
            made.append(await serve(*parts))
            return made[0]

        monkeypatch.setattr(daemon_module.Daemon, "serve", remember)
        serving = asyncio.create_task(process.serve(small_settings(tmp_path)))
        async with asyncio.timeout(60.0):
            while not made:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

        def broken(event: object, now: float) -> list[object]:
            raise AssertionError("the books do not balance")

        monkeypatch.setattr(made[0].planner, "handle", broken)
        with pytest.raises(AssertionError):
            made[0].appliance.step(DrainStarted(1))
        return await serving

    assert asyncio.run(main()) == process.EXIT_FAILED
    assert "the books do not balance" in caplog.text
