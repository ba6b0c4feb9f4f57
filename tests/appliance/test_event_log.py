"""The ring of block events, and what its watchers see."""

import asyncio
import contextlib

import pytest

from kvtier.appliance import event_log
from kvtier.appliance.core.instructions import BlockChange, Notify
from kvtier.appliance.event_log import BlockEvent, EventLog
from kvtier.tiers.block import Tier

from .loops import run, turns


def notice(number: int) -> Notify:
    return Notify(BlockChange.STORED, 1, Tier.DRAM, [number.to_bytes(32, "big")], "")


def filled(capacity: int, num_events: int) -> EventLog:
    events = EventLog(capacity)
    for number in range(1, num_events + 1):
        events.append(notice(number))
    assert events.check_integrity() == []
    return events


def sequences(found: list[BlockEvent]) -> list[int]:
    return [event.sequence for event in found]


def test_what_is_remembered() -> None:
    events = filled(capacity=4, num_events=10)
    assert sequences(events.after(0)) == [7, 8, 9, 10]
    assert sequences(events.after(8)) == [9, 10]
    assert sequences(events.after(3)) == [7, 8, 9, 10], "a gap: the first is later than asked for"
    assert events.after(10) == []
    assert events.after(99) == []


def test_names_are_bounded_as_well_as_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of thousands of blocks counts as that many: 65,536 of those were 10 GB."""
    monkeypatch.setattr(event_log, "MAX_BLOCK_NAMES", 10)
    events = EventLog(100)
    chains = [[bytes([number, block] * 16) for block in range(4)] for number in range(5)]
    for chain in chains:
        events.append(Notify(BlockChange.STORED, 1, Tier.DRAM, chain, ""))
    assert [list(event.prefix_hashes) for event in events.after(0)] == chains[3:]
    assert sequences(events.after(0)) == [4, 5]
    events.append(Notify(BlockChange.STORED, 1, Tier.DRAM, [name for chain in chains for name in chain], ""))
    assert sequences(events.after(0)) == [6], "the last one, however large"
    assert events.check_integrity() == []


def test_a_watcher_sees_the_past_it_asked_for_and_then_the_present() -> None:
    async def main() -> None:
        events = filled(capacity=10, num_events=3)
        seen: list[int] = []

        async def watch(after: int) -> None:
            async for event in events.watch(after):
                seen.append(event.sequence)

        watching = asyncio.create_task(watch(1))
        await turns()
        assert seen == [2, 3]
        events.append(notice(4))
        events.append(notice(5))
        await turns()
        assert seen == [2, 3, 4, 5]
        assert events.num_watchers == 1
        events.close()
        await watching
        assert events.num_watchers == 0

    run(main())


def test_only_new_ones_unless_asked() -> None:
    async def main() -> None:
        events = filled(capacity=10, num_events=3)
        watching = events.watch(0)
        first = asyncio.ensure_future(anext(watching))
        await turns()
        events.append(notice(4))
        assert (await first).sequence == 4
        await watching.aclose()

    run(main())


def test_a_slow_watcher_finds_a_gap_and_costs_nothing() -> None:
    async def main() -> None:
        events = filled(capacity=3, num_events=1)
        watching = events.watch(0)
        first = asyncio.ensure_future(anext(watching))
        await turns()
        for number in range(2, 20):
            events.append(notice(number))
        assert (await first).sequence == 17, "2 to 16 are forgotten"
        assert (await anext(watching)).sequence == 18
        await watching.aclose()

    run(main())


def test_a_number_from_an_earlier_life_starts_anew() -> None:
    async def main() -> None:
        events = filled(capacity=10, num_events=3)
        watching = events.watch(5000)
        assert (await anext(watching)).sequence == 1
        await watching.aclose()

    run(main())


def test_a_cancelled_watcher_is_forgotten() -> None:
    async def main() -> None:
        events = filled(capacity=3, num_events=1)
        watching = events.watch(0)
        task = asyncio.ensure_future(anext(watching))
        await turns()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert events.num_watchers == 0

    run(main())
