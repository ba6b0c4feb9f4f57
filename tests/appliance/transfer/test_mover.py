"""The mover, with copiers whose completion the test controls."""

import asyncio
import errno
import random
from collections.abc import Callable

import pytest

from kvtier.appliance.core.events import CopyFinished, EdgeMeasured, Event
from kvtier.appliance.core.instructions import CancelCopy
from kvtier.appliance.transfer.lanes import Route
from kvtier.appliance.transfer.mover import Mover
from kvtier.tiers.base import Cause
from kvtier.tiers.block import Tier, Urgency

from ..loops import run, turns
from .movers import FORWARD, LOAD, SPILL, STAGING_EDGE, Bench, HandCopier, copy


def test_the_most_urgent_goes_first() -> None:
    async def main() -> None:
        bench = Bench(bound=1)
        copies = [
            copy(1),  # starts at once and blocks the lane
            copy(2, urgency=Urgency.IDLE),
            copy(3, urgency=Urgency.PREFILL, deadline_at=9.0),
            copy(4, urgency=Urgency.PREFILL, deadline_at=5.0, group=1),
            copy(5, urgency=Urgency.PREFILL, deadline_at=5.0, group=0),
            copy(6, urgency=Urgency.PREFILL, deadline_at=5.0, group=0),
            copy(7, urgency=Urgency.DECODING),
        ]
        for each in copies:
            bench.mover.start(each)
        for _ in copies:
            bench.check()
            bench.copiers[LOAD].end()
            await turns()
        assert bench.copiers[LOAD].numbers() == [1, 7, 5, 6, 4, 3, 2]
        assert len(bench.finished()) == len(copies)

    run(main())


def test_writes_make_way_for_reads_that_a_request_waits_for() -> None:
    async def main() -> None:
        bench = Bench(bound=8)
        writes, reads = bench.copiers[SPILL], bench.copiers[LOAD]
        bench.mover.start(copy(1, urgency=Urgency.IDLE))  # a prefetch
        for number in range(10, 16):
            bench.mover.start(copy(number, SPILL, urgency=Urgency.IDLE))
        assert len(writes.running) == 6, "nobody waits for that read"
        bench.mover.start(copy(2, urgency=Urgency.QUEUED))
        for number in range(16, 20):
            bench.mover.start(copy(number, SPILL, urgency=Urgency.IDLE))
        for left in (5, 4, 3, 2, 2):
            writes.end()
            await turns()
            assert len(writes.running) == left
        reads.end(1)
        await turns()
        assert len(writes.running) == 5, "the end of the read lets all begin"
        bench.check()
        for copier in (writes, reads):
            while copier.running:
                copier.end()
                await turns()
        assert len(bench.finished()) == 12

    run(main())


def test_what_one_thread_is_to_copy_is_not_cut() -> None:
    async def main() -> None:
        bench = Bench(bound=4)
        bench.mover.start(copy(1, SPILL, num_items=8))
        assert [len(items) for items, _ in bench.copiers[SPILL].running] == [2] * 4
        while bench.copiers[SPILL].running:
            bench.copiers[SPILL].end()
            await turns()
        alone = copy(2, SPILL, num_items=8)
        alone.in_one = True
        bench.mover.start(alone)
        assert [len(items) for items, _ in bench.copiers[SPILL].running] == [8]
        bench.copiers[SPILL].end()
        await turns()
        assert bench.finished()[2] == [None] * 8

    run(main())


def test_batches_in_flight_are_bounded_and_loads_do_not_wait_behind_spills() -> None:
    async def main() -> None:
        bench = Bench(bound=2)
        for number in range(10):
            bench.mover.start(copy(number, SPILL))
        spill = next(s for s in bench.mover.statistics() if (s.source, s.target) == ("dram", "nvme"))
        assert (spill.num_in_flight, spill.num_queued) == (2, 8)
        bench.mover.start(copy(100, LOAD))
        assert bench.copiers[LOAD].numbers() == [100], "a load waited although no other load runs"
        bench.copiers[LOAD].end()
        await turns()
        assert bench.finished() == {100: [None]}
        for _ in range(10):
            assert len(bench.copiers[SPILL].running) <= 2
            bench.check()
            bench.copiers[SPILL].end()
            await turns()

    run(main())


def test_a_large_copy_is_shared_and_its_outcomes_keep_the_order_of_the_items() -> None:
    async def main() -> None:
        bench = Bench(bound=4)
        bench.mover.start(copy(1, num_items=16))
        running = bench.copiers[LOAD].running
        assert [len(items) for items, _ in running] == [4, 4, 4, 4]
        while running:  # last batch first
            assert bench.finished() == {}
            bench.copiers[LOAD].end(-1)
            await turns()
        [event] = [event for event in bench.events if isinstance(event, CopyFinished)]
        assert [outcome.checksum for outcome in event.outcomes] == [
            number.to_bytes(16, "big") for number in range(16)
        ]

    run(main())


@pytest.mark.parametrize(("batch_bytes", "sizes"), [(16 << 20, [4, 1]), (0, [1, 1, 1, 1])])
def test_what_threads_do_not_share_is_not_cut_for_them(batch_bytes: int, sizes: list[int]) -> None:
    async def main() -> None:
        copier = HandCopier()
        moved: list[Event] = []
        routes = {LOAD: Route(copier, batch_bytes=batch_bytes)}
        mover = Mover(routes, moved.append, max_in_flight={LOAD: 4}, clock=lambda: 0.0, takes_turns=False)
        mover.start(copy(1, num_items=5, num_bytes=4 << 20))
        assert [len(items) for items, _ in copier.running] == sizes
        while copier.running:
            copier.end()
            await turns()
        [finished] = [event for event in moved if isinstance(event, CopyFinished)]
        assert [outcome.cause for outcome in finished.outcomes] == [None] * 5

    run(main())


def test_cancel_drops_what_is_queued_and_lets_the_rest_end() -> None:
    async def main() -> None:
        bench = Bench(bound=1)
        bench.mover.start(copy(1, num_items=2, num_bytes=4 << 20))
        bench.mover.start(copy(2))
        bench.mover.cancel(CancelCopy(2))
        bench.mover.cancel(CancelCopy(1))
        assert bench.finished() == {2: [Cause.CANCELLED]}, "one batch of copy 1 is still in flight"
        bench.check()
        bench.copiers[LOAD].end()
        await turns()
        assert bench.finished()[1] == [None, Cause.CANCELLED]
        bench.mover.cancel(CancelCopy(1))  # ended long ago
        bench.check()

    run(main())


def test_a_dead_client_s_copies_end_as_source_gone() -> None:
    async def main() -> None:
        bench = Bench(bound=1)
        bench.mover.attach(7, {Tier.DRAM: Route(bench.copiers[STAGING_EDGE])})
        bench.mover.attach(8, {Tier.DRAM: Route(bench.copiers[STAGING_EDGE])})
        for number, client in ((1, 7), (2, 7), (3, 8)):
            bench.mover.start(copy(number, STAGING_EDGE, num_bytes=1 << 20, client=client))
        bench.mover.detach(7)
        assert bench.finished() == {2: [Cause.SOURCE_GONE]}
        bench.mover.start(copy(4, STAGING_EDGE, client=7))
        assert bench.finished()[4] == [Cause.SOURCE_GONE]
        bench.copiers[STAGING_EDGE].end()
        await turns()
        assert bench.finished()[1] == [None], "what was in flight is not lost"
        assert bench.copiers[STAGING_EDGE].numbers() == [1, 3], "the other client is served"
        bench.check()
        bench.copiers[STAGING_EDGE].end()
        await turns()

    run(main())


def test_hold_keeps_a_tier_waiting_and_refuse_gives_it_up() -> None:
    async def main() -> None:
        bench = Bench()
        bench.mover.hold(Tier.NVME)
        bench.mover.start(copy(1, SPILL))
        assert bench.copiers[SPILL].started == []
        bench.mover.resume(Tier.NVME)
        assert bench.copiers[SPILL].numbers() == [1]
        bench.mover.hold(Tier.NVME)
        bench.mover.start(copy(2, SPILL))
        bench.mover.refuse(Tier.NVME)
        bench.mover.start(copy(3, SPILL))
        assert bench.finished() == {2: [Cause.TIER_OFFLINE], 3: [Cause.TIER_OFFLINE]}
        bench.mover.start(copy(4, LOAD))
        assert bench.copiers[LOAD].numbers() == [4], "reading is another matter"
        for edge in (SPILL, LOAD):
            bench.copiers[edge].end()
        await turns()
        bench.check()

    run(main())


def test_copies_inside_a_tier_that_takes_no_writes_wait_until_it_does() -> None:
    """They ended as IO_ERROR, and the planner condemned what they would have read."""

    async def main() -> None:
        bench = Bench(bound=1)
        for number in (1, 2):
            bench.mover.start(copy(number, FORWARD))
        bench.mover.start(copy(3, SPILL))
        bench.mover.start(copy(4, SPILL))
        bench.mover.refuse(Tier.NVME, Cause.IO_ERROR)
        bench.mover.start(copy(5, FORWARD))
        bench.copiers[FORWARD].end()
        await turns()
        bench.mover.resume(Tier.NVME)  # of another call
        bench.check()
        assert bench.finished() == {1: [None], 4: [Cause.IO_ERROR]}
        assert bench.copiers[FORWARD].numbers() == [1]
        bench.mover.admit(Tier.NVME)
        bench.copiers[FORWARD].end()
        await turns()
        assert (bench.finished()[2], bench.copiers[FORWARD].numbers()) == ([None], [1, 2, 5])
        bench.mover.start(copy(6, FORWARD))
        bench.mover.refuse(Tier.NVME)
        assert bench.finished()[6] == [Cause.TIER_OFFLINE], "what it holds cannot be read either"
        for edge in (SPILL, FORWARD):
            bench.copiers[edge].end()
        await turns()
        bench.check()
        assert not bench.mover.is_busy

    run(main())


def test_completions_share_a_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        wake_ups: list[object] = []
        send = loop.call_soon_threadsafe

        def counting(function: Callable[[], None]) -> asyncio.Handle:
            wake_ups.append(function)
            return send(function)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
        bench = Bench(bound=8)
        for number in range(8):
            bench.mover.start(copy(number))
        for _ in range(8):
            bench.copiers[LOAD].end()
        assert len(wake_ups) == 1
        await turns()
        assert len(bench.finished()) == 8

    run(main())


def test_a_copier_that_raises_is_a_copy_that_did_not_land(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        bench = Bench()
        bench.mover.start(copy(1, num_items=1))
        _, future = bench.copiers[LOAD].running.pop()
        future.set_exception(AssertionError("a bug"))
        await turns()
        assert bench.finished() == {1: [Cause.IO_ERROR]}
        bench.check()

    run(main())
    assert "a bug" in caplog.text


@pytest.mark.parametrize("short", [MemoryError(), OSError(errno.ENOMEM, "no memory for scratch")])
def test_memory_that_is_short_says_nothing_against_what_was_to_be_read(short: Exception) -> None:
    """The planner gives up a record that says IO_ERROR."""

    async def main() -> None:
        bench = Bench()
        bench.mover.start(copy(1, num_items=1))
        _, future = bench.copiers[LOAD].running.pop()
        future.set_exception(short)
        await turns()
        assert bench.finished() == {1: [Cause.NO_SPACE]}

    run(main())


def test_copies_that_ended_beside_one_at_which_the_planner_failed_are_waited_for() -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        bench = Bench(bound=3)
        for number in range(3):
            bench.mover.start(copy(number))
        deliver = bench.events.append
        failures = iter([True])

        def fail_once(event: Event) -> None:
            if next(failures, False):
                raise AssertionError("the planner's")
            deliver(event)

        bench.mover._deliver = fail_once
        for _ in range(3):
            bench.copiers[LOAD].end()
        await turns()
        assert len(bench.finished()) == 2
        await bench.mover.stop()
        assert not bench.mover.is_busy

    run(main())


def test_what_the_planner_begins_while_the_mover_stops_is_not_begun() -> None:
    """Engines are closed next. A copy that ended at once would let the planner begin another one for ever."""

    async def main() -> None:
        bench = Bench(bound=1)

        def begin_another(event: Event) -> None:
            bench.events.append(event)
            if isinstance(event, CopyFinished):
                bench.mover.start(copy(event.copy + 10))

        bench.mover._deliver = begin_another
        bench.mover.start(copy(1))
        bench.mover.start(copy(2))
        stopping = asyncio.ensure_future(bench.mover.stop())
        await turns()
        bench.copiers[LOAD].end()
        await stopping
        assert not bench.mover.is_busy
        assert bench.copiers[LOAD].numbers() == [1]
        assert bench.finished() == {1: [None], 2: [Cause.CANCELLED]}

    run(main())


def test_bandwidth_is_measured_over_busy_time_and_reported() -> None:
    async def main() -> None:
        bench = Bench(bound=2)
        for round_ in range(30):  # two batches share the device: 8 MiB in 1 ms
            bench.now += 10.0  # idle time must not count
            bench.mover.start(copy(2 * round_, num_bytes=4 << 20))
            bench.mover.start(copy(2 * round_ + 1, num_bytes=4 << 20))
            bench.now += 0.001
            bench.copiers[LOAD].end()
            bench.copiers[LOAD].end()
            await turns()
        measured = [event for event in bench.events if isinstance(event, EdgeMeasured)]
        assert len(measured) == 30, "once per round: they are 10 s apart"
        assert measured[-1].bandwidth_bytes_per_s == pytest.approx((8 << 20) / 0.001, rel=0.01)
        assert (measured[-1].source, measured[-1].target) == (Tier.NVME, Tier.DRAM)

    run(main())


def test_stop_cancels_the_queue_and_waits_for_what_is_in_flight() -> None:
    async def main() -> None:
        bench = Bench(bound=1)
        bench.mover.start(copy(1))
        bench.mover.start(copy(2))
        stopping = asyncio.create_task(bench.mover.stop())
        await turns()
        assert bench.finished() == {2: [Cause.CANCELLED]}
        assert not stopping.done()
        bench.copiers[LOAD].end()
        await stopping
        assert bench.finished()[1] == [None]

    run(main())


@pytest.mark.parametrize("seed", range(8))
def test_every_copy_ends_exactly_once_whatever_happens(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        bench = Bench(bound=rng.randint(1, 3), takes_turns=seed >= 5)
        copier = bench.copiers[STAGING_EDGE]
        for client in (1, 2, 3):
            bench.mover.attach(client, {Tier.DRAM: Route(copier, copier.inline)})
        num_started = 0
        for _ in range(400):
            bench.now += rng.random()
            action = rng.random()
            if action < 0.45:
                num_started += 1
                edge = rng.choice([SPILL, LOAD, STAGING_EDGE])
                client = rng.randint(1, 4)
                size = rng.choice([4096, 1 << 18, 1 << 20, 3 << 20])
                urgency = rng.choice(list(Urgency))
                bench.mover.start(
                    copy(num_started, edge, rng.randint(1, 9), num_bytes=size, urgency=urgency, client=client)
                )
            elif action < 0.85:
                running = [c for c in bench.copiers.values() if c.running]
                if running:
                    chosen = rng.choice(running)
                    chosen.end(rng.randrange(len(chosen.running)))
                    await turns()
            elif action < 0.95:
                bench.mover.cancel(CancelCopy(rng.randint(1, max(1, num_started))))
            elif action < 0.97:
                bench.mover.detach(rng.randint(1, 4))
            else:
                rng.choice([bench.mover.hold, bench.mover.resume])(Tier.NVME)
            bench.check()
        stopping = asyncio.create_task(bench.mover.stop())
        await turns()
        for each in bench.copiers.values():
            while each.running:
                each.end()
        await stopping
        await turns()
        assert sorted(bench.finished()) == list(range(1, num_started + 1))
        bench.check()

    run(main())
