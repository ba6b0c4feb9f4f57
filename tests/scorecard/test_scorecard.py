"""The scorecard names tests that exist, and reads what its commands print."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from . import record
from .mend import Mend
from .mends import MENDS, mend_tests
from .page import SHOWN, runs, scorecard
from .readers import read_mends, read_overload, read_pytest, read_simulator, read_store_loop
from .record import Entry
from .rows import ROWS, arguments_of, defect_tests


def test_every_test_of_a_defect_is_there() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        *defect_tests(),
        *mend_tests(),
    ]
    done = subprocess.run(command, cwd=record.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("mend", MENDS, ids=lambda mend: mend.number)
def test_a_break_fits_the_code_that_it_breaks(mend: Mend) -> None:
    text = (record.ROOT / mend.file).read_text()
    assert [text.count(old) for old, _ in mend.breaks] == [1] * len(mend.breaks)


def test_every_row_has_a_line_and_a_command() -> None:
    assert SHOWN.keys() == {row.name for row in ROWS}
    for row in ROWS:
        arguments, size = arguments_of(row, 0.5, 7)
        assert arguments[0] == "-m"
        assert size == (row.size if row.is_fixed else round(row.size / 2))


def test_runs_add_up_and_no_seed_is_used_twice(tmp_path: Path) -> None:
    path = tmp_path / "data" / "runs.json"
    figures = {"kills": 500.0, "lost": 0.0, "verified_bytes": float(1 << 30)}
    for size in (500, 200):
        entry = Entry("store kills", size, "python -m x", "abc", "2026-01-01 00:00", "a machine", 60, figures)
        record.add(entry, path)
    entries = record.load(path)
    assert record.next_run("store kills", entries) == 701
    assert record.next_run("seeds", []) == record.FIRST["seeds"]
    table = scorecard(entries)
    assert "2.0 GiB, none wrong" in table
    assert "1,000 kills, 0 lost, none wrong; **10.0% of the 10,000 wanted**" in table
    assert table.count("never ran") == len(ROWS) - 1
    assert "abc" not in runs(entries)
    assert "| store kills | 200 kills | abc |" in runs([replace(entries[1], note="failed: x")])


def test_a_run_of_an_unknown_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"runs": [dict.fromkeys(Entry.__slots__, "x")]}))
    with pytest.raises(ValueError, match="unknown rows"):
        record.load(path)


def test_what_is_printed_is_read() -> None:
    printed = (
        "verify: 400 seeds, 174193 events, 5305.5 virtual hours in 8.6 s (5 seeds/s); 0 violations\n"
        "  bit_rot 13, put_answered 4680, reads_verified 8020\n"
        "unmask: 400 seeds, 10 events, 5318.6 virtual hours in 8.4 s (4 seeds/s); 2 violations\n"
        "  crash 74\n"
    )
    assert read_simulator(printed) == {"seeds": 800, "events": 174203, "faults": 87, "violations": 2}
    assert read_pytest("1 failed, 12 passed, 3 skipped in 4.5s") == {"passed": 12, "failed": 1, "skipped": 3}
    recorded = "figure probes 3\nfigure flood_s 0.1\nfigure flood_s 1.5e-01\n2 passed in 4.5s"
    assert read_mends(recorded) == {"passed": 2, "failed": 0, "skipped": 0, "probes": 3, "flood_s": 0.15}
    tally = "seed 1, 6 s: Tally(num_kills=20, num_verified=10, num_acknowledged=59, num_sealed_lost=0)"
    assert read_store_loop(tally)["kills"] == 20
    header = (
        "load principal accepted/s p50 p99 refused/s p50 p99 first CANCELLED late other RssAnon most recovery"
    )
    overload = f"{header}\n{'- ' * 15}\n1x calm 870 2.0 12.0 0 nan nan 30.0 0 0 0 60 61 5\n"
    overload += "floor-1x calm 990 1.0 6.0 0 nan nan 8.0 0 0 0 0 0 0\n"
    overload += "10x calm 900 9.0 20.5 400 0.5 15.0 90.0 3 0 0 70 75 110\n"
    overload += "floor-10x calm 910 1.0 9.5 410 0.5 8.0 60.0 4 0 0 0 0 0\n"
    assert read_overload(overload) == {
        "p99_1x_ms": 12.0,
        "p99_10x_ms": 20.5,
        "refused_p99_ms": 15.0,
        "floor_p99_1x_ms": 6.0,
        "floor_p99_10x_ms": 9.5,
        "floor_refused_p99_ms": 8.0,
        "highest_mib": 75.0,
        "recovery_ms": 110.0,
        "cancelled": 3.0,
    }
    with pytest.raises(ValueError, match="no load"):
        read_overload(header)
    with pytest.raises(ValueError, match="no test ran"):
        read_pytest("no tests ran in 0.1s")
    with pytest.raises(ValueError, match="is not in what was printed"):
        read_store_loop("Traceback")
