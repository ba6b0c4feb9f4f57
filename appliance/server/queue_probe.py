"""QueueProbe: calls of the daemon to itself, which tell how long calls wait inside gRPC (admission.py)."""

import asyncio
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final

import grpc

from .admission import Admission

_SERVICE: Final = "kvtier.internal.Probe"
TIMEOUT_S = 5.0  # a probe that takes longer got lost; by then the queue is known to be long


class QueueProbe:
    """Sends one probe at a time to `address`, a socket of `server` itself, and tells `admission` of it."""

    def __init__(self, server: "grpc.aio.Server", admission: Admission) -> None:
        self._admission = admission
        self._channel: grpc.aio.Channel | None = None
        self._call: Callable[..., Any] | None = None
        self._under_way: asyncio.Task[None] | None = None
        handler: Any = grpc.stream_unary_rpc_method_handler(self._arrived)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Probe": handler}),))

    async def start(self, address: str) -> None:
        """Connect. Until then, and without an address, no call waits as far as is known."""
        self._channel = grpc.aio.insecure_channel(address)
        await self._channel.channel_ready()  # else the first probe measures how long that takes
        self._call = self._channel.unary_unary(f"/{_SERVICE}/Probe")

    async def stop(self) -> None:
        """End the probe under way and the connection. Idempotent."""
        if self._under_way is not None:
            self._under_way.cancel()
        if self._channel is not None:
            await self._channel.close()
        self._call = None

    def send_if_due(self) -> None:
        """Send a probe when calls came since the last one."""
        is_free = self._under_way is None or self._under_way.done()
        if self._call is not None and is_free and self._admission.begin_probe(monotonic_ns()):
            self._under_way = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        assert self._call is not None
        is_due = True
        while is_due:
            try:
                await self._call(b"", timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError:
                self._admission.end_probe(monotonic_ns(), has_arrived=False)
            is_due = self._admission.begin_probe(monotonic_ns())

    async def _arrived(self, requests: Any, context: Any) -> bytes:
        self._admission.end_probe(monotonic_ns())
        return b""
