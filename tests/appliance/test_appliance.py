"""Appliance.step with a planner that says what the test wrote down."""

import asyncio
import typing

import pytest

from kvtier.appliance.appliance import TURNS_TO_ANSWER
from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import (
    AwaitBlocks,
    BlockChange,
    Instruction,
    Notify,
    Publish,
    Reply,
    Retract,
    StopAwaiting,
)
from kvtier.appliance.core.results import AcquireResult, CountResult, PutResult, ReadyFragments
from kvtier.appliance.transfer.object_edge import Work
from kvtier.tiers.base import CopyOutcome
from kvtier.tiers.block import Tier

from .loops import SLOW_CALLBACK_S, run, turns
from .scripted import (
    LABEL,
    STAGING,
    Recorder,
    ScriptedPlanner,
    build,
    copy,
    released,
    until_told,
)


def test_every_instruction_is_executed_by_somebody() -> None:
    async def main() -> None:
        appliance = build(ScriptedPlanner(), Recorder())
        of_sources = {*typing.get_args(Work), AwaitBlocks, StopAwaiting}  # of a planner that has a source
        assert set(typing.get_args(Instruction)) == set(appliance._execute) | of_sources
        await appliance.stop()

    run(main())


def test_a_reply_in_the_same_step_needs_no_future() -> None:
    async def main() -> None:
        planner = ScriptedPlanner([Reply(1, CountResult(3))])
        appliance = build(planner, Recorder())
        assert appliance.ask(released) == CountResult(3)
        assert planner.told == [ev.ReleaseRequested(1, 1, [])]
        await appliance.stop()

    run(main())


def test_a_later_reply_completes_a_future() -> None:
    async def main() -> None:
        planner = ScriptedPlanner([], [Reply(1, CountResult(3)), Reply(9, CountResult(0))])
        appliance = build(planner, Recorder())
        answer = appliance.ask(released)
        assert isinstance(answer, asyncio.Future)
        assert not answer.done()
        appliance.step(ev.Tick())
        assert await answer == CountResult(3)
        assert appliance.counters["replies_to_nobody"] == 1
        await appliance.stop()

    run(main())


def test_instructions_run_in_order_and_their_effects_come_after_them() -> None:
    """A copy that ended at once is told to the planner only when its list of instructions is done."""

    async def main() -> None:
        recorder = Recorder()
        planner = ScriptedPlanner(
            [Retract(Tier.DRAM, [7]), copy(1, STAGING), Retract(Tier.DRAM, [8])],
            [Publish(Tier.DRAM, [7], [LABEL]), Reply(1, PutResult(b"\2"))],
        )
        appliance = build(planner, recorder)
        assert appliance.ask(released) == PutResult(b"\2"), "a short put is answered in one go"
        assert recorder.done == [("retract", 7), ("inline", 1), ("retract", 8), ("publish", 7)]
        assert isinstance(planner.told[1], ev.CopyFinished)
        assert planner.told[1].outcomes == [CopyOutcome(None, b"c" * 16)]
        await appliance.stop()

    run(main())


@pytest.mark.parametrize("is_another_first", [False, True])
def test_what_others_hear_of_a_landing_waits_for_its_answers(is_another_first: bool) -> None:
    """Until the loop has had some turns, until the next event, or until the end: never later, never lost."""

    async def main() -> None:
        recorder = Recorder()
        planner = ScriptedPlanner([copy(1, STAGING)], [Reply(1, PutResult(b"\2"))])
        planner.rest.append([Retract(Tier.DRAM, [9])])
        appliance = build(planner, recorder)
        heard: list[type] = []
        appliance.observers.append(lambda event, instructions, now: heard.append(type(event)))
        assert appliance.ask(released) == PutResult(b"\2")
        assert recorder.done == [("inline", 1)]
        if is_another_first:
            appliance.step(ev.Tick())
        else:
            await turns(TURNS_TO_ANSWER + 1)
        assert recorder.done == [("inline", 1), ("retract", 9)]
        assert heard[:3] == [ev.ReleaseRequested, ev.CopyFinished, ev.Tick], "each event is heard of once"
        planner.script += [[copy(2, STAGING)], []]
        planner.rest.append([Retract(Tier.DRAM, [5])])
        appliance.step(ev.Tick())
        await appliance.stop()
        assert recorder.done[-2:] == [("retract", 5), "close"], "carried out while there are tiers"

    run(main())


def test_a_planner_that_raised_is_not_asked_again() -> None:
    async def main() -> None:
        planner = ScriptedPlanner([Retract(Tier.NVME, [7])])  # there is no such tier here
        appliance = build(planner, Recorder())
        with pytest.raises(KeyError):
            appliance.step(ev.Tick())
        assert isinstance(appliance.failed.exception(), KeyError)
        appliance.step(ev.Tick())
        assert len(planner.told) == 1
        await appliance.stop()

    run(main())


def test_a_stream_ends_with_its_last_answer_or_with_a_refusal() -> None:
    def answer(number: int, *, last: bool) -> Reply:
        return Reply(1, AcquireResult(5, number, ReadyFragments(), last, 1.0))

    async def main() -> None:
        planner = ScriptedPlanner([answer(1, last=False)], [answer(2, last=False)], [answer(3, last=True)])
        appliance = build(planner, Recorder())
        replies = appliance.ask_many(
            lambda call: ev.AcquireRequested(call, 1, "", 1, []), lambda result: result.num_blocks
        )
        assert replies.take() == [1]
        assert not replies.ended
        collecting = asyncio.create_task(collect(replies.__aiter__()))
        await turns()
        appliance.step(ev.Tick())
        await turns()
        appliance.step(ev.Tick())
        assert await collecting == [2, 3]
        appliance.abandon(replies)  # too late to matter
        assert not any(isinstance(event, ev.AcquireAbandoned) for event in planner.told)
        await appliance.stop()

    async def collect(replies: typing.AsyncIterator[int]) -> list[int]:
        return [number async for number in replies]

    run(main())


def test_an_abandoned_stream_is_told_and_its_answers_dropped() -> None:
    async def main() -> None:
        planner = ScriptedPlanner([], [Reply(1, AcquireResult(5, 1, ReadyFragments(), True, 1.0))])
        appliance = build(planner, Recorder())
        replies = appliance.ask_many(lambda call: ev.AcquireRequested(call, 1, "", 1, []), lambda r: r)
        appliance.abandon(replies)
        appliance.abandon(replies)
        assert [event for event in planner.told if isinstance(event, ev.AcquireAbandoned)] == [
            ev.AcquireAbandoned(1)
        ]
        assert [answer async for answer in replies] == []
        await appliance.stop()

    run(main())


def test_the_planner_s_deadline_becomes_a_tick_in_time() -> None:
    async def main() -> None:
        planner = ScriptedPlanner()
        appliance = build(planner, Recorder())
        loop = asyncio.get_running_loop()
        planner.deadline = loop.time() + 60.0
        appliance.step(ev.ClientGone(1, "test"))
        planner.deadline = due = loop.time() + 0.02  # earlier than what is armed
        appliance.step(ev.ClientGone(1, "test"))
        await until_told(planner, ev.Tick)
        ticked_at = planner.times[[type(event) for event in planner.told].index(ev.Tick)]
        assert ticked_at >= due, "not before its time"
        planner.deadline = None
        await appliance.stop()

    run(main())


def test_what_a_step_left_over_is_done_while_a_drain_waits_for_the_end() -> None:
    """It looks in every turn of the loop, and must not set the due timer anew each time."""

    class LeftOver(ScriptedPlanner):
        def handle(self, event: ev.Event, now: float) -> list[Instruction]:
            self.is_busy, self.deadline = False, None
            return super().handle(event, now)

    async def main() -> None:
        planner = LeftOver()
        planner.is_busy, planner.deadline = True, 0.0
        appliance = build(planner, Recorder())
        async with asyncio.timeout(2 * SLOW_CALLBACK_S):
            await appliance.settled()
        assert planner.told == [ev.Tick()]
        await appliance.stop()

    run(main())


def test_a_deadline_that_moved_away_makes_no_tick() -> None:
    async def main() -> None:
        planner = ScriptedPlanner()
        appliance = build(planner, Recorder())
        loop = asyncio.get_running_loop()
        planner.deadline = loop.time() + 0.005
        appliance.step(ev.ClientGone(1, "test"))
        planner.deadline = loop.time() + 60.0
        await asyncio.sleep(0.02)
        assert not any(isinstance(event, ev.Tick) for event in planner.told)
        await appliance.stop()

    run(main())


def test_a_planner_that_raises_ends_the_daemon() -> None:
    class Broken(ScriptedPlanner):
        def handle(self, event: ev.Event, now: float) -> list[Instruction]:
            raise AssertionError("the books do not balance")

    async def main() -> None:
        appliance = build(Broken(), Recorder())
        with pytest.raises(AssertionError, match="balance"):
            appliance.step(ev.Tick())
        assert isinstance(appliance.failed.exception(), AssertionError)
        await appliance.stop()

    run(main())


def test_notices_become_events() -> None:
    async def main() -> None:
        planner = ScriptedPlanner([Notify(BlockChange.REMOVED, 1, Tier.DRAM, [b"p" * 32], "evicted")])
        appliance = build(planner, Recorder())
        appliance.step(ev.Tick())
        [event] = appliance.events.after(0)
        assert (event.change, event.reason) == (BlockChange.REMOVED, "evicted")
        assert appliance.check_integrity() == []
        await appliance.stop()

    run(main())
