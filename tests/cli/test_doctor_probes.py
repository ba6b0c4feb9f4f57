"""What the doctor finds out about a host: mounts, locks, cgroups, files that cannot be written."""

import errno
import os
from pathlib import Path

import pytest

from kvtier.appliance.config import host_memory
from kvtier.appliance.preflight import facts, probes
from kvtier.tiers.cold.mounts import filesystem_of


def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    mountinfo = (
        "22 1 259:1 / / rw - ext4 /dev/root rw\n"
        "30 22 0:25 / /mnt rw shared:1 - tmpfs tmpfs rw\n"
        "31 30 259:3 / /mnt/my\\040disk rw,noatime shared:2 - xfs /dev/nvme0n1 rw\n"
        "not a mount\n"
    )
    assert filesystem_of(Path("/mnt/my disk/data"), mountinfo) == "xfs"
    assert filesystem_of(Path("/mnt/other"), mountinfo) == "tmpfs"
    assert filesystem_of(Path("/mntx"), mountinfo) == "ext4"


def test_the_holder_of_a_lock_is_read_from_the_kernels_list() -> None:
    locks = "1: POSIX  ADVISORY  WRITE 11 08:01:55 0 EOF\n2: FLOCK  ADVISORY  WRITE 4711 103:02:55 0 EOF\n"
    assert probes.holder_in(locks, 0x103, 2, 55) == "pid 4711"
    assert probes.holder_in(locks, 8, 1, 55) == ""


def test_the_tightest_cgroup_counts(tmp_path: Path) -> None:
    """Of a hierarchy of version 2, or one of version 1; without a limit the host's memory does."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 8000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/pod/daemon\n9:name=systemd:/\n4:cpu,memory:/box\n")

    def limit(group: str, names: tuple[str, str], most: str, used: str) -> host_memory.HostMemory:
        (cgroup / group).mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, (most, used), strict=True):
            (cgroup / group / name).write_text(f"{value}\n")
        return host_memory.read_memory(proc, cgroup)

    v1, v2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
    assert host_memory.read_memory(proc, cgroup) == (9000 << 10, 8000 << 10)
    assert limit("pod/daemon", v2, "max", "7") == (9000 << 10, 8000 << 10)
    assert limit("memory/box", v1, str(0x7FFFFFFFFFFFF000), "7") == (9000 << 10, 8000 << 10)
    assert limit("pod", v2, "1000000", "100") == (1_000_000, 999_900)
    assert limit("memory/box", v1, "500000", "600000") == (500_000, 0)
    assert limit("memory/other", v1, "1", "1") == (500_000, 0), "somebody else's"


def test_a_held_lock_is_seen_and_not_disturbed(tmp_path: Path) -> None:
    from kvtier.tiers.cold.ownership import DirectoryLock

    assert facts.gather_directory(tmp_path).lock_holder == ""
    lock = DirectoryLock(tmp_path)
    assert facts.gather_directory(tmp_path).lock_holder == f"pid {os.getpid()}"
    assert lock.still_ours()
    lock.release()
    assert facts.gather_directory(tmp_path).lock_holder == ""


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EINVAL])
def test_why_a_file_cannot_be_written_is_kept(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only ext4 was taken for a file system without O_DIRECT, and the fix was ext4."""
    assert facts.gather_directory(tmp_path).write_errno == 0

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.pwritev", refuse)
    assert facts.gather_directory(tmp_path).write_errno == code


def test_a_shared_folder_is_noticed(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert facts.gather_listen(f"unix://{tmp_path}/k.sock").is_shared_folder
    tmp_path.chmod(0o700)
    assert not facts.gather_listen(f"unix://{tmp_path}/k.sock").is_shared_folder
    (tmp_path / "k.sock").write_text("")
    assert facts.gather_listen(f"unix://{tmp_path}/k.sock").kind == "other"
