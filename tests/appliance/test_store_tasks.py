"""What the cold store does beside copies: namespaces, segments that are sealed and freed, failures."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import (
    FreeSegment,
    SealSegment,
    StoreNamespace,
)
from kvtier.tiers.base import Cause, CopyError, CopyOutcome
from kvtier.tiers.block import Tier

from .loops import run, turns
from .scripted import (
    IDENTITY,
    SPILL,
    Recorder,
    ScriptedPlanner,
    build,
    copy,
    until_told,
)


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


@pytest.mark.parametrize(
    ("failure", "cause", "is_lost"),
    [
        (CopyError(Cause.IO_ERROR, "the disk is gone"), Cause.IO_ERROR, False),
        (ValueError("the disk is gone"), Cause.TIER_OFFLINE, True),
    ],
)
def test_a_store_that_fails_takes_no_records_and_is_lost_of_a_defect_alone(
    failure: Exception, cause: Cause, is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One namespace that could not be stored took away all that nvme held."""

    async def main() -> None:
        recorder = Recorder()
        recorder.failure = failure
        planner = ScriptedPlanner([StoreNamespace(IDENTITY), copy(1, SPILL)])
        appliance = build(planner, recorder)
        appliance.step(ev.Tick())
        finished = await until_told(planner, ev.CopyFinished)
        assert isinstance(finished, ev.CopyFinished)
        assert [outcome.cause for outcome in finished.outcomes] == [cause]
        lost = [event for event in planner.told if isinstance(event, ev.TierLost)]
        assert [(one.tier, one.offline, one.is_read_on) for one in lost] == [(Tier.NVME, True, not is_lost)]
        assert appliance.counters["store_namespace_failed"] == 1
        await appliance.stop()

    run(main())
    assert "the disk is gone" in caplog.text


@pytest.mark.parametrize("verb", ["store_namespace", "free"])
def test_a_store_that_failed_is_asked_again_and_comes_back(
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    record_property: Callable[[str, object], None],
) -> None:
    """One failed append to the manifest took nvme offline until a restart."""
    caplog.set_level("INFO")
    monkeypatch.setattr("kvtier.appliance.store_tasks.STORE_RETRY_S", 0.001)

    async def main() -> None:
        recorder = Recorder()
        recorder.failure = CopyError(Cause.IO_ERROR, "the disk is gone")
        planner = ScriptedPlanner([StoreNamespace(IDENTITY) if verb == "store_namespace" else FreeSegment(7)])
        appliance = build(planner, recorder)
        appliance.step(ev.Tick())
        async with asyncio.timeout(60.0):
            while appliance.counters[f"{verb}_failed"] < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        recorder.failure = None
        record_property("failed_appends", appliance.counters[f"{verb}_failed"])
        async with asyncio.timeout(60.0):
            while "takes writes again" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        told = [event for event in planner.told if isinstance(event, ev.TierLost)]
        assert [(one.offline, one.is_read_on) for one in told] == [(True, True), (False, True)]
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
