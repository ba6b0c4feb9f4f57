"""The cold store where a container without a volume has it; `python -m tests.crash.overlay` runs longer."""

import sys
from pathlib import Path

import pytest

from .overlay import run_on_overlay


def test_a_killed_writer_loses_nothing_on_an_overlay_file_system(tmp_path: Path) -> None:
    done = run_on_overlay(tmp_path, [sys.executable, "-m", "tests.crash.store_loop", "--iterations", "5"])
    if done.returncode == 32:
        pytest.skip(f"no overlay file system can be mounted here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "num_kills=5" in done.stdout
    assert "num_sealed_lost=0" in done.stdout
