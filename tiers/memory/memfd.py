"""What Linux offers for shared memory: memfds, seals, placement. One function per kernel call.

memfds were chosen over files in /dev/shm: they have no name that leaks when a process is killed, no
size limit of a mount, and they can be sealed, which is the only way to give a process of the same user
memory that it can read and cannot write (a read-only descriptor can be re-opened for writing through
/proc). Python's `mmap` is kept for the mapping, ctypes is used for the calls it lacks or makes while
holding the GIL.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...v1.shm import HUGE_PAGE_BYTES

_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; hardened hosts refuse memfds without it
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; fcntl has no name for it before Python 3.13
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MPOL_BIND = 2
_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
_MAX_NODES = 1024

#: For memory that clients only read: mappings made so far stay writable (ours), later ones cannot be.
SEALS_READ_ONLY = _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: For memory that a client writes: its size is fixed, so that reading it can never raise SIGBUS here.
SEALS_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)


class SharedMemoryError(Exception):
    """The kernel refused memory in the shape the configuration asks for; the message names the fix."""


def create(name: str, num_bytes: int, *, huge: bool = False) -> int:
    """Return a new, unsealed memfd of `num_bytes`. Raises OSError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge:
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    try:
        descriptor = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel: it knows no such flag
            raise
        descriptor = os.memfd_create(name, flags)
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def create_mapped(name: str, num_bytes: int, fix: str, *, huge: bool = False) -> tuple[int, mmap.mmap]:
    """Return (descriptor, writable mapping) of a new, unsealed memfd.

    Raises SharedMemoryError, with `fix`, when the kernel refuses either.
    """
    descriptor = -1
    try:
        descriptor = create(name, num_bytes, huge=huge)
        return descriptor, mmap.mmap(descriptor, num_bytes)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise SharedMemoryError(
            f"cannot map {num_bytes} bytes of shared memory ({error.strerror}); {fix}"
        ) from error


def seal(descriptor: int, seals: int) -> None:
    """Add `seals`, for ever, unless they are there. Map memory writable before sealing it SEALS_READ_ONLY.

    Raises SharedMemoryError.
    """
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & seals != seals:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        raise SharedMemoryError(
            f"cannot seal shared memory ({error.strerror}); kvtier needs Linux 5.1 or newer"
        ) from error


def free_huge_pages(nodes: Sequence[int] = ()) -> int:
    """Return how many 2 MiB pages the host has free, or its NUMA `nodes`; 0 where there is no such pool."""
    pools = [f"/sys/devices/system/node/node{node}/hugepages" for node in nodes]
    num_free = 0
    for pool in pools or ["/sys/kernel/mm/hugepages"]:
        with suppress(OSError):
            num_free += int(Path(f"{pool}/hugepages-{HUGE_PAGE_BYTES >> 10}kB/free_hugepages").read_text())
    return num_free


def address_of(mapping: mmap.mmap) -> int:
    """Return where a writable `mapping` starts."""
    first = ctypes.c_char.from_buffer(mapping)
    try:
        return ctypes.addressof(first)
    finally:
        del first  # an export would keep the mapping from being closed


def populate(descriptor: int, mapping: mmap.mmap, offset: int, length: int) -> None:
    """Allocate these pages and enter them in this process's page tables. Content is not changed.

    Releases the GIL. Without it the first copy into a page pays for it, at 0.4 GB/s instead of 20.
    Raises SharedMemoryError when memory is short.
    """
    try:
        os.posix_fallocate(descriptor, offset, length)
    except OSError as error:
        raise SharedMemoryError(
            f"cannot allocate {length} bytes of shared memory ({error.strerror}); make the tier smaller or "
            "raise the memory limit of this process's control group"
        ) from error
    # Refused by kernels before 5.14: the pages are there, only entering them is left to the first touch.
    address = address_of(mapping) + offset
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)


def lock(mapping: mmap.mmap) -> bool:
    """Keep `mapping` from being swapped; False where RLIMIT_MEMLOCK forbids it. Releases the GIL."""
    return bool(_libc.mlock(ctypes.c_void_p(address_of(mapping)), ctypes.c_size_t(len(mapping))) == 0)


def bind(mapping: mmap.mmap, nodes: Sequence[int]) -> None:
    """Have the pages of `mapping`, none of which exists yet, come from NUMA `nodes` only.

    CXL memory is a NUMA node without processors. Raises SharedMemoryError.
    """
    if _MBIND is None:
        raise SharedMemoryError(f"NUMA nodes cannot be chosen on {platform.machine()}; remove numa_nodes")
    if not all(0 <= node < _MAX_NODES for node in nodes):
        raise SharedMemoryError(f"no such NUMA node in {list(nodes)}; see /sys/devices/system/node/online")
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    status = _libc.syscall(
        ctypes.c_long(_MBIND),
        ctypes.c_void_p(address_of(mapping)),
        ctypes.c_ulong(len(mapping)),
        ctypes.c_int(_MPOL_BIND),
        mask,
        ctypes.c_ulong(_MAX_NODES + 1),  # the kernel counts one less
        ctypes.c_uint(0),
    )
    if status != 0:
        code = ctypes.get_errno()
        fix = {
            errno.EINVAL: "choose nodes of /sys/devices/system/node/has_memory",
            errno.EPERM: "seccomp forbids mbind here; give CAP_SYS_NICE or remove numa_nodes",
        }.get(code, "remove numa_nodes")
        raise SharedMemoryError(f"cannot bind to NUMA nodes {list(nodes)} ({os.strerror(code)}); {fix}")
