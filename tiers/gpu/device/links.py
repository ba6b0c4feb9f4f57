"""What the link between dram and hbm makes, measured once when the daemon has its memory.

A few copies of memory of its own in each direction, after everything is pinned: some milliseconds, in the
background, and never longer than a deadline, because a link that is shared with a runtime may be slow for
reasons of its own. (Not of the warm pool's memory: clients are writing and reading there by now.) The best of
the copies counts: what the link can do, not what it did beside others. From then on real copies say what it
does.

Rejected: reading the link's generation and width (says what it could be; a slot behind a switch, an IOMMU or
the wrong NUMA node are what one wants to see), and waiting for the first loads (the first decisions are then
made on a default that is off by a factor of twenty).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from .contract import Device, pieces_of
from .slabs import Slabs
from .waiting import copy_and_wait

NUM_COPIES = 4
SMALL_BYTES = 4096
LIMIT_S = 0.05  # for each direction
HANG_S = 5.0  # after this the device counts as lost to us


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One direction: what one large copy makes, and how long a small one takes."""

    bandwidth_bytes_per_s: float
    latency_s: float


def measure(
    device: Device, num_bytes: int = 16 << 20, clock: Callable[[], float] = time.perf_counter
) -> tuple[LinkSpeed, LinkSpeed]:
    """Return the speed from the host's memory to the device and back, with copies of `num_bytes`.

    Blocks, for some milliseconds. Raises DeviceError; memory of a device that does not answer is not given
    back.
    """
    stream = device.take_stream()
    slabs = Slabs(device, {"copied": num_bytes}, {}, 1)
    slab = slabs.take()
    assert slab is not None

    def time_s(source: int, target: int, length: int) -> float:
        began_at = clock()
        copy_and_wait(device, stream, pieces_of([(source, target, length)]), HANG_S)
        return clock() - began_at

    def speed(source: int, target: int) -> LinkSpeed:
        began_at = clock()
        latency_s = min(time_s(source, target, SMALL_BYTES) for _ in range(2))
        best_s = time_s(source, target, num_bytes)
        for _ in range(NUM_COPIES - 1):
            if clock() - began_at > LIMIT_S:
                break
            best_s = min(best_s, time_s(source, target, num_bytes))
        return LinkSpeed(num_bytes / best_s, latency_s)

    up, down = speed(slab.host, slab.device), speed(slab.device, slab.host)
    device.give_stream(stream)
    slabs.close()
    return up, down
