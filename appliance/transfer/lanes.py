"""Lanes: what the mover has to do on each edge, in which order, and what it did.

An edge (source tier or staging, target tier) has its own lane: a fair queue (fair_queue.py) and a bounded
number of batches in flight. NVMe reads and NVMe writes are different edges with different executors, so a
load never waits behind a spill in our queues; only the device itself can still make it wait, and gets few
writes at a time while it reads for a request. One queue for everything was rejected for that reason, a thread
per copy because nothing would bound it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ...tiers.base import Copier, CopyItem, CopyOutcome
from ...tiers.block import Tier, Urgency
from ..core.instructions import STAGING, Copy
from ..histogram import Histogram
from .fair_queue import BandwidthShares, FairQueue
from .throughput import ThroughputMeter

MIN_BATCH_BYTES = 256 << 10  # cutting finer costs more in hand-over than it gains in sharing
MAX_BATCH_BYTES = 4 << 20
LEAST_PARTS = 2  # of a copy that finds the threads of its edge busy: its batches need no more

#: Batches written to a device at a time while it reads what a request waits for.
MAX_WRITES_BESIDE_READS = 2

#: Of edges that a device's own engines copy, which no thread of ours waits for: a batch costs the host some
#: 100 us however large it is, and a link of 55 GB/s moves 5 MB in that time. Four of them in flight keep an
#: urgent copy waiting for a millisecond.
DEVICE_BATCH_BYTES = 16 << 20


class Edge(NamedTuple):
    """The source and target of a copy; source None is a client's staging extent."""

    source: Tier | None
    target: Tier

    @property
    def source_label(self) -> str:
        """The source's name in text."""
        return STAGING if self.source is None else self.source.label


Inline: TypeAlias = Callable[[Sequence[CopyItem]], list[CopyOutcome]]


class Route(NamedTuple):
    """What executes the copies of one edge: in worker threads, and, where that can be short, at once.

    `batch_bytes`: what a batch should have where cutting a copy for several threads gains nothing, else 0."""

    copier: Copier
    inline: Inline | None = None
    batch_bytes: int = 0


@dataclass(slots=True)
class EdgeStatistics:
    """What one edge did and does."""

    source: str
    target: str
    num_copies: int  # fragments that landed
    num_failed: int  # fragments that did not
    num_in_flight: int  # batches
    num_queued: int  # batches
    num_bytes: int
    bandwidth_bytes_per_s: float
    latency_s: float
    seconds: Histogram  # of batches; the lane's own, it goes on counting
    bytes_of_tenant: Counter[str]  # that landed; the lane's own, too


@dataclass(slots=True)
class QueuedCopy:
    """One Copy instruction on its way. `num_open` counts its batches that have not ended."""

    copy: Copy
    outcomes: list[CopyOutcome]
    num_open: int = 0


@dataclass(slots=True)
class CopyBatch:
    """A run of items of one job and one tenant that one thread copies. Its key says how soon it must go:
    urgency, deadline, layer group, arrival."""

    key: tuple[int, float, int, int]
    tenant: str
    job: QueuedCopy
    start: int
    stop: int
    num_bytes: int
    began_at: float = 0.0

    @property
    def is_waited_for(self) -> bool:
        """Whether a request waits for it."""
        return self.key[0] <= Urgency.QUEUED

    @property
    def items(self) -> Sequence[CopyItem]:
        """The items of this batch."""
        return self.job.copy.items[self.start : self.stop]


@dataclass(slots=True)
class EdgeQueue:
    """The queue of one edge, and its statistics."""

    edge: Edge
    max_in_flight: int
    shares: BandwidthShares
    queue: FairQueue[CopyBatch] = field(init=False)
    num_in_flight: int = 0
    num_waited_for: int = 0  # of them, by a request
    num_copies: int = 0
    num_failed: int = 0
    meter: ThroughputMeter = field(default_factory=ThroughputMeter)
    seconds: Histogram = field(default_factory=Histogram)  # of batches, from begin to end
    measured_at: float = float("-inf")
    bytes_of_tenant: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.queue = FairQueue(self.shares)

    def enqueue(self, job: QueuedCopy, sequence: Iterator[int], batch_bytes: int = 0, start: int = 0) -> None:
        """Cut a copy's items from `start` on, kept in order, into batches for all threads of this edge.

        Batches have `batch_bytes`, or an equal share each for the threads that have nothing to do; they end
        where the next item is another tenant's.
        """
        copy, tenant_of = job.copy, self.shares.tenant
        total = sum(item.label.raw_length for item in copy.items[start:])
        num_free = self.max_in_flight - self.num_in_flight - len(self.queue)
        num_parts = min(max(num_free, LEAST_PARTS), self.max_in_flight)
        share = batch_bytes or min(max(total // num_parts, MIN_BATCH_BYTES), MAX_BATCH_BYTES)
        if copy.in_one:
            share = total
        num_bytes = 0
        owner = tenant_of(copy.items[start].label.namespace_id)
        for position in range(start, len(copy.items)):
            item = copy.items[position]
            num_bytes += item.label.raw_length
            following = (
                copy.items[position + 1].label.namespace_id if position + 1 < len(copy.items) else None
            )
            next_owner = tenant_of(following) if following is not None else None
            if num_bytes >= share or next_owner != owner:
                self.queue.push(self.batch(job, start, position + 1, num_bytes, sequence))
                job.num_open += 1
                start, num_bytes = position + 1, 0
                owner = next_owner or ""

    def begin(self, batch: CopyBatch, now: float) -> None:
        """Count a batch that is handed over."""
        self.num_in_flight += 1
        self.num_waited_for += batch.is_waited_for
        batch.began_at = now
        self.meter.began(now)

    def end(self, batch: CopyBatch) -> None:
        """Count a batch that is in flight no more."""
        self.num_in_flight -= 1
        self.num_waited_for -= batch.is_waited_for

    def batch(
        self, job: QueuedCopy, start: int, stop: int, num_bytes: int, sequence: Iterator[int]
    ) -> CopyBatch:
        """Return items `start` to `stop` of a job as one batch."""
        copy, label = job.copy, job.copy.items[start].label
        key = (int(copy.urgency), copy.deadline_at, label.group, next(sequence))
        return CopyBatch(key, self.shares.tenant(label.namespace_id), job, start, stop, num_bytes)

    def count(
        self, outcomes: Sequence[CopyOutcome], tenant: str, began_at: float, ended_at: float, num_bytes: int
    ) -> bool:
        """Count what was copied of `num_bytes` of a tenant; return whether the edge's estimates changed."""
        num_failed = sum([outcome.cause is not None for outcome in outcomes])
        self.num_copies += len(outcomes) - num_failed
        self.num_failed += num_failed
        moved_bytes = 0 if num_failed else num_bytes
        self.bytes_of_tenant[tenant] += moved_bytes
        self.seconds.observe(ended_at - began_at)
        return self.meter.ended(began_at, ended_at, moved_bytes)

    def put_back(self, batches: Sequence[CopyBatch]) -> None:
        """Queue batches that were taken, each where its copy's urgency and deadline put it now."""
        for batch in batches:
            copy = batch.job.copy
            batch.key = (int(copy.urgency), copy.deadline_at, *batch.key[2:])
            self.queue.push(batch)

    def statistics(self) -> EdgeStatistics:
        """Return the statistics of this edge."""
        return EdgeStatistics(
            self.edge.source_label,
            self.edge.target.label,
            self.num_copies,
            self.num_failed,
            self.num_in_flight,
            len(self.queue),
            self.meter.num_bytes,
            self.meter.bandwidth_bytes_per_s,
            self.meter.latency_s,
            self.seconds,
            self.bytes_of_tenant,
        )
