"""The ways of storing that bench/mlperf_stores.py gives to MLPerf's workload, without the workload."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from bench.machine import ROOT
from bench.mlperf_stores import DirectFiles, Meter


class Timing(NamedTuple):
    total: float
    device: float
    host: float


@pytest.fixture
def files(tmp_path: Path) -> DirectFiles:
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("no direct I/O here")
    return DirectFiles(Timing, tmp_path)


def test_entries_of_any_length_come_back(files: DirectFiles) -> None:
    entries = {f"e{size}": np.arange(size, dtype=np.float16) for size in (1, 2048, 5_000_001)}
    for key, entry in entries.items():
        assert files.write(key, entry).total > 0
    for key, entry in entries.items():
        found, timing = files.read(key)
        assert found.tobytes() == entry.tobytes()
        assert timing.total > 0


def test_what_is_gone_is_a_miss_and_counted(files: DirectFiles) -> None:
    files.write("one", np.zeros(10, np.float16))
    (files.base_path / "one").unlink()
    with pytest.raises(KeyError):
        files.read("one")
    assert files.num_missed == 1
    files.write("two", np.zeros(10, np.float16))
    files.delete("two")
    assert not (files.base_path / "two").exists()
    with pytest.raises(KeyError):
        files.read("two")


def test_seconds_of_calls_that_overlap_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("bench.mlperf_stores.time.perf_counter", lambda: now[0])
    meter = Meter(tmp_path, 2)
    now[0] = 10.0
    with meter.call(2_000_000_000):
        now[0] = 11.0
        with meter.call(1_000_000_000):
            now[0] = 12.0
        now[0] = 13.0
    now[0] = 100.0
    with pytest.raises(KeyError), meter.call(5_000_000_000):
        raise KeyError
    assert meter.shown("read")["read_gbs"] == 1.0
    with meter.call(1_000_000_000):
        now[0] = 101.0
    assert meter.shown("read")["read_gbs"] == 1.0


def test_wrong_bytes_end_the_run(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np; from pathlib import Path; from bench.mlperf_stores import DirectFiles\n"
        "class Files(DirectFiles):\n"
        "    def _write(self, key, data): self.kept = data.copy()\n"
        "    def _read(self, key, num_bytes): self.kept[0] ^= 1; return self.kept\n"
        "files = Files(lambda **words: words, Path(sys.argv[1]))\n"
        "files.write('one', np.zeros(10, np.uint8)); files.read('one')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3
    assert "not what was written" in done.stderr


def test_it_says_where_the_workload_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.mlperf", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "github.com/mlcommons/storage" in done.stderr
