"""The attacks of a hostile client on what it was given a descriptor of: warm extents, the index, staging.

A separate program (attacker.py), that shares nothing with this process but the descriptor, tries them as
this user and as `nobody`. Beforehand the same attacks are shown to work on memory that is not sealed:
a test in which nothing can get through would prove nothing.
"""

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.tiers.memory import memfd
from kvtier.tiers.memory.extent import SlotExtent
from kvtier.tiers.memory.index import IndexWriter
from kvtier.tiers.memory.staging import StagingExtent
from tests.tiers.cold.attacker import ATTACKS, FORGED

SIZE = 2 << 20
SAME, NOBODY = -1, 65534
SELF_ONLY = "/proc/PID/mem of the daemon"  # stops at the kernel's ptrace check, not at a seal

users = pytest.mark.parametrize("user", [SAME, NOBODY], ids=["same user", "nobody"])


def attack(descriptor: int, user: int, names: list[str]) -> dict[str, str]:
    """Run the attacker as `user`; return what became of each attack."""
    if user >= 0 and os.geteuid() != 0:
        pytest.skip("only root can start a program of another user")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    program = str(Path(__file__).with_name("attacker.py"))
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [descriptor])
        process = subprocess.run(
            [sys.executable, "-I", program, str(theirs.fileno()), str(user), json.dumps(names)],
            pass_fds=[theirs.fileno()],
            timeout=120,
            capture_output=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        ours.settimeout(60)
        results: dict[str, str] = json.loads(ours.recv(1 << 16))
        assert set(results) == set(names)
        return results


@pytest.fixture
def extent() -> Iterator[SlotExtent]:
    made = SlotExtent("test", SIZE)
    made.data[:8] = b"original"
    yield made
    made.close()


def got_through(results: dict[str, str]) -> set[str]:
    return {name for name, result in results.items() if result == "ok"}


@users
def test_attacks_work_on_memory_that_is_not_sealed(user: int) -> None:
    descriptor = memfd.create("open", SIZE)
    try:
        through = got_through(attack(descriptor, user, [name for name in ATTACKS if name != SELF_ONLY]))
        assert len(through) >= 16, f"only {sorted(through)}"
    finally:
        os.close(descriptor)


@users
def test_extent_withstands(extent: SlotExtent, user: int) -> None:
    size = os.fstat(extent.descriptor).st_size
    # The daemon's own memory is out of reach for another user; from the same user only PR_SET_DUMPABLE, which
    # is the daemon's to set, protects it.
    names = [name for name in ATTACKS if name != SELF_ONLY or user != SAME]
    assert got_through(attack(extent.descriptor, user, names)) == set()
    assert bytes(extent.data[:8]) == b"original"
    assert os.fstat(extent.descriptor).st_size == size
    assert fcntl.fcntl(extent.descriptor, fcntl.F_GET_SEALS) & memfd.SEALS_READ_ONLY == memfd.SEALS_READ_ONLY


@users
def test_index_withstands(user: int) -> None:
    index = IndexWriter(17, epoch=1)
    assert index.insert(99, 5)
    names = [name for name in ATTACKS if name != SELF_ONLY]
    assert got_through(attack(index.descriptor, user, names)) == set()
    assert index.check_integrity() == []
    assert index.remove(99, 5)
    index.close()


def test_daemon_still_writes_and_reads_files_into_a_sealed_extent(extent: SlotExtent, tmp_path: Path) -> None:
    extent.data[8:16] = b"and more"
    path = tmp_path / "record"
    path.write_bytes(b"from a file")
    with path.open("rb") as file:
        assert os.preadv(file.fileno(), [extent.data[16:27]], 0) == 11
    assert bytes(extent.data[:27]) == b"originaland morefrom a file"


@users
def test_staging_is_writable_but_cannot_kill_the_daemon(user: int) -> None:
    staging = StagingExtent(SIZE)
    view = staging.view(0, SIZE)
    allowed = got_through(attack(staging.descriptor, user, ["write", "shared writable mapping"]))
    assert allowed == {"write", "shared writable mapping"}
    assert bytes(view[:8]) == FORGED
    names = ["shrink", "grow", "grow by fallocate", "append", "reopen and truncate", "add a seal"]
    assert got_through(attack(staging.descriptor, user, names)) == set()
    # Holes may be punched: they read as zeros, not as SIGBUS.
    assert got_through(attack(staging.descriptor, user, ["punch a hole"])) == {"punch a hole"}
    assert not any(view[:4096])
    assert len(bytes(view)) == SIZE
    staging.close()
