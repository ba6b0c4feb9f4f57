"""Hosts that fetch from each other: what one computed another reads from its memory, the same bytes."""

from pathlib import Path

from .fleet_hosts import CHAIN_BLOCKS, fleet, until


def test_a_prompt_of_one_host_is_read_by_another_from_its_memory(tmp_path: Path) -> None:
    with fleet(tmp_path, 2) as (first, second):
        first.put(1)
        until(lambda: second.read(1) == CHAIN_BLOCKS)
        assert second.counter("peer_fetches_arrived") > 0
        assert first.counter("peer_bytes_sent") == second.counter("peer_bytes_received") > 0
        assert first.counter("peer_tickets_issued") == first.counter("peer_tickets_sent")
        assert [host.daemon.stop() for host in (first, second)] == [0, 0]
