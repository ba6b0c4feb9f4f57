"""Ports of servers under test: no two of one run, nor of two workers, are the same."""

import socket
from pathlib import Path

import pytest

from . import ports


def test_each_call_returns_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    of_first = {ports.free_port() for _ in range(50)}
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    of_second = {ports.free_port() for _ in range(50)}
    assert len(of_first | of_second) == 100


def test_a_port_with_a_listener_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "PER_WORKER", 2)
    with socket.create_server(("127.0.0.1", ports.free_port())) as server:
        assert server.getsockname()[1] not in {ports.free_port() for _ in range(4)}


def test_the_kernel_does_not_hand_them_out() -> None:
    [first, _] = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert int(first) >= ports.FIRST + ports.NUM_WORKERS * ports.PER_WORKER
