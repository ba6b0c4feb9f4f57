"""How many requests a search, and the fetches after it, take."""

import importlib.util
import time
from pathlib import Path

import pytest

from kvtier.appliance.core.events import CopyFinished, SourceSearched
from kvtier.appliance.core.instructions import BundleBlocks, FetchBundle, SearchBundles
from kvtier.appliance.transfer import object_edge
from kvtier.appliance.transfer.bundles import BundleTransfer
from kvtier.sources.objects.keys import Epochs, bundle_key
from kvtier.sources.objects.layout import BundleError
from kvtier.sources.objects.store import ObjectStore
from kvtier.tiers.base import CopyItem
from kvtier.tiers.block import FragmentLabel, Tier
from tests.sources.objects.s3_server import S3Server, StoredObject

from ..loops import run
from .edge_host import BLUE, IDENTITY, RED, Host, closed, exported, fetched

if importlib.util.find_spec("obstore") is None:
    pytest.skip("no object stores: `pip install obstore`", allow_module_level=True)

NAMES = [bytes([number]) * 32 for number in range(32)]


def transfer_of(server: S3Server, num_there: int, age: int) -> BundleTransfer:
    """Return what searches a store with the first bundles of a chain, of `age` epochs ago."""
    now_s, epochs = time.time(), Epochs(1)
    epoch = epochs.alive(now_s)[age]
    for name in NAMES[:num_there]:
        key = bundle_key(epoch, "", IDENTITY.digest, name)
        server.objects[f"fleet/{key}"] = StoredObject(b"no bundle", now_s)
    return BundleTransfer(ObjectStore("s3://bucket/fleet"), {}, epochs, lambda: now_s, lambda deadline: None)


@pytest.mark.parametrize(
    ("num_there", "age", "num_heads"),
    [(0, 0, 3), (32, 0, 6), (16, 0, 8), (32, 1, 8), (32, 2, 8), (16, 2, 10)],
)
def test_a_search_asks_first_where_the_chain_was_found(
    num_there: int, age: int, num_heads: int, server: S3Server
) -> None:
    transfer = transfer_of(server, num_there, age)
    found = transfer.search(SearchBundles(1, IDENTITY, NAMES))
    assert found.num_found == num_there
    assert server.count("head") == num_heads


def test_a_fetch_of_what_a_search_passed_over_asks_once(server: S3Server) -> None:
    transfer = transfer_of(server, 32, 2)
    transfer.search(SearchBundles(1, IDENTITY, NAMES))
    bundle = BundleBlocks(IDENTITY, b"", 0, [NAMES[2]])
    item = CopyItem(0, 0, FragmentLabel(IDENTITY.digest, 1, NAMES[2], b"", 0, 0, 4096))
    with pytest.raises(BundleError):
        transfer.fetch(FetchBundle(bundle, Tier.DRAM, [(1, [item])], 1e9), lambda copy, outcomes: None)
    assert server.count("get") == 1


def test_a_whole_bundle_comes_in_one_request(server: S3Server) -> None:
    async def scene() -> None:
        one, other = Host("s3://bucket/fleet"), Host("s3://bucket/fleet")
        await exported(one)
        assert await fetched(other) == {10: {None}, 11: {None}}
        assert server.count("get") == 1
        await closed(one)
        await closed(other)

    run(scene())


def test_a_fetch_waits_for_few_of_the_searches_of_another_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request at a time: of eight, which one ends first is up to the machine."""
    monkeypatch.setattr(object_edge, "MAX_IN_FLIGHT", 1)

    async def scenario() -> None:
        first = Host(tmp_path, identity=BLUE)
        await exported(first)
        await closed(first)
        host = Host(tmp_path, identity=BLUE)
        await host.open()
        for number in range(300):
            host.edge.execute(SearchBundles(number, RED, [number.to_bytes(32, "big")]))
        host.edge.execute(SearchBundles(300, BLUE, host.bundle.names))
        host.edge.execute(host.fetch())
        await host.last(SourceSearched, 301)
        kinds = [type(one) for one in host.events]
        landed = [at for at, kind in enumerate(kinds) if kind is CopyFinished]
        assert kinds[: landed[-1]].count(SourceSearched) <= 2
        searched = [one.search for one in host.events if isinstance(one, SourceSearched)]
        assert searched.index(300) <= 2
        await closed(host)

    run(scenario())


def test_searches_and_fetches_alternate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy store gets one request at a time: then no fetch began while lookups asked for searches."""
    monkeypatch.setattr(object_edge, "MAX_IN_FLIGHT", 1)

    async def scenario() -> None:
        host = Host(tmp_path, identity=BLUE)
        await host.open()
        for number in range(8):
            host.edge.execute(SearchBundles(number, RED, [number.to_bytes(32, "big")]))
        for number in range(4):
            host.edge.execute(host.fetch(copy=2 * number))
        await host.last(SourceSearched, 8)
        kinds = [type(one) for one in host.events if isinstance(one, SourceSearched | CopyFinished)]
        assert kinds == [SourceSearched, CopyFinished, CopyFinished] * 4 + [SourceSearched] * 4
        await closed(host)

    run(scenario())
