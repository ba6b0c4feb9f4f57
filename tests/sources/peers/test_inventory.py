"""What is remembered of another host is what it said last, whatever the order of changes and merges."""

import hashlib
import random

import pytest

from kvtier.sources.peers import inventory
from kvtier.sources.peers.inventory import HostInventory, NameSet, short_names, unpack_names

DIGEST = b"d" * 32


def name(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "big")).digest()


@pytest.mark.parametrize("seed", range(20))
def test_a_set_is_what_was_added_and_not_removed(seed: int) -> None:
    rng, names, truth = random.Random(seed), NameSet(), set[int]()
    merging = None
    for _ in range(200):
        chosen = rng.sample(range(300), rng.randrange(1, 20))
        is_there = rng.random() < 0.6
        names.change(short_names(map(name, chosen)), is_there)
        truth = truth | set(chosen) if is_there else truth - set(chosen)
        if merging is not None and rng.random() < 0.5:
            names.adopt(*merging)  # changes came meanwhile
            merging = None
        elif merging is None and rng.random() < 0.3:
            merging = names.merged()
        asked = rng.sample(range(300), 40)
        found = names.has(unpack_names(short_names(map(name, asked))))
        assert found == [number in truth for number in asked]


def test_a_prefix_ends_at_the_first_block_that_is_not_there() -> None:
    held, chain = HostInventory(), [name(number) for number in range(10)]
    assert held.prefix(DIGEST, chain) == 0
    held.change(DIGEST, short_names(chain[:4] + chain[5:]), b"")
    assert held.prefix(DIGEST, chain) == 4
    assert held.prefix(b"e" * 32, chain) == 0
    assert held.prefix(DIGEST, chain) < len(chain)
    assert held.prefix(DIGEST, chain[5:]) == len(chain[5:])
    assert held.prefix(DIGEST, []) == 0
    held.change(DIGEST, b"", short_names(chain[:1]))
    assert held.prefix(DIGEST, chain) == 0


def test_what_is_beyond_the_bound_is_not_remembered() -> None:
    held = HostInventory(max_names=5)
    held.change(DIGEST, short_names(name(number) for number in range(8)), b"")
    assert (len(held), held.num_refused) == (5, 3)
    assert held.prefix(DIGEST, [name(number) for number in range(8)]) == 5


def test_blocks_on_disk_are_counted_as_they_were_told_last() -> None:
    held, chain = HostInventory(), [name(number) for number in range(6)]
    held.change(DIGEST, short_names(chain), b"", short_names([*chain[3:], name(99)]))
    assert (held.prefix(DIGEST, chain), held.num_on_disk(DIGEST, chain)) == (6, 3)
    held.change(DIGEST, short_names(chain[3:4]), b"")  # loaded
    held.change(DIGEST, b"", short_names(chain[5:]))
    assert (held.prefix(DIGEST, chain), held.num_on_disk(DIGEST, chain[:5])) == (5, 1)
    held.change(DIGEST, short_names(chain[5:]), b"")  # put again, into memory
    assert (held.prefix(DIGEST, chain), held.num_on_disk(DIGEST, chain)) == (6, 1)
    assert held.num_on_disk(DIGEST, []) == held.num_on_disk(b"e" * 32, chain) == 0
    assert not held.prefix(DIGEST, [name(99)])


def test_bytes_behind_the_last_whole_name_are_nothing() -> None:
    held = HostInventory()
    held.change(DIGEST, short_names([name(1)]) + b"abc", b"xyz")
    assert held.prefix(DIGEST, [name(1)]) == 1


def test_many_changes_are_merged_into_eight_bytes_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "MERGE_NAMES", 64)
    held = HostInventory()
    assert held.change(DIGEST, short_names(name(number) for number in range(63)), b"") == []
    (names,) = held.change(DIGEST, short_names([name(63)]), b"")
    merged, changes = names.merged()
    assert (merged.nbytes, len(changes)) == (64 * 8, 64)
    names.adopt(merged, changes)
    assert not names.is_to_be_merged
    assert held.prefix(DIGEST, [name(number) for number in range(65)]) == 64
