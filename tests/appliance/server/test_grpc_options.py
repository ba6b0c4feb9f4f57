"""What the gRPC server is told about its transports; by option, because the times are minutes."""

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from kvtier.appliance.server import grpc_server


class Made(Exception):
    """The server was made, with these options."""


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a GrpcServer tells gRPC."""

    def server(*, options: Sequence[tuple[str, Any]], **others: Any) -> None:
        raise Made(dict(options))

    monkeypatch.setattr(grpc.aio, "server", server)
    service: Any = type("Anything", (), {"__getattr__": lambda self, name: self})()
    with pytest.raises(Made) as made:
        grpc_server.GrpcServer(*[service] * 5, with_reflection=False)
    found: dict[str, Any] = made.value.args[0]
    return found


def test_a_peer_that_is_gone_without_a_word_is_found_out(options: dict[str, Any]) -> None:
    """A half-open connection kept its streams and leases for ever."""
    assert options["grpc.keepalive_permit_without_calls"] == 1, "also of a client that only keeps a lease"
    assert options["grpc.http2.max_pings_without_data"] == 0, "a stream of events may wait for hours"
    assert 0 < options["grpc.keepalive_timeout_ms"] < options["grpc.keepalive_time_ms"] <= 300_000


def test_calls_and_connections_are_bounded(options: dict[str, Any]) -> None:
    """What docs/security.md says of calls on a connection, and of those that gRPC holds back: their memory is
    the daemon's."""
    assert options["grpc.max_concurrent_streams"] == 32
    assert options["grpc.server.max_pending_requests"] == 4096
    assert options["grpc.server.max_pending_requests_hard_limit"] == 4096
