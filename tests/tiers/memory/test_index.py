"""The shared index against a model and against the reference reader."""

import random
from collections import Counter

import pytest

from kvtier.tiers.memory.index import Indexes, IndexWriter, log2_entries_for
from kvtier.tiers.memory.memfd import SharedMemoryError
from kvtier.v1.shm import MAX_PROBES
from tests.tiers.memory.reader import Reader


@pytest.mark.parametrize("seed", range(6))
def test_against_a_model(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    index = IndexWriter(6, epoch=seed)
    reader = Reader(index.descriptor, {}, 0)
    assert reader.epoch == seed
    held: Counter[tuple[int, int]] = Counter()
    refused: set[tuple[int, int]] = set()
    # Few tags that meet at few positions, near full: tombstones, wrap-around and refusals all occur.
    tags = [rng.choice([60, 62, 63]) + (rng.randrange(1 << 40) << 6) for _ in range(20)]
    for _ in range(800):
        entry = (rng.choice(tags), rng.randrange(4))
        if held[entry] and rng.random() < 0.6:
            assert index.remove(*entry)
            held[entry] -= 1
        elif not held[entry] and index.insert(*entry):
            held[entry] += 1
        elif not held[entry]:
            refused.add(entry)
            assert not index.remove(*entry)
        assert index.check_integrity() == []
        tag = entry[0]
        assert sorted(reader.places(tag)) == sorted(p for (t, p), n in held.items() if n and t == tag)
    assert index.num_dropped >= len(refused) > 0
    for entry, count in held.items():
        assert index.remove(*entry) == bool(count)
    assert index.num_entries == 0
    index.close()
    index.close()


def test_no_room_is_counted_not_an_error() -> None:
    index = IndexWriter(10, epoch=1)
    entered = [index.insert(2 + (n << 10), n) for n in range(MAX_PROBES + 3)]
    assert entered == [True] * MAX_PROBES + [False] * 3
    assert index.num_dropped == 3
    assert not index.remove(2 + (MAX_PROBES << 10), MAX_PROBES)
    assert index.remove(2, 0)
    assert index.insert(2 + (MAX_PROBES << 10), MAX_PROBES), "a tombstone is room"
    assert index.check_integrity() == []
    index.close()


def test_one_tag_in_two_tiers() -> None:
    index = IndexWriter(10, epoch=1)
    assert index.insert(77, 1)
    assert index.insert(77, 2)
    assert Reader(index.descriptor, {}, 0).places(77) == [1, 2]
    assert index.remove(77, 1)
    assert Reader(index.descriptor, {}, 0).places(77) == [2]
    index.close()


def test_tombstones_do_not_pile_up() -> None:
    index = IndexWriter(10, epoch=1)
    rng = random.Random(1)
    for _ in range(20_000):
        tag = rng.randrange(2, 1 << 64)
        assert index.insert(tag, 1)
        assert index.remove(tag, 1)
    assert index.num_tombstones == 0
    index.close()


def test_audit_finds_what_is_wrong() -> None:
    index = IndexWriter(10, epoch=1)
    assert index.insert(5, 1)
    index.num_entries = 2
    assert index.check_integrity() != []
    index.num_entries = 1
    index._words[5 * 2] = 900  # an entry where nobody looks for it
    assert index.check_integrity() != []
    index.close()


def test_half_load_drops_nothing() -> None:
    num_places = 4000
    index = IndexWriter(log2_entries_for(num_places), epoch=1)
    rng = random.Random(3)
    assert all(index.insert(rng.randrange(2, 1 << 64), n) for n in range(num_places))
    index.close()


def test_domains_have_indexes_of_their_own_up_to_a_limit() -> None:
    indexes = Indexes(100, epoch=3, max_domains=2)
    assert indexes.of(1) is indexes.of(1)
    assert indexes.of(1) is not indexes.of(2)
    with pytest.raises(SharedMemoryError, match="2 isolation domains"):
        indexes.of(3)
    assert indexes.check_integrity() == []
    indexes.close()
