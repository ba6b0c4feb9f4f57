"""Segments are emptied while the store still forgets others durably, a few at a time."""

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity.reclaim import MAX_FREEING, SEGMENTS_A_FREEING

from ..rig import Rig


@pytest.mark.parametrize("num_segments", [4, 3 * SEGMENTS_A_FREEING])
def test_the_next_segment_is_emptied_while_others_are_forgotten(num_segments: int) -> None:
    rig = Rig(dram_blocks=2, nvme_blocks=1, num_segments=num_segments)
    for number in range(num_segments):  # until nvme is full
        rig.cool_new(f"{number}", 1)
    rig.to_free = []
    for number in range(2 * MAX_FREEING):
        rig.start_put([f"{number}".encode() * 32])
        rig.settle()
    expected = min(MAX_FREEING, max(1, num_segments // SEGMENTS_A_FREEING))
    assert len(rig.to_free) == expected
    while rig.to_free:
        rig.do(ev.SegmentFreed(rig.to_free.pop()))  # in any order
        rig.settle()
    assert rig.planner.story.counters["segments_reclaimed"] >= 2 * expected
