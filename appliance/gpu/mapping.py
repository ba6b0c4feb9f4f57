"""PageMapping: what a registration takes from a device, and gives back as a whole.

Opening another process's memory or event, and closing it, may block for as long as that process, or any
other, keeps the device busy; closing reportedly waits for the device. Each mapping is therefore made, and
given back, on a thread of its own (detached.py).
"""

from contextlib import ExitStack
from dataclasses import dataclass, fields

from ...tiers.block import Geometry
from ...tiers.gpu.device.contract import Event, Stream
from ...tiers.gpu.pages.gather import PageLane
from ...tiers.gpu.pages.layouts import PageLayout, PageTensor, page_table
from ...tiers.gpu.pages.pages import RegisteredPages
from ...v1 import direct_pb2

MAX_EXPORTED_EVENTS = 256  # of one registration


@dataclass(slots=True)
class PageMapping:
    """A runtime's pages, opened, with two streams of their own: a get does not wait for a put."""

    lane: PageLane
    pages: RegisteredPages
    loads: Stream
    saves: Stream
    runtime_events: list[Event]  # recorded by the runtime; we ask whether they have happened
    event_sets: list[list[Event]]  # recorded by us, one event per layer group
    event_handles: list[bytes]
    taken: ExitStack

    @property
    def geometry(self) -> Geometry:
        """The geometry of the namespace that the pages were registered for."""
        return self.pages.table.geometry

    def give_back(self) -> None:
        """Close everything; what fails keeps nothing else from being closed. Blocks. Raises DeviceError.

        The caller knows that no stream still touches it."""
        self.taken.close()


def layout_of(request: direct_pb2.RegisterPagesRequest) -> PageLayout:
    """Return the layout that a message describes, unchecked."""
    names = [field.name for field in fields(PageTensor)]
    tensors = tuple(PageTensor(*(getattr(tensor, name) for name in names)) for tensor in request.tensors)
    return PageLayout(
        request.num_pages,
        request.page_tokens,
        request.page_stride,
        request.token_stride,
        request.head_stride,
        tensors,
    )


def map_pages(lane: PageLane, geometry: Geometry, request: direct_pb2.RegisterPagesRequest) -> PageMapping:
    """Open a runtime's memory and events. Blocks.

    Raises DeviceError, OCCUPIED when no streams are left; nothing is kept then."""
    device = lane.device
    with ExitStack() as taken:
        loads = device.take_stream()
        taken.callback(device.give_stream, loads)
        saves = device.take_stream()
        taken.callback(device.give_stream, saves)
        addresses = []
        for allocation in request.allocations:
            memory = device.open(allocation.handle, allocation.num_bytes)
            addresses.append(memory.address)
            taken.callback(device.close, memory)
        events = []
        for handle in request.event_handles:
            event = device.open_event(handle)
            events.append(event)
            taken.callback(device.recycle, event)
        sets: list[list[Event]] = []
        handles = []
        for _ in range(min(request.num_event_sets, MAX_EXPORTED_EVENTS // geometry.num_groups)):
            sets.append([])
            for _ in range(geometry.num_groups):
                event, handle = device.export_event()
                sets[-1].append(event)
                handles.append(handle)
                taken.callback(device.recycle, event)
        pages = RegisteredPages(page_table(layout_of(request), geometry, addresses))
        return PageMapping(lane, pages, loads, saves, events, sets, handles, taken.pop_all())
