"""Draining under load, five times: bench/drains.py does it a hundred."""

from pathlib import Path

from bench.drains import Loop

NUM_DRAINS = 5


def test_runtimes_see_misses_only_while_the_daemon_leaves_and_comes_back(tmp_path: Path) -> None:
    outcome = Loop(tmp_path, seed=1).run(NUM_DRAINS)
    assert outcome.failures == []
    assert outcome.num_drains == outcome.num_lease_reads == NUM_DRAINS
    assert outcome.num_blocks_read > 0
