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
    finder = Finder(client, [Group(0, 16, 1)], ttl_s=30.0, search_wait_s=1.0)
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


class LateRank:
    """A lease with some blocks on their way, of which only `num_arrive` come."""

    def __init__(self, num_blocks: int, num_arrive: int) -> None:
        self.num_blocks = self.num_stored = num_blocks
        self.num_arrive = num_arrive

    async def wait(self) -> None:
        self.num_blocks = self.num_arrive


def test_what_did_not_arrive_is_not_stored() -> None:
    """A block that the object store was to bring, and did not, has to be saved when it is computed."""
    client: Any = SimpleNamespace()
    finder = Finder(client, [Group(0, 16, 1)], ttl_s=30.0, search_wait_s=1.0)
    question = LookupRequest("s", tuple(bytes([n]) * 32 for n in range(6)))
    leases: list[Any] = [LateRank(6, 6), LateRank(6, 2)]

    async def acquire(namespace: Any, chain: list[bytes], **_: Any) -> Any:
        return leases[namespace]

    client.acquire = acquire
    found = FoundPrefix()

    async def run() -> None:
        namespaces: Any = [[0], [1]]
        await finder.pin(namespaces, question, found)
        assert (found.num_tokens, found.stored) == (96, (6,))
        await finder.wait(found, question)

    asyncio.run(run())
    assert (found.num_tokens, found.stored) == (32, (2,))
