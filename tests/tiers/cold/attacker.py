"""A hostile client: receives one descriptor over a Unix socket and tries everything to change it.

Run as a program of its own: it inherits the socket, whose descriptor is its first argument, and nothing else,
in particular none of the daemon's mappings. The second argument is the user to become, or -1; the third the
names of the attacks in JSON. It answers with a JSON object, attack -> "ok" when it got through, else the
errno's name.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import socket
import sys
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)
FORGED = b"forged!!"
PUNCH_HOLE, KEEP_SIZE, ZERO_RANGE = 0x2, 0x1, 0x10
PROT_READ, PROT_WRITE, MAP_SHARED, MAP_PRIVATE = 1, 2, 1, 2
MADV_REMOVE, MADV_POPULATE_WRITE = 9, 23
F_SEAL_WRITE = 0x8
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def check(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), "refused")


def mapped(fd: int, protection: int, flags: int = MAP_SHARED) -> int:
    address = libc.mmap(None, 1 << 20, protection, flags, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "refused")
    return int(address)


def map_and_store(fd: int) -> None:
    ctypes.memmove(mapped(fd, PROT_READ | PROT_WRITE), FORGED, len(FORGED))


def protect_and_store(fd: int) -> None:
    address = mapped(fd, PROT_READ)
    check(libc.mprotect(address, 1 << 20, PROT_READ | PROT_WRITE))
    ctypes.memmove(address, FORGED, len(FORGED))


def private_store(fd: int) -> None:
    """Allowed, and changes only the attacker's own copy: the daemon must not see it."""
    ctypes.memmove(mapped(fd, PROT_READ | PROT_WRITE, MAP_PRIVATE), FORGED, len(FORGED))
    raise OSError(errno.EPERM, "it is a private copy")


def reopened(fd: int, flags: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", flags)


def send_into(fd: int) -> None:
    source = os.memfd_create("source")
    os.write(source, FORGED)
    os.sendfile(fd, source, 0, len(FORGED))


def splice_into(fd: int) -> None:
    reader, writer = os.pipe()
    os.write(writer, FORGED)
    os.splice(reader, fd, len(FORGED), offset_dst=0)


def copy_range_into(fd: int) -> None:
    source = os.memfd_create("source")
    os.write(source, FORGED)
    os.copy_file_range(source, fd, len(FORGED), 0, 0)


def poke_daemon(fd: int) -> None:
    """Write into the daemon's own mapping of this memory through /proc/PID/mem."""
    inode = os.fstat(fd).st_ino
    with open(f"/proc/{os.getppid()}/maps") as maps:
        lines = [line.split() for line in maps]
    start = next(int(f[0].split("-")[0], 16) for f in lines if len(f) > 5 and int(f[4]) == inode)
    memory = os.open(f"/proc/{os.getppid()}/mem", os.O_RDWR)
    os.pwrite(memory, FORGED, start)


ATTACKS: dict[str, Callable[[int], object]] = {
    "write": lambda fd: os.pwrite(fd, FORGED, 0),
    "writev": lambda fd: os.pwritev(fd, [FORGED], 0),
    "append": lambda fd: (os.lseek(fd, 0, os.SEEK_END), os.write(fd, FORGED)),
    "sendfile": send_into,
    "splice": splice_into,
    "copy_file_range": copy_range_into,
    "shared writable mapping": map_and_store,
    "private writable mapping": private_store,
    "read mapping made writable": protect_and_store,
    "reopen and write": lambda fd: os.pwrite(reopened(fd, os.O_RDWR), FORGED, 0),
    "reopen and map": lambda fd: map_and_store(reopened(fd, os.O_RDWR)),
    "reopen and truncate": lambda fd: reopened(fd, os.O_RDWR | os.O_TRUNC),
    "shrink": lambda fd: os.ftruncate(fd, 4096),
    "grow": lambda fd: os.ftruncate(fd, os.fstat(fd).st_size + (2 << 20)),
    "grow by fallocate": lambda fd: check(libc.fallocate(fd, 0, os.fstat(fd).st_size, 2 << 20)),
    "punch a hole": lambda fd: check(libc.fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 0, 2 << 20)),
    "zero a range": lambda fd: check(libc.fallocate(fd, ZERO_RANGE, 0, 2 << 20)),
    "MADV_REMOVE": lambda fd: check(libc.madvise(mapped(fd, PROT_READ), 1 << 20, MADV_REMOVE)),
    "MADV_POPULATE_WRITE": lambda fd: check(
        libc.madvise(mapped(fd, PROT_READ), 1 << 20, MADV_POPULATE_WRITE)
    ),
    "add a seal": lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_WRITE),
    "/proc/PID/mem of the daemon": poke_daemon,
}


def become(user: int) -> None:
    """Give up root for good. The interpreter is already running: `user` need not be able to start it."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    # The kernel hides /proc/self from a process that has just dropped root; a client that was started as
    # `user` would see it, and half of the attacks go through it.
    check(libc.prctl(4, 1, 0, 0, 0))  # PR_SET_DUMPABLE


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    if int(sys.argv[2]) >= 0:
        become(int(sys.argv[2]))
    _, descriptors, _, _ = socket.recv_fds(channel, 16, 1)
    descriptor = descriptors[0]
    with contextlib.suppress(OSError), mmap.mmap(descriptor, 8, prot=mmap.PROT_READ) as readable:
        assert len(readable[:8]) == 8
    results = {}
    for name in json.loads(sys.argv[3]):
        try:
            ATTACKS[name](descriptor)
            results[name] = "ok"
        except OSError as error:
            results[name] = errno.errorcode.get(error.errno or 0, str(error))
        except ValueError as error:  # Python's own checks, before the kernel is asked
            results[name] = str(error)
    channel.sendall(json.dumps(results).encode())


if __name__ == "__main__":
    main()
