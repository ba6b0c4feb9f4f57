"""Segments are emptied while the store still forgets others durably, a few at a time."""

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity import reclaim
from kvtier.appliance.core.capacity.reclaim import MAX_FREEING, SEGMENTS_A_FREEING

from ..rig import Rig, hashes
from .test_reclaim import BLOCK_BYTES, adopt, chain, forwarded_bytes, num_reclaimed


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


def test_what_a_segment_won_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: one of beginnings, all of it copied, that was forgotten while the next was emptied won what was
    still to be copied of that, and so the copies had no end."""
    monkeypatch.setattr(reclaim, "STEP_BLOCKS", 2)
    num_blocks, num_segments = 4, 2 * SEGMENTS_A_FREEING
    beginning = hashes("a", 24 * num_blocks)
    blocks = [(*one[:3], n // num_blocks) for n, one in enumerate(chain(beginning, b"", 0, 0))]
    for n in range(6):
        blocks += chain(hashes(f"e{n}", 2), beginning[-1], len(beginning), 24 + n // 2)
    rig = Rig(nvme_blocks=num_blocks, num_segments=num_segments)
    adopt(rig, blocks)
    rig.to_free = []
    for number in range(7 * num_blocks):
        rig.start_put(hashes(f"new {number}", 1))
        while rig.copies or rig.planner.is_busy:
            if rig.copies:
                rig.finish(rig.copies[0])
            else:
                rig.tick()
            if rig.to_free and rig.planner.reclaim.is_busy:  # the next is being emptied
                rig.do(ev.SegmentFreed(rig.to_free.pop(0)))
    assert num_reclaimed(rig) > num_segments // 4
    num_emptied = num_reclaimed(rig) + len(rig.to_free)  # of each a quarter is copied, whatever it is
    assert 4 * forwarded_bytes(rig) <= (num_segments + num_emptied) * num_blocks * BLOCK_BYTES
