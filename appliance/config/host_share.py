"""Computes `tiers.dram.capacity` as a share of this host's memory: `auto` (the default), or a percentage.

`auto` is a quarter of the memory that this process may use: the host's, or the tightest limit of its control
groups. Memory of dram is allocated right after the start, counts against the daemon's control group and is
not reclaimed (memfds without swap). So the share is what all else can do without: a runtime on the same host
loads its weights through the page cache, and keeps some gigabytes beside its GPU's. Three bounds:

    at most half of what is available   a runtime that was here first keeps the other half
    at most 32 GiB                      512 extents: daemon and clients stay below `ulimit -n` 1024, and the
                                        memory of a daemon that is only tried is in place within a minute
    at least 256 MiB                    less holds no prompt of 2,000 tokens of an 8B model

The available memory is read once per process: a reload must find the size that was chosen at the start.
"""

from functools import cache

from . import units
from .host_memory import HostMemory, read_memory

AUTO = "auto"
SHARE, SHARE_OF_AVAILABLE = 0.25, 0.5
MIN_BYTES, MAX_BYTES = 256 << 20, 32 << 30
STEP_BYTES = 64 << 20  # sizes are whole multiples


class HostShare(int):
    """A number of bytes given as a share of memory; `written` is the text, such as `40%`."""

    written: str


@cache
def host_memory() -> HostMemory:
    """Return the memory that this process may use, read at the first call."""
    return read_memory()


def auto_bytes(memory: HostMemory) -> int:
    """Return what `auto` is on a host."""
    wanted = min(memory.total_bytes * SHARE, memory.available_bytes * SHARE_OF_AVAILABLE, MAX_BYTES)
    return max(MIN_BYTES, _whole_steps(wanted))


def parse_capacity(value: object) -> int:
    """Return a number of bytes from a size, a percentage of the host's memory, or `auto`.

    Raises ValueError, saying how to write it.
    """
    if isinstance(value, HostShare):
        return value
    if isinstance(value, str) and value.strip() == AUTO:
        return _share(auto_bytes(host_memory()), AUTO)
    if isinstance(value, str) and value.strip().endswith("%"):
        share = units.parse_fraction(value)
        return _share(_whole_steps(share * host_memory().total_bytes), units.format_fraction(share))
    try:
        return units.parse_bytes(value)
    except ValueError as problem:
        raise ValueError(f"{problem}; or a share of the host's memory: auto, 40%") from None


def format_capacity(num_bytes: int) -> str:
    """Return a capacity as it was written."""
    return num_bytes.written if isinstance(num_bytes, HostShare) else units.format_bytes(num_bytes)


def _share(num_bytes: int, written: str) -> HostShare:
    share = HostShare(num_bytes)
    share.written = written
    return share


def _whole_steps(num_bytes: float) -> int:
    return int(num_bytes) // STEP_BYTES * STEP_BYTES
