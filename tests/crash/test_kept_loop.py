"""What a kill -9 of the daemon leaves in memory; `python -m tests.crash.kept_loop` kills more often."""

from pathlib import Path

from tests.crash.kept_loop import Loop, Tally


def test_killed_under_load_it_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    tally = Tally()
    Loop(tmp_path, 1, tally).run(3)
    assert tally.num_found == tally.num_put > 0
