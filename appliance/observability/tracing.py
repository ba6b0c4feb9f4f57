"""Tracing: what became of a get or a put, as OpenTelemetry spans.

    kvtier.get | kvtier.put      from the request to its last answer
    ├── kvtier.plan              what the planner thought about it
    └── kvtier.copy              each batch that the plan sent off, until it landed

Made from the events and instructions of the planner, which every request passes: no service has a line of
tracing in it, and without the extra this module is never imported. Calls continue the caller's trace (W3C
`traceparent`): in gRPC's metadata, and in a frame of the local channel. Copies that begin later than the plan
(a get that had to wait for room) and background ones (spills, prefetches) have no span: the metrics have
them.

Attributes are numbers and words of ours. Names of blocks and sessions are never in a span.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ... import __version__
from ...tiers.ladder import STANDARD, Ladder
from ..core.events import AcquireAbandoned, AcquireRequested, CommitRequested, CopyFinished, Event
from ..core.instructions import STAGING, Copy, Reply
from ..core.results import AcquireResult, PutOutcome, PutResult, Refusal
from ..errors import StartError
from ..server.call_latency import TRACEPARENT

MAX_OPEN = 4096  # spans; beyond them requests are not traced

OPENING: dict[type, str] = {AcquireRequested: "kvtier.get", CommitRequested: "kvtier.put"}


@dataclass(slots=True)
class _TracedRequest:
    """A get or a put without its last answer, or with copies under way."""

    span: trace.Span
    context: Any
    num_copies: int = 0
    ended_ns: int = 0


class Tracing:
    """Hears of every step. `clock` is the appliance's; spans carry wall time."""

    def __init__(self, exporter: SpanExporter, clock: Callable[[], float], ladder: Ladder = STANDARD) -> None:
        self._tiers = ladder.tiers
        resource = Resource.create({"service.name": "kvtier", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvtier")
        self._propagator = TraceContextTextMapPropagator()
        self._clock = clock
        self._wall_ns = time.time_ns() - int(clock() * 1e9)
        self._requests: dict[int, _TracedRequest] = {}  # by call
        self._copies: dict[int, tuple[_TracedRequest, trace.Span]] = {}  # by copy

    def stepped(self, event: Event, instructions: Sequence[Any], now: float) -> None:
        """Open and close spans as the step says."""
        name = OPENING.get(type(event))
        if name is not None and len(self._requests) + len(self._copies) < MAX_OPEN:
            self._open(name, event, instructions, now)
        elif type(event) is CopyFinished and event.copy in self._copies:
            self._landed(event)
        elif type(event) is AcquireAbandoned and event.call in self._requests:
            self._end(event.call)
        if self._requests:
            for instruction in instructions:
                if type(instruction) is Reply and instruction.call in self._requests:
                    self._answered(instruction)

    def stop(self) -> None:
        """Send what is left. Blocks for as long as the exporter does."""
        self._provider.shutdown()

    # ------------------------------------------------------------------------------------ internals

    def _ns(self, at: float) -> int:
        return self._wall_ns + int(at * 1e9)

    def _open(self, name: str, event: Any, instructions: Sequence[Any], now: float) -> None:
        came_from = self._propagator.extract({"traceparent": TRACEPARENT.get()})
        span = self._tracer.start_span(name, came_from, start_time=self._ns(now))
        request = _TracedRequest(span, trace.set_span_in_context(span))
        self._requests[event.call] = request
        if isinstance(event, AcquireRequested):
            span.set_attribute("kvtier.num_asked", len(event.prefix_hashes) - event.first_block)
        plan = self._tracer.start_span("kvtier.plan", request.context, start_time=self._ns(now))
        plan.end(self._ns(self._clock()))
        for instruction in instructions:
            if type(instruction) is Copy:
                self._copy_began(request, instruction)

    def _copy_began(self, request: _TracedRequest, copy: Copy) -> None:
        span = self._tracer.start_span("kvtier.copy", request.context, start_time=self._ns(self._clock()))
        span.set_attribute("kvtier.source", STAGING if copy.source is None else copy.source.label)
        span.set_attribute("kvtier.target", copy.target.label)
        span.set_attribute("kvtier.num_fragments", len(copy.items))
        span.set_attribute("kvtier.num_bytes", sum(item.label.raw_length for item in copy.items))
        request.num_copies += 1
        self._copies[copy.copy] = request, span

    def _landed(self, event: CopyFinished) -> None:
        request, span = self._copies.pop(event.copy)
        failed = sorted({outcome.cause.value for outcome in event.outcomes if outcome.cause is not None})
        if failed:
            span.set_status(trace.StatusCode.ERROR, ", ".join(failed))
        span.end(self._ns(self._clock()))
        request.num_copies -= 1
        self._close(request)

    def _answered(self, reply: Reply) -> None:
        """Record an answer; the last one ends the request, unless copies are still under way."""
        result, span = reply.result, self._requests[reply.call].span
        if isinstance(result, AcquireResult):
            for tier in self._tiers if result.tiers else ():
                if number := result.tiers.count(tier):
                    span.set_attribute(f"kvtier.num_{tier.label}", number)
            if not result.last:
                return
            span.set_attribute("kvtier.num_blocks", result.num_blocks)
        elif isinstance(result, PutResult):
            span.set_attribute("kvtier.num_stored", list(result.outcomes).count(PutOutcome.STORED))
        elif isinstance(result, Refusal):
            span.set_status(trace.StatusCode.ERROR, result.reason)
        self._end(reply.call)

    def _end(self, call: int) -> None:
        request = self._requests.pop(call)
        request.ended_ns = self._ns(self._clock())
        self._close(request)

    def _close(self, request: _TracedRequest) -> None:
        if request.ended_ns and not request.num_copies:
            request.span.end(request.ended_ns)


def exporter(kind: str) -> SpanExporter:
    """Return what sends spans away. Raises StartError when its package is not there."""
    if kind == "console":
        return ConsoleSpanExporter()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as missing:
        raise StartError(
            f"`observe.traces: otlp` needs {missing.name}: pip install 'kvtier[otel]'"
        ) from missing
    made: SpanExporter = OTLPSpanExporter()
    return made
