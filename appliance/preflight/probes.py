"""How the facts are found: one small question to the kernel each, answered without leaving a trace."""

import errno
import importlib.util
import mmap
import os
import socket
import stat
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

from ...tiers.memory import memfd
from ...v1.shm import PAGE_BYTES
from ..config.host_memory import read_memory, read_text

CAP_IPC_LOCK = 14
ENDING_INTERVAL_S = 0.02
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_FLAGS, _PF_EXITING = 6, 0x4  # field of /proc/PID/stat behind the name; set since Linux 2.6
HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
#: Optional libraries, by what is imported.
OPTIONAL_MODULES = ("cryptography", "msgpack", "numba", "opentelemetry.sdk", "zmq")


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node."""

    number: int
    has_cpus: bool
    num_bytes: int


def holder_in(locks: str, major: int, minor: int, inode: int) -> str:
    """Return the holder of an flock on a file, as "pid 17", from /proc/locks; empty when it is not locked."""
    name = f"{major:02x}:{minor:02x}:{inode}"
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == name:
            return f"pid {fields[4]}"
    return ""


def available_bytes() -> int:
    """Return the memory that this process may still take."""
    return read_memory().available_bytes


def is_installed(module: str) -> bool:
    """Return whether a module can be found. Does not import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing, or it was removed from sys.modules
        return False


def may_listen(host: str, port: int) -> bool:
    """Return whether a TCP port is free at an address of this host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def kind_at(path: Path) -> str:
    """Return what is at the path of a Unix socket.

    "", "socket" (nothing listens), "live" (something does), "closed" (this user may not connect) or "other".
    Waits for a killed process to end: the kernel closes its sockets after it has unmapped its memory, a tenth
    of a second per GiB.
    """
    while True:
        kind, listener = _probe(path)
        if kind != "live" or not _is_ending(listener):
            return kind
        threading.Event().wait(ENDING_INTERVAL_S)


def _probe(path: Path) -> tuple[str, int]:
    """Return what is at a path, as `kind_at`, and the process that listens there; 0 if it is not known."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return "other", 0
    except OSError:
        return "", 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return "socket", 0
        except PermissionError:
            return "closed", 0
        except OSError:  # a full backlog is alive, too
            return "live", 0
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return "live", _CREDENTIALS.unpack(credentials)[0]


def _is_ending(process: int) -> bool:
    """Whether the kernel is taking a process apart. False for one of another PID namespace."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return bool(int(fields[_FLAGS]) & _PF_EXITING)


def numa_nodes(folder: Path) -> tuple[Node, ...]:
    """Return the NUMA nodes with memory, from their folder in sysfs, by number."""
    nodes = []
    for entry in folder.glob("node[0-9]*"):
        memory = next(
            (line for line in read_text(entry / "meminfo").splitlines() if "MemTotal" in line), "0 kB"
        )
        num_bytes = int(memory.split()[-2]) * 1024
        if num_bytes:
            nodes.append(Node(int(entry.name[4:]), bool(read_text(entry / "cpulist")), num_bytes))
    return tuple(sorted(nodes, key=lambda node: node.number))


def seal_error() -> str:
    """Return why memfds cannot be made or sealed, empty when they can."""
    try:
        descriptor = memfd.create("kvtier-doctor", PAGE_BYTES)
    except OSError as error:
        return f"memfd_create is refused ({error.strerror})"
    try:
        memfd.seal(descriptor, memfd.SEALS_READ_ONLY)
    except memfd.SharedMemoryError as error:
        return str(error)
    finally:
        os.close(descriptor)
    return ""


def has_pidfd() -> bool:
    """Return whether the kernel has pidfds."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


def has_capability(number: int) -> bool:
    """Return whether this process has a capability in effect."""
    for line in read_text(Path("/proc/self/status")).splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def write_errno(directory: Path) -> int:
    """Return why direct I/O fails in a directory, 0 when it works. Tries it on a file without a name."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        with open(fd, "rb"), mmap.mmap(-1, PAGE_BYTES) as page:
            os.pwritev(fd, [page], 0)
            os.preadv(fd, [page], 0)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def lock_holder(path: Path) -> str:
    """Return the holder of the flock on a file, as "pid 17"; empty when it is not locked."""
    try:
        status = path.stat()
    except OSError:
        return ""
    device = status.st_dev
    return holder_in(read_text(Path("/proc/locks")), os.major(device), os.minor(device), status.st_ino)


def allocated_bytes(file: Path) -> int:
    """Return the disk space of a file, 0 where there is none."""
    try:
        return file.stat().st_blocks * 512
    except OSError:
        return 0


def nearest_existing(path: Path) -> Path:
    """Return `path`, or the nearest thing above it that exists, as far as this user may know."""
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def filesystem_bytes(path: str) -> int:
    """Return the size of the file system at `path`, 0 where there is none."""
    try:
        space = os.statvfs(path)
    except OSError:
        return 0
    return space.f_blocks * space.f_frsize
