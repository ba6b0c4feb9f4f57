"""A short run of the daemon's crash loop; `python -m tests.crash.daemon_loop` is the long one."""

from pathlib import Path

import pytest

from tests.crash.daemon_loop import Loop


@pytest.mark.slow
def test_a_killed_daemon_serves_right_bytes_and_all_that_was_sealed(tmp_path: Path) -> None:
    tally = Loop(tmp_path, seed=7, max_life_s=0.4).run(iterations=5)
    print(tally)
    assert tally.num_kills == 5
    assert tally.num_put > 0
    assert tally.num_read > 0
    assert tally.num_sealed > 0
    assert tally.num_sealed_lost == 0
