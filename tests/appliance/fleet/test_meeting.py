"""A directory adds hosts and loses none that is there: whatever happens to it, known hosts stay known."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from kvtier.appliance.fleet import meeting
from kvtier.appliance.fleet.meeting import KnownLives, Meeting, own_address
from kvtier.sources.directories.records import TTL_S, HostRecord, refusal_of

from ...fakes.directories import FakeDirectory, Shelf
from ..loops import run

OWN = HostRecord(1, "", "own")
OTHER = HostRecord(2, "10.0.0.2:7070", "other")


def test_a_host_that_is_named_no_more_is_known_for_a_while() -> None:
    lives = KnownLives()
    lives.meet([OTHER, OWN], OWN.epoch, 100.0)
    assert lives.records == {2: OTHER}
    lives.meet([], OWN.epoch, 100.0 + TTL_S - 0.1)
    assert lives.records == {2: OTHER}
    lives.meet([OTHER], OWN.epoch, 105.0 + TTL_S)
    assert lives.records == {2: OTHER}
    lives.meet([], OWN.epoch, 105.0 + 2 * TTL_S)
    assert lives.records == {}


def test_known_hosts_are_not_pushed_out_by_more_than_can_be_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "MAX_RECORDS", 4)
    lives = KnownLives()
    lives.meet([OTHER], OWN.epoch, 0.0)
    lives.meet([HostRecord(number, f"h{number}:1") for number in range(3, 60)] + [OTHER], OWN.epoch, 1.0)
    assert len(lives.records) == 4
    assert OTHER in lives.records.values()


def test_two_lives_at_one_address_are_told_apart() -> None:
    lives = KnownLives()
    twin = HostRecord(3, OTHER.address, "twin")
    lives.meet([OTHER, twin], OWN.epoch, 0.0)
    assert lives.twins() == {OTHER.address: [OTHER, twin]}


class Scene:
    """A meeting over a shelf, and what it tells."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.told: asyncio.Queue[Mapping[int, HostRecord]] = asyncio.Queue()
        self.met: asyncio.Queue[bool] = asyncio.Queue()
        self.meeting = Meeting(FakeDirectory(self.shelf), OWN, lambda: "10.0.0.1:7070", self.told.put_nowait)
        self.meeting.met = self.met.put_nowait

    def enter(self, record: HostRecord) -> None:
        """Let another host enter itself."""
        self.shelf.records[record.epoch] = record, 1e12

    async def again(self) -> bool:
        """Meet once more."""
        self.meeting.hurry()
        return await self.met.get()


def scene(main: Any) -> None:
    """Run `main` with a scene whose meeting runs."""

    async def running() -> None:
        one = Scene()
        task = asyncio.create_task(one.meeting.run())
        try:
            async with asyncio.timeout(60):
                await main(one)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await one.meeting.stop()
            assert OWN.epoch not in one.shelf.records

    run(running())


def test_who_is_known_stays_when_the_directory_is_lost_or_flushed() -> None:
    async def main(one: Scene) -> None:
        assert await one.met.get()
        one.enter(OTHER)
        assert not await one.again()
        assert await one.told.get() == {2: OTHER}
        one.shelf.is_down = True
        lost = asyncio.Event()
        one.meeting.lost = lost.set
        one.meeting.hurry()
        await lost.wait()
        one.shelf.is_down = False
        one.shelf.records.clear()
        assert await one.met.get()  # after a try that finds it again by itself
        assert one.meeting.lives.records == {2: OTHER}
        assert one.meeting.counters["directory_failed"] >= 1
        assert one.meeting.counters["directory_entered_again"] == 1
        assert one.shelf.records[OWN.epoch][0].address == "10.0.0.1:7070"
        assert one.told.empty()

    scene(main)


@pytest.mark.parametrize(
    ("listen", "found"),
    [
        ("10.0.0.1:7070", "10.0.0.1:7070"),
        ("0.0.0.0:7070", "127.0.0.1:7070"),
        ("[::]:7070", "127.0.0.1:7070"),
    ],
)
@pytest.mark.parametrize("name", ["no-such-host.invalid", "255.255.255.255"])
def test_the_own_address_is_the_one_that_others_reach(listen: str, found: str, name: str) -> None:
    """Before: a host entered itself nowhere while the first node of the directory had no name or route."""
    away, there = (name, 2379), ("127.0.0.1", 6379)
    assert own_address(listen, [away, there]) == own_address(listen, [there, away]) == found


def test_hosts_that_share_no_protocol_are_refused_with_words() -> None:
    assert refusal_of(1, 1) == refusal_of(9, 1) == ""
    assert "upgrade this host" in refusal_of(9, 2)
    assert "upgrade it" in refusal_of(0, 0)


def test_an_unexpected_error_is_tried_again_as_a_directory_that_does_not_answer() -> None:
    """Before: it ended the task, and the host was in the directory no more."""

    async def main(one: Scene) -> None:
        assert await one.met.get()
        changed, lost = one.meeting._changed, asyncio.Event()

        def fails_once(lives: Mapping[int, HostRecord]) -> None:
            one.meeting._changed = changed
            raise KeyError("of the client")

        one.meeting._changed, one.meeting.lost = fails_once, lost.set
        one.enter(OTHER)
        one.meeting.hurry()
        await lost.wait()
        assert one.meeting.problem == "KeyError('of the client')"
        assert not await one.again()
        assert await one.told.get() == {2: OTHER}
        assert one.meeting.counters["directory_failed"] == 1

    scene(main)
