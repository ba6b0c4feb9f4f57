"""What listeners are told of blocks, by where each rank has them."""

from array import array

from kvtier.clients.vllm.scheduler.announcer import (
    Announced,
    Announcer,
    Block,
    EventFields,
    Key,
    by_place,
    runs,
)

NAMES = [bytes([i]) * 32 for i in range(8)]


def block(i: int, group: int = 0) -> Block:
    fields = EventFields(array("I", [i]))
    return Block(Key(("", b""), group, NAMES[i]), NAMES[i - 1] if i else b"", fields)


def place(announcer: Announcer, i: int, *mediums: str, group: int = 0) -> None:
    for rank, medium in enumerate(mediums):
        announcer.place(block(i, group).key, rank, medium)


def said(changes: Announced) -> dict[str, list[tuple[int, str]]]:
    """Return what there is to say, by kind: the block's number and the medium."""
    kinds = {"dropped": changes.dropped, "stored": changes.stored, "removed": changes.removed}
    return {
        kind: [(b.fields.tokens[0], medium) for b, medium in told] for kind, told in kinds.items() if told
    }


def test_a_block_counts_where_every_rank_has_it_and_as_its_slowest_part() -> None:
    announcer = Announcer(2)
    announcer.add([block(0)])
    assert said(announcer.take()) == {}
    place(announcer, 0, "CPU", "")
    assert said(announcer.take()) == {}
    place(announcer, 0, "CPU", "CPU")
    assert said(announcer.take()) == {"stored": [(0, "CPU")]}
    place(announcer, 0, "CPU", "STORAGE")
    assert said(announcer.take()) == {"stored": [(0, "STORAGE")], "removed": [(0, "CPU")]}
    place(announcer, 0, "STORAGE", "CPU")
    assert said(announcer.take()) == {}
    place(announcer, 0, "", "CPU")
    assert said(announcer.take()) == {"removed": [(0, "STORAGE")]}


def test_what_came_and_went_between_two_steps_is_not_told() -> None:
    announcer = Announcer(1)
    announcer.add([block(0)])
    place(announcer, 0, "CPU")
    place(announcer, 0, "")
    assert said(announcer.take()) == {}
    place(announcer, 1, "CPU")  # never added: of another engine
    assert said(announcer.take()) == {}


def test_the_oldest_is_taken_back_when_there_are_too_many() -> None:
    announcer = Announcer(1, max_blocks=2)
    announcer.add([block(0), block(1)])
    place(announcer, 0, "CPU")
    place(announcer, 1, "CPU")
    announcer.take()
    announcer.add([block(0)])  # used again: 1 is the oldest now
    announcer.add([block(2)])
    assert said(announcer.take()) == {"dropped": [(1, "CPU")]}
    assert announcer.unknown([block(i).key for i in range(3)]) == [1]
    announcer.clear()
    assert said(announcer.take()) == {"dropped": [(0, "CPU")]}


def test_nothing_is_announced_while_nothing_is_known() -> None:
    announcer = Announcer(1)
    announcer.add([block(0), block(1)])
    place(announcer, 0, "CPU")
    announcer.take()
    assert announcer.forget_places() == [block(0).key, block(1).key]
    assert said(announcer.take()) == {"removed": [(0, "CPU")]}
    place(announcer, 0, "STORAGE")
    assert said(announcer.take()) == {"stored": [(0, "STORAGE")]}


def test_events_are_of_blocks_that_continue_one_another() -> None:
    told = [
        (block(0), "CPU"),
        (block(1), "CPU"),
        (block(2), "STORAGE"),
        (block(4), "STORAGE"),
        (block(5, 1), "CPU"),
    ]
    assert [(medium, [b.fields.tokens[0] for b in run]) for medium, run in runs(told)] == [
        ("CPU", [0, 1]),
        ("STORAGE", [2]),
        ("STORAGE", [4]),
        ("CPU", [5]),
    ]
    assert by_place(told) == {
        (0, "CPU"): NAMES[:2],
        (0, "STORAGE"): [NAMES[2], NAMES[4]],
        (1, "CPU"): [NAMES[5]],
    }
    assert list(runs([])) == []
