"""PagePuts: stores blocks from a runtime's pages (PutPages of direct.proto).

    the runtime's event, if any -> the planner's decision -> copies (tiers/gpu/pages/gather.py) -> answer

To the planner such a put is one like any other; its staging extent is the pages.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from ...tiers.gpu.device.contract import DeviceError, Event
from ...tiers.gpu.pages.gather import PUT_BYTES
from ...tiers.memory.places import I64
from ...v1 import direct_pb2, kvcache_pb2
from ..core import events, results
from ..errors import error, from_refusal
from ..replies import NowOrLater
from ..security.callers import Caller
from ..server.cache_service import CacheService
from . import runtime_events
from .registrations import MAX_WAITING_PUTS, Registration
from .runtime_events import has_happened


class PagePuts:
    """The puts of all `registrations`, a list that changes. Lives on the event loop.

    `on_trouble` is told of a broken device."""

    def __init__(
        self,
        service: CacheService,
        counters: Counter[str],
        on_trouble: Callable[[DeviceError], None],
        registrations: Sequence[Registration],
    ) -> None:
        self._service = service
        self._counters = counters
        self._on_trouble = on_trouble
        self._registrations = registrations
        self._loop = asyncio.get_running_loop()

    def start(
        self,
        caller: Caller,
        registration: Registration,
        reserve: kvcache_pb2.ReserveRequest,
        ids: I64,
        after: Event | None,
    ) -> "asyncio.Future[direct_pb2.PutPagesResponse]":
        """Store the blocks in the pages `ids` (blocks, pages per block) once `after` has happened.

        Answered when they are stored and the pages are not read any more. Raises CallerError, BusyError."""
        block_bytes = registration.mapping.geometry.block_bytes
        if len(ids) * block_bytes >= PUT_BYTES:
            raise error("TOO_LARGE", f"{len(ids)} blocks of {block_bytes} bytes; split the put")
        store = partial(self._store, caller, registration, reserve, ids)
        if after is None:
            return store()
        same_client = (one for one in self._registrations if one.owner == registration.owner)
        if sum(one.num_waiting for one in same_client) >= MAX_WAITING_PUTS:
            message = f"{MAX_WAITING_PUTS} puts of this client wait for an event of its own"
            raise error("TOO_MANY_IN_FLIGHT", message, retry_after_s=0.01)
        registration.num_waiting += 1
        wait = self._loop.create_task(
            has_happened(registration.mapping.lane.device, after, registration.ending)
        )
        wait.add_done_callback(partial(self._waited, registration))
        return self._loop.create_task(self._store_after(wait, registration, store))

    def _waited(self, registration: Registration, _: "asyncio.Future[bool]") -> None:
        """Count a put that waits no more; its event is not asked any more either."""
        registration.num_waiting -= 1
        registration.look()

    async def _store_after(
        self,
        wait: "asyncio.Task[bool]",
        registration: Registration,
        store: "Callable[[], asyncio.Future[direct_pb2.PutPagesResponse]]",
    ) -> direct_pb2.PutPagesResponse:
        """Store the blocks once the runtime's event has happened. Raises ApplianceError when it does not."""
        try:
            is_free = await wait
        except DeviceError as problem:
            self._on_trouble(problem)
            raise error("NO_DEVICE", f"the event of this put cannot be asked: {problem}") from None
        if registration.is_ending:
            raise error("UNKNOWN_PAGES", "the pages were unregistered while the put waited for its event")
        if not is_free:
            self._counters["direct_puts_event_late"] += 1
            raise error(
                "BAD_PAGES", f"the event of this put has not happened within {runtime_events.EVENT_S:g} s"
            )
        return await store()

    def _store(
        self, caller: Caller, registration: Registration, reserve: kvcache_pb2.ReserveRequest, ids: I64
    ) -> "asyncio.Future[direct_pb2.PutPagesResponse]":
        """Let the planner decide, and copy. Raises CallerError."""
        block_bytes = registration.mapping.geometry.block_bytes
        build = self._service.reservation(caller, registration.client, reserve)
        first = registration.gather.open_put(ids)
        spans = [(first + block * block_bytes, block_bytes) for block in range(len(ids))]
        client, request_id = registration.client.id, reserve.request_id
        answer = self._service.appliance.ask(
            lambda call: events.CommitRequested(call, client, request_id, 0, spans, build(call))
        )
        return self._loop.create_task(self._answer(registration, first, answer))

    async def _answer(
        self,
        registration: Registration,
        first: int,
        answer: NowOrLater[results.Result],
    ) -> direct_pb2.PutPagesResponse:
        """Count and return the planner's answer to a put; the source of its byte 0 is `first`.

        Raises ApplianceError when the planner refuses."""
        result = await answer if isinstance(answer, asyncio.Future) else answer
        registration.gather.close_put(first)
        if isinstance(result, results.Refusal):
            raise from_refusal(result)
        assert isinstance(result, results.PutResult)
        num_stored = result.outcomes.count(kvcache_pb2.PUT_OUTCOME_STORED)
        self._counters["direct_puts"] += 1
        self._counters["direct_put_blocks"] += num_stored
        self._counters["direct_put_bytes"] += num_stored * registration.mapping.geometry.block_bytes
        return direct_pb2.PutPagesResponse(outcomes=result.outcomes)
