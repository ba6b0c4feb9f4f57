"""Layers stream: on virtual devices, the first layer of a prefix that comes from nvme is on the GPU long
before the last.

The planner and the lane of the edge are the real ones; the disk moves one batch after the other at its rate,
and the link takes what has landed, both in virtual time. What is shown is the order and the overlap, which is
all that software can do about it; the ratio on a real machine is owed."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.promotion import loads
from kvtier.appliance.transfer.fair_queue import BandwidthShares
from kvtier.appliance.transfer.lanes import Edge, EdgeQueue, QueuedCopy
from kvtier.tiers.base import Cause, CopyOutcome
from kvtier.tiers.block import Geometry, Tier

from .. import rig as rigs
from ..rig import Rig

LAYERS, BLOCKS, BATCH = 16, 10, 4  # three batches for each layer, the last one smaller
DISK_BYTES_PER_S, LINK_BYTES_PER_S = 7e9, 50e9


@pytest.fixture
def geometry(monkeypatch: pytest.MonkeyPatch) -> Geometry:
    """One layer a fragment."""
    geometry = Geometry(LAYERS, 1, 64, 16, "float16", layers_per_group=1)
    monkeypatch.setattr(rigs, "GEOMETRY", geometry)
    monkeypatch.setattr(loads, "MAX_BATCH", BATCH)
    return geometry


@dataclass
class Pipeline:
    """A disk and a link behind it, and when each layer was whole on the device."""

    rig: Rig
    lane: EdgeQueue = field(
        default_factory=lambda: EdgeQueue(Edge(Tier.NVME, Tier.DRAM), 1, BandwidthShares())
    )
    disk_s: float = 0.0
    link_s: float = 0.0
    arrived: dict[int, int] = field(default_factory=dict)  # layer group -> fragments on the device
    whole_at: dict[int, float] = field(default_factory=dict)
    sequence: Any = field(default_factory=itertools.count)

    def take_copies(self) -> None:
        """Queue what the planner asked for, as the mover does."""
        for copy in [copy for copy in self.rig.copies if copy.source is Tier.NVME]:
            self.rig.copies.remove(copy)
            self.lane.enqueue(
                QueuedCopy(copy, [CopyOutcome(Cause.CANCELLED)] * len(copy.items)), self.sequence
            )

    def run(self, call: int) -> None:
        """Let the disk read everything; the link takes what each answer says is readable."""
        num_seen = 0
        while self.lane.queue:
            batch = self.lane.queue.pop()
            self.disk_s += batch.num_bytes / DISK_BYTES_PER_S
            job = batch.job
            job.outcomes[batch.start : batch.stop] = [CopyOutcome(None, b"\7" * 16)] * (
                batch.stop - batch.start
            )
            job.num_open -= 1
            if not job.num_open:
                self.rig.do(ev.CopyFinished(job.copy.copy, job.outcomes))
            for result in self.rig.answers[call][num_seen:]:
                self.deliver(result.ready)
            num_seen = len(self.rig.answers[call])

    def deliver(self, ready: Iterable[Any]) -> None:
        """Send fragments over the link, earliest layers first, as a delivery does."""
        self.link_s = max(self.link_s, self.disk_s)
        for part in sorted(ready, key=lambda part: (part.group, part.tier)):
            self.link_s += part.length / LINK_BYTES_PER_S
            self.arrived[part.group] = self.arrived.get(part.group, 0) + 1
            if self.arrived[part.group] == BLOCKS:
                self.whole_at[part.group] = self.link_s


def test_the_first_layer_takes_a_fraction_of_the_last(geometry: Geometry) -> None:
    rig = Rig(dram_blocks=16 * BLOCKS, nvme_blocks=40 * BLOCKS, hbm_blocks=1, hbm_is_shared=False)
    chain = rig.put_new("long", BLOCKS)
    rig.do(ev.DrainStarted(rig.call()))  # a copy of everything on nvme
    rig.settle()
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    rig.settle()
    assert [rig.where(name) for name in chain] == [{"nvme"}] * BLOCKS

    call = rig.acquire(chain, on_device=True, load_anyway=True)
    pipeline = Pipeline(rig)
    pipeline.take_copies()
    pipeline.run(call)

    assert rig.answer(call).last
    assert rig.answer(call).num_blocks == BLOCKS
    times = [pipeline.whole_at[group] for group in range(LAYERS)]
    assert times == sorted(times), "in layer order"
    assert times[0] <= times[-1] / 4, "the bar"
    assert times[0] <= times[-1] / LAYERS * 1.5, "nothing but the first layer was read before it was sent"
    alone_s = BLOCKS * geometry.block_bytes / DISK_BYTES_PER_S
    assert times[-1] <= alone_s * 1.01, "the link is hidden behind the disk, but for the last layer"
    assert rig.planner.check_integrity() == []
