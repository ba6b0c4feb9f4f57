"""What a daemon as it is installed lets others reach: every socket it listens at, as the kernel says."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..daemon import child_of

LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
LOOPBACK = "0100007F"  # 127.0.0.1, as the kernel writes it on little-endian machines
ACCEPTS = 0x10000  # __SO_ACCEPTCON in /proc/net/unix


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[int]:
    """`kvtier serve` without a policy, an option or a setting but its size; its process id."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVTIER_")}
    with subprocess.Popen(
        [sys.executable, "-m", "kvtier.appliance.cli", "serve"],
        env={**inherited, "KVTIER_TIERS__DRAM__CAPACITY": "64MiB", "XDG_RUNTIME_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert " ready at unix://" in process.stdout.readline()
            yield child_of(process.pid)
        finally:
            process.terminate()
            process.wait()


def sockets_of(pid: int) -> set[str]:
    """Return the inodes of the sockets that a process has open."""
    links = [os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def ports_of(pid: int) -> list[tuple[str, int]]:
    """Return (address, port) of each TCP listener of a process, the address as the kernel's hex digits."""
    mine = sockets_of(pid)
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN and words[9] in mine:
                address, _, port = words[1].partition(":")
                found.append((address, int(port, 16)))
    return found


def paths_of(pid: int) -> list[Path]:
    """Return each Unix socket that a process accepts connections at; abstract ones begin with @."""
    mine = sockets_of(pid)
    lines = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    accepting = [words for words in lines if words[6] in mine and int(words[3], 16) & ACCEPTS]
    return sorted(Path(words[7] if len(words) > 7 else "@") for words in accepting)


def test_a_default_daemon_has_at_most_one_listener_that_asks_nobody_who_they_are(daemon: int) -> None:
    """That one is HTTP, for this host, and answers GET only (tests/appliance/observability/test_web.py).
    Of the Unix sockets the kernel says which user connects, and file modes keep out all but this user and
    its group."""
    ports = ports_of(daemon)
    assert len(ports) <= 1, "9464 when it is free; when it is not, none"
    assert all(address == LOOPBACK for address, _ in ports)
    paths = paths_of(daemon)
    assert [path.name.partition(".sock")[2] for path in paths] == ["", ".grpc", ".local"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o660, 0o600, 0o660]
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in paths} == {0o700}
