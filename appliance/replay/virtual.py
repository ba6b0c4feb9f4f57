"""Virtual tiers: rooms of any size with nothing in them, and copies that take their time.

The rooms are the production ones, so placement and accounting are too. An edge moves one batch at a time,
most urgent first as the mover's lanes do, at a bandwidth, and every batch is heard of a latency after its
last byte: queueing is what makes a full edge slow, and a model without it flatters every policy that moves
much.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ...tiers.base import Cause, CopyOutcome, Room
from ...tiers.block import Geometry, Tier
from ...tiers.cold.footer import footer_bytes_for
from ...tiers.cold.log import SegmentLog, record_bytes
from ...tiers.ladder import Ladder
from ...tiers.memory.slots import SlotPool
from ...v1.shm import slot_bytes_for
from ..config.units import parse_bytes, parse_duration
from ..core.events import CopyFinished
from ..core.instructions import STAGING, CancelCopy, Copy, HastenCopy

#: What every copy reports; nothing is compared with it, as there are no bytes.
CHECKSUM = b"virtual checksum"
LANDED = CopyOutcome(None, CHECKSUM)
MIN_SEGMENTS = 8
MAX_SEGMENT_BYTES = 64 << 20
MIN_EXTENTS = 32  # where namespaces with different slots share a tier


class EdgeSpeed(NamedTuple):
    """What an edge can do."""

    bandwidth_bytes_per_s: float
    latency_s: float

    @classmethod
    def parse(cls, text: str, latency_s: float) -> "EdgeSpeed":
        """Return what `SPEED[@LATENCY]` says; without a latency it is `latency_s`. Raises ValueError."""
        bandwidth, _, latency = text.partition("@")
        speed = cls(
            float(parse_bytes(bandwidth.removesuffix("/s"))),
            parse_duration(latency) if latency else latency_s,
        )
        if speed.bandwidth_bytes_per_s <= 0:
            raise ValueError(f"{text!r}: with no bandwidth nothing ever arrives")
        return speed


#: One PCIe 4 NVMe device, one NUMA node, one GPU's link. Name your own with --edge, or measure them: the
#: edges of `kvtier status --json`.
DEFAULT_SPEEDS: Mapping[str, EdgeSpeed] = {
    "staging>dram": EdgeSpeed(12e9, 20e-6),
    "dram>nvme": EdgeSpeed(3e9, 100e-6),
    "nvme>dram": EdgeSpeed(6e9, 120e-6),
    "nvme>nvme": EdgeSpeed(2e9, 200e-6),
    "hbm>dram": EdgeSpeed(24e9, 20e-6),
    "dram>hbm": EdgeSpeed(24e9, 20e-6),
    "nvme>hbm": EdgeSpeed(6e9, 120e-6),
    "hbm>nvme": EdgeSpeed(3e9, 100e-6),
    "dram>runtime": EdgeSpeed(24e9, 20e-6),  # what the runtime itself reads, prefix in hand
    "hbm>runtime": EdgeSpeed(1e12, 5e-6),
}
#: A further memory tier: a CXL 2.0 expander on eight lanes, behind one processor.
FAR_MEMORY = EdgeSpeed(12e9, 20e-6)


def default_speeds(ladder: Ladder) -> dict[str, EdgeSpeed]:
    """Return what the edges of these tiers can do unless that is said, by name."""
    speeds = dict(DEFAULT_SPEEDS)
    above: list[str] = [ladder.put_tier.label]
    for tier in ladder.host_tiers:
        if tier > ladder.put_tier:
            name, log = tier.label, ladder.log_tier.label
            for other in above:
                speeds[f"{other}>{name}"] = speeds[f"{name}>{other}"] = FAR_MEMORY
            speeds[f"{name}>{log}"] = DEFAULT_SPEEDS["dram>nvme"]
            speeds[f"{log}>{name}"] = DEFAULT_SPEEDS["nvme>dram"]
            speeds[f"{name}>runtime"] = FAR_MEMORY
            above.append(name)
    return speeds


def memory_room(capacity_bytes: int, geometries: Sequence[Geometry]) -> SlotPool:
    """Return a memory tier of this size.

    With slots of one size it is one extent: no byte is lost to cutting.
    """
    sizes = {slot_bytes_for(size) for g in geometries for size in g.fragment_bytes}
    if len(sizes) == 1:
        slot_bytes = sizes.pop()
        return SlotPool(1, max(1, capacity_bytes // slot_bytes) * slot_bytes)
    extent_bytes = max(max(sizes), capacity_bytes // MIN_EXTENTS)
    return SlotPool(max(1, capacity_bytes // extent_bytes), extent_bytes)


def _least_segment_bytes(geometries: Sequence[Geometry]) -> int:
    records = [record_bytes(size) for g in geometries for size in g.fragment_bytes]
    return 8 * max(records)


def cold_room_bytes(geometries: Sequence[Geometry]) -> int:
    """Return the size of the smallest cold store for such blocks."""
    segment_bytes = _least_segment_bytes(geometries)
    return 3 * (segment_bytes + footer_bytes_for(segment_bytes))


def cold_room(capacity_bytes: int, geometries: Sequence[Geometry]) -> SegmentLog:
    """Return a cold store of this size, in segments that hold several records each."""
    smallest_bytes = _least_segment_bytes(geometries)
    segment_bytes = max(smallest_bytes, min(MAX_SEGMENT_BYTES, capacity_bytes // MIN_SEGMENTS))
    footer_bytes = footer_bytes_for(segment_bytes)
    segment_bytes += footer_bytes
    return SegmentLog(max(3, capacity_bytes // segment_bytes), segment_bytes, footer_bytes)


def rooms_for(
    capacity_bytes: Mapping[Tier, int], geometries: Sequence[Geometry], ladder: Ladder
) -> dict[Tier, Room]:
    """Return the rooms of these tiers."""
    return {
        tier: cold_room(size, geometries) if tier == ladder.log_tier else memory_room(size, geometries)
        for tier, size in sorted(capacity_bytes.items())
    }


class VirtualClock:
    """Time that jumps from one thing to the next.

    Deterministic: ties keep the order in which they were made.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Schedule a call at a time, now at the earliest."""
        heapq.heappush(self._agenda, (max(when, self.now), next(self._numbers), act))

    def next_at(self) -> float | None:
        """Return the time of the next scheduled call; None without one."""
        return self._agenda[0][0] if self._agenda else None

    def run_next(self) -> None:
        """Advance the clock to the next scheduled call and run it."""
        when, _, act = heapq.heappop(self._agenda)
        self.now = when
        act()


@dataclass(slots=True)
class _VirtualLane:
    """One edge: what waits, and whether something moves."""

    queue: list[tuple[int, float, int, int, Copy]] = field(default_factory=list)
    is_moving: bool = False


class VirtualMover:
    """Executes copies on the virtual clock; `finished` hears of each."""

    def __init__(
        self,
        clock: VirtualClock,
        speeds: Mapping[str, EdgeSpeed],
        finished: Callable[[CopyFinished], None],
    ) -> None:
        self._clock = clock
        self._speeds = speeds
        self._finished = finished
        self._lanes: dict[str, _VirtualLane] = {}
        self._numbers = itertools.count()
        self.num_bytes: Counter[str] = Counter()  # moved or moving, by edge

    def start(self, copy: Copy) -> None:
        """Queue a batch."""
        edge = edge_name(copy)
        lane = self._lanes.setdefault(edge, _VirtualLane())
        group = copy.items[0].label.group
        entry = (int(copy.urgency), copy.deadline_at, group, next(self._numbers), copy)
        heapq.heappush(lane.queue, entry)
        self._move(edge, lane)

    def cancel(self, instruction: CancelCopy) -> None:
        """Drop a batch that has not begun; one that has completes."""
        for lane in self._lanes.values():
            for queued in [entry for entry in lane.queue if entry[-1].copy == instruction.copy]:
                lane.queue.remove(queued)
                heapq.heapify(lane.queue)
                self._clock.at(self._clock.now, partial(self._end, queued[-1], CopyOutcome(Cause.CANCELLED)))

    def hasten(self, instruction: HastenCopy) -> None:
        """Requeue a batch that has not begun, with this urgency and deadline."""
        for lane in self._lanes.values():
            for queued in [entry for entry in lane.queue if entry[-1].copy == instruction.copy]:
                lane.queue.remove(queued)
                lane.queue.append((int(instruction.urgency), instruction.deadline_at, *queued[2:]))
                heapq.heapify(lane.queue)

    def _move(self, edge: str, lane: _VirtualLane) -> None:
        if lane.is_moving or not lane.queue:
            return
        copy = heapq.heappop(lane.queue)[-1]
        lane.is_moving = True
        num_bytes = sum(item.label.raw_length for item in copy.items)
        self.num_bytes[edge] += num_bytes
        speed = self._speeds[edge]
        moved_at = self._clock.now + num_bytes / speed.bandwidth_bytes_per_s

        self._clock.at(moved_at, partial(self._moved, edge, lane))
        self._clock.at(moved_at + speed.latency_s, partial(self._end, copy, LANDED))

    def _moved(self, edge: str, lane: _VirtualLane) -> None:
        lane.is_moving = False
        self._move(edge, lane)

    def _end(self, copy: Copy, outcome: CopyOutcome) -> None:
        self._finished(CopyFinished(copy.copy, [outcome] * len(copy.items)))


def edge_name(copy: Copy) -> str:
    """Return `source>target` of a copy."""
    source = STAGING if copy.source is None else copy.source.label
    return f"{source}>{copy.target.label}"
