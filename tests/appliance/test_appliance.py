"""Appliance.step with a planner that says what the test wrote down."""

import asyncio
import threading
import typing
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest

from kvtier.appliance.appliance import TURNS_TO_ANSWER, Appliance
from kvtier.appliance.backends import TierBackends
from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import (
    AwaitBlocks,
    BlockChange,
    Copy,
    FreeSegment,
    Instruction,
    Notify,
    Publish,
    Reply,
    Retract,
    SealSegment,
    StopAwaiting,
    StoreNamespace,
)
from kvtier.appliance.core.results import AcquireResult, PutResult, ReadyFragments, ReleaseResult
from kvtier.appliance.event_log import EventLog
from kvtier.appliance.transfer.lanes import Edge, Route
from kvtier.appliance.transfer.object_edge import Work
from kvtier.tiers.base import Cause, CopyError, CopyItem, CopyOutcome, EngineStatistics
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity, Tier, Urgency

from .loops import SLOW_CALLBACK_S, run, turns

SPILL = Edge(Tier.DRAM, Tier.NVME)
STAGING = Edge(None, Tier.DRAM)
LABEL = FragmentLabel(b"n" * 32, 1, b"p" * 32, b"", 0, 0, 4096)
IDENTITY = NamespaceIdentity(b"m" * 16, Geometry(1, 1, 64, 16, "float16"))


class ScriptedPlanner:
    """Answers each event with the next entry of its script; remembers what it was told."""

    def __init__(self, *script: list[Instruction]) -> None:
        self.script = deque(script)
        self.rest: deque[list[Instruction]] = deque()  # of steps in two halves
        self.told: list[ev.Event] = []
        self.times: list[float] = []
        self.deadline: float | None = None

    def handle(self, event: ev.Event, now: float) -> list[Instruction]:
        self.told.append(event)
        self.times.append(now)
        return self.script.popleft() if self.script else []

    answer = handle

    def follow_up(self) -> list[Instruction]:
        return self.rest.popleft() if self.rest else []

    is_busy = False
    may_put_off = False

    def next_deadline(self) -> float | None:
        return self.deadline


class Recorder:
    """An engine, a copier and a cold store that write down what happens to them, in order."""

    tier = Tier.DRAM

    def __init__(self) -> None:
        self.done: list[object] = []
        self.gate = threading.Event()  # what the store's thread waits for
        self.gate.set()
        self.fails = False
        self.running: list[Future[list[CopyOutcome]]] = []

    def publish_run(self, places: Sequence[int], labels: Sequence[FragmentLabel]) -> None:
        self.done += [("publish", place) for place in places]

    def retract(self, place: int) -> None:
        self.done.append(("retract", place))

    def start(self, items: Sequence[CopyItem]) -> "Future[list[CopyOutcome]]":
        self.done.append(("copy", items[0].target))
        self.running.append(Future())
        return self.running[-1]

    def inline(self, items: Sequence[CopyItem]) -> list[CopyOutcome]:
        self.done.append(("inline", items[0].target))
        return [CopyOutcome(None, b"c" * 16) for _ in items]

    def _store(self, verb: str, argument: object) -> None:
        self.gate.wait(2 * SLOW_CALLBACK_S)
        self.done.append((verb, argument))
        if self.fails:
            raise CopyError(Cause.IO_ERROR, "the disk is gone")

    def seal(self, segment: int) -> bool:
        self._store("seal", segment)
        return True

    def free(self, segment: int) -> None:
        self._store("free", segment)

    def store_namespace(self, identity: NamespaceIdentity) -> None:
        self._store("store_namespace", identity)

    def forget_namespace(self, identity: NamespaceIdentity) -> None:
        self._store("forget_namespace", identity)

    def on_failed_write(self, call: Callable[[int], None]) -> None:
        self.write_failed = call

    def check_writable(self, segment: int) -> None:
        self._store("check_writable", segment)

    def resize(self, num_segments: int) -> None:
        self._store("resize", num_segments)

    def give_back(self, number: int) -> None:
        self._store("give_back", number)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics("recorder")

    def check_integrity(self) -> list[str]:
        return []

    def close(self) -> None:
        self.done.append("close")


def build(planner: ScriptedPlanner, recorder: Recorder) -> Appliance:
    route = Route(recorder)
    engine = store = typing.cast(typing.Any, recorder)
    backends = TierBackends({Tier.DRAM: engine}, {SPILL: route}, {SPILL: 2, STAGING: 2}, store)
    appliance = Appliance(typing.cast(typing.Any, planner), backends, EventLog(16))
    appliance.mover.attach(1, {Tier.DRAM: Route(recorder, recorder.inline)})
    return appliance


def copy(number: int, edge: Edge) -> Copy:
    return Copy(number, edge.source, edge.target, [CopyItem(0, number, LABEL)], Urgency.QUEUED, client=1)


def released(call: int) -> ev.ReleaseRequested:
    return ev.ReleaseRequested(call, 1, [])


async def until_told(planner: ScriptedPlanner, kind: type) -> ev.Event:
    async with asyncio.timeout(60.0):
        while not any(isinstance(event, kind) for event in planner.told):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return next(event for event in planner.told if isinstance(event, kind))


def test_every_instruction_is_executed_by_somebody() -> None:
    async def main() -> None:
        appliance = build(ScriptedPlanner(), Recorder())
        of_sources = {*typing.get_args(Work), AwaitBlocks, StopAwaiting}  # of a planner that has a source
        assert set(typing.get_args(Instruction)) == set(appliance._execute) | of_sources
        await appliance.stop()

    run(main())


def test_a_reply_in_the_same_step_needs_no_future() -> None:
    async def main() -> None:
        planner = ScriptedPlanner([Reply(1, ReleaseResult(3))])
        appliance = build(planner, Recorder())
        assert appliance.ask(released) == ReleaseResult(3)
        assert planner.told == [ev.ReleaseRequested(1, 1, [])]
        await appliance.stop()

    run(main())


def test_a_later_reply_completes_a_future() -> None:
    async def main() -> None:
        planner = ScriptedPlanner([], [Reply(1, ReleaseResult(3)), Reply(9, ReleaseResult(0))])
        appliance = build(planner, Recorder())
        answer = appliance.ask(released)
        assert isinstance(answer, asyncio.Future)
        assert not answer.done()
        appliance.step(ev.Tick())
        assert await answer == ReleaseResult(3)
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


def test_no_record_is_written_before_its_namespace_is_stored() -> None:
    async def main() -> None:
        recorder = Recorder()
        recorder.gate.clear()
        planner = ScriptedPlanner([StoreNamespace(IDENTITY), copy(1, SPILL)])
        appliance = build(planner, recorder)
        appliance.step(ev.Tick())
        await turns()
        assert recorder.done == [], "the copy waits for the store"
        recorder.gate.set()
        async with asyncio.timeout(60.0):
            while len(recorder.done) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert recorder.done == [("store_namespace", IDENTITY), ("copy", 1)]
        recorder.running.pop().set_result([CopyOutcome(None)])
        await until_told(planner, ev.CopyFinished)
        await appliance.stop()

    run(main())


def test_a_store_that_fails_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        recorder = Recorder()
        recorder.fails = True
        planner = ScriptedPlanner([StoreNamespace(IDENTITY), copy(1, SPILL)])
        appliance = build(planner, recorder)
        appliance.step(ev.Tick())
        lost = await until_told(planner, ev.TierLost)
        assert isinstance(lost, ev.TierLost)
        assert (lost.tier, lost.offline) == (Tier.NVME, True)
        finished = await until_told(planner, ev.CopyFinished)
        assert isinstance(finished, ev.CopyFinished)
        assert [outcome.cause for outcome in finished.outcomes] == [Cause.TIER_OFFLINE]
        assert appliance.counters["store_namespace_failed"] == 1
        await appliance.stop()

    run(main())
    assert "the disk is gone" in caplog.text


@pytest.mark.parametrize("verb", ["store_namespace", "free"])
def test_a_store_that_failed_is_asked_again_and_comes_back(
    verb: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """One failed append to the manifest took nvme offline until a restart."""
    monkeypatch.setattr("kvtier.appliance.store_tasks.STORE_RETRY_S", 0.001)

    async def main() -> None:
        recorder = Recorder()
        recorder.fails = True
        planner = ScriptedPlanner([StoreNamespace(IDENTITY) if verb == "store_namespace" else FreeSegment(7)])
        appliance = build(planner, recorder)
        appliance.step(ev.Tick())
        await until_told(planner, ev.TierLost)
        async with asyncio.timeout(60.0):
            while appliance.counters[f"{verb}_failed"] < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        recorder.fails = False
        record_property("failed_appends", appliance.counters[f"{verb}_failed"])
        planner.told.clear()
        back = await until_told(planner, ev.TierLost)
        assert isinstance(back, ev.TierLost)
        assert (back.tier, back.offline) == (Tier.NVME, False)
        assert (ev.SegmentFreed(7) in planner.told) == (verb == "free")
        recorder.done.clear()
        planner.script.append([copy(1, SPILL)])
        appliance.step(ev.Tick())
        await turns()
        assert recorder.done == [("copy", 1)], "it takes copies again"
        recorder.running.pop().set_result([CopyOutcome(None)])
        await until_told(planner, ev.CopyFinished)
        await appliance.stop()

    run(main())


def test_a_segment_is_kept_in_the_order_asked_and_freeing_is_told() -> None:
    async def main() -> None:
        recorder = Recorder()
        planner = ScriptedPlanner([SealSegment(2), FreeSegment(2), SealSegment(2)])
        appliance = build(planner, recorder)
        appliance.step(ev.Tick())
        assert await until_told(planner, ev.SegmentFreed) == ev.SegmentFreed(2)
        await appliance.settled()
        assert recorder.done == [("seal", 2), ("free", 2), ("seal", 2)]
        assert appliance.counters["segments_sealed"] == 2
        await appliance.stop()

    run(main())


def test_a_segment_whose_flush_takes_long_keeps_no_other_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        recorder, is_flushed = Recorder(), threading.Event()
        monkeypatch.setattr(recorder, "seal", lambda segment: is_flushed.wait(60.0))
        planner = ScriptedPlanner([SealSegment(3), FreeSegment(2)])
        appliance = build(planner, recorder)
        appliance.step(ev.Tick())
        assert await until_told(planner, ev.SegmentFreed) == ev.SegmentFreed(2)
        assert appliance.counters["segments_sealed"] == 0
        is_flushed.set()
        await appliance.settled()
        assert appliance.counters["segments_sealed"] == 1
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
