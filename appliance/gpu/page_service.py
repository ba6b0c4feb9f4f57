"""DirectPath: the calls by which a runtime's pages are filled and read without its help (direct.proto).

    RegisterPages -> memory mapped, streams taken, a client of its own opened in the planner
    GetPages      -> PageDelivery (deliveries.py)
    PutPages      -> PagePuts (page_puts.py)
    UnregisterPages, or the end of the connection -> nothing new; given back when the device is quiet

All that talks to a device runs on one thread per device, the enqueuer: handing thousands of copies to a
driver takes milliseconds, which the event loop does not have.

A second registration of a process waits until the earlier ones that are ending are quiet. So a runtime that
lost its connection in the middle of a get knows, once it is registered again, that nothing writes its pages
any more.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from secrets import randbits
from typing import Any, NamedTuple, TypeVar

from ...tiers.block import HASH_BYTES, NamespaceIdentity, Tier, tenant_of
from ...tiers.gpu.device.contract import Device, DeviceError, DeviceFault, Event
from ...tiers.gpu.pages.gather import AddressesOf, GatherCopier, PageLane
from ...tiers.gpu.pages.kernels import load, measured
from ...tiers.gpu.pages.layouts import LayoutError, check_layout
from ...tiers.gpu.pages.pages import PageIdError
from ...tiers.memory.places import I64
from ...v1 import direct_pb2
from ..core.shares import Shares
from ..detached import apart
from ..errors import ApplianceError, error
from ..replies import AnswerQueue, NowOrLater
from ..security.callers import Caller
from ..security.client_registry import ConnectedClient
from ..server.cache_service import CacheService
from ..transfer.lanes import Route
from .deliveries import PageDelivery, PageGet
from .mapping import layout_of, map_pages
from .page_puts import PagePuts
from .registrations import (
    MAX_DELIVERIES,
    MAX_EVENT_SETS,
    MAX_EVENTS,
    MAX_HANDLE_BYTES,
    MAX_REGISTERING,
    MAX_REGISTRATIONS,
    Registration,
)

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0

R = TypeVar("R")


class DirectDevice(NamedTuple):
    """A device and its addresses of slots, by tier.

    That is dram, as far as it is pinned, and hbm, if the device has that or reaches it. What is in another
    tier comes by way of one that is here."""

    device: Device
    slots: Mapping[Tier, AddressesOf]


class _OpenLane(NamedTuple):
    """A device with its enqueuer, and the lane once it is known which way of copying is quicker."""

    device: Device
    enqueuer: ThreadPoolExecutor
    lane: "Future[PageLane]"

    @classmethod
    def of(cls, given: DirectDevice) -> "_OpenLane":
        """Start the enqueuer of a device, and the trial of its copies there."""
        device, slots = given
        enqueuer = ThreadPoolExecutor(1, f"kvtier-direct-{device.index}")

        def make() -> PageLane:
            return PageLane(device, enqueuer, slots, measured(device, load(device)))

        return cls(device, enqueuer, enqueuer.submit(make))

    def close(self) -> None:
        """End the enqueuer, and give back what copies had. Blocks."""
        if self.lane.exception() is None:
            self.enqueuer.submit(self.lane.result().copier.close)
        self.enqueuer.shutdown()


class DirectPath:
    """Handlers of the direct path. Lives on the event loop. `hashers` take checksums of what puts brought."""

    def __init__(self, service: CacheService, devices: list[DirectDevice], hashers: Executor) -> None:
        self.counters: Counter[str] = Counter()
        self._service = service
        self._hashers = hashers
        self._loop = asyncio.get_running_loop()
        self._registrations: list[Registration] = []
        self._shares = Shares(MAX_REGISTRATIONS, 0)  # registrations, also those that begin or end
        self._registering: Counter[int] = Counter()  # RegisterPages under way, by client
        self._puts = PagePuts(service, self.counters, self._on_trouble, self._registrations)
        self._is_closed = False
        self._lanes = {one.device.uuid: _OpenLane.of(one) for one in devices}

    # ------------------------------------------------------------------------------------- registering

    def register_pages(
        self, caller: Caller, request: direct_pb2.RegisterPagesRequest
    ) -> "asyncio.Future[direct_pb2.RegisterPagesResponse]":
        """Map a runtime's pages. Raises CallerError, UnknownError, BusyError."""
        client = caller.client
        assert client is not None, "only over the local channel"
        identity = self._service.identity_of(caller, request.namespace_id)
        lane = self._lanes.get(request.device_uuid)
        if lane is None:
            known = ", ".join(self._lanes) or "none"
            raise error("NO_DEVICE", f"the daemon has no device {request.device_uuid!r}; it has {known}")
        if self._service.draining:
            raise error("DRAINING", "the daemon is shutting down; recompute", retry_after_s=1.0)
        if self._registering[client.id] >= MAX_REGISTERING:
            message = f"{MAX_REGISTERING} registrations of this client are under way"
            raise error("TOO_MANY_IN_FLIGHT", message, retry_after_s=0.1)
        tenant = tenant_of(client.domain)
        self._shares.resize(MAX_REGISTRATIONS, self._service.options.num_tenants)
        if not self._shares.may_take(tenant, 1):
            held = self._shares.held(tenant)
            message = f"{held} runtimes of the tenant have registered pages, its share of {MAX_REGISTRATIONS}"
            raise error("TOO_MANY_CLIENTS", message, 1.0)
        if max(len(request.event_handles) - MAX_EVENTS, request.num_event_sets - MAX_EVENT_SETS) > 0:
            raise error("BAD_PAGES", f"at most {MAX_EVENTS} events and {MAX_EVENT_SETS} event sets are taken")
        geometry = identity.geometry
        if max(len(request.tensors), len(request.allocations)) > geometry.num_layers * geometry.num_planes:
            raise error("BAD_PAGES", "more tensors, or allocations, than layers and planes; name each once")
        handles = [*(one.handle for one in request.allocations), *request.event_handles]
        if any(not 0 < len(handle) <= MAX_HANDLE_BYTES for handle in handles):
            raise error("BAD_PAGES", f"a handle has 1 to {MAX_HANDLE_BYTES} bytes")
        try:
            sizes = [allocation.num_bytes for allocation in request.allocations]
            check_layout(layout_of(request), geometry, sizes)
        except LayoutError as problem:
            raise error("BAD_PAGES", str(problem)) from None
        self._registering[client.id] += 1
        self._shares.add(tenant, 1)
        registering = self._loop.create_task(self._register(client, lane, identity, request))
        registering.add_done_callback(partial(self._registered, client))
        return registering

    def _registered(
        self, client: ConnectedClient, done: "asyncio.Future[direct_pb2.RegisterPagesResponse]"
    ) -> None:
        """Count a RegisterPages that is under way no more, well or not."""
        self._registering[client.id] -= 1
        if done.cancelled() or done.exception() is not None:
            self._shares.give(tenant_of(client.domain), 1)
        self._registering += Counter()  # drops clients that register nothing

    async def _register(
        self,
        client: ConnectedClient,
        opened: _OpenLane,
        identity: NamespaceIdentity,
        request: direct_pb2.RegisterPagesRequest,
    ) -> direct_pb2.RegisterPagesResponse:
        for earlier in [one for one in self._registrations if one.is_ending and one.pid == client.pid]:
            await asyncio.shield(earlier.ended)
        lane = await asyncio.wrap_future(opened.lane)
        make = apart(lambda: map_pages(lane, identity.geometry, request), f"kvtier-map-{client.id}")
        try:
            mapping = await asyncio.wrap_future(make)
        except DeviceError as problem:
            if problem.fault is DeviceFault.OCCUPIED:
                message = "all streams of the device are taken; close another runtime's pages"
                raise error("TOO_MANY_CLIENTS", message, retry_after_s=1.0) from None
            self.counters[f"direct_register_{problem.fault.value}"] += 1
            raise error("NO_DEVICE", f"the pages cannot be opened: {problem}") from None
        dram = self._service.memory(Tier.DRAM)
        gather = GatherCopier(mapping.pages, lane, mapping.saves, dram, self._hashers, self._on_trouble)
        registration = Registration(1 + randbits(62), client, mapping, gather, self._close_quiet)
        try:
            if self._is_closed or self._service.clients.get(client.id) is not client:
                raise error("UNKNOWN_CLIENT", "the client is gone")
            registration.client = self._service.clients.open_pages(client, {Tier.DRAM: Route(registration)})
        except ApplianceError:
            await self._give_back(registration)
            raise
        self._registrations.append(registration)
        self.counters["direct_registrations"] += 1
        handles = mapping.event_handles
        return direct_pb2.RegisterPagesResponse(registration_id=registration.id, event_handles=handles)

    def unregister_pages(
        self, caller: Caller, request: direct_pb2.UnregisterPagesRequest
    ) -> "asyncio.Future[direct_pb2.UnregisterPagesResponse]":
        """Forget pages; answered when nothing touches them any more."""
        registration = self._own(caller, request.registration_id)
        registration.end()
        return self._answer_after(registration.ended, direct_pb2.UnregisterPagesResponse())

    def client_gone(self, client_id: int) -> None:
        """A connection ended: end its registrations. Idempotent."""
        for registration in list(self._registrations):
            if registration.owner == client_id and not registration.is_ending:
                registration.end()

    # -------------------------------------------------------------------------------------------- gets

    def get_pages(
        self, caller: Caller, request: direct_pb2.GetPagesRequest
    ) -> AnswerQueue[direct_pb2.GetPagesResponse]:
        """Start a get into pages; return its answers, now and to come."""
        registration = self._own(caller, request.registration_id)
        acquire = request.acquire
        self._check_geometry(caller, registration, acquire.namespace_id)
        acquire.client_id, acquire.ttl_ms = 0, 0
        if acquire.request_id in registration.deliveries:
            raise error("BAD_REQUEST", f"a get with request_id {acquire.request_id!r} is under way")
        if len(registration.deliveries) >= MAX_DELIVERIES:
            raise error("TOO_MANY_IN_FLIGHT", f"{MAX_DELIVERIES} gets into these pages are under way", 0.01)
        num_blocks = len(acquire.prefix_hashes) // HASH_BYTES - acquire.first_block
        ids = self._ids(registration, request.page_ids, num_blocks, is_target=True)
        after = self._event(registration, request.after_event)
        reads_hbm = Tier.HBM in registration.mapping.lane.slots
        self.counters["direct_gets_without_hbm"] += not reads_hbm
        replies = self._service.start_acquire(
            caller, acquire, lambda result: result, registration.client, reads_hbm
        )
        event_set = None
        if request.with_events and registration.free_sets:
            event_set = registration.free_sets.pop()

        delivery = PageDelivery(
            registration.mapping,
            registration.client,
            self._service.appliance,
            replies,
            PageGet(acquire.first_block, ids, after, event_set, self._service.tiers.pack),
            self.counters,
        )
        registration.deliveries[acquire.request_id] = delivery
        delivery.task.add_done_callback(partial(self._delivered, registration, acquire.request_id))
        return delivery.answers

    def _delivered(
        self,
        registration: Registration,
        request_id: str,
        task: "asyncio.Future[direct_pb2.GetPagesResponse | ApplianceError]",
    ) -> None:
        """Give the last answer of a get, when its pages and its event set are free again."""
        delivery = registration.deliveries.pop(request_id)
        if delivery.event_set is not None:
            registration.free_sets.append(delivery.event_set)
        registration.look()
        if not task.cancelled():
            delivery.answers.add(task.result(), is_last=True)

    def cancel_pages(
        self, caller: Caller, request: direct_pb2.CancelPagesRequest
    ) -> NowOrLater[direct_pb2.CancelPagesResponse]:
        """Cancel a get; answered when it touches its pages no more."""
        registration = self._own(caller, request.registration_id)
        delivery = registration.deliveries.get(request.request_id)
        if delivery is None:
            return direct_pb2.CancelPagesResponse()
        delivery.cancel()
        return self._answer_after(delivery.task, direct_pb2.CancelPagesResponse())

    # -------------------------------------------------------------------------------------------- puts

    def put_pages(
        self, caller: Caller, request: direct_pb2.PutPagesRequest
    ) -> "asyncio.Future[direct_pb2.PutPagesResponse]":
        """Store blocks from pages; answered when they are stored and the pages are not read any more."""
        registration = self._own(caller, request.registration_id)
        reserve = request.reserve
        self._check_geometry(caller, registration, reserve.namespace_id)
        num_blocks = len(reserve.prefix_hashes) // HASH_BYTES
        ids = self._ids(registration, request.page_ids, num_blocks, is_target=False)
        after = self._event(registration, request.after_event)
        return self._puts.start(caller, registration, reserve, ids, after)

    # -------------------------------------------------------------------------------------------- ends

    def _close_quiet(self, registration: Registration) -> None:
        """Give back a registration that has ended and that no stream touches any more."""
        self._registrations.remove(registration)
        self._service.clients.close(registration.client.id, "pages unregistered")
        work = self._loop.create_task(self._give_back(registration))
        work.add_done_callback(lambda _: self._ended(registration))

    def _ended(self, registration: Registration) -> None:
        self._shares.give(tenant_of(registration.client.domain), 1)
        registration.ended.set_result(None)

    async def _give_back(self, registration: Registration) -> None:
        """Close what a registration has of the device. A failure is logged and counted."""
        try:
            await asyncio.wrap_future(
                apart(registration.mapping.give_back, f"kvtier-unmap-{registration.owner}")
            )
        except DeviceError as problem:
            log.error("pages of client %d could not be closed: %s", registration.owner, problem)
            self.counters["direct_close_failed"] += 1

    def _on_trouble(self, problem: DeviceError) -> None:
        """A put met a broken device; on any thread."""
        log.error("put from registered pages: %s", problem)
        self._loop.call_soon_threadsafe(self._count_trouble, f"direct_put_device_{problem.fault.value}")

    def _count_trouble(self, name: str) -> None:
        self.counters[name] += 1

    async def close(self) -> None:
        """End every registration. What does not become quiet in time is ended by shutting its device down.
        Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        ending = list(self._registrations)
        for registration in ending:
            if not registration.is_ending:
                registration.end()
        ended = [registration.ended for registration in ending]
        if ended and (await asyncio.wait(ended, timeout=CLOSE_GRACE_S))[1]:
            log.error("registered pages are still being copied; shutting the devices down")
            for lane in reversed(self._lanes.values()):  # peers first: they read the memory of hbm's
                await asyncio.to_thread(lane.device.shut_down)
            for registration in ending:
                registration.gather.give_up()
                for delivery in registration.deliveries.values():
                    delivery.give_up()
            await asyncio.wait(ended, timeout=CLOSE_GRACE_S)
        for lane in self._lanes.values():
            await asyncio.to_thread(lane.close)

    def check_integrity(self) -> list[str]:
        """Audit: no registration that is over, no event set used twice."""
        return [problem for one in self._registrations for problem in one.problems()]

    # ---------------------------------------------------------------------------------------- common parts

    def _own(self, caller: Caller, number: int) -> Registration:
        assert caller.client is not None, "only over the local channel"
        for registration in self._registrations:
            is_own = (registration.id, registration.owner) == (number, caller.client.id)
            if is_own and not registration.is_ending:
                return registration
        raise error("UNKNOWN_PAGES", f"this client has no registration {number}; register the pages (again)")

    def _check_geometry(self, caller: Caller, registration: Registration, namespace_id: int) -> None:
        if self._service.identity_of(caller, namespace_id).geometry != registration.mapping.geometry:
            raise error("BAD_PAGES", "the namespace has another geometry than the pages were registered for")

    def _ids(self, registration: Registration, packed: bytes, num_blocks: int, *, is_target: bool) -> I64:
        try:
            return registration.mapping.pages.ids(packed, max(0, num_blocks), is_target=is_target)
        except PageIdError as problem:
            raise error("BAD_PAGES", str(problem)) from None

    def _event(self, registration: Registration, number: int) -> Event | None:
        known = registration.mapping.runtime_events
        if number > len(known):
            raise error("BAD_PAGES", f"event {number} of {len(known)} that were registered")
        return known[number - 1] if number else None

    def _answer_after(self, future: "asyncio.Future[Any]", answer: R) -> "asyncio.Future[R]":
        later: asyncio.Future[R] = self._loop.create_future()
        future.add_done_callback(lambda _: None if later.done() else later.set_result(answer))
        return later
