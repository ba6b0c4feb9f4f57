"""Registrations: pages that a runtime opened to us, and everything that goes with them.

A registration holds the runtime's memory mapped, two streams (one for gets, one for puts, so that nobody
waits for a save) and a client of its own in the planner. That client is why leases of the direct path are the
daemon's: the runtime may die at any moment, and what a device is reading is held until the *device* says that
it is done (I-6). It also counts against the same limits as any other client's.

Streams are a registration's own for its life: copies into the pages of one runtime do not queue behind those
of another. No stream waits for an event of a runtime (runtime_events.py).

Opening another process's memory or event, and closing it, may block for as long as that process, or any
other, keeps the device busy; closing reportedly waits for the device. Each registration is therefore opened,
and closed, on a thread of its own (`apart`).
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ...tiers.base import Copier, CopyItem, CopyOutcome
from ...tiers.gpu.device.contract import Device, DeviceError, DeviceMemory, Event, Stream
from ...tiers.gpu.device.own_events import OwnEvents
from ...tiers.gpu.pages.gather import GatherCopier
from ...tiers.gpu.pages.kernels import PieceCopier
from ...tiers.gpu.pages.layouts import PageLayout, PageTensor, page_table
from ...tiers.gpu.pages.pages import RegisteredPages
from ...v1 import direct_pb2
from ..security.client_registry import ConnectedClient

if TYPE_CHECKING:
    from ...tiers.block import Geometry
    from .deliveries import Delivery

R = TypeVar("R")

# Limits of the direct path. What is beyond one is refused at once, most with a time after which to retry.
MAX_REGISTRATIONS = 64  # being opened, open or being closed; vLLM workers have three for each KV cache group
MAX_REGISTERING = 16  # RegisterPages of one client under way: each is a thread that the device may keep
MAX_EVENTS = 64  # that one runtime may open to us
MAX_HANDLE_BYTES = 256
MAX_EVENT_SETS = 16
MAX_EXPORTED_EVENTS = 256  # of one registration
MAX_DELIVERIES = 32  # of one registration at a time
MAX_WAITING_PUTS = 64  # of one client, whose events have not happened: each is asked every 50 us


@dataclass(slots=True)
class Mapping:
    """What a registration took from a device. `give_back` when nothing touches it any more."""

    device: Device
    pages: RegisteredPages
    memories: list[DeviceMemory]
    loads: Stream
    saves: Stream
    runtime_events: list[Event]  # recorded by the runtime; we ask whether they have happened
    event_sets: list[list[Event]]  # recorded by us, one event per layer group
    event_handles: list[bytes]

    def give_back(self) -> None:
        """Close everything. The caller knows that no stream still touches it. Blocks."""
        for memory in self.memories:
            self.device.close(memory)
        for event in [*self.runtime_events, *(event for events in self.event_sets for event in events)]:
            self.device.recycle(event)
        self.device.give_stream(self.loads)
        self.device.give_stream(self.saves)


@dataclass(eq=False, slots=True)
class Registration:
    """Pages of one runtime. Lives on the event loop."""

    id: int
    owner: int  # the runtime's client
    pid: int
    client: ConnectedClient  # holds the leases and makes the puts
    geometry: "Geometry"
    mapping: Mapping
    gather: GatherCopier
    copier: PieceCopier
    events: OwnEvents  # by which its deliveries and puts learn that the device is done
    deliveries: dict[str, "Delivery"] = field(default_factory=dict)  # by request id
    num_gathering: int = 0  # batches of puts under way
    num_waiting: int = 0  # puts whose event has not happened yet
    free_sets: list[int] = field(default_factory=list)  # event sets that no delivery uses
    is_ending: bool = False
    ending: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ended: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def is_quiet(self) -> bool:
        """Whether no stream touches the pages on our behalf."""
        return not self.deliveries and not self.num_gathering and not self.num_waiting

    def problems(self) -> list[str]:
        """Return what is wrong with this registration, in words."""
        found = []
        given = (d.event_set for d in self.deliveries.values() if d.event_set is not None)
        sets = sorted([*self.free_sets, *given])
        if sets != list(range(len(self.mapping.event_sets))):
            found.append(f"registration {self.id}: event sets {sets} of {len(self.mapping.event_sets)}")
        if self.is_ending and self.is_quiet:
            found.append(f"registration {self.id} is quiet and not given back")
        if min(self.num_gathering, self.num_waiting) < 0:
            found.append(f"registration {self.id}: {self.num_gathering} batches, {self.num_waiting} waits")
        return found


def layout_of(request: direct_pb2.RegisterPagesRequest) -> PageLayout:
    """Return the layout that a message describes, unchecked."""
    tensors = tuple(
        PageTensor(
            tensor.allocation,
            tensor.offset,
            tensor.first_layer,
            tensor.num_layers,
            tensor.layer_stride,
            tensor.first_plane,
            tensor.num_planes,
            tensor.plane_stride,
        )
        for tensor in request.tensors
    )
    return PageLayout(
        request.num_pages,
        request.page_tokens,
        request.page_stride,
        request.token_stride,
        request.head_stride,
        tensors,
    )


def map_pages(
    device: Device, layout: PageLayout, geometry: "Geometry", request: direct_pb2.RegisterPagesRequest
) -> Mapping:
    """Open a runtime's memory and events. Blocks. Raises DeviceError; then nothing is kept."""
    undo: list[Callable[[], None]] = []
    try:
        streams: list[Stream] = []
        for _ in range(2):
            stream = device.take_stream()
            if stream is None:
                raise DeviceOccupied
            streams.append(stream)
            undo.append(partial(device.give_stream, stream))
        memories = []
        for allocation in request.allocations:
            memory = device.open(allocation.handle, allocation.num_bytes)
            memories.append(memory)
            undo.append(partial(device.close, memory))
        events = []
        for handle in request.event_handles:
            event = device.open_event(handle)
            events.append(event)
            undo.append(partial(device.recycle, event))
        num_sets = min(request.num_event_sets, MAX_EXPORTED_EVENTS // geometry.num_groups)
        sets: list[list[Event]] = []
        handles = []
        for _ in range(num_sets):
            sets.append([])
            for _ in range(geometry.num_groups):
                event, handle = device.export_event()
                sets[-1].append(event)
                handles.append(handle)
                undo.append(partial(device.recycle, event))
    except (DeviceError, DeviceOccupied):
        for step in reversed(undo):
            step()
        raise
    pages = RegisteredPages(page_table(layout, geometry, [memory.address for memory in memories]))
    return Mapping(device, pages, memories, streams[0], streams[1], events, sets, handles)


def apart(call: Callable[[], R], name: str) -> "Future[R]":
    """Run `call` on a daemon thread of its own, which keeps neither others nor the process's end waiting."""
    future: Future[R] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except BaseException as problem:
            future.set_exception(problem)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class CountedCopier:
    """A copier whose batches are counted on the event loop: `on_change(+1)` at the start, `(-1)` at the
    end."""

    def __init__(self, copier: Copier, on_change: Callable[[int], None]) -> None:
        self._copier = copier
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()

    def start(self, items: Sequence[CopyItem]) -> "Future[list[CopyOutcome]]":
        """See Copier.start."""
        self._on_change(+1)
        future = self._copier.start(items)
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._on_change, -1))
        return future


class DeviceOccupied(Exception):
    """All streams of the device are taken."""


def find(registrations: Sequence[Registration], number: int, owner: int) -> Registration | None:
    """Return the registration `number` of client `owner`, unless it is ending."""
    return next((r for r in registrations if (r.id, r.owner) == (number, owner) and not r.is_ending), None)
