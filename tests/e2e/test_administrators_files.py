"""Files that an administrator names: whatever stands in their place neither stops the daemon nor its end."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from kvtier.appliance.config import Loaded, Origin
from kvtier.v1.files import read_regular_file
from tests.appliance.conftest import small_settings
from tests.appliance.loops import DaemonThread
from tests.cli.conftest import run
from tests.daemon import Daemon

STOP_S = 60.0
Record = Callable[[str, object], None]


def pipe_at(path: Path) -> None:
    """Put a pipe in the place of a file."""
    os.mkfifo(path.with_suffix(".pipe"))
    os.replace(path.with_suffix(".pipe"), path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (pipe_at, "no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "no regular file"),
        (lambda path: path.mkdir(), "Is a directory|no regular file"),
        (lambda path: path.write_bytes(bytes(9)), "larger than 8 bytes"),
        (lambda path: None, "No such file"),
    ],
    ids=["pipe", "device", "folder", "large", "absent"],
)
def test_what_is_no_file_of_its_size_is_refused(
    make: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=words):
        read_regular_file(tmp_path / "file", 8)


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8))
    (tmp_path / "link").symlink_to("file")
    assert read_regular_file(tmp_path / "link", 8) == bytes(8)


def test_a_pipe_in_place_of_the_policy_is_refused_and_the_daemon_ends(
    tmp_path: Path, record_property: Record
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("tiers: {dram: {capacity: 64MiB}}\nobserve: {http: off}\n")
    daemon = Daemon(tmp_path, policy)
    daemon.start()
    pipe_at(policy)
    try:
        daemon.wait_for_log("it is no regular file")
    finally:
        began_at = time.monotonic()
        assert daemon.stop() == 0
    record_property("stop_with_a_pipe_s", time.monotonic() - began_at)


@pytest.mark.parametrize("setting", ["certificate", "key", "client_ca", "tokens", "master_key", "profile"])
def test_a_pipe_in_place_of_a_file_that_a_policy_names_is_said(setting: str, tmp_path: Path) -> None:
    pipe, profiles = tmp_path / "pipe", tmp_path / "profiles"
    os.mkfifo(pipe)
    profiles.mkdir()
    os.mkfifo(profiles / "a.yaml")
    tls = {"certificate": "/absent", "key": "/absent", "client_ca": "/absent"}
    named: dict[str, dict[str, object]] = {
        "tokens": {"access": {"tokens": str(pipe)}},
        "master_key": {
            "encryption": {"master_key": str(pipe)},
            "tiers": {"nvme": {"path": str(tmp_path / "nvme"), "capacity": "1GiB"}},
        },
        "profile": {"compression": {"profiles": str(profiles)}},
    }
    policy = tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump(named.get(setting, {"access": {"tls": {**tls, setting: str(pipe)}}})))
    result = run("policy", "validate", str(policy))
    assert result.exit_code == 1
    assert "it is no regular file" in result.stderr


class HangingOrigin(Origin):
    """A policy file on a network that is gone: reading it does not return before the test ends."""

    reading, network = threading.Event(), threading.Event()

    def read(self) -> str | None:
        """Block."""
        self.reading.set()
        self.network.wait()
        return None


def test_a_policy_file_that_hangs_does_not_hold_up_the_end(tmp_path: Path, record_property: Record) -> None:
    served = DaemonThread(Loaded(small_settings(tmp_path)))
    try:
        with served:
            served.daemon.reload.origin = HangingOrigin(tmp_path / "policy.yaml")
            served.call(lambda: asyncio.ensure_future(served.daemon.reload.from_file()))
            assert HangingOrigin.reading.wait(STOP_S)
            began_at = time.monotonic()
        record_property("stop_while_hanging_s", time.monotonic() - began_at)
    finally:
        HangingOrigin.network.set()


def test_a_read_that_hangs_does_not_hold_up_the_end_of_the_process() -> None:
    program = """
import asyncio, os
from kvtier.appliance.detached import detached

async def main():
    ours, theirs = os.pipe()
    try:
        async with asyncio.timeout(0.01):
            await detached(lambda: os.read(ours, 1))
    except TimeoutError:
        print("left")

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=STOP_S)
    assert (ended.returncode, ended.stdout) == (0, "left\n"), ended.stderr
