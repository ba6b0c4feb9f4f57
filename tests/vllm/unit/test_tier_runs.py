"""How a job of vLLM (keys in any order, of any group, with holes) becomes chains."""

import random

import pytest

from kvtier.clients.vllm_tier.runs import (
    Run,
    group_of,
    hash_of,
    in_order_of_asking,
    is_usable,
    runs_of,
    session_of,
)

TOKENS = {0: 32, 1: 16}


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def position(one: bytes) -> int:
    """Chunk n of a request ends at (n + 1) chunks."""
    return (int.from_bytes(hash_of(one), "big") + 1) * TOKENS[group_of(one)]


def test_keys_are_a_hash_and_a_group() -> None:
    assert hash_of(key(7, 3)) == (7).to_bytes(32, "big")
    assert group_of(key(7, 3)) == 3
    assert is_usable(key(7))
    assert not is_usable(b"xxhash, 16 bytes" + bytes(4))  # neither long enough nor safe


def test_a_shuffled_chain_is_one_run_with_its_rows() -> None:
    numbers = list(range(5, 12))
    random.Random(3).shuffle(numbers)
    runs = runs_of([key(n) for n in numbers], [100 + n for n in numbers], position, TOKENS)
    assert runs == [Run(0, tuple(key(n) for n in range(5, 12)), tuple(range(105, 112)))]


def test_holes_and_groups_cut() -> None:
    keys = [key(n) for n in (0, 1, 4, 5, 9)] + [key(n, 1) for n in (2, 3)]
    runs = runs_of(reversed(keys), range(6, -1, -1), position, TOKENS)
    assert [(run.group, [int.from_bytes(h, "big") for h in run.hashes], run.rows) for run in runs] == [
        (0, [0, 1], (0, 1)),
        (0, [4, 5], (2, 3)),
        (0, [9], (4,)),
        (1, [2, 3], (5, 6)),
    ]


def test_the_parent_is_what_ends_where_the_run_begins() -> None:
    asked: list[tuple[int, int]] = []

    def before(group: int, end: int) -> bytes:
        asked.append((group, end))
        return b"p" * 32

    runs = runs_of([key(0), key(3), key(2, 1)], [0, 1, 2], position, TOKENS, before)
    assert [run.parent for run in runs] == [b"", b"p" * 32, b"p" * 32]  # nothing is before the start
    assert asked == [(0, 96), (1, 32)]


@pytest.mark.parametrize("known", [None, 0])
def test_without_positions_every_chunk_is_alone(known: int | None) -> None:
    runs = runs_of([key(1), key(2)], [0, 1], lambda _: known, TOKENS, lambda *_: b"p" * 32)
    assert sorted(run.keys for run in runs) == [(key(1),), (key(2),)]
    assert {run.parent for run in runs} == {b""}


def test_a_partial_tail_ends_between_chunks() -> None:
    ends = {key(0): 32, key(1): 64, key(2): 80}
    runs = runs_of(ends, range(3), ends.get, TOKENS)
    assert [len(run.keys) for run in runs] == [2, 1]


def test_every_key_is_in_exactly_one_run_whatever_the_job() -> None:
    chance = random.Random(11)
    for _ in range(200):
        keys = [key(n, g) for g in TOKENS for n in chance.sample(range(30), chance.randrange(20))]
        chance.shuffle(keys)
        unknown = set(chance.sample(keys, min(len(keys), 3)))
        runs = runs_of(keys, range(len(keys)), lambda k: None if k in unknown else position(k), TOKENS)  # noqa: B023
        pairs = [pair for run in runs for pair in zip(run.keys, run.rows, strict=True)]
        assert sorted(pairs) == sorted(zip(keys, range(len(keys)), strict=True))
        for run in runs:
            ends = [position(k) for k in run.keys]
            assert ends == list(range(ends[0], ends[-1] + 1, TOKENS[run.group]))


def test_lookups_keep_the_order_of_asking_per_group() -> None:
    asked = [key(5), key(2, 1), key(4), key(1, 1)]
    assert in_order_of_asking(asked) == {0: [key(5), key(4)], 1: [key(2, 1), key(1, 1)]}


@pytest.mark.parametrize(
    ("params", "session"), [(None, ""), ({}, ""), ({"kvtier_session": 5}, ""), ({"kvtier_session": "a"}, "a")]
)
def test_sessions_are_named_by_requests(params: dict[str, object] | None, session: str) -> None:
    assert session_of(params) == session
