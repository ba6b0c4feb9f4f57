"""What a kill -9 takes in each mode; `python -m tests.crash.mode_loop` measures it."""

import random
from pathlib import Path

import pytest

from tests.crash.mode_loop import Life, Tally


@pytest.mark.parametrize("mode", ["idle", "through"])
def test_what_was_acknowledged_is_found_once_the_device_was_idle(tmp_path: Path, mode: str) -> None:
    tally = Tally()
    Life(tmp_path, mode, tally).rest_and_die(rest_s=None)
    assert tally.num_found == tally.num_put > 0


def test_in_mode_spill_what_fits_into_memory_is_lost(tmp_path: Path) -> None:
    tally = Tally()
    Life(tmp_path, "spill", tally).rest_and_die(rest_s=0.0)
    assert (tally.num_kills, tally.num_found) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["idle", "through"])
def test_killed_under_load_it_has_right_bytes(tmp_path: Path, mode: str) -> None:
    tally = Tally()
    Life(tmp_path, mode, tally).work_and_die(random.Random(7), max_life_s=0.5)
    assert tally.num_found <= tally.num_put
