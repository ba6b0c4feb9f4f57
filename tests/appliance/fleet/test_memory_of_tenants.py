"""What is remembered and asked of other hosts for one tenant costs the others nothing that they need."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.appliance.core.events import Event, SourceChanged, SourceSearched
from kvtier.appliance.core.fleet import promises
from kvtier.appliance.core.fleet.promises import Promises
from kvtier.appliance.core.instructions import SearchBundles
from kvtier.appliance.fleet import index, peer_edge
from kvtier.appliance.fleet.finding import ChainPart
from kvtier.appliance.fleet.index import MAX_LOOKS, IndexedHosts
from kvtier.appliance.fleet.peer_edge import PeerEdge
from kvtier.sources.directories.records import HostRecord
from kvtier.sources.directories.redis_index import bundle_key
from kvtier.sources.peers.inventory import NAME_BYTES
from kvtier.tiers.block import Geometry, NamespaceIdentity

from ...fakes.directories.index import FakeIndex
from ..loops import run

DIGEST = bytes(32)
ACME, BOLT = (
    NamespaceIdentity(b"m" * 16, Geometry(8, 1, 64, 16, "float16"), domain=f"tenant:{name}")
    for name in ("acme", "bolt")
)


def names(first: int, count: int) -> list[bytes]:
    """Return names of blocks."""
    return [number.to_bytes(8, "big") * 4 for number in range(first, first + count)]


class SlowIndex(FakeIndex):
    """Answers when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    async def holders(self, keys: Sequence[bytes]) -> list[frozenset[int]]:
        await self.may_answer.wait()
        return await super().holders(keys)


async def indexed(of: FakeIndex, mine: Sequence[bytes]) -> IndexedHosts:
    """Return the hosts of an index: host 7 has a bundle of one block for each of `mine`."""
    hosts = IndexedHosts(of, None, lambda: None, lambda: None, lambda: 0.0)
    hosts.set_lives({7: HostRecord(7, "127.0.0.1:1")})
    await of.add(7, [bundle_key(DIGEST, name[:NAME_BYTES]) for name in mine])
    hosts.directory_answers()
    return hosts


async def found(hosts: IndexedHosts, chain: Sequence[bytes], tenant: str) -> list[int]:
    """Return how many blocks of a chain the hosts have that have any."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    hosts.find(ChainPart(DIGEST, chain, 0, 1, tenant), answer.set_result)
    return list((await answer).values())


def test_looks_of_one_tenant_leave_others_theirs() -> None:
    """Before: one tenant's lookups took all MAX_LOOKS, and no host had what others asked for."""

    async def main() -> None:
        of = SlowIndex()
        of.may_answer.set()
        hosts = await indexed(of, mine := names(0, 5))
        assert await found(hosts, mine[:1], "") == [1]
        of.may_answer.clear()
        acme = [asyncio.create_task(found(hosts, names(100 * n, 2), "acme")) for n in range(1, 41)]
        await asyncio.sleep(0)
        bolt = asyncio.create_task(found(hosts, mine, "bolt"))
        await asyncio.sleep(0)
        assert hosts.counters["index_looks_left_out"] == 40 - MAX_LOOKS // 2
        of.may_answer.set()
        assert await bolt == [5]
        assert await asyncio.gather(*acme) == [[]] * 40
        await hosts.stop()

    run(main())


def test_answers_for_one_tenant_do_not_make_those_for_others_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index, "MAX_KNOWN", 32)

    async def main() -> None:
        hosts = await indexed(of := FakeIndex(), mine := names(0, 5))
        assert await found(hosts, mine, "bolt") == [5]
        for number in range(1, 20):
            await found(hosts, names(100 * number, 8), "acme")
        of.is_down = True
        assert await found(hosts, mine, "bolt") == [5], "it is not asked again"
        await hosts.stop()

    run(main())


def test_what_hosts_tell_of_one_tenants_chains_leaves_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: 16 awaited chains of 4,096 blocks, and a hand-over of another tenant was computed."""
    monkeypatch.setattr(index, "MAX_KNOWN", 32)

    async def main() -> None:
        hosts = await indexed(FakeIndex(), [])
        (host,) = hosts.live()
        hosts.told(host, DIGEST, mine := names(0, 5), "bolt")
        hosts.told(host, DIGEST, names(100, 500), "acme")
        assert await found(hosts, mine, "bolt") == [5]
        await hosts.stop()

    run(main())


def test_prompts_that_one_tenant_has_ranked_do_not_make_those_of_others_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: 16 rankings of 4,096 blocks, and every second turn of a session of another tenant was sent to a
    host that does not have its first."""
    monkeypatch.setattr(promises, "MAX_PROMISES", 32)
    sent = Promises()
    sent.add("bolt", DIGEST, mine := names(0, 5), "host", 1.0, 0.0)
    sent.add("acme", DIGEST, names(100, 500), "other", 1.0, 0.0)
    assert sent.prefix("bolt", DIGEST, mine, "host", 0.5) == 5


class Store:
    """A store that has nothing, behind a PeerEdge."""

    def __init__(self) -> None:
        self.asked: list[SearchBundles] = []

    def execute(self, work: SearchBundles) -> None:
        """Note a search."""
        self.asked.append(work)


def test_what_a_store_lacks_of_one_tenant_does_not_make_that_of_others_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_edge, "MAX_MISSING", 8)

    async def main() -> None:
        events: list[Event] = []
        hosts, store = await indexed(FakeIndex(), []), Store()
        edge = PeerEdge(hosts, {}, events.append, lambda: 0.0, None)
        edge.store = store  # type: ignore[assignment]
        edge.deliver_of_store(SourceChanged(True))

        async def search(number: int, identity: NamespaceIdentity, chain: list[bytes]) -> None:
            edge.execute(SearchBundles(number, identity, chain[15::16], chain, 0))
            for _ in range(5):
                await asyncio.sleep(0)
            if not any(isinstance(one, SourceSearched) and one.search == number for one in events):
                edge.deliver_of_store(SourceSearched(number, 0, 0))

        await search(0, BOLT, mine := names(0, 16))
        for number in range(1, 30):
            await search(number, ACME, names(100 * number, 16))
        await search(30, BOLT, mine)
        assert [one.search for one in store.asked] == list(range(30)), "not asked again"
        await edge.stop()
        await hosts.stop()

    run(main())
