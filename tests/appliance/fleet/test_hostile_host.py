"""Whatever a host of the fleet sends is a miss: no wrong byte, and no request past its deadline."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.appliance.core.requests.fetches import FETCH_FRACTION
from kvtier.clients import ExpectedBlocks, HostRank, PrefillSpeed
from kvtier.sources.directories.records import PROTOCOL

from ...daemon import PATIENT
from ...e2e.fleet_hosts import CHAIN_BLOCKS, IDENTITY, TRANSPORT, Host, names_of
from ...ports import free_port
from ...waiting import until
from .hostile_host import TRICKS, HostileHost

CHAINS = range(1, 4)


@contextmanager
def beside(folder: Path, hostile: HostileHost, *others: str, transport: str = TRANSPORT) -> Iterator[Host]:
    """Start a host that knows the hostile one."""
    port = free_port()
    host = Host(folder, port, [f"127.0.0.1:{hostile.port}", *others], {"peers.transport": transport})
    try:
        host.daemon.start()
        host.register()
        host.daemon.wait_for_log(f"127.0.0.1:{hostile.port} (")
        yield host
        assert host.daemon.audit() == []
        assert "Traceback" not in host.daemon.log.read_text()
    finally:
        host.daemon.close()
        hostile.close()


@pytest.mark.parametrize("trick", TRICKS)
def test_what_it_sends_is_a_miss(trick: str, tmp_path: Path) -> None:
    names = [name for chain in CHAINS for name in names_of(chain)]
    hostile = HostileHost(trick, IDENTITY, names)
    with beside(tmp_path / "host", hostile) as host:
        until(lambda: host.read(CHAINS[0]) == 0 and hostile.num_asked > 0)
        for chain in CHAINS:
            assert host.read(chain) == 0  # the client's deadline is a minute: it is answered long before
        with host.client as client:
            namespace, expected = client.register(IDENTITY), ExpectedBlocks(epoch=7, wait_s=1.0)
            assert client.get(namespace, names_of(9), expected=expected).num_blocks == 0
        for chain in CHAINS:
            host.put(chain)
            assert host.read(chain) == CHAIN_BLOCKS
        until(lambda: host.status().num_leases == 0)


def test_a_host_of_a_later_protocol_is_refused_with_words(tmp_path: Path) -> None:
    hostile = HostileHost("nothing", IDENTITY, names_of(1))
    hostile.oldest = PROTOCOL + 1
    host = Host(tmp_path / "host", free_port(), [f"127.0.0.1:{hostile.port}"], {})
    try:
        host.daemon.start()
        host.register()
        host.daemon.wait_for_log("upgrade this host")
        [found] = host.status().hosts
        assert (found.state, "it is newer" in found.problem) == ("down", True)
        assert (host.read(1), hostile.num_asked) == (0, 0)
    finally:
        host.daemon.close()
        hostile.close()


def test_what_an_honest_host_has_is_read_from_there(tmp_path: Path) -> None:
    """Two tries: after the hostile host the honest one, which takes its place for a minute."""
    names = [name for chain in CHAINS for name in names_of(chain)]
    hostile = HostileHost("other bytes", IDENTITY, names)
    honest = Host(tmp_path / "honest", port := free_port(), [f"127.0.0.1:{port}"], {})
    honest.daemon.start()
    try:
        for chain in CHAINS:
            honest.put(chain)
        with beside(tmp_path / "host", hostile, honest.address) as host:
            host.daemon.wait_for_log(f"host {honest.address} (")
            for chain in CHAINS:
                until(lambda chain=chain: host.read(chain) == CHAIN_BLOCKS)  # type: ignore[misc]
            assert host.counter("peer_fetches_arrived") > 0
    finally:
        honest.daemon.close()


def test_a_host_that_drips_is_given_up_long_before_its_time_is_over(tmp_path: Path) -> None:
    """Before: a get waited for it as long as computing takes, or its caller."""
    hostile = HostileHost("drips", IDENTITY, names_of(1))
    with beside(tmp_path / "host", hostile, transport="tcp") as host, host.client as client:
        until(lambda: host.status().hosts[0].num_blocks > 0)
        namespace = client.register(IDENTITY, PrefillSpeed(1.0))
        began_at = time.monotonic()
        assert client.get(namespace, names_of(1)).num_blocks == 0
        assert time.monotonic() - began_at < FETCH_FRACTION * PATIENT.call_s
        assert hostile.num_asked > 0


@pytest.mark.parametrize("tells_tiers", [True, False])
def test_it_is_ranked_by_what_can_be_believed_of_it(tells_tiers: bool, tmp_path: Path) -> None:
    """Its load is no numbers; that of an older host is not told, and the tier of its blocks unknown."""
    hostile = HostileHost("refuses", IDENTITY, names_of(1))
    hostile.tells_tiers = tells_tiers
    with beside(tmp_path / "host", hostile) as host, host.client as client:
        namespace = client.register(IDENTITY)

        def told() -> HostRank:
            (there,) = [one for one in client.rank(namespace, names_of(1)).hosts if not one.is_self]
            return there

        until(lambda: told().num_held == CHAIN_BLOCKS)
        there = told()
        counts = there.num_in_memory, there.num_on_disk, there.num_in_unknown_tier
        assert counts == ((0, CHAIN_BLOCKS, 0) if tells_tiers else (0, 0, CHAIN_BLOCKS))
        assert (there.load_s > 0.0) == tells_tiers
        assert ("memory_free_share" in there.load) == tells_tiers


def test_an_acquire_ends_by_its_deadline_beside_a_host_that_stalls(tmp_path: Path) -> None:
    hostile = HostileHost("nothing", IDENTITY, names_of(1))
    with beside(tmp_path / "host", hostile) as host:
        until(lambda: host.read(1) == 0 and hostile.num_asked > 0)
        assert host.counter("peer_fetches_broken") > 0  # after a second without a byte
        host.put(1)
        assert host.read(1) == CHAIN_BLOCKS


@pytest.mark.parametrize("trick", ["never answers", "nothing"])
def test_callers_with_little_time_do_not_make_a_host_silent(trick: str, tmp_path: Path) -> None:
    """Before: the first one that was late kept all callers from asking that host for a second."""
    chains = iter(range(1, 50))
    hostile = HostileHost(trick, IDENTITY, [name for chain in range(1, 50) for name in names_of(chain)])
    with beside(tmp_path / "host", hostile) as host, host.client as client:
        namespace = client.register(IDENTITY)
        until(lambda: host.status().hosts[0].num_blocks > 0)

        def is_asked() -> bool:
            client.get(namespace, names_of(next(chains)), deadline_s=0.1, load_anyway=True)
            return hostile.num_asked > 0

        until(is_asked)
        assert not host.status().hosts[0].is_paused


def test_more_names_than_a_host_sends_at_once_end_its_stream(tmp_path: Path) -> None:
    """Before: half a million in a message, and the event loop stood still for 170 ms with each."""
    hostile = HostileHost("refuses", IDENTITY, [number.to_bytes(32) for number in range(30_000)])
    host = Host(tmp_path / "host", free_port(), [f"127.0.0.1:{hostile.port}"], {})
    try:
        host.daemon.start()
        host.register()
        host.daemon.wait_for_log("blocks in one message, which no host does")
    finally:
        host.daemon.close()
        hostile.close()
