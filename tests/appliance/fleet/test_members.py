"""Names of hosts stand for their addresses; one that is not resolved takes nothing from the others."""

import asyncio
import socket
import threading
from typing import Any

import pytest

from kvtier.appliance.fleet.members import MAX_ADDRESSES, NUM_LOOKUPS, FleetMembers, within_bound

from ..loops import run

PATIENCE_S = 60.0


def addresses_of(*names: str, at_least: int = 0) -> frozenset[str]:
    """Return the first `at_least` addresses or more that are told for these names."""

    async def first() -> frozenset[str]:
        told: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        running = asyncio.create_task(FleetMembers(names, told.put_nowait).run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                while len(addresses := await told.get()) < at_least:
                    pass
                return addresses
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return run(first())


def test_addresses_are_themselves() -> None:
    assert addresses_of("127.0.0.1:7070", "[::1]:7071") == {"127.0.0.1:7070", "[::1]:7071"}


def test_a_name_is_all_its_addresses_and_a_wrong_one_is_none() -> None:
    names = ("127.0.0.9:7070", "localhost:7071", "kvtier-hosts.invalid:7072", f"{'x' * 70}.invalid:7073")
    found = addresses_of(*names, at_least=2)
    assert "127.0.0.9:7070" in found
    assert found & {"127.0.0.1:7071", "[::1]:7071"}
    assert not [one for one in found if one.endswith((":7072", ":7073"))]


def test_names_that_are_not_answered_delay_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    hung, real = threading.Event(), socket.getaddrinfo

    def lookup(host: str, *more: Any, **options: Any) -> Any:
        if host.startswith("hung"):
            hung.wait(PATIENCE_S)
            raise OSError("no answer")
        return real(host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    names = [f"hung{number}:7070" for number in range(NUM_LOOKUPS - 1)]
    try:
        assert addresses_of(*names, "localhost:7071", at_least=1)
        assert not hung.is_set()
    finally:
        hung.set()


def test_above_the_bound_known_hosts_stay() -> None:
    known = frozenset(f"10.9.0.{number}:7070" for number in range(200))
    new = frozenset(f"10.0.0.{number}:7070" for number in range(200))
    kept = within_bound(known, known | new)
    assert len(kept) == MAX_ADDRESSES
    assert known <= kept
    assert within_bound(known, new) == new
