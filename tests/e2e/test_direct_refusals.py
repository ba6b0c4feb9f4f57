"""What the direct path refuses, and its limits: wrong calls, hostile ones, and too many of them."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.appliance.gpu import page_service as direct
from kvtier.appliance.gpu.registrations import MAX_REGISTERING, MAX_REGISTRATIONS, MAX_WAITING_PUTS
from kvtier.appliance.gpu.runtime_events import has_happened
from kvtier.clients import AsyncClient
from kvtier.clients.errors import InvalidRequest, NotFound, Overloaded, PreconditionFailed
from kvtier.tiers.gpu.device.contract import DeviceError, DeviceFault, DeviceMemory
from kvtier.v1 import direct_pb2
from kvtier.v1.local import Method
from tests.fakes.gpu.device import FakeDevice

from ..appliance.raw_client import RawClient, Refused
from .direct_device import FakeExporter
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


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path) as running:
        yield running
        running.assert_at_rest()


# ----------------------------------------------------------------------------- wrong and hostile callers


def registration(**changes: object) -> direct_pb2.RegisterPagesRequest:
    request = direct_pb2.RegisterPagesRequest(
        device_uuid=FakeDevice().uuid,
        num_pages=4,
        page_tokens=16,
        page_stride=16 * 256,
        token_stride=256,
        head_stride=128,
        allocations=[direct_pb2.Allocation(handle=b"x" * 64, num_bytes=1 << 20)],
        tensors=[
            direct_pb2.PageTensor(num_layers=2, layer_stride=1 << 17, num_planes=2, plane_stride=1 << 16)
        ],
    )
    for name, value in changes.items():
        if isinstance(value, list):
            del getattr(request, name)[:]
            getattr(request, name).extend(value)
        else:
            setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "NO_DEVICE"),  # well formed, but nobody's handle
        ({"device_uuid": "nobody"}, "NO_DEVICE"),
        ({"num_pages": 1 << 31}, "BAD_PAGES"),
        ({"page_stride": (1 << 64) - 1}, "BAD_PAGES"),
        ({"allocations": []}, "BAD_PAGES"),
        ({"allocations": [direct_pb2.Allocation(handle=b"", num_bytes=1 << 20)]}, "BAD_PAGES"),
        ({"allocations": [direct_pb2.Allocation(handle=b"y" * 4096, num_bytes=1 << 20)]}, "BAD_PAGES"),
        ({"allocations": [direct_pb2.Allocation(handle=b"y" * 64, num_bytes=1 << 20)] * 1000}, "BAD_PAGES"),
        ({"event_handles": [b"e" * 64] * 65}, "BAD_PAGES"),
        ({"event_handles": [b""]}, "BAD_PAGES"),
        ({"num_event_sets": 1 << 31}, "BAD_PAGES"),
        ({"namespace_id": 77}, "UNKNOWN_NAMESPACE"),
    ],
)
def test_a_hostile_registration_is_refused(served: Served, changes: dict[str, object], reason: str) -> None:
    num_free = len(served.device._free_streams)
    with RawClient(served.daemon.service.facts.local_socket_path) as client:
        client.attach()
        request = registration(**{"namespace_id": client.register().namespace_id} | changes)
        with pytest.raises(Refused) as refused:
            client.call(Method.REGISTER_PAGES, request, direct_pb2.RegisterPagesResponse)
        assert refused.value.detail.reason == reason
    served.assert_at_rest()
    assert len(served.device._free_streams) == num_free


def test_registrations_that_failed_take_nothing(served: Served) -> None:
    """Else no runtime could register after as many as the daemon takes."""
    with RawClient(served.daemon.service.facts.local_socket_path) as client:
        client.attach()
        request = registration(namespace_id=client.register().namespace_id)
        for _ in range(MAX_REGISTRATIONS + 1):
            with pytest.raises(Refused) as refused:
                client.call(Method.REGISTER_PAGES, request, direct_pb2.RegisterPagesResponse)
            assert refused.value.detail.reason == "NO_DEVICE", "its handle is unknown"


def test_a_client_that_says_its_memory_is_larger_than_it_is(served: Served) -> None:
    """The copy would fault and take the device from everybody."""
    with runtime_at(served.target) as one:

        class Liar(FakeExporter):
            def export(self, address: int):  # type: ignore[no-untyped-def]
                return super().export(address)._replace(num_bytes=1 << 30)

        liar = Liar(one.device)
        liar.memories = one.exporter.memories
        with pytest.raises(PreconditionFailed, match="bytes asked for"):
            one.client.register_pages(one.namespace, "vllm", one.tensors, liar)
        assert len(served.daemon.direct._registrations) == 1


def test_nobody_uses_another_one_s_pages(served: Served) -> None:
    with runtime_at(served.target) as one, runtime_at(served.target) as two:
        two.pages._state.registration_id = one.pages._state.registration_id
        with pytest.raises(NotFound, match="register"):
            two.pages.get(two.namespace, CHAIN, IDS)
        with pytest.raises(NotFound, match="register"):
            two.pages.put(two.namespace, CHAIN, IDS)
        two.pages._state.registration_id += 1


def test_wrong_calls_are_refused_with_the_fix(served: Served) -> None:
    with runtime_at(served.target, num_events=1) as one:
        get, put = one.pages.get, one.pages.put
        with pytest.raises(InvalidRequest, match="twice"):
            get(one.namespace, CHAIN[:2], [3, 3])
        with pytest.raises(InvalidRequest, match="2 blocks need 2 ids"):
            get(one.namespace, CHAIN[:2], [3])
        with pytest.raises(InvalidRequest, match="32 pages"):
            put(one.namespace, CHAIN[:1], [NUM_PAGES])
        with pytest.raises(InvalidRequest, match="one of `events`"):
            get(one.namespace, CHAIN[:1], [1], after=object())
        with pytest.raises(InvalidRequest, match="parent"):
            put(one.namespace, CHAIN[:1], [1], parent=b"short")
        other = one.client.register(replace(IDENTITY, geometry=replace(GEOMETRY, num_layers=2)))
        with pytest.raises(InvalidRequest, match="another geometry"):
            get(other, CHAIN[:1], [1])


def test_streams_are_a_limit_that_says_so(served: Served) -> None:
    num_free = len(served.device._free_streams)
    runtimes = [Runtime(served.target) for _ in range(num_free // 2)]  # two streams each
    with pytest.raises(Overloaded, match="all streams"):
        Runtime(served.target)
    for runtime in runtimes:
        runtime.close()
    with runtime_at(served.target):
        pass


def test_without_a_device_the_direct_path_says_so(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        served.thread.call(lambda: setattr(served.daemon.local, "_direct", None))
        with pytest.raises(PreconditionFailed, match="no GPU"):
            Runtime(served.target)


# ------------------------------------------------------------------------------------------- too many


class Pages:
    """Paged tensors of one layer order on a fake GPU that stands still, for an asyncio client."""

    def __init__(self) -> None:
        self.device = FakeDevice(seed=2, may_wait_abroad=True)
        self.exporter = FakeExporter(self.device)
        whole = self.exporter.tensor(4 * NUM_PAGES * 4 * 2 * 64)
        self.tensors = list(whole.view(np.uint16).reshape(4, NUM_PAGES, 2, 4, 32))


def test_puts_that_wait_for_a_runtime_s_event_are_bounded_per_client(served: Served) -> None:
    pages = Pages()

    async def main() -> None:
        async with AsyncClient(served.target) as client, AsyncClient(served.target) as other:
            namespace = await client.register(IDENTITY)
            registered = [
                await one.register_pages(namespace, "vllm", pages.tensors, pages.exporter, num_events=1)
                for one in (client, client, other)
            ]
            stream = pages.device.take_stream()
            for one in registered:
                stream.record(one.events[0])
            chains = [names(f"chain {number}", 1) for number in range(MAX_WAITING_PUTS)]
            waiting = [
                asyncio.create_task(one.put(namespace, chain, [3], after=one.events[0]))
                for number, chain in enumerate(chains)
                for one in [registered[number % 2]]
            ]
            await asyncio.to_thread(served.until, lambda: num_waiting(served) == MAX_WAITING_PUTS)
            for one in registered[:2]:  # whichever pages they come from
                with pytest.raises(Overloaded, match="wait for an event") as refused:
                    await one.put(namespace, names("more", 1), [3], after=one.events[0])
                assert refused.value.retry_after_s > 0
            assert (await registered[0].put(namespace, names("at once", 1), [3])).num_stored == 1
            third = registered[2]
            late = asyncio.create_task(third.put(namespace, names("x", 1), [3], after=third.events[0]))
            await asyncio.to_thread(served.until, lambda: num_waiting(served) == MAX_WAITING_PUTS + 1)
            while pages.device.step():
                continue
            assert [(await put).num_stored for put in [*waiting, late]] == [1] * (MAX_WAITING_PUTS + 1)
            again = await registered[1].put(namespace, names("more", 1), [3], after=registered[1].events[0])
            assert again.num_stored == 1
            for one in registered:
                await one.unregister()

    asyncio.run(main())
    pages.device.shut_down()


def num_waiting(served: Served) -> int:
    return sum(one.num_waiting for one in served.daemon.direct._registrations)


class Gated(FakeDevice):
    """Opens and closes another process's memory when it is let, as a device may that is kept busy."""

    def __init__(self, **options: Any) -> None:
        super().__init__(is_live=True, **options)
        self.may_open, self.may_close = threading.Event(), threading.Event()
        self.may_open.set()
        self.may_close.set()

    def open(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        assert self.may_open.wait(WAIT_S)
        return super().open(handle, num_bytes)

    def close(self, memory: DeviceMemory) -> None:
        assert self.may_close.wait(WAIT_S)
        super().close(memory)


class Refusing(Gated):
    """Closes memory of other processes, and then says that it could not."""

    def close(self, memory: DeviceMemory) -> None:
        super().close(memory)
        raise DeviceError(DeviceFault.REFUSED, "test")


def test_what_cannot_be_closed_keeps_nothing_else_from_being_given_back(tmp_path: Path) -> None:
    """Neither streams nor events, whether the runtime unregisters or goes while its pages are mapped."""
    device, pages = Refusing(num_streams=NUM_STREAMS, seed=3), Pages()
    with Served(tmp_path, device=device) as served:
        num_free = len(device._free_streams)
        with runtime_at(served.target, num_events=1, num_event_sets=1):
            pass
        served.until(lambda: served.daemon.direct.counters["direct_close_failed"] == 1)
        assert len(device._free_streams) == num_free
        device.may_open.clear()

        async def main() -> None:
            async with AsyncClient(served.target) as client:
                namespace = await client.register(IDENTITY)
                call = client.register_pages(namespace, "vllm", pages.tensors, pages.exporter)
                registering = asyncio.create_task(call)
                await asyncio.to_thread(served.until, lambda: served.daemon.direct._registering.total() == 1)
                registering.cancel()

        asyncio.run(main())
        served.until(lambda: not len(served.daemon.service.clients))
        device.may_open.set()
        served.until(lambda: not served.daemon.direct._registering)
        assert served.count("direct_close_failed") == 2
        assert len(device._free_streams) == num_free
        served.assert_at_rest()
    pages.device.shut_down()


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Served]:
    """Its device opens and closes memory when it is let."""
    with Served(tmp_path, device=Gated(num_streams=8 * MAX_REGISTERING, seed=3)) as running:
        yield running
        running.device.may_open.set()  # type: ignore[attr-defined]
        running.device.may_close.set()  # type: ignore[attr-defined]
        running.assert_at_rest()


def test_registrations_under_way_are_bounded_per_client(gated: Served) -> None:
    pages = Pages()
    device = gated.device
    assert isinstance(device, Gated)
    device.may_open.clear()

    async def main() -> None:
        async with AsyncClient(gated.target) as client, AsyncClient(gated.target) as other:
            namespace = await client.register(IDENTITY)

            def register(one: AsyncClient) -> "asyncio.Task[Any]":
                return asyncio.create_task(
                    one.register_pages(namespace, "vllm", pages.tensors, pages.exporter)
                )

            under_way = [register(client) for _ in range(MAX_REGISTERING)]
            await asyncio.to_thread(
                gated.until, lambda: gated.daemon.direct._registering.total() == MAX_REGISTERING
            )
            with pytest.raises(Overloaded, match="registrations of this client are under way") as refused:
                await register(client)
            assert refused.value.retry_after_s > 0
            under_way.append(register(other))
            await asyncio.to_thread(
                gated.until, lambda: gated.daemon.direct._registering.total() == MAX_REGISTERING + 1
            )
            device.may_open.set()
            registered = [await one for one in under_way]
            registered.append(await register(client))
            for one in registered:
                await one.unregister()

    asyncio.run(main())
    assert gated.thread.call(lambda: dict(gated.daemon.direct._registering)) == {}
    pages.device.shut_down()


def test_pages_that_are_still_being_closed_count(gated: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MAX_REGISTRATIONS", 2)
    device = gated.device
    assert isinstance(device, Gated)
    with ExitStack() as undo:
        one = Runtime(gated.target)
        undo.enter_context(runtime_at(gated.target))
        device.may_close.clear()
        ending = one.start(one.close)
        gated.until(lambda: len(gated.daemon.direct._registrations) == 1)
        with pytest.raises(Overloaded, match="have registered pages"):
            Runtime(gated.target)
        device.may_close.set()
        ending.result(WAIT_S)
        undo.enter_context(runtime_at(gated.target))


def test_registrations_of_one_tenant_leave_the_others_their_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: one tenant took all 64, for as long as its runtimes lived."""
    monkeypatch.setattr(direct, "MAX_REGISTRATIONS", 8)
    tenants = {"acme": {"members": [f"uid:{os.getuid()}"]}, "bolt": {"members": ["uid:4711"]}}
    pages, device = Pages(), FakeDevice(is_live=True, num_streams=128, seed=1)

    async def main(target: str) -> None:
        async with AsyncClient(target) as client:
            namespace = await client.register(IDENTITY)

            async def register() -> Any:
                return await client.register_pages(namespace, "vllm", pages.tensors, pages.exporter)

            # two are reserved for each tenant; of the other four as many as are left free
            held = [await register() for _ in range(4)]
            with pytest.raises(Overloaded, match="4 runtimes of the tenant have registered pages"):
                await register()
            await held.pop().unregister()
            held.append(await register())
            for one in held:
                await one.unregister()

    with Served(tmp_path, device=device, tenants=tenants) as served:
        asyncio.run(main(served.target))
    pages.device.shut_down()


@pytest.mark.parametrize("num_cancellations", [1, 2])
def test_an_event_is_not_asked_any_more_once_its_waiter_was_cancelled(num_cancellations: int) -> None:
    """It is given back then, and asking it would be an error that takes the device."""
    device = FakeDevice(seed=1)
    stream = device.take_stream()
    event, _ = device.export_event()
    stream.record(event)  # the device stands still: it does not happen

    async def main() -> None:
        waiter = asyncio.create_task(has_happened(device, event, asyncio.get_running_loop().create_future()))
        await asyncio.sleep(0)
        for _ in range(num_cancellations):
            waiter.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        [call] = device._calls
        assert call.is_given_up
        assert not waiter.done(), "the device may still ask the event"
        device.run()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert not device._calls

    asyncio.run(main())
    device.shut_down()
