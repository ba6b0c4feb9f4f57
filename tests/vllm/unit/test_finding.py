"""Finder: what it pins on several ranks, when one of them refuses."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.clients import Overloaded
from kvtier.clients.vllm.groups import Group
from kvtier.clients.vllm.scheduler.finding import Finder, FoundPrefix
from kvtier.clients.vllm.scheduler.lookups import LookupRequest


class SlowRanks:
    """A client whose acquire of namespace "full" is refused at once, and of others granted a little later."""

    def __init__(self) -> None:
        self.granted: list[Any] = []

    async def acquire(self, namespace: Any, chain: list[bytes], **_: Any) -> Any:
        if namespace == "full":
            raise Overloaded("too many in flight", reason="TOO_MANY_IN_FLIGHT")
        for _turn in range(3):
            await asyncio.sleep(0)
        self.granted.append(SimpleNamespace(num_blocks=len(chain), num_stored=len(chain)))
        return self.granted[-1]


def test_no_lease_is_lost_when_one_rank_refuses() -> None:
    """What the others are granted afterwards is known to whoever must release it."""
    client: Any = SlowRanks()
    finder = Finder(client, [Group(0, 16, 1)], ttl_s=30.0)
    found = FoundPrefix()
    namespaces: Any = [["full"], ["well"], ["well"]]

    async def run() -> None:
        with pytest.raises(Overloaded):
            await finder.pin(namespaces, LookupRequest("s", (bytes(32),)), found)
        known = list(found.leases)
        for _turn in range(10):
            await asyncio.sleep(0)
        assert len(client.granted) == 2
        assert known == client.granted

    asyncio.run(run())
