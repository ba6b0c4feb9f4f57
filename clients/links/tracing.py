"""Which trace a call belongs to: the caller's, where it has one. A tracing caller has loaded OpenTelemetry,
so nothing is imported here, and a runtime without it pays a look into a dictionary."""

import sys

from ...v1.local import TRACEPARENT_BYTES


def traceparent() -> str:
    """Return the W3C trace context of the span the caller is in, empty when it is in none."""
    opentelemetry = sys.modules.get("opentelemetry.trace")
    if opentelemetry is None:
        return ""
    context = opentelemetry.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    text = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"
    assert len(text) == TRACEPARENT_BYTES
    return text


def trace_metadata() -> tuple[tuple[str, str], ...] | None:
    """Return the same as gRPC metadata of a call."""
    text = traceparent()
    return (("traceparent", text),) if text else None
