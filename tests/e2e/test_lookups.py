"""Lookups that are read from shared memory: the answers of a call, without one."""

import hashlib
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.appliance.core.events import SourceChanged, TierLost
from kvtier.appliance.server import residences
from kvtier.clients import Client, Geometry, NamespaceIdentity, PrefillSpeed
from kvtier.clients.errors import Unavailable
from kvtier.clients.operations.lookups import look_up_here
from kvtier.clients.values.keys import pack
from kvtier.tiers.block import Tier

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..daemon import Daemon
from ..waiting import until

GEOMETRY = Geometry(num_layers=2, num_kv_heads=4, head_dim=128, block_tokens=16, dtype="bfloat16")
WIDER = Geometry(
    num_layers=2, num_kv_heads=4, head_dim=128, block_tokens=16, dtype="bfloat16", layers_per_group=1
)


def identity(text: str, geometry: Geometry = GEOMETRY) -> NamespaceIdentity:
    return NamespaceIdentity(hashlib.sha256(text.encode()).digest(), geometry)


def chain(number: int, num_blocks: int) -> list[bytes]:
    return [hashlib.sha256(b"%d %d" % (number, block)).digest() for block in range(num_blocks)]


def read_one(client: Client, namespace: Any, hashes: Any) -> Any:
    """Return a lookup that no call was made for; None where one is needed."""
    assert client._link is not None
    return look_up_here(client._link.attachment, namespace, pack(hashes))


def when_filled(client: Client, namespace: Any, hashes: Any) -> Any:
    """Return what `read_one` does once the table that a lookup has mapped is filled."""
    return until(lambda: read_one(client, namespace, hashes), "no table, or it is not filled")


def num_calls(served: DaemonThread) -> int:
    """Return how many lookups the daemon has answered."""
    histograms = served.daemon.service.call_latencies.histograms
    return sum(h.num for (method, *_), h in histograms.items() if method == "Lookup")


def test_what_is_read_is_what_is_asked(tmp_path: Path) -> None:
    """Random puts into a pool that spills to nvme, which forgets: every lookup is the one by gRPC."""
    dice = random.Random(20)
    settings = small_settings(tmp_path, nvme=True, write="through")
    target = settings.listen[0]
    with (
        DaemonThread(settings) as served,
        Client(target) as client,
        Client(target, shared_memory=False) as asking,
    ):
        namespaces = [
            client.register(identity("a"), PrefillSpeed(20_000.0)),
            client.register(identity("b", WIDER)),
        ]
        twins = [asking.register(one.identity) for one in namespaces]
        num_read, labels = 0, set[str]()
        for step in range(300):
            which, number = dice.randrange(2), dice.randrange(40)
            namespace, names = namespaces[which], chain(number, 40)
            action = dice.random()
            if action < 0.6:
                count = dice.randrange(1, 41)
                data = bytes(count * namespace.block_bytes)
                seconds = dice.choice([0.0, 0.01])
                client.put(namespace, names[:count], data, prefill_s=seconds)
            elif action < 0.8:
                client.get(namespace, names[: dice.randrange(1, 41)])
            served.wait(served.daemon.appliance.settled())
            for wanted in (names[: dice.randrange(1, 41)], chain(dice.randrange(40), 40)):
                asked = asking.lookup(twins[which], wanted)
                client.lookup(namespace, wanted)  # maps the table, the first time
                read = when_filled(client, namespace, wanted)
                assert read == asked, f"step {step}: {read} {asked}"
                num_read += 1
                labels |= {tier.label for tier in read.tiers}
        assert (num_read, labels) == (600, {"dram", "nvme"})
        before = num_calls(served)
        client.lookup(namespaces[0], chain(3, 40))
        assert num_calls(served) == before
        assert served.call(served.daemon.service.residences.check_integrity) == []


def test_tables_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is half full is retired; lookups are asked until the next one is mapped and filled."""
    monkeypatch.setattr(residences, "MIN_LOG2_ENTRIES", 8)
    settings = small_settings(tmp_path)
    small = Geometry(num_layers=1, num_kv_heads=1, head_dim=16, block_tokens=16, dtype="int8", num_planes=1)
    with DaemonThread(settings) as served, Client(settings.listen[0]) as client:
        namespace = client.register(identity("small", small))
        names, tables = chain(1, 400), set[int]()
        for start in range(0, 400, 10):
            data = bytes(10 * namespace.block_bytes)
            parent = names[start - 1] if start else b""
            assert client.put(namespace, names[start : start + 10], data, parent=parent).complete
            assert client.lookup(namespace, names).num_blocks == start + 10
            link: Any = client._link
            tables.add(id(link.attachment.residence))
            read = read_one(client, namespace, names)
            assert read is None or read.num_blocks == start + 10
        assert read is not None
        assert len(tables) >= 2
        assert served.call(served.daemon.service.residences.check_integrity) == []


def test_a_retired_table_is_not_read(tmp_path: Path) -> None:
    """A client that repeats a lookup asks again, and maps the next table; the planner is observed once."""
    settings = small_settings(tmp_path)
    with DaemonThread(settings) as served, Client(settings.listen[0]) as client:
        namespace, names = client.register(identity("a")), chain(1, 3)
        client.put(namespace, names, bytes(3 * namespace.block_bytes))
        num_observers = set[int]()
        for _ in range(3):
            assert client.lookup(namespace, names).num_blocks == 3
            when_filled(client, namespace, names)
            num_observers.add(len(served.daemon.appliance.observers))
            served.call(served.daemon.service.residences.close)
            assert read_one(client, namespace, names) is None
        assert len(num_observers) == 1


def test_more_is_asked_for_where_more_may_be_known(tmp_path: Path) -> None:
    """A source, a tier that is offline: what is in memory is read, of what is not the daemon is asked."""
    settings = small_settings(tmp_path, nvme=True)
    with DaemonThread(settings) as served, Client(settings.listen[0]) as client:
        namespace, names = client.register(identity("a")), chain(1, 4)
        client.put(namespace, names[:3], bytes(3 * namespace.block_bytes))
        step = served.daemon.appliance.step
        assert client.lookup(namespace, names).num_blocks == 3
        when_filled(client, namespace, names)
        for begin, end in (
            (SourceChanged(True, False, False), SourceChanged(False, False, False)),
            (TierLost(Tier(2, "nvme"), True, "a test"), TierLost(Tier(2, "nvme"), False, "a test")),
        ):
            served.call(partial(step, begin))
            assert read_one(client, namespace, names) is None
            assert read_one(client, namespace, names[:3]).num_blocks == 3
            assert client.lookup(namespace, names).num_blocks == 3
            served.call(partial(step, end))
            assert read_one(client, namespace, names).num_blocks == 3


def test_a_table_is_of_one_domain(tmp_path: Path) -> None:
    """Nothing of another domain is in a client's table: no blocks, no namespaces and their speeds."""
    settings = small_settings(tmp_path)
    target = settings.listen[0]
    with DaemonThread(settings), Client(target, domain="one") as one, Client(target, domain="two") as two:
        spaces = [client.register(identity("a"), PrefillSpeed(777.0)) for client in (one, two)]
        one.put(spaces[0], chain(1, 3), bytes(3 * spaces[0].block_bytes))
        assert one.lookup(spaces[0], chain(1, 3)).num_blocks == 3
        assert two.lookup(spaces[1], chain(1, 3)).num_blocks == 0
        link: Any = two._link
        table = link.attachment.residence
        assert table.find(pack(chain(1, 3)), spaces[0].id).codes == b""
        assert table.speed(spaces[0], spaces[0].id) is None
        assert table.speed(spaces[1], spaces[1].id) is not None
        assert not any(table._table)


def test_threads_look_up_at_once_with_one_client(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    with DaemonThread(settings), Client(settings.listen[0]) as client:
        namespace = client.register(identity("shared by threads"))
        names = chain(1, 4)
        client.put(namespace, names, bytes(4 * GEOMETRY.block_bytes))

        def look_up(_: int) -> set[int]:
            return {client.lookup(namespace, names).num_blocks for _ in range(2_000)}

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(look_up, range(4))) == [{4}] * 4


def test_the_table_of_a_daemon_that_died_is_not_believed(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Client(daemon.target) as client:
        namespace = client.register(identity("a"))
        client.put(namespace, chain(1, 3), bytes(3 * namespace.block_bytes))
        assert client.lookup(namespace, chain(1, 3)).num_blocks == 3
        when_filled(client, namespace, chain(1, 3))
        daemon.stop()
        until(lambda: read_one(client, namespace, chain(1, 3)) is None)
        with pytest.raises(Unavailable):
            client.lookup(namespace, chain(1, 3))
        daemon.start()
        assert client.lookup(namespace, chain(1, 3)).num_blocks == 0
