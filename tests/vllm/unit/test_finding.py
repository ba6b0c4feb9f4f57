"""Finder: what it pins on several ranks, when one of them refuses."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.clients import Overloaded
from kvtier.clients.vllm.groups import Group
from kvtier.clients.vllm.scheduler.finding import MAX_BLOCKS, Finder, FoundPrefix
from kvtier.clients.vllm.scheduler.handover import HandoverSource
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


class Handover:
    """A client that expects blocks of another host: how many come per group, `None` if it is gone at once."""

    def __init__(self, groups: list[Group], num_arrive: list[int] | None) -> None:
        self.groups, self.num_arrive = groups, num_arrive

    async def acquire(self, namespace: Any, chain: list[bytes], **_: Any) -> Any:
        if self.num_arrive is None:
            lease = LateRank(0, 0)
        else:
            lease = LateRank(len(chain), self.num_arrive[namespace.index])
        lease.num_stored = 0  # of what is expected nothing is stored yet
        return lease

    def find(self, num_blocks: int, first_token: int = 0) -> FoundPrefix:
        client: Any = self
        finder, found = Finder(client, self.groups, ttl_s=30.0, search_wait_s=1.0), FoundPrefix()
        question = LookupRequest(
            "s",
            tuple(n.to_bytes(32, "big") for n in range(num_blocks)),
            first_token,
            source=HandoverSource("gone:7070", 0, num_blocks * 16),
        )
        namespaces: Any = [
            [SimpleNamespace(index=g.index, geometry=SimpleNamespace(block_tokens=16)) for g in self.groups]
        ]

        async def run() -> None:
            await finder.pin(namespaces, question, found)
            await finder.wait(found, question)

        asyncio.run(run())
        return found


ONE = [Group(0, 16, 1)]
TWO = [*ONE, Group(1, 16, 1)]
WINDOWED = [*ONE, Group(1, 16, 1, window_tokens=40)]


@pytest.mark.parametrize("groups", [ONE, TWO, WINDOWED])
@pytest.mark.parametrize("num_blocks", [8, MAX_BLOCKS + 8])
def test_nothing_is_stored_by_a_hand_over_from_a_host_that_is_gone(
    groups: list[Group], num_blocks: int
) -> None:
    """Nor before the window, where no call asked; else the computed prompt would never be saved."""
    for num_arrive in (None, [0] * len(groups)):  # it was gone before, or went while it was waited for
        found = Handover(groups, num_arrive).find(num_blocks)
        assert (found.num_tokens, found.stored) == (0, (0,) * len(groups))


@pytest.mark.parametrize("groups", [TWO, WINDOWED])
def test_a_hand_over_that_asks_for_nothing_says_nothing_of_what_is_stored(groups: list[Group]) -> None:
    found = Handover(groups, None).find(8, first_token=128)
    assert (found.num_tokens, found.stored) == (0, ())


def test_of_a_hand_over_is_stored_what_came() -> None:
    found = Handover(ONE, [3]).find(8)
    assert (found.num_tokens, found.stored) == (48, (3,))
    found = Handover(TWO, [3, 5]).find(8)
    assert (found.num_tokens, found.stored) == (48, (3, 5))
    found = Handover(WINDOWED, [8, 7]).find(8)
    assert (found.num_tokens, found.stored) == (0, (8, 7)), "the window before a shorter end was not pinned"
    found = Handover(WINDOWED, [8, 8]).find(8)
    assert (found.num_tokens, found.stored) == (128, (8, 8))


class OneChain:
    """A client that has the first `num_blocks` of any chain."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    async def lookup(self, namespace: Any, chain: list[bytes]) -> Any:
        number = min(self._num_blocks, len(chain))
        return SimpleNamespace(num_blocks=number, num_available=number, search_s=0.0)

    async def acquire(self, namespace: Any, chain: list[bytes], **_: Any) -> Any:
        number = min(self._num_blocks, len(chain))
        return SimpleNamespace(num_blocks=number, num_stored=number, reason="", tiers=())


def test_a_longer_prompt_of_a_model_with_windows_only_finds_its_beginning() -> None:
    """Before: the window before the end of the whole prompt was pinned, and only the same prompt found."""
    for groups in ([Group(0, 16, 1, window_tokens=40)], ONE):
        client: Any = OneChain(6)
        finder, found = Finder(client, groups, ttl_s=30.0, search_wait_s=0.0), FoundPrefix()
        question = LookupRequest("s", tuple(n.to_bytes(32, "big") for n in range(8)), 0)
        namespaces: Any = [[SimpleNamespace(index=0, geometry=SimpleNamespace(block_tokens=16))]]
        asyncio.run(finder.pin(namespaces, question, found))
        assert found.num_tokens == 96
