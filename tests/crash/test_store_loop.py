"""A short run of the crash loop; `python -m tests.crash.store_loop` is the long one."""

from pathlib import Path

from tests.crash import store_loop


def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    tally = store_loop.run(tmp_path, iterations=15, seed=7, max_life_s=0.1)
    assert tally.num_kills == 15
    assert tally.num_acknowledged > 0
    assert tally.num_verified > 0
    assert tally.num_sealed_lost == 0
