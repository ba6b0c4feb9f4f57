"""The direct path end to end: a daemon with a fake GPU, runtimes whose pages it fills and reads."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.appliance.gpu import mapping
from kvtier.appliance.gpu import page_service as direct
from kvtier.appliance.gpu.mapping import PageMapping
from kvtier.appliance.gpu.registrations import Registration
from kvtier.clients import AsyncClient, Client, PutOutcome, Tier
from kvtier.tiers.gpu.pages import kernels
from kvtier.tiers.gpu.pages.kernels import Way
from tests.fakes.gpu.device import FakeDevice

from ..tiers.gpu.host_launch import HostLaunch
from .direct_device import FakeExporter, Mute
from .direct_scene import (
    GEOMETRY,
    IDENTITY,
    NUM_PAGES,
    NUM_STREAMS,
    WAIT_S,
    Runtime,
    Served,
    names,
    runtime_at,
)

CHAIN = names("chain", 8)
IDS = [5, 2, 30, 11, 7, 19, 3, 28]
OTHERS = [1, 4, 6, 8, 9, 10, 12, 13]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path) as running:
        yield running
        running.assert_at_rest()


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[Served]:
    """Its device does nothing unless it is pumped."""
    with Served(tmp_path, device=FakeDevice(num_streams=NUM_STREAMS, seed=3)) as running:
        yield running
        running.assert_at_rest()


# ------------------------------------------------------------------------------------------- round trips


def test_what_is_put_from_pages_comes_back_into_other_pages(served: Served) -> None:
    with runtime_at(served.target) as one, runtime_at(served.target) as two:
        one.fill(1)
        before = two.whole.copy()
        assert one.pages.put(one.namespace, CHAIN, IDS).num_stored == 8
        more = [*CHAIN, *names("unknown", 1)]
        report = two.pages.get(two.namespace, more, [*OTHERS, 0])
        assert (report.num_blocks, report.num_loaded, report.num_stored) == (8, 8, 8)
        assert two.read(OTHERS) == one.read(IDS)
        untouched = [page for page in range(NUM_PAGES) if page not in OTHERS]
        assert (two.whole[:, untouched] == before[:, untouched]).all()
        assert two.pages.get(two.namespace, CHAIN, OTHERS[:3], first_block=5).num_loaded == 3
        assert two.read(OTHERS[:3]) == one.read(IDS[5:])
        assert two.pages.get(two.namespace, names("unknown", 2), [0, 1]).num_blocks == 0
    assert served.count("direct_get_blocks") == 11


def test_what_came_by_one_way_leaves_by_the_other(served: Served) -> None:
    """Pages and shared memory hold the same bytes of a block."""
    with runtime_at(served.target) as runtime, Client(served.target) as client:
        runtime.fill(2)
        namespace = client.register(IDENTITY)
        runtime.pages.put(runtime.namespace, CHAIN, IDS)
        data = client.get(namespace, CHAIN).data.view(np.uint16)
        blocks = data.reshape(8, 4, 2, 4, 2, 16)  # layer, plane, token, head, dim
        for block, page in enumerate(IDS):  # token, head, K and V in the pages
            expected = runtime.whole[:, page].reshape(4, 4, 2, 2, 16).transpose(0, 3, 1, 2, 4)
            assert (blocks[block] == expected).all()
        client.put(namespace, names("x", 8), data)
        runtime.whole[:] = 0
        assert runtime.pages.get(runtime.namespace, names("x", 8), OTHERS).num_loaded == 8
        assert runtime.pages.put(runtime.namespace, names("y", 8), OTHERS).num_stored == 8
        assert (client.get(namespace, names("y", 8)).data.view(np.uint16) == data).all()


def test_a_put_answers_per_block(served: Served) -> None:
    with runtime_at(served.target) as runtime:
        put = runtime.pages.put
        assert put(runtime.namespace, CHAIN[:4], IDS[:4]).num_stored == 4
        again = put(runtime.namespace, CHAIN, IDS).outcomes
        assert again == [PutOutcome.DEDUPLICATED] * 4 + [PutOutcome.STORED] * 4
        orphan = put(runtime.namespace, names("z", 1), IDS[:1], parent=names("nobody", 1)[0]).outcomes
        assert orphan == [PutOutcome.PARENT_MISSING]
        assert put(runtime.namespace, [], []).outcomes == []
        assert put(runtime.namespace, names("tail", 2), [0, 0], parent=CHAIN[-1]).num_stored == 2


def test_small_pieces_go_by_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(is_live=True, num_streams=NUM_STREAMS)
    launch = HostLaunch(device)
    monkeypatch.setattr(direct, "load", lambda _: launch)
    monkeypatch.setattr(
        kernels, "_measure", lambda device, kernel: dict.fromkeys(Way, 64)
    )  # pieces here have 32 bytes
    with Served(tmp_path, device=device) as served:
        with runtime_at(served.target) as one:
            one.fill(1)
            assert one.pages.put(one.namespace, CHAIN, IDS).num_stored == 8
            num_gathers = len(launch.seen)
            assert one.pages.get(one.namespace, CHAIN, OTHERS).num_loaded == 8
            assert one.read(OTHERS) == one.read(IDS)
            assert 0 < num_gathers < len(launch.seen)
        served.assert_at_rest()


def test_each_way_of_pieces_has_its_own_crossover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes out of hbm is copied as was found quicker within the device, not across the link."""
    device = FakeDevice(is_live=True, num_streams=NUM_STREAMS)
    launch = HostLaunch(device)
    monkeypatch.setattr(direct, "load", lambda _: launch)
    monkeypatch.setattr(kernels, "_measure", lambda device, kernel: {Way.WITHIN: 64})
    with Served(tmp_path, device=device) as served:
        with runtime_at(served.target) as one:
            one.fill(1)
            one.pages.put(one.namespace, CHAIN, IDS)
            assert one.pages.get(one.namespace, CHAIN, OTHERS).num_loaded == 8
            assert not launch.seen
            assert one.client.prefetch(one.namespace, CHAIN, Tier.HBM).num_promoted == 8
            served.evict()
            assert one.pages.get(one.namespace, CHAIN, OTHERS).num_loaded == 8
            assert launch.seen
            assert one.read(OTHERS) == one.read(IDS)
        served.assert_at_rest()


def test_layer_groups_are_told_with_events_in_layer_order(stalled: Served) -> None:
    with runtime_at(stalled.target, num_event_sets=2) as one:
        one.fill(3)
        stalled.let_finish(one.start(one.pages.put, one.namespace, CHAIN, IDS))
        stored = one.read(IDS)
        one.whole[:] = 0
        with one.pages.begin_get(one.namespace, CHAIN, IDS) as delivery:
            groups = []
            for group in delivery:  # told before the device has done anything
                groups.append((group.group, group.num_blocks))
                assert not group.event.is_done()
                if len(groups) == GEOMETRY.num_groups:
                    assert not one.whole.any()
                    break
            assert groups == [(0, 8), (1, 8), (2, 8), (3, 8)]
            while not group.event.is_done():
                assert stalled.device.step()
            assert one.read(IDS) == stored  # the last event vouches for all layers
            report = stalled.let_finish(one.start(delivery.wait))
        assert report.num_loaded == 8
        assert stalled.thread.call(stalled.daemon.check_integrity) == []


def test_the_first_layer_s_event_vouches_for_it(stalled: Served) -> None:
    with runtime_at(stalled.target, num_event_sets=1) as one:
        one.fill(4)
        stalled.let_finish(one.start(one.pages.put, one.namespace, CHAIN, IDS))
        kept = one.whole.copy()
        one.whole[:] = 0
        with one.pages.begin_get(one.namespace, CHAIN, IDS) as delivery:
            first = next(iter(delivery))
            while not first.event.is_done():
                assert stalled.device.step()
            assert (one.whole[0][IDS] == kept[0][IDS]).all()
            assert not (one.whole[3][IDS] == kept[3][IDS]).all()  # seed 3: the last layer was not done yet
            stalled.let_finish(one.start(delivery.wait))


def test_later_answers_of_a_get_begin_at_later_blocks(tmp_path: Path) -> None:
    """What is in dram is told at once, what is on nvme later: answers count from the chain."""
    with Served(tmp_path, nvme=True) as served:
        with runtime_at(served.target, num_event_sets=1) as one:
            one.fill(6)
            assert one.pages.put(one.namespace, CHAIN, IDS, session="s").num_stored == 8
            one.client.session("s").end(archive=True)
            served.evict()
            first = one.pages.get(one.namespace, CHAIN[:4], [14, 15, 16, 17], load_anyway=True)
            assert first.num_loaded == 4
            tiers = one.client.lookup(one.namespace, CHAIN).tiers
            assert tiers == (Tier.DRAM,) * 4 + (Tier.NVME,) * 4
            kept = one.whole.copy()
            one.whole[:] = 0
            with one.pages.begin_get(
                one.namespace, CHAIN, OTHERS[:6], first_block=2, load_anyway=True
            ) as delivery:
                groups = [group.group for group in delivery]
                report = delivery.wait()
            assert groups == [0, 1, 2, 3]
            assert report.num_loaded == 6
            assert (one.whole[:, OTHERS[:6]] == kept[:, IDS[2:]]).all()
        served.assert_at_rest()


def test_the_asyncio_client_does_the_same(served: Served) -> None:
    device = FakeDevice(is_live=True)
    exporter = FakeExporter(device)
    whole = exporter.tensor(4 * NUM_PAGES * 4 * 2 * 64).view(np.uint16).reshape(4, NUM_PAGES, 2, 4, 32)

    async def main() -> None:
        async with AsyncClient(served.target) as client:
            namespace = await client.register(IDENTITY)
            async with await client.register_pages(
                namespace, "vllm", list(whole), exporter, num_event_sets=1
            ) as pages:
                whole[:] = np.arange(whole.size, dtype=np.uint32).astype(np.uint16).reshape(whole.shape)
                assert (await pages.put(namespace, CHAIN, IDS)).num_stored == 8
                assert (await pages.get(namespace, CHAIN, OTHERS)).num_loaded == 8
                async with await pages.begin_get(namespace, CHAIN, [14, 15, *range(20, 26)]) as delivery:
                    assert [group.group async for group in delivery] == [0, 1, 2, 3]
                    assert (await delivery.wait()).num_loaded == 8
                assert (whole[:, IDS] == whole[:, OTHERS]).all()

    asyncio.run(main())
    device.shut_down()


# ------------------------------------------------------------------------------------------------- order


def test_a_put_reads_what_the_kernel_before_its_event_wrote(stalled: Served) -> None:
    with runtime_at(stalled.target, is_live=False, num_events=1) as one, runtime_at(stalled.target) as two:
        one.fill(5)
        event = one.pages.events[0]
        one.kernel(6, event)
        put = one.start(one.pages.put, one.namespace, CHAIN, IDS, after=event)
        stalled.until(lambda: stalled.waits_for_a_runtime)
        stalled.device.run()  # all that may be done before the event: nothing
        assert not stalled.has_copies
        one.device.run()
        written = one.read(IDS)
        assert stalled.let_finish(put).num_stored == 8
        stalled.let_finish(two.start(two.pages.get, two.namespace, CHAIN, OTHERS))
        assert two.read(OTHERS) == written


def test_a_get_does_not_write_pages_that_a_kernel_before_its_event_still_uses(stalled: Served) -> None:
    with runtime_at(stalled.target, is_live=False, num_events=1) as one:
        one.fill(7)
        stalled.let_finish(one.start(one.pages.put, one.namespace, CHAIN, IDS))
        stored = one.read(IDS)
        event = one.pages.events[0]
        one.kernel(8, event)
        get = one.start(one.pages.get, one.namespace, CHAIN, OTHERS, after=event)
        stalled.until(lambda: stalled.waits_for_a_runtime)
        stalled.device.run()
        assert not stalled.has_copies
        one.device.run()  # the kernel overwrites everything; had the get been before it, it would be lost
        assert stalled.let_finish(get).num_loaded == 8
        assert one.read(OTHERS) == stored


def test_the_lease_holds_until_the_device_is_done(stalled: Served) -> None:
    """Not until the copies were enqueued: what they read must not be evicted, nor written by a later put."""
    with runtime_at(stalled.target) as one:
        one.fill(9)
        stalled.let_finish(one.start(one.pages.put, one.namespace, CHAIN, IDS))
        stored = one.read(IDS)
        get = one.start(one.pages.get, one.namespace, CHAIN, OTHERS)
        stalled.until(lambda: stalled.has_copies)
        assert stalled.thread.call(stalled.num_leases) == 1
        stalled.evict(at_rest=False)
        with Client(stalled.target) as client:  # as much as dram holds, over and over
            namespace = client.register(IDENTITY)
            filler = np.full(8 * GEOMETRY.block_bytes, 0xEE, np.uint8)
            for number in range(8 << 20 // filler.nbytes):
                client.put(namespace, names(f"filler {number}", 8), filler)
        assert stalled.thread.call(stalled.num_leases) == 1
        assert stalled.let_finish(get).num_loaded == 8
        assert one.read(OTHERS) == stored
        assert stalled.thread.call(stalled.num_leases) == 0


def test_a_put_is_not_visible_before_its_bytes_have_landed(stalled: Served) -> None:
    with runtime_at(stalled.target) as one, Client(stalled.target) as client:
        one.fill(10)
        namespace = client.register(IDENTITY)
        put = one.start(one.pages.put, one.namespace, CHAIN, IDS)
        stalled.until(lambda: stalled.has_copies)
        assert client.lookup(namespace, CHAIN).num_blocks == 0
        assert stalled.let_finish(put).num_stored == 8
        assert client.lookup(namespace, CHAIN).num_blocks == 8


# -------------------------------------------------------------------------------------- cancel, end, loss


def test_cancel_returns_when_the_pages_are_the_caller_s_again(stalled: Served) -> None:
    with runtime_at(stalled.target) as one:
        one.fill(11)
        stalled.let_finish(one.start(one.pages.put, one.namespace, CHAIN, IDS))
        delivery = one.pages.begin_get(one.namespace, CHAIN, OTHERS)
        stalled.until(lambda: stalled.has_copies)
        cancel = one.start(delivery.cancel)
        stalled.until(lambda: next(iter(registration_of(stalled).deliveries.values()))._cancelled.done())
        assert not cancel.done()
        assert stalled.thread.call(stalled.num_leases) == 1
        stalled.let_finish(cancel)
        assert not stalled.has_copies
        assert delivery.wait().num_loaded == 0
    assert stalled.count("direct_gets_cancelled") == 1


def registration_of(served: Served) -> Registration:
    """The one that there is."""
    [registration] = served.daemon.direct._registrations
    assert isinstance(registration, Registration)
    return registration


def test_a_cancelled_task_waits_for_the_device_too(stalled: Served) -> None:
    device = FakeDevice(is_live=True)
    exporter = FakeExporter(device)
    whole = exporter.tensor(4 * NUM_PAGES * 4 * 2 * 64).view(np.uint16).reshape(4, NUM_PAGES, 2, 4, 32)

    async def main() -> None:
        async with AsyncClient(stalled.target) as client:
            namespace = await client.register(IDENTITY)
            pages = await client.register_pages(namespace, "vllm", list(whole), exporter)
            await pump(asyncio.create_task(pages.put(namespace, CHAIN, IDS)))
            get = asyncio.create_task(pages.get(namespace, CHAIN, OTHERS))
            await asyncio.to_thread(stalled.until, lambda: stalled.has_copies)
            get.cancel()
            for _ in range(50):
                await asyncio.sleep(0)
            assert not get.done()
            await pump(get)
            assert get.cancelled()
            assert not stalled.has_copies

    async def pump(task: "asyncio.Task[object]") -> None:
        while not task.done():
            stalled.device.run()
            await asyncio.sleep(0.001)

    asyncio.run(main())
    device.shut_down()


def test_unregistering_waits_for_the_device(stalled: Served) -> None:
    one = Runtime(stalled.target)
    one.fill(12)
    stalled.let_finish(one.start(one.pages.put, one.namespace, CHAIN, IDS))
    one.pages.begin_get(one.namespace, CHAIN, OTHERS)
    stalled.until(lambda: stalled.has_copies)
    end = one.start(one.pages.unregister)
    stalled.until(lambda: registration_of(stalled).is_ending)
    assert not end.done()
    assert stalled.opened() == 1
    stalled.let_finish(end)
    assert stalled.opened() == 0
    one.client.close()


def test_after_a_silent_daemon_the_next_call_waits_until_the_old_one_let_go(
    stalled: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that timed out leaves its pages in doubt; being registered again settles it."""
    asked: list[Any] = []
    opened: list[int] = []  # mappings that were there when a registration was mapped

    def check_layout(*arguments: Any) -> None:
        asked.append(arguments)

    def map_pages(*arguments: Any) -> PageMapping:
        opened.append(stalled.opened())
        return mapping.map_pages(*arguments)

    monkeypatch.setattr(direct, "check_layout", check_layout)
    monkeypatch.setattr(direct, "map_pages", map_pages)
    one = Runtime(stalled.target)
    one.fill(13)
    stalled.let_finish(one.start(one.pages.put, one.namespace, CHAIN[:1], IDS[:1], deadline_s=WAIT_S))
    lost = one.start(one.pages.get, one.namespace, CHAIN[:1], OTHERS[:1], deadline_s=1.0)
    assert "NO_ANSWER" in str(lost.exception(WAIT_S))
    assert stalled.has_copies
    stalled.until(lambda: registration_of(stalled).is_ending)
    again = one.start(one.pages.get, one.namespace, CHAIN[:1], OTHERS[:1], deadline_s=WAIT_S)
    stalled.until(lambda: len(asked) == 2)
    for _ in range(5):
        stalled.thread.call(lambda: None)
    assert opened == [0]  # asked to register, and not before the device is done
    assert stalled.let_finish(again).num_loaded == 1
    assert one.read(OTHERS[:1]) == one.read(IDS[:1])
    assert opened == [0, 0]
    one.pages.unregister()
    one.client.close()


def test_a_lost_device_is_a_miss_and_the_daemon_lives(tmp_path: Path) -> None:
    device = FakeDevice(num_streams=NUM_STREAMS, seed=3)
    with Served(tmp_path, device=device) as served:
        one = Runtime(served.target)
        one.fill(14)
        served.let_finish(one.start(one.pages.put, one.namespace, CHAIN, IDS))
        get = one.start(one.pages.get, one.namespace, CHAIN, OTHERS)
        served.until(lambda: served.has_copies)
        device.lose("fell off the bus")
        report = served.let_finish(get)
        assert (report.num_loaded, report.reason) == (0, "device_failed")
        report = served.let_finish(one.start(one.pages.get, one.namespace, CHAIN, OTHERS))
        assert (report.num_loaded, report.reason) == (0, "device_failed")
        late = served.let_finish(one.start(one.pages.put, one.namespace, names("late", 8), IDS))
        assert late.outcomes == [PutOutcome.FAILED] * 8
        assert served.thread.call(served.num_leases) == 0
        assert one.client.get(one.namespace, CHAIN).num_loaded == 8  # by shared memory, as ever
        assert served.count("direct_get_device_lost") == 2
        assert served.count("direct_put_device_lost") >= 1
        one.client.close()
        served.assert_at_rest()


def test_memory_that_a_device_may_still_touch_is_kept_until_it_is_shut_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "CLOSE_GRACE_S", 0.1)
    device = Mute(num_streams=NUM_STREAMS, seed=3)
    with Served(tmp_path, device=device) as served:
        one = Runtime(served.target)
        one.fill(15)
        served.let_finish(one.start(one.pages.put, one.namespace, CHAIN, IDS, deadline_s=WAIT_S))
        device.is_mute = True
        get = one.start(one.pages.get, one.namespace, CHAIN, OTHERS, deadline_s=1.0)
        assert get.exception(WAIT_S) is not None
        assert served.thread.call(served.num_leases) == 1
        device.run()
        assert served.thread.call(served.num_leases) == 1  # nobody knows; so it stays
        assert served.count("direct_gets_in_doubt") == 1
        assert one.client.get(one.namespace, CHAIN).num_loaded == 8
        one.client.close()
        served.thread.wait(served.daemon.direct.close())
        assert served.thread.call(served.num_leases) == 0
