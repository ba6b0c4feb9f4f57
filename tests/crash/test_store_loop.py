"""A short run of the crash loop; `python -m tests.crash.store_loop` is the long one."""

from pathlib import Path

import pytest

from tests.crash import store_loop


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path, is_encrypted: bool) -> None:
    num_lives = 8 if is_encrypted else 15
    tally = store_loop.run(tmp_path, num_lives, seed=7, max_life_s=0.1, is_encrypted=is_encrypted)
    assert tally.num_kills == num_lives
    assert tally.num_acknowledged > 0
    assert tally.num_verified > 0
    assert tally.num_sealed_lost == 0
