"""The HTTP listener and the value behind the page."""

import http.client
import json
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvtier.appliance.config import Observe, Settings, SettingsError
from kvtier.appliance.errors import StartError
from kvtier.appliance.observability.http_connections import (
    MAX_ANSWERS_PER_PEER,
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_PER_PEER,
)
from kvtier.appliance.observability.http_server import is_own_name
from kvtier.clients import Client

from ...generated import ROOT
from .conftest import CHAIN_BLOCKS, GEOMETRY, IDENTITY, Shown, Start, names, use

REST = b"Host: localhost\r\n\r\n"
DOCUMENT = (ROOT / "docs" / "web-api.md").read_text()


def shape(value: Any) -> Any:
    """Return the names in a value, lists by their first item; numbers are all alike."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value and isinstance(value[0], dict) else []
    return "value"


def test_the_snapshot_is_what_its_page_says(start: Start, tmp_path: Path) -> None:
    prices = {"gb_month": 0.02, "thousand_puts": 0.005}
    (tmp_path / "store").mkdir()
    shown = start(objects={"url": f"file://{tmp_path}/store", "price": prices})
    use(shown)
    shown.until(lambda: shown.snapshot()["source"]["requests"] != [])
    documented = json.loads(DOCUMENT.split("```json")[1].split("```")[0])
    found = shown.snapshot()
    found["tiers"] = [tier for tier in found["tiers"] if tier["tier"] == "dram"]
    for key in ("used_bytes", "edge_bytes_per_s"):
        found["history"][key] = documented["history"][key]  # by tier and edge: not every daemon has all
    for key in ("eviction", "admission"):
        found["policy"][key] = documented["policy"][key]
    assert found["fleet"] is None  # without other hosts; with them: tests/e2e/test_peers.py
    found["fleet"] = documented["fleet"]
    assert shape(found) == shape(documented)


def test_the_snapshot_adds_up(start: Start) -> None:
    shown = start()
    use(shown)
    found = shown.snapshot()
    totals, session = found["totals"], found["sessions"]["latest"][0]
    assert totals["asked"] == sum(totals["found"].values()) + totals["missed"] + totals["declined"] == 120
    assert totals["hit_ratio"] == sum(totals["found"].values()) / 120
    assert totals["saved_s"] > 0
    assert totals["read_bytes"] == sum(totals["found"].values()) * GEOMETRY.block_bytes
    assert totals["loaded_bytes"] == totals["found"]["nvme"] * GEOMETRY.block_bytes > 0
    assert {key: session[key] for key in ("asked", "missed", "stored_bytes")} == {
        "asked": 120,
        "missed": 24,
        "stored_bytes": 3 * CHAIN_BLOCKS * GEOMETRY.block_bytes,
    }
    assert sum(session["blocks"].values()) == 3 * CHAIN_BLOCKS
    assert session["bytes"]["dram"] == session["blocks"]["dram"] * GEOMETRY.block_bytes
    for tier in found["tiers"]:
        assert sum(tier["bytes_by_urgency"].values()) == tier["used_bytes"]
    assert sum(found["sessions"]["by_urgency"].values()) == 1
    assert found["decisions"]
    for decision in found["decisions"]:
        assert decision["num_blocks"] > 0
        if decision["next_price"] is not None:
            assert decision["price"] <= decision["next_price"]


def test_what_one_client_acquires_and_others_read_is_asked_once(start: Start) -> None:
    """As vLLM's scheduler and workers do."""
    shown, num = start(), 12  # a client may pin half of dram: 16 blocks
    with Client(shown.target) as scheduler, Client(shown.target) as worker:
        namespace = scheduler.register(IDENTITY)
        worker.register(IDENTITY)
        scheduler.put(namespace, names("0", num), bytes(num * GEOMETRY.block_bytes))
        with scheduler.acquire(namespace, names("0", 2 * num)):
            assert worker.get(namespace, names("0", num)[4:]).num_one_sided == num - 4
            worker.flush()
        once = shown.snapshot()["totals"]
        scheduler.get(namespace, names("0")[:5])
        scheduler.flush()
        again = shown.snapshot()["totals"]
    assert (once["asked"], once["found"]["dram"], once["missed"]) == (2 * num, num, num)
    assert (again["asked"], again["found"]["dram"]) == (2 * num + 5, num + 5)


def test_a_session_is_told_what_is_gone(start: Start) -> None:
    shown = start(nvme=False)
    with Client(shown.target) as client:
        namespace = client.register(IDENTITY)
        for chain in "012":
            payload = bytes(CHAIN_BLOCKS * GEOMETRY.block_bytes)
            client.put(namespace, names(chain), payload, session="s")
        session = shown.snapshot()["sessions"]["latest"][0]
    assert session["blocks"]["gone"] > 0
    assert session["blocks"]["dram"] + session["blocks"]["gone"] == 3 * CHAIN_BLOCKS


@pytest.mark.parametrize("with_names", [False, True])
def test_names_are_shown_only_when_they_may_be(start: Start, with_names: bool) -> None:
    shown = start(names=with_names)
    use(shown, session_id="agent-42")
    text = shown.get("/api/snapshot")
    known = [name[:4].hex() for chain in "012" for name in names(chain)]
    assert ("agent-42" in text) == with_names
    assert any(name in text for name in known) == with_names
    assert "agent-42" not in shown.get("/metrics")


def test_the_past_grows_and_adds_up(start: Start) -> None:
    shown = start()
    sampler = shown.daemon.observability.view.sampler
    shown.served.call(shown.daemon.observability.view.close)  # from here on samples are ours
    use(shown)
    shown.served.call(sampler.sample)
    use(shown, chains=1)
    shown.served.call(sampler.sample)
    history = shown.snapshot()["history"]
    assert sum(history["asked"]) == shown.snapshot()["totals"]["asked"]
    for i, asked in enumerate(history["asked"]):
        found = sum(history["found"][tier][i] for tier in history["found"])
        assert asked == found + history["missed"][i] + history["declined"][i]
        assert history["hit_ratio"][i] == (found / asked if asked else None)
    only_last = json.loads(shown.get("/api/snapshot?history=1"))["history"]
    assert only_last["asked"] == history["asked"][-1:]
    assert json.loads(shown.get("/api/snapshot?history=0"))["history"]["asked"] == []


def test_the_stream_sends_the_past_once_and_then_what_is_new(start: Start) -> None:
    shown = start()
    shown.served.call(shown.daemon.observability.view.close)
    assert shown.daemon.observability.http is not None
    connection = http.client.HTTPConnection(
        urlsplit(shown.daemon.observability.http.address).netloc, timeout=60
    )
    for _ in range(3):
        shown.served.call(shown.daemon.observability.view.sampler.sample)
    connection.request("GET", "/api/stream")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"

    def event() -> Any:
        assert answer.readline() == b"event: snapshot\n"
        data = answer.readline()
        assert answer.readline() == b"\n"
        return json.loads(data.removeprefix(b"data: "))

    assert len(event()["history"]["asked"]) >= 3
    shown.served.call(shown.daemon.observability.view.sampler.sample)
    assert len(event()["history"]["asked"]) == 1
    connection.close()


def test_readiness_and_liveness_tell_the_truth(start: Start) -> None:
    shown = start()
    assert shown.request("GET", "/readyz") == (200, "serving\n")
    shown.served.wait(shown.daemon.drain(1.0))
    assert shown.request("GET", "/readyz") == (503, "draining\n")
    assert shown.request("GET", "/healthz") == (200, "draining\n")
    assert "kvtier_ready 0.0" in shown.get("/metrics")
    shown.served.call(lambda: shown.daemon.appliance.failed.set_exception(AssertionError("planted")))
    assert shown.request("GET", "/healthz") == (503, "failed\n")
    shown.served.call(shown.daemon.appliance.failed.exception)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/metrics", {}, 405),
        ("DELETE", "/", {}, 405),
        ("GET", "/../etc/passwd", {}, 404),
        ("GET", "/api/snapshot?history=-1", {}, 400),
        ("GET", "/api/snapshot?history=301", {}, 400),
        ("GET", f"/api/snapshot?history={'1' * 5000}", {}, 400),
        ("GET", "//[", {}, 400),
        ("GET", "/metrics", {"Host": "rebound.example"}, 421),
        ("GET", "/metrics", {"Host": "["}, 421),
        ("GET", "/metrics", {"Host": "localhost:1"}, 200),
        ("GET", "/metrics", {"Host": "10.1.2.3:9464"}, 200),
        ("HEAD", "/metrics", {}, 200),
    ],
)
def test_requests_are_answered_as_documented(
    start: Start, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    found, body = start().request(method, path, headers)
    assert found == status
    assert (body == "") == (method == "HEAD")


@pytest.mark.parametrize("garbage", [b"\0\1\2\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000, b""])
def test_what_is_no_request_does_no_harm(start: Start, garbage: bytes) -> None:
    shown = start()
    address = _address(shown)
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
    assert shown.request("GET", "/readyz")[0] == 200


def test_the_oldest_incomplete_request_goes_first(start: Start) -> None:
    shown = start()
    with ExitStack() as stack:
        waiting = [_half_a_request(shown, stack) for _ in range(MAX_CONNECTIONS_PER_PEER)]
        newest = _half_a_request(shown, stack)
        assert waiting[0].recv(1) == b""
        for connection in (waiting[1], newest):
            connection.sendall(REST)
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_half_requests_of_many_peers_do_not_stop_a_probe(
    start: Start, record_property: Callable[[str, object], None]
) -> None:
    shown = start()
    with ExitStack() as stack:
        for i in range(2 * MAX_CONNECTIONS):
            _half_a_request(shown, stack, f"127.0.0.{2 + i % 8}")
        for _ in range(MAX_CONNECTIONS_PER_PEER):
            assert shown.request("GET", "/healthz")[0] == 200
    record_property("probes_answered", MAX_CONNECTIONS_PER_PEER)


def test_a_peer_takes_the_places_of_its_own_connections(start: Start) -> None:
    shown = start()
    with ExitStack() as stack:
        other = _half_a_request(shown, stack)
        for _ in range(2 * MAX_CONNECTIONS):
            _half_a_request(shown, stack, "127.0.0.2")
        other.sendall(REST)
        assert other.recv(12) == b"HTTP/1.1 200"


def test_answers_that_last_leave_a_reserve_for_probes(start: Start) -> None:
    shown = start()
    with ExitStack() as stack:
        for _ in range(MAX_ANSWERS_PER_PEER):
            stream = _half_a_request(shown, stack, path="/api/stream")
            stream.sendall(REST)
            assert stream.recv(12) == b"HTTP/1.1 200"
        assert shown.request("GET", "/metrics")[0] == 503
        for _ in range(MAX_CONNECTIONS):
            _half_a_request(shown, stack)
        assert shown.request("GET", "/healthz")[0] == 200
        assert len(stream.recv(1)) == 1


def test_an_address_that_is_taken_stops_the_start_only_when_it_was_asked_for(start: Start) -> None:
    shown = start()
    host, port = _address(shown)
    with pytest.raises(StartError, match=r"observe\.http"):
        start(http=f"{host}:{port}")
    assert start(http="off").daemon.observability.http is None


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"http": "9464"}, "IP:PORT"),
        ({"http": "example.org:80"}, "IP:PORT"),
        ({"http": "0.0.0.0:9464", "names": True}, "other hosts"),
        ({"kv_events": "5557"}, "tcp://HOST:PORT"),
    ],
)
def test_settings_are_refused_with_the_fix(values: dict[str, object], fix: str) -> None:
    with pytest.raises((SettingsError, ValueError), match=fix):
        Settings.model_validate({"observe": values})


def test_the_default_is_this_host_only() -> None:
    address = Observe().http_address
    assert address is not None
    assert (address.host, address.is_wanted) == ("127.0.0.1", False)
    assert Observe.model_validate({"http": False}).http_address is None


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1:1", True),
        ("[::1]:80", True),
        ("localhost", True),
        ("a.example", False),
        ("", False),
        ("[", False),
    ],
)
def test_who_may_be_named(host: str, own: bool) -> None:
    assert is_own_name(host) == own


def _address(shown: Shown) -> tuple[str, int]:
    server = shown.daemon.observability.http
    assert server is not None
    return server.host, server.port


def _half_a_request(
    shown: Shown, stack: ExitStack, peer: str = "127.0.0.1", path: str = "/healthz"
) -> socket.socket:
    """Return a connection from the address `peer` that misses REST."""
    connection = socket.create_connection(_address(shown), timeout=60, source_address=(peer, 0))
    stack.enter_context(connection).sendall(f"GET {path} HTTP/1.1\r\n".encode())
    return connection
