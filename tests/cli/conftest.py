"""A small AdminService that answers from a script: real gRPC over a real socket, in a thread of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from kvtier.appliance.cli.app import cli
from kvtier.v1 import admin_pb2, types_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server

GIB = 1 << 30


def status() -> admin_pb2.GetStatusResponse:
    """Return a status with something in every field."""
    return admin_pb2.GetStatusResponse(
        version="0.1.0",
        epoch=1 << 62,
        uptime_s=3725.4,
        tiers=[
            admin_pb2.TierStatus(
                tier=types_pb2.TIER_DRAM,
                backend="sealed memfd",
                capacity_bytes=4 * GIB,
                used_bytes=2 * GIB,
                reserved_bytes=GIB // 2,
                condemned_bytes=1,
                pinned_bytes=GIB,
                num_fragments=4096,
            ),
            admin_pb2.TierStatus(tier=types_pb2.TIER_NVME, backend="direct", capacity_bytes=16 * GIB),
        ],
        edges=[
            admin_pb2.EdgeStatus(
                source="dram",
                target="nvme",
                num_copies=7,
                bytes=GIB,
                bandwidth_bytes_per_s=2.5e9,
                latency_s=0.001,
            )
        ],
        scrubs=[
            admin_pb2.ScrubStatus(tier="dram", num_passes=3, last_bytes=GIB, last_took_s=5),
            admin_pb2.ScrubStatus(tier="nvme", share_done=0.25, num_damaged=2),
        ],
        num_blocks=4096,
        num_clients=2,
        num_namespaces=1,
        counters={"stored_dram": 4096, "evicted_dram": 12},
        codec_speeds=[
            admin_pb2.CodecSpeed(codec="exponents", dtype="bfloat16", decode_bytes_per_s=1.57e10),
            admin_pb2.CodecSpeed(codec="planes", dtype="bfloat16"),
        ],
    )


class ScriptedAdmin(AdminServiceServicer):
    """Answers every call; remembers what was asked. `refusal` makes it refuse, as the daemon does."""

    def __init__(self) -> None:
        self.status = status()
        self.inspected = '{"lease": 17, "blocks": [{"prefix": "5f3a9c01", "pinned": true}], "owner": null}'
        self.problems: list[str] = []
        self.evicted = admin_pb2.EvictResponse(num_blocks=3, bytes=3 << 20)
        self.verified = admin_pb2.VerifyResponse(
            num_units=2, num_units_done=2, num_fragments=16, bytes=2 * GIB, is_last=True, took_s=2
        )
        self.refusal: types_pb2.ErrorDetail | None = None
        self.requests: list[Any] = []
        self.delay_s = 0.0

    async def _answer(self, request: Any, context: Any, answer: Any) -> Any:
        self.requests.append(request)
        await asyncio.sleep(self.delay_s)
        if self.refusal is not None:
            detail = (("kvtier-error-bin", self.refusal.SerializeToString()),)
            context.set_trailing_metadata(detail)
            await context.abort(grpc.StatusCode.NOT_FOUND, self.refusal.message)
        return answer

    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer(request, context, self.status)

    async def Inspect(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer(request, context, admin_pb2.InspectResponse(json=self.inspected))

    async def GetStory(self, request: Any, context: Any) -> Any:  # noqa: N802
        line = admin_pb2.StoryLine(at_s=1.5, what="evicted from [dram]", why="watermark")
        return await self._answer(request, context, admin_pb2.GetStoryResponse(lines=[line], uptime_s=97.0))

    async def Explain(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer(request, context, admin_pb2.ExplainResponse(num_blocks={"dram": 1}))

    async def GetSnapshot(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer(request, context, admin_pb2.GetSnapshotResponse(json="{}"))

    async def GetPolicy(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer(request, context, admin_pb2.GetPolicyResponse())

    async def ApplyPolicy(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer(request, context, admin_pb2.ApplyPolicyResponse())

    async def Evict(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer(request, context, self.evicted)

    async def ListTenants(self, request: Any, context: Any) -> Any:  # noqa: N802
        acme = admin_pb2.TenantStatus(
            name="tenant:acme",
            bandwidth_share=3,
            nvme_bytes=GIB,
            copied_bytes={"nvme>dram": 2 * GIB},
            has_key=True,
        )
        return await self._answer(request, context, admin_pb2.ListTenantsResponse(tenants=[acme]))

    async def EraseTenant(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = admin_pb2.EraseTenantResponse(num_blocks=4096, had_key=True)
        return await self._answer(request, context, answer)

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = admin_pb2.DrainResponse(num_leases_ended=1, num_blocks_flushed=2, num_blocks_unflushed=512)
        return await self._answer(request, context, answer)

    async def Verify(self, request: Any, context: Any) -> Any:  # noqa: N802
        yield admin_pb2.VerifyResponse(num_units=2, num_units_done=1, num_fragments=8, bytes=GIB, took_s=1)
        yield await self._answer(request, context, self.verified)

    async def CheckIntegrity(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._answer(request, context, admin_pb2.CheckIntegrityResponse(problems=self.problems))


@pytest.fixture
def target(tmp_path: Path) -> str:
    """An address in a folder of this test's own."""
    return f"unix://{tmp_path}/k.sock"


@pytest.fixture
def scripted(target: str) -> Iterator[ScriptedAdmin]:
    """A ScriptedAdmin that listens at `target`."""
    with serving(target) as servicer:
        yield servicer


@contextmanager
def serving(target: str) -> Iterator[ScriptedAdmin]:
    """Yield a ScriptedAdmin that listens at `target` until the context ends."""
    servicer = ScriptedAdmin()
    ready, leave = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server = grpc.aio.server()
        add_AdminServiceServicer_to_server(servicer, server)
        server.add_insecure_port(target)
        await server.start()
        ready.set()
        await leave.wait()
        await server.stop(None)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield servicer
    finally:
        loop.call_soon_threadsafe(leave.set)
        thread.join()
        loop.close()


def run(*arguments: str, target: str | None = None) -> Result:
    """Run the command line in this process; `target` goes through the environment, as in a pod."""
    env = {"KVTIER_TARGET": target, "KVTIER_POLICY": None, "NO_COLOR": "1"}
    return CliRunner().invoke(cli, arguments, env=env)
