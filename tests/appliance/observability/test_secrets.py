"""Logs and traces: what they say, and that nothing planted in a request is found in any of them."""

import asyncio
import json
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext

from kvtier.appliance.errors import error
from kvtier.appliance.observability.logs import JsonFormatter, TextFormatter, clean, describe
from kvtier.appliance.observability.tracing import Tracing
from kvtier.clients import AsyncClient, Client
from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceStub
from kvtier.v1.local import Flag, Frame, Method, encode

from ...daemon import Daemon
from ..raw_client import identity
from .conftest import CHAIN_BLOCKS, GEOMETRY, IDENTITY, Shown, Start, names, use

SECRET = "hunter2-sk-live-4eC39HqLyjWDarjtT1zdp7dc"
PROMPT = "Dear doctor, my name is Eleanor Rigby"
PLANTED = (SECRET, SECRET.encode().hex(), PROMPT, "Eleanor", "4eC39HqLyjWDarjt")
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def plant(target: str, local_path: str) -> None:
    """Say secrets wherever a request has room for text or bytes, well and badly."""
    payload = (PROMPT.encode() * 4000)[: GEOMETRY.block_bytes]
    with Client(target, name=PROMPT[:30]) as client:
        namespace = client.register(IDENTITY)
        client.put(namespace, [SECRET.encode()[:32]], payload, session=SECRET)
        client.get(namespace, [SECRET.encode()[:32]], session=SECRET)
        for session in (SECRET, PROMPT):
            client.get(namespace, names("nowhere"), session=session)  # a call, where the one before was none
            client.put(namespace, names(session, 1), payload, session=session)
        client.session(PROMPT)
    with grpc.insecure_channel(target) as channel:
        stub = KVCacheServiceStub(channel)
        opened = stub.OpenClient(pb.OpenClientRequest(name=SECRET, request_id=PROMPT))
        metadata = (("authorization", f"Bearer {SECRET}"),)
        for request in (
            pb.AcquireRequest(client_id=opened.client_id, session_id=PROMPT * 100),
            pb.AcquireRequest(client_id=opened.client_id, prefix_hashes=SECRET.encode()),
            pb.AcquireRequest(
                client_id=opened.client_id, request_id=SECRET, namespace_id=99, prefix_hashes=b"x" * 32
            ),
        ):
            with pytest.raises(grpc.RpcError):
                list(stub.Acquire(request, metadata=metadata))
        call: Any = channel.unary_unary("/kvtier.v1.KVCacheService/Lookup")
        with pytest.raises(grpc.RpcError):
            call(SECRET.encode(), metadata=metadata)
        bad = identity()
        bad.domain = PROMPT
        with pytest.raises(grpc.RpcError):
            stub.RegisterNamespace(pb.RegisterNamespaceRequest(identity=bad))
    for garbage in (SECRET.encode(), encode(Frame(Method.ATTACH, Flag.NONE, 1, PROMPT.encode()))):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(local_path)
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass


def assert_clean(where: str, text: str) -> None:
    """Fail when something planted is in `text`."""
    assert text, f"{where} is empty: this would find nothing anywhere"
    for secret in PLANTED:
        assert secret not in text, f"{secret!r} in {where}"


@pytest.fixture
def capture() -> Iterator[list[str]]:
    """Everything logged meanwhile, in both formats."""
    lines: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.extend((JsonFormatter().format(record), TextFormatter().format(record)))

    keeper = Keeper()
    logging.getLogger().addHandler(keeper)
    yield lines
    logging.getLogger().removeHandler(keeper)


def trace(shown: Shown) -> InMemorySpanExporter:
    """Let a daemon trace into memory."""
    kept = InMemorySpanExporter()
    observability = shown.daemon.observability

    def begin() -> None:
        observability.tracing = Tracing(kept, observability.view.clock)
        observability.view.appliance.observers.append(observability.tracing.stepped)
        observability.view.service.call_latencies.is_traced = True

    shown.served.call(begin)
    return kept


def finished(shown: Shown, kept: InMemorySpanExporter) -> list[Any]:
    tracing = shown.daemon.observability.tracing
    assert tracing is not None
    shown.served.wait(asyncio.to_thread(tracing._provider.force_flush))
    return list(kept.get_finished_spans())


def test_nothing_planted_is_found_in_log_metric_snapshot_or_trace(start: Start, capture: list[str]) -> None:
    shown = start()
    kept = trace(shown)
    plant(shown.target, shown.daemon.service.facts.local_socket_path)
    logging.getLogger("kvtier.test").warning("the keeper keeps")
    assert_clean("the log", "\n".join(capture))
    assert_clean("the metrics", shown.get("/metrics"))
    assert_clean("the snapshot", shown.get("/api/snapshot"))
    spans = finished(shown, kept)
    assert_clean("the traces", "\n".join(span.to_json() for span in spans))
    assert any((line.startswith("{") and "malformed" in line) or "closing" in line for line in capture)
    assert shown.audit() == []


@pytest.mark.parametrize("form", ["text", "json"])
def test_nothing_planted_is_found_in_the_log_of_a_process(tmp_path: Any, form: str) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"observe: {{log: {form}, http: off}}\ntiers: {{dram: {{capacity: 64MiB}}}}\n")
    with Daemon(tmp_path, policy) as daemon:
        plant(daemon.target, f"{daemon.path}.local")
        assert daemon.stop() == 0
    text = daemon.log.read_text()
    assert_clean("the log", text)
    lines = [line for line in text.splitlines() if " ready at " not in line]
    assert any("malformed" in line or "closing" in line for line in lines), text
    if form == "json":
        for line in lines:
            assert {"at", "severity", "logger", "message"} <= set(json.loads(line))


def test_a_get_is_a_trace_of_plan_and_copies(start: Start) -> None:
    shown = start()
    kept = trace(shown)
    use(shown)
    spans = finished(shown, kept)
    by_id = {span.context.span_id: span for span in spans}
    children: dict[str, list[tuple[str, Any]]] = {"kvtier.get": [], "kvtier.put": []}
    for span in spans:
        assert span.end_time >= span.start_time
        if span.parent is not None:
            parent = by_id[span.parent.span_id]
            children[parent.name].append((span.name, span.attributes))
            assert parent.start_time <= span.start_time
    assert {name for name, _ in children["kvtier.get"]} == {"kvtier.plan", "kvtier.copy"}
    edges = {
        (attributes["kvtier.source"], attributes["kvtier.target"])
        for name, attributes in children["kvtier.get"]
        if name == "kvtier.copy"
    }
    assert ("nvme", "dram") in edges
    assert edges <= {("nvme", "dram"), ("dram", "nvme")}, "bring up, and make room for it"
    puts = [span for span in spans if span.name == "kvtier.put"]
    assert sum(span.attributes["kvtier.num_stored"] for span in puts) == 3 * CHAIN_BLOCKS
    assert not shown.daemon.observability.tracing._requests  # type: ignore[union-attr]
    assert not shown.daemon.observability.tracing._copies  # type: ignore[union-attr]


def test_a_get_over_grpc_continues_the_callers_trace(start: Start) -> None:
    shown = start()
    kept = trace(shown)
    with grpc.insecure_channel(shown.target) as channel:
        stub = KVCacheServiceStub(channel)
        client = stub.OpenClient(pb.OpenClientRequest(name="c")).client_id
        namespace = stub.RegisterNamespace(pb.RegisterNamespaceRequest(identity=identity())).namespace_id
        request = pb.AcquireRequest(client_id=client, namespace_id=namespace, prefix_hashes=names("0")[0])
        list(stub.Acquire(request, metadata=(("traceparent", TRACEPARENT),)))
        list(stub.Acquire(request))
    gets = [span for span in finished(shown, kept) if span.name == "kvtier.get"]
    assert f"{gets[0].context.trace_id:032x}" == TRACEPARENT.split("-")[1]
    assert f"{gets[0].parent.span_id:016x}" == TRACEPARENT.split("-")[2]
    assert gets[1].parent is None


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_clients_calls_belong_to_the_span_it_is_in(
    start: Start, shared_memory: bool, is_async: bool
) -> None:
    """Over the local channel in a flagged frame, over gRPC in the metadata; only where somebody traces."""
    shown = start()
    data = bytes(GEOMETRY.block_bytes)
    tracer = TracerProvider().get_tracer("a runtime")
    kept = trace(shown)

    def both() -> None:
        with Client(shown.target, shared_memory=shared_memory) as client:
            namespace = client.register(IDENTITY)
            with tracer.start_as_current_span("step") as span:
                contexts.append(span.get_span_context())
                client.put(namespace, names("0")[:1], data)
                client.acquire(namespace, names("0")[:1]).release()
            client.acquire(namespace, names("0")[:1]).release()

    async def both_async() -> None:
        async with AsyncClient(shown.target, shared_memory=shared_memory) as client:
            namespace = await client.register(IDENTITY)
            with tracer.start_as_current_span("step") as span:
                contexts.append(span.get_span_context())
                await client.put(namespace, names("0")[:1], data)
                await (await client.acquire(namespace, names("0")[:1])).release()
            await (await client.acquire(namespace, names("0")[:1])).release()

    contexts: list[SpanContext] = []
    if is_async:
        asyncio.run(both_async())
    else:
        both()
    spans = [span for span in finished(shown, kept) if span.name in ("kvtier.get", "kvtier.put")]
    # A lease over gRPC is an acquire and a stream, which an early release cuts short: one span or two.
    parents = list(dict.fromkeys((span.name, span.parent and tuple(span.parent[:2])) for span in spans))
    mine = (contexts[0].trace_id, contexts[0].span_id)
    assert parents == [("kvtier.put", mine), ("kvtier.get", mine), ("kvtier.get", None)]


def test_what_is_cleaned() -> None:
    digest = "5f3a9c01" * 8
    assert clean(f"block {digest} left") == "block 5f3a9c01… left"
    assert clean(f"token {'aB3-' * 10}") == "token …"
    assert (
        clean("/var/lib/kvtier/segment-000001: bad\nsecond") == "/var/lib/kvtier/segment-000001: bad second"
    )
    assert len(clean("word " * 1000)) < 400
    assert describe(error("BAD_KEY", "32 bytes each")) == "CallerError: BAD_KEY: 32 bytes each"
    with pytest.raises(json.JSONDecodeError) as foreign:
        json.loads(SECRET)
    assert describe(foreign.value) == "JSONDecodeError", "a message made by others may repeat its input"
    assert describe(OSError(2, "No such file", "/secret")) == "FileNotFoundError: No such file"


def test_a_line_of_json_has_allowed_fields_only() -> None:
    record = logging.LogRecord(
        "kvtier.x", logging.WARNING, "x.py", 1, "tier %s: %d of %s", ("dram", 3, {"a": 1}), None
    )
    record.tier, record.prompt = "dram", PROMPT
    entry = json.loads(JsonFormatter().format(record))
    assert entry["message"] == "tier dram: 3 of {'a': 1}"
    assert set(entry) == {"at", "severity", "logger", "message", "tier"}
    foreign = logging.LogRecord("grpc._x", logging.ERROR, "x.py", 1, "failed: %s", (PROMPT,), None)
    assert json.loads(JsonFormatter().format(foreign))["message"] == "failed: %s"
    other = logging.LogRecord("kvtier.x", logging.ERROR, "x.py", 1, "got %s", (b"bytes",), None)
    assert re.search(r"got <bytes>$", TextFormatter().format(other))
