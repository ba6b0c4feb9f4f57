"""Readiness tells the truth: each thing that must go on is stopped in turn, in a running daemon."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtier.appliance.observability.health import COPY_PATIENCE_S, PLANNER_PATIENCE_S, Health, HealthCheck
from kvtier.appliance.transfer.lanes import Edge, Route
from kvtier.clients import Client
from kvtier.tiers.base import Copier
from kvtier.tiers.block import Tier

from .conftest import CHAIN_BLOCKS, GEOMETRY, IDENTITY, Shown, Start, names

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_an_organ_is_stalled_after_its_patience_and_well_when_it_moves() -> None:
    health = Health()

    def look(has_work: bool, num_done: int, now: float) -> tuple[str, ...]:
        health.look([HealthCheck("heart", has_work, num_done, 5.0), HealthCheck("idle", False, 0, 0.0)], now)
        return health.stalled

    assert look(True, 7, 100.0) == ()
    assert look(True, 7, 104.9) == ()
    assert look(True, 7, 105.0) == ("heart",)
    assert look(True, 8, 106.0) == ()  # it moved: its patience begins anew
    assert look(True, 8, 110.9) == ()
    assert look(False, 8, 120.0) == ()  # nothing to do
    assert look(True, 8, 121.0) == ()
    assert look(True, 8, 126.0) == ("heart",)


def _grpc_health(shown: Shown, service: str) -> int:
    with grpc.insecure_channel(shown.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status)


def _look(shown: Shown, later_s: float = 0.0) -> None:
    """Let the view check health, as if `later_s` had gone by."""
    view = shown.daemon.observability.view

    def look() -> None:
        view.close()  # no looks but ours
        clock = view.clock
        view.clock = lambda: clock() + later_s
        view.check_health()
        view.clock = clock

    shown.served.call(look)
    shown.served.wait(shown.daemon.reports.settle())


class _Swallowing:
    """A copier whose device never answers, until it is told to."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._swallowed: list[tuple[Any, Future[Any]]] = []

    def start(self, items: Any) -> "Future[Any]":
        self._swallowed.append((items, Future()))
        return self._swallowed[-1][1]

    def answer(self) -> None:
        """Do what was asked for meanwhile."""
        for items, promise in self._swallowed:
            promise.set_result(self._copier.start(items).result())
        self._swallowed.clear()


@contextlib.contextmanager
def _hung_spills(shown: Shown) -> Iterator[Callable[[], None]]:
    """Let the device swallow what is spilled; yields what ends that, which leaving does, too."""
    routes: Any = shown.daemon.appliance.mover._routes
    edge = Edge(Tier.DRAM, Tier.NVME)
    real = routes[edge]
    hung = _Swallowing(real.copier)
    shown.served.call(lambda: routes.update({edge: Route(hung)}))

    def end() -> None:
        routes[edge] = real
        hung.answer()

    try:
        yield lambda: shown.served.call(end)
    finally:
        shown.served.call(end)


def test_a_device_that_swallows_copies_makes_the_daemon_not_ready_until_it_answers(start: Start) -> None:
    shown = start()
    data = np.ones(CHAIN_BLOCKS * GEOMETRY.block_bytes, np.uint8)
    with _hung_spills(shown) as end, Client(shown.target) as client:
        ns = client.register(IDENTITY)
        assert client.put(ns, names("a"), data)
        assert client.put(ns, names("b")[:6], data[: 6 * GEOMETRY.block_bytes])  # above the watermark
        _look(shown)
        assert shown.request("GET", "/readyz") == (200, "serving\n")
        _look(shown, COPY_PATIENCE_S)
        assert shown.request("GET", "/readyz") == (503, "stalled: copies dram>nvme\n")
        assert shown.request("GET", "/healthz")[0] == 200  # a restart cures no device
        assert "kvtier_ready 0.0" in shown.get("/metrics")
        assert _grpc_health(shown, "kvtier.v1.KVCacheService") == NOT_SERVING
        assert _grpc_health(shown, "kvtier.v1.AdminService") == SERVING  # people can still ask
        assert _grpc_health(shown, "") == SERVING
        end()
        shown.served.wait(shown.daemon.appliance.settled())
        _look(shown, COPY_PATIENCE_S)
        assert shown.request("GET", "/readyz") == (200, "serving\n")
        assert _grpc_health(shown, "kvtier.v1.KVCacheService") == SERVING
        assert shown.audit() == []


def test_a_dead_timer_of_the_planner_makes_the_daemon_not_ready(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = start(nvme=False)
    appliance = shown.daemon.appliance
    data = np.ones(CHAIN_BLOCKS * GEOMETRY.block_bytes, np.uint8)
    with Client(shown.target) as client:
        ns = client.register(IDENTITY)
        client.put(ns, names("a"), data)
        with client.acquire(ns, names("a"), ttl_s=60.0):  # the planner has a deadline now

            def kill() -> float:
                monkeypatch.setattr(appliance, "_arm_timer", lambda: None)
                if appliance._timer is not None:
                    appliance._timer.cancel()
                deadline = appliance.planner.next_deadline()
                assert deadline is not None
                return max(0.0, deadline - appliance.clock()) + 0.1

            due_s = shown.served.call(kill)
            _look(shown, due_s)
            assert shown.request("GET", "/readyz")[0] == 200
            _look(shown, due_s + PLANNER_PATIENCE_S)
            assert shown.request("GET", "/readyz") == (503, "stalled: planner\n")
            monkeypatch.undo()


def test_a_lost_cold_store_is_named_and_the_rest_is_served(start: Start) -> None:
    shown = start()
    shown.served.call(lambda: shown.daemon.appliance.lose_tier(Tier.NVME, "planted"))
    assert shown.request("GET", "/readyz") == (200, "serving; nvme is offline\n")


def test_a_drain_is_not_ready_and_alive(start: Start) -> None:
    shown = start()
    shown.served.wait(shown.daemon.drain(1.0))
    _look(shown)
    for service in ("KVCacheService", "AdminService", "EventsService"):
        assert _grpc_health(shown, f"kvtier.v1.{service}") == NOT_SERVING
    assert _grpc_health(shown, "") == SERVING  # or an orchestrator would kill what drains
