"""The memory of this host that this process may use: /proc/meminfo and the limits of its control groups."""

from pathlib import Path
from typing import NamedTuple


class HostMemory(NamedTuple):
    """Memory that this process may use, in bytes."""

    total_bytes: int  # the host's, or the tightest limit of its control groups
    available_bytes: int  # of that, what nothing uses now


def read_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Return the host's memory, less where a control group (version 1 or 2, or one around it) has a limit."""
    fields = dict(line.split(":", 1) for line in read_text(proc / "meminfo").splitlines() if ":" in line)
    total, available = (int(fields.get(f"Mem{w}", "0 kB").split()[0]) << 10 for w in ("Total", "Available"))
    folders = [cgroup, cgroup / "memory"]
    for line in read_text(proc / "self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        own = (cgroup / "memory" if controllers else cgroup) / name.lstrip("/")
        folders += [own, *own.parents]
    for folder in dict.fromkeys(folders):
        limit = read_text(folder / "memory.max") or read_text(folder / "memory.limit_in_bytes")
        if folder.is_relative_to(cgroup) and limit.isdigit() and int(limit) < 1 << 60:
            used = read_number(folder / "memory.current") or read_number(folder / "memory.usage_in_bytes")
            total, available = min(total, int(limit)), min(available, max(0, int(limit) - used))
    return HostMemory(total, available)


def read_text(path: Path) -> str:
    """Return the stripped text of a small file; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def read_number(path: Path) -> int:
    """Return the number in a small file; 0 where there is none."""
    text = read_text(path)
    return int(text) if text.isdigit() else 0
