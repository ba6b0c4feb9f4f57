"""Two daemons on the same socket or folder, and one that starts right after another one was killed."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.appliance.host.process import EXIT_CANNOT_START

from ..daemon import Daemon, set_words
from .test_kept_memory import NUM_BLOCKS, found, kill, store

SMALL = ("tiers.dram.capacity=64MiB", "observe.http=off")


def settings(folder: Path) -> tuple[str, ...]:
    nvme = (f"tiers.nvme.path={folder}/nvme", "tiers.nvme.capacity=256MiB", "tiers.nvme.segment=4MiB")
    return SMALL + nvme


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, settings=settings(tmp_path)) as daemon:
        yield daemon


@pytest.mark.parametrize("has_same_socket", [True, False])
def test_a_second_daemon_is_refused_and_the_first_goes_on(running: Daemon, has_same_socket: bool) -> None:
    store(running)
    serving = running.pid
    target = running.target if has_same_socket else f"{running.target}.other"
    command = [sys.executable, "-m", "kvtier.appliance.cli", "serve", "--listen", target]
    second = subprocess.run(
        [*command, *set_words(settings(running.path.parent))], capture_output=True, text=True
    )
    assert second.returncode == EXIT_CANNOT_START, second.stderr
    words = "another daemon listens" if has_same_socket else f"pid {serving}"
    assert words in second.stderr
    assert running.pid == serving
    assert found(running) == NUM_BLOCKS
    kill(running)
    assert found(running) == NUM_BLOCKS, "memory is what it was"


def test_after_its_supervisor_was_killed_a_start_at_once_works_and_has_nvme(running: Daemon) -> None:
    store(running)
    assert running.stop() == 0  # all of it is in nvme now
    running.start()
    assert found(running) == NUM_BLOCKS
    running.signal(signal.SIGKILL)
    with Daemon(running.path.parent, settings=settings(running.path.parent)) as again:
        again.wait_for_log("ready at")
        assert found(again) == NUM_BLOCKS
        assert again.stop() == 0
    assert not running.path.exists()
    assert not Path(f"{running.path}.local").exists()
