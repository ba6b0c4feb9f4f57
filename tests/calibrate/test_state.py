"""What was measured survives the end of the program, and is not mixed with other runs."""

from pathlib import Path

import pytest

from kvtier.appliance.calibrate.state import Measurements, StateError

RUN: dict[str, str | int | float] = {"model": "ab", "text": "cd", "rows": 8}


def test_measurements_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "run.measured"
    with Measurements(path, RUN) as state:
        state.keep("0.0.0 int2", 0.5)
        state.keep("0.0.1 int2", 1e-9)
    with Measurements(path, RUN) as state:
        assert state.known == {"0.0.0 int2": 0.5, "0.0.1 int2": 1e-9}


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "run.measured"
    with Measurements(path, RUN) as state:
        state.keep("first", 1.0)
        state.keep("second", 2.0)
    whole = path.read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:length])
        with Measurements(path, RUN) as state:
            assert state.known.items() <= {"first": 1.0, "second": 2.0}.items()
            state.keep("third", 3.0)
        with Measurements(path, RUN) as state:
            assert state.known["third"] == 3.0


@pytest.mark.parametrize("other", [{**RUN, "model": "ff"}, {**RUN, "rows": 9}, {"model": "ab", "text": "cd"}])
def test_another_run_is_refused(tmp_path: Path, other: dict[str, str | int | float]) -> None:
    path = tmp_path / "run.measured"
    with Measurements(path, RUN) as state:
        state.keep("first", 1.0)
    before = path.read_bytes()
    with pytest.raises(StateError, match="of another calibration"):
        Measurements(path, other)
    assert path.read_bytes() == before


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(StateError, match="name another --state"):
        Measurements(path, RUN)
    assert path.read_text() == "my notes\n"
