"""Two daemons on the same socket or folder, and one that starts right after another one was killed."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.appliance.host.process import EXIT_CANNOT_START

from ..daemon import Daemon
from .test_kept_memory import NUM_BLOCKS, found, kill, store

SMALL = ("tiers.dram.capacity=64MiB", "observe.http=off")


def arguments(folder: Path) -> tuple[str, ...]:
    nvme = (f"tiers.nvme.path={folder}/nvme", "tiers.nvme.capacity=256MiB", "tiers.nvme.segment=4MiB")
    return tuple(part for setting in SMALL + nvme for part in ("--set", setting))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path, arguments=arguments(tmp_path))
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.close()


@pytest.mark.parametrize("has_same_socket", [True, False])
def test_a_second_daemon_is_refused_and_the_first_goes_on(running: Daemon, has_same_socket: bool) -> None:
    store(running)
    serving = running.pid
    target = running.target if has_same_socket else f"{running.target}.other"
    command = [sys.executable, "-m", "kvtier.appliance.cli", "serve", "--listen", target]
    second = subprocess.run([*command, *arguments(running.path.parent)], capture_output=True, text=True)
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
    again = Daemon(running.path.parent, arguments=arguments(running.path.parent))
    try:
        again.start()
        again.wait_for_log("ready at")
        assert found(again) == NUM_BLOCKS
        assert again.stop() == 0
    finally:
        again.close()
    assert not running.path.exists()
    assert not Path(f"{running.path}.local").exists()
