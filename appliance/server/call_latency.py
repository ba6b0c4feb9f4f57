"""CallLatencies: the duration of each call, by method, transport and code.

Measured where a transport meets a handler, from the request being decoded to its last answer being handed
over. The label sets are closed: methods of the .proto, two transports, status codes of gRPC.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from time import perf_counter
from typing import Any, Final

import grpc

from ..histogram import Histogram

GRPC: Final = "grpc"
LOCAL: Final = "local"
OK: Final = "OK"

#: The W3C trace context of the call being handled; empty where none came.
TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")
CANCELLED: Final = "CANCELLED"

Unary = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncIterator[Any]]


class CallLatencies:
    """A histogram per (method, transport, code), made when the first such call ends."""

    def __init__(self) -> None:
        self.histograms: dict[tuple[str, str, str], Histogram] = {}
        self.is_traced = False  # whether callers' trace contexts are kept

    def ended(self, method: str, transport: str, code: str, seconds: float) -> None:
        """Count a call that ended."""
        key = (method, transport, code)
        histogram = self.histograms.get(key)
        if histogram is None:
            histogram = self.histograms[key] = Histogram()
        histogram.observe(seconds)

    def timed(self, method: str, handler: Unary) -> Unary:
        """Return a gRPC handler with one answer that counts its calls."""

        async def call(request: Any, context: Any) -> Any:
            self._take_context(context)
            began_at, code = perf_counter(), OK
            try:
                return await handler(request, context)
            except asyncio.CancelledError:
                code = CANCELLED
                raise
            except BaseException:
                code = _code(context)
                raise
            finally:
                self.ended(method, GRPC, code, perf_counter() - began_at)

        return call

    def timed_stream(self, method: str, handler: Stream) -> Stream:
        """Return a gRPC handler with many answers that counts its calls."""

        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            self._take_context(context)
            began_at, code = perf_counter(), CANCELLED  # unless it ends by itself
            try:
                async for answer in handler(request, context):
                    yield answer
                code = OK
            except grpc.aio.AbortError:
                code = _code(context)
                raise
            finally:
                self.ended(method, GRPC, code, perf_counter() - began_at)

        return call

    def _take_context(self, context: Any) -> None:
        if self.is_traced:
            TRACEPARENT.set(str(dict(context.invocation_metadata() or ()).get("traceparent", "")))


def _code(context: Any) -> str:
    """Return the name of the status a handler aborted with."""
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"
