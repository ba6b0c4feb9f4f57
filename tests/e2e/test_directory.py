"""Hosts that find each other in a directory: a real one, which is lost, flushed and found again."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ..sources.directories.servers import (
    Server,
    etcd_cluster,
    etcd_leader,
    etcd_server,
    needs_etcd,
    needs_redis,
    redis_server,
    stopped,
    write_certificates,
)
from ..sources.directories.services import etcd_with_a_user
from ..waiting import until
from .fleet_hosts import CHAIN_BLOCKS, Host, fleet, indexed

#: Set by `make test-directories`: a minute of daemons and servers that are killed.
needs_time = pytest.mark.skipif(
    not os.environ.get("KVTIER_DIRECTORY_FAULTS"), reason="takes a minute (make test-directories)"
)
SERVERS = [
    pytest.param("redis", redis_server, marks=needs_redis),
    pytest.param("etcd", etcd_server, marks=[needs_etcd, needs_time]),
]


@pytest.mark.parametrize(("engine", "start"), SERVERS)
def test_hosts_find_each_other_and_stay_together_without_the_directory(
    tmp_path: Path, engine: str, start: Callable[[Path], AbstractContextManager[Server]]
) -> None:
    with start(tmp_path) as server:
        url = f"{engine}://127.0.0.1:{server.port}"
        with fleet(tmp_path, 2, peers__hosts="[]", peers__directory__url=url) as (first, second):
            first.put(1)
            until(lambda: second.read(1) == CHAIN_BLOCKS)
            server.stop()
            until(lambda: second.counter("peer_directory_failed") > 0)
            first.put(2)
            until(lambda: second.read(2) == CHAIN_BLOCKS)
            assert [host.state for host in second.status().hosts] == ["live"]
            assert [host.daemon.stop() for host in (first, second)] == [0, 0]


@needs_redis
def test_with_an_index_hosts_read_from_each_other(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, indexed(tmp_path, server, 2) as (first, second):
        first.put(1)
        until(lambda: second.read(1) == CHAIN_BLOCKS - CHAIN_BLOCKS % 4)  # whole bundles
        assert second.counter("peer_fetches_arrived") > 0
        assert first.counter("peer_index_bundles_added") == CHAIN_BLOCKS // 4
        server.stop()
        for host in (first, second):
            host.put(2)
            assert host.read(2) == CHAIN_BLOCKS
        assert second.read(3) == 0
        server.start()  # empty
        until(lambda: first.counter("peer_directory_entered_again") > 0)
        first.put(3)
        until(lambda: second.read(3) == CHAIN_BLOCKS - CHAIN_BLOCKS % 4)
        assert [host.daemon.stop() for host in (first, second)] == [0, 0]


@needs_redis
@needs_time
def test_a_flushed_directory_is_entered_again(tmp_path: Path) -> None:
    def hosts_of(server: Server) -> Any:
        return server.ask("SCARD", "{kvtier:kvtier}:hosts").strip()

    with redis_server(tmp_path) as server:
        url = f"redis://127.0.0.1:{server.port}"
        with fleet(tmp_path, 2, peers__hosts="[]", peers__directory__url=url) as (first, second):
            until(lambda: hosts_of(server) == ":2")
            until(lambda: bool(second.status().hosts))
            server.ask("FLUSHALL")
            until(lambda: hosts_of(server) == ":2")
            assert second.counter("peer_directory_entered_again") > 0
            assert [host.state for host in second.status().hosts] == ["live"]
            assert first.daemon.stop() == 0
            assert hosts_of(server) == ":1"
            until(lambda: not second.status().hosts)


@contextmanager
def watched(asks: Host, other: Host) -> Iterator[Counter[str]]:
    """Count local calls of a host, those that succeeded, and after which it knew another host as live."""
    seen, has_ended = Counter[str](), threading.Event()

    def watch() -> None:
        while not has_ended.wait(0.05):
            seen["calls"] += 1
            seen["succeeded"] += asks.stores(9) and asks.read(9) == CHAIN_BLOCKS
            states = {host.address: host.state for host in asks.status().hosts}
            seen["other is live"] += states.get(other.address) == "live"

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        has_ended.set()
        thread.join()


@needs_etcd
@needs_time
def test_hosts_find_each_other_while_a_member_of_etcd_and_then_its_leader_is_lost(tmp_path: Path) -> None:
    """Three members over TLS with a user, one of them killed, stopped, or started again at each step."""

    def live(host: Host) -> int:
        return sum(one.state == "live" for one in host.status().hosts)

    with etcd_cluster(tmp_path, 3, write_certificates(tmp_path)) as members:
        more = {
            "peers__directory__url": f"{etcd_with_a_user(members)}#test",
            "peers__directory__credentials": str(tmp_path),
        }
        with fleet(tmp_path, 3, peers__hosts="[]", **more) as (first, second, third):
            until(lambda: live(first) == live(second) == 2)

            def starts_again(chain: int) -> None:
                third.daemon.stop()
                until(lambda: live(first) == live(second) == 1)
                third.daemon.start()
                third.register()
                until(lambda: live(first) == live(second) == live(third) == 2)
                first.put(chain)
                until(lambda: third.read(chain) == CHAIN_BLOCKS)

            with watched(first, second) as seen:
                for chain, is_leader in enumerate((False, True)):
                    leader = etcd_leader(members)
                    away = leader if is_leader else next(one for one in members if one is not leader)
                    away.stop()
                    starts_again(chain)
                    away.start()
                with stopped(etcd_leader(members)):
                    starts_again(2)
            assert seen["calls"] == seen["succeeded"] == seen["other is live"] > 3
            assert [host.daemon.stop() for host in (first, second, third)] == [0, 0, 0]
