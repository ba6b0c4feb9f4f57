"""Reclaim: what leaves the cold store with a segment, what is copied forward, and in what steps."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity import reclaim
from kvtier.tiers.block import NamespaceIdentity, Tier
from kvtier.tiers.cold.recovery import RECORD, RecoveredStore, SegmentSummary
from kvtier.v1.shm import place_of
from tests.records import columns

from ..rig import GEOMETRY, RECORD_BYTES, STORED, Rig, hashes

#: Name, name of the parent (or b""), position, segment.
Block = tuple[bytes, bytes, int, int]
BLOCK_BYTES = GEOMETRY.num_groups * RECORD_BYTES


def adopt(rig: Rig, blocks: Sequence[Block]) -> None:
    """Let the planner of a rig find these blocks in its cold store."""
    rows: list[tuple[object, ...]] = []
    num_pages: Counter[int] = Counter()
    for name, parent, position, segment in blocks:
        for group in range(GEOMETRY.num_groups):
            length = GEOMETRY.fragment_bytes[group]
            place = place_of(segment, num_pages[segment])
            num_pages[segment] += RECORD_BYTES // 4096
            above = parent or b"\0" * 32
            rows.append(
                (0, name, above, position > 0, position, group, place, length, length, b"\7" * 16, 0, False)
            )
    segments = [
        SegmentSummary(number, pages, pages * 4096 // RECORD_BYTES, pages * 4096)
        for number, pages in sorted(num_pages.items())
    ]
    found = RecoveredStore(
        [NamespaceIdentity(b"m" * 16, GEOMETRY)], columns(np.array(rows, RECORD)), segments, Counter()
    )
    rig.planner.adopt(found, 0.0)


def chain(names: Sequence[bytes], parent: bytes, position: int, segment: int) -> list[Block]:
    """Return blocks that continue `parent`, one after the other, in a segment."""
    parents = [parent, *names[:-1]]
    return [
        (name, above, position + n, segment)
        for n, (name, above) in enumerate(zip(names, parents, strict=True))
    ]


def num_reclaimed(rig: Rig) -> int:
    return int(rig.planner.story.counters.get("segments_reclaimed", 0))


def put_until_reclaimed(rig: Rig, num_segments: int = 1) -> None:
    """Put blocks of other prompts until so many segments were reclaimed."""
    number = 0
    while num_reclaimed(rig) < num_segments:
        assert rig.put(hashes(f"new {number}", 1)) == [STORED]
        rig.tick(1.0)
        rig.settle()
        number += 1
        assert number < 200, "reclaim frees no room"


def forwarded_bytes(rig: Rig) -> int:
    """Return the bytes of records that were copied forward."""
    copies = [one for one in rig.started if one.source is Tier.NVME is one.target]
    return sum(len(one.items) for one in copies) * RECORD_BYTES


def test_what_several_chains_begin_with_outlives_the_reclaim_of_its_segment() -> None:
    """Before: it had no use since the start, and went with all that continued it, in whatever segment."""
    beginning = hashes("a", 2)
    blocks = chain(beginning, b"", 0, 0)
    blocks += [(hashes(f"e{number}", 1)[0], beginning[1], 2, 1) for number in range(6)]
    rig = Rig(nvme_blocks=8, num_segments=4)
    adopt(rig, blocks)
    put_until_reclaimed(rig)
    assert rig.found(beginning) == 2


@pytest.mark.parametrize("num_blocks", [6, 8])
def test_a_beginning_larger_than_the_budget_outlives_the_reclaim_of_its_segment(num_blocks: int) -> None:
    """Before: a quarter of a segment was copied forward, two blocks; the rest took 24 others along."""
    beginning, ends = hashes("a", num_blocks), [hashes(f"e{number}", 4) for number in range(6)]
    blocks = chain(beginning, b"", 0, 0)
    for number, end in enumerate(ends):
        blocks += chain(end, beginning[-1], num_blocks, 1 + number // 2)
    rig = Rig(nvme_blocks=8, num_segments=8)
    adopt(rig, blocks)
    put_until_reclaimed(rig)
    assert rig.found(beginning) == num_blocks
    assert [rig.found([*beginning, *end]) for end in ends[2:]] == [num_blocks + 4] * 4
    assert forwarded_bytes(rig) == num_blocks * BLOCK_BYTES


@pytest.mark.parametrize(("num_chains", "num_left"), [(1, 2), (2, 2)])
def test_what_one_chain_continues_or_little_hangs_on_is_copied_within_the_budget(
    num_chains: int, num_left: int
) -> None:
    """One chain of 20 blocks, or two of four: nothing beyond a quarter of the segment is copied."""
    beginning, length = hashes("a", 6), 20 // num_chains if num_chains == 1 else 4
    blocks = chain(beginning, b"", 0, 0)
    for number in range(num_chains):
        blocks += chain(hashes(f"e{number}", length), beginning[-1], 6, 1 + number)
    rig = Rig(nvme_blocks=24, num_segments=8, max_forward_fraction=2 / 24)
    adopt(rig, blocks)
    for name in beginning:  # used again
        rig.planner.catalog.num_uses[rig.planner.catalog.find(rig.namespace_id, name)] = 1
    put_until_reclaimed(rig)
    assert rig.found(beginning) == num_left


def large_chain(monkeypatch: pytest.MonkeyPatch) -> tuple[Rig, list[bytes]]:
    """Return a rig with a chain of 40 blocks in five segments; the first is reclaimed with the next event,
    eight blocks looked at in a step."""
    monkeypatch.setattr(reclaim, "STEP_BLOCKS", 8)
    rig, names = Rig(nvme_blocks=8, num_segments=8, min_free_segments=4), hashes("a", 40)
    parents = [b"", *names]
    adopt(rig, [(name, parents[n], n, n // 8) for n, name in enumerate(names)])
    return rig, names


def test_a_subtree_is_dropped_a_few_blocks_at_a_time_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: all of it in one step. What is left can be read from its start in between."""
    rig, names = large_chain(monkeypatch)
    counts = [rig.found(names)]
    while counts[-1]:
        assert not counts[1:] or rig.planner.is_busy, "the next step is due at once"
        rig.tick()
        counts.append(rig.found(names))
    assert counts[0] == 40
    assert {before - after for before, after in pairwise(counts)} <= set(range(5))
    assert not forwarded_bytes(rig)


def test_nothing_is_due_while_the_store_is_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, names = large_chain(monkeypatch)
    while rig.found(names) > 30:
        rig.tick()
    rig.do(ev.TierLost(Tier.NVME, True, "test"))
    assert not rig.planner.is_busy
    rig.do(ev.TierLost(Tier.NVME, False, "test"))
    assert rig.planner.is_busy


def test_a_block_that_is_put_while_its_subtree_is_dropped_keeps_what_it_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, names = large_chain(monkeypatch)
    while rig.found(names) > 30:
        rig.tick()
    num_left = rig.found(names)
    assert rig.put(names[num_left : num_left + 1], parent=names[num_left - 1]) == [STORED]
    while rig.planner.is_busy or rig.copies:
        rig.tick()
        rig.settle()
    assert rig.found(names) == num_left + 1


def test_a_block_that_is_read_while_its_subtree_is_dropped_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, names = large_chain(monkeypatch)
    while rig.found(names) > 30:
        rig.tick()
    call = rig.acquire(names[:4])
    while rig.planner.is_busy or rig.copies:
        rig.tick()
        rig.settle()
    assert rig.answer(call).num_blocks == 4
    assert rig.found(names) >= 4


def random_tree(rng: Random, num_segments: int, num_blocks: int) -> list[Block]:
    """Return blocks of a random tree that fill segments in the order in which they were put."""
    blocks: list[Block] = []
    is_deep = rng.random()
    while len(blocks) < num_segments * num_blocks:
        name = rng.randbytes(32)
        segment = len(blocks) // num_blocks
        if not blocks or rng.random() < 0.05:
            blocks.append((name, b"", 0, segment))
            continue
        parent = blocks[-1] if rng.random() < is_deep else rng.choice(blocks)
        blocks.append((name, parent[0], parent[2] + 1, segment))
    return blocks


@pytest.mark.parametrize("seed", range(12))
def test_reclaim_always_frees_room(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tree: each put finds room, and each byte that beginnings take frees another."""
    rng = Random(seed)
    monkeypatch.setattr(reclaim, "STEP_BLOCKS", rng.choice([2, 5, 256]))
    num_blocks, num_segments = rng.choice([4, 8]), rng.choice([4, 6, 8])
    rig = Rig(nvme_blocks=num_blocks, num_segments=num_segments)
    tree = random_tree(rng, num_segments - 2, num_blocks)
    adopt(rig, tree)
    catalog = rig.planner.catalog
    for name, *_ in reversed(tree):  # what continues a block is used with it
        row = catalog.find(rig.namespace_id, name)
        used = [(catalog.num_uses[child], catalog.last_used[child]) for child in catalog.children(row)]
        used.append((rng.choice([0, 1, 5]), rng.choice([0.0, rng.random()])))
        catalog.num_uses[row], catalog.last_used[row] = map(max, zip(*used, strict=True))
    segment_bytes = num_blocks * BLOCK_BYTES
    most_bytes = num_segments * segment_bytes / 4
    num_in_a_row = before = 0
    for number in range(3 * num_segments * num_blocks):
        num_copied = forwarded_bytes(rig)
        assert rig.put(hashes(f"new {number}", 1)) == [STORED]
        while rig.planner.is_busy or rig.copies:
            rig.settle()
            rig.tick()
        num_in_a_row = num_reclaimed(rig) - before
        before += num_in_a_row
        assert num_in_a_row <= 1 + num_segments // 2
        assert forwarded_bytes(rig) - num_copied <= most_bytes + segment_bytes
        assert 2 * forwarded_bytes(rig) <= most_bytes + 1.25 * before * segment_bytes + segment_bytes
    assert before > num_segments
    assert "nvme_full" not in rig.planner.story.counters
