"""Direct gets and puts: pages registered once, then one call each, and the daemon copies.

A registration belongs to a connection. When that is replaced (the daemon was restarted, a call timed out) the
next operation registers again, and the daemon answers that only when nothing of the earlier connection
touches the pages any more; so the first answer on a new connection also settles what a broken call left open.

While a call is under way its pages are the daemon's. A call that its caller gives up (a cancelled task,
Ctrl-C) therefore returns only when the daemon has said that it is done with them.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...v1 import direct_pb2
from ...v1.shm import HASH_BYTES
from ...v1.types import Tier
from ..errors import (
    CONNECTION_LOST,
    InvalidRequest,
    KvtierError,
    PreconditionFailed,
    Unavailable,
    broken_answer,
)
from ..values.keys import pack
from ..values.namespace import Namespace
from ..values.types import PutReport
from .answers import num_blocks_of, outcomes_of, tiers_of
from .base import Operations
from .effects import Attach, Attachment, Forget, Operation, Receive
from .gets import Chain, check_first_block
from .page_layouts import PagesDescription, describe
from .puts import put_header
from .terms import PutTerms, ReadTerms


class Exported(NamedTuple):
    """One device allocation as another process can open it."""

    handle: bytes
    address: int  # where it begins, here
    num_bytes: int


class Exporter(Protocol):
    """How this process's device memory and events become handles.

    CudaExporter (direct_cuda.py) is the one for GPUs; its events are torch's.
    """

    device_uuid: str

    def export(self, address: int) -> Exported:
        """Return the allocation that `address` lies in. Raises PreconditionFailed, naming the fix."""
        ...

    def new_event(self) -> tuple[Any, bytes]:
        """Return an event that this process records, and its handle."""
        ...

    def open_event(self, handle: bytes) -> Any:
        """Return an event of the daemon's, for this process's streams to wait for."""
        ...


class LayerGroup(NamedTuple):
    """Layer groups up to `group` of the first `num_blocks` blocks are in the pages once `event` has happened.

    Not a promise yet: a later layer may fail to arrive, and the final report then names fewer blocks."""

    group: int
    num_blocks: int
    event: Any


@dataclass(frozen=True, slots=True)
class PagesReport:
    """What a get brought: blocks `first_block` to `num_blocks` of the chain are in their pages.

    Nothing else that the get named is worth reading.
    """

    num_blocks: int
    first_block: int
    tiers: tuple[Tier, ...] = ()  # where each block was found
    num_stored: int = 0  # length of the stored prefix
    reason: str = ""  # why less than that is there

    @property
    def num_loaded(self) -> int:
        """Number of blocks that are in the pages."""
        return max(0, self.num_blocks - self.first_block)


@dataclass(eq=False)
class PagesRegistration:
    """Registered pages. `events` are for the caller's streams to record (`after=` of get and put)."""

    operations: Operations
    namespace: Namespace
    description: PagesDescription
    exporter: Exporter
    num_event_sets: int = 0
    events: tuple[Any, ...] = ()
    handles: tuple[bytes, ...] = ()
    registration_id: int = 0
    _attachment: Attachment | None = None
    _group_events: list[Any] = field(default_factory=list)

    @property
    def pages_per_block(self) -> int:
        """Pages that hold the tokens of one block."""
        return self.namespace.geometry.block_tokens // self.description.page_tokens

    def register(self, namespace: Namespace) -> Operation[tuple[Attachment, int]]:
        """See that this connection knows the pages; return it, and the id of `namespace` on it."""
        attachment, namespace_id = yield from self.operations.begin(namespace)
        if not attachment.local:
            raise PreconditionFailed(
                "pages are registered over the local channel only; use a unix:// target of this host",
                reason="NO_DEVICE",
            )
        if self._attachment is not attachment:
            _, own_id = yield from self.operations.begin(self.namespace)
            request = self._request(own_id)
            answer = yield from self.operations.call(attachment, "RegisterPages", request)
            self.registration_id = answer.registration_id
            self._group_events = [self.exporter.open_event(handle) for handle in answer.event_handles]
            self._attachment = attachment
        return attachment, namespace_id

    def unregister(self) -> Operation[None]:
        """Forget the pages; returns when the daemon has let go of them. Never raises for one that is gone."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            request = direct_pb2.UnregisterPagesRequest(registration_id=self.registration_id)
            if (yield Attach(connect=False)) is not attachment:
                return
            with suppress(KvtierError):
                yield from self.operations.call(attachment, "UnregisterPages", request)

    def put(
        self, namespace: Namespace, hashes: Any, page_ids: Any, after: Any, terms: PutTerms
    ) -> Operation[PutReport]:
        """Store blocks from pages; see Pages.put."""
        packed = pack(hashes)
        num_blocks = len(packed) // HASH_BYTES
        timeout_s = self.operations.deadline(terms.deadline_s)
        header = put_header(self.operations, packed, timeout_s, terms)
        if not num_blocks:
            return PutReport([])
        ids, event = self._packed_ids(page_ids, num_blocks), self._number_of(after)
        attachment, namespace_id = yield from self.register(namespace)
        self.operations.chain(attachment, packed)
        header.namespace_id = namespace_id
        request = direct_pb2.PutPagesRequest(
            registration_id=self.registration_id, reserve=header, page_ids=ids, after_event=event
        )
        ticket = yield from self.operations.send(attachment, "PutPages", request, timeout_s)
        try:
            answer = yield Receive(ticket)
        except KvtierError:
            raise
        except BaseException:  # given up; but the daemon reads the pages until it answers
            with suppress(KvtierError):
                yield Receive(ticket)
            raise
        return PutReport(outcomes_of(answer.message.outcomes, num_blocks))

    def _request(self, namespace_id: int) -> direct_pb2.RegisterPagesRequest:
        """Return the message that registers the pages."""
        description = self.description
        allocations: dict[int, tuple[int, Exported]] = {}  # by address: number, allocation
        tensors = []
        for placed in description.tensors:
            found = next((a for a in allocations.values() if _contains(a[1], placed.address)), None)
            if found is None:
                exported = self.exporter.export(placed.address)
                found = allocations[exported.address] = (len(allocations), exported)
            tensors.append(
                direct_pb2.PageTensor(
                    allocation=found[0],
                    offset=placed.address - found[1].address,
                    first_layer=placed.first_layer,
                    num_layers=placed.num_layers,
                    layer_stride=placed.layer_stride,
                    first_plane=placed.first_plane,
                    num_planes=placed.num_planes,
                    plane_stride=placed.plane_stride,
                )
            )
        return direct_pb2.RegisterPagesRequest(
            namespace_id=namespace_id,
            device_uuid=self.exporter.device_uuid,
            num_pages=description.num_pages,
            page_tokens=description.page_tokens,
            page_stride=description.page_stride,
            token_stride=description.token_stride,
            head_stride=description.head_stride,
            allocations=[
                direct_pb2.Allocation(handle=exported.handle, num_bytes=exported.num_bytes)
                for _, exported in allocations.values()
            ],
            tensors=tensors,
            event_handles=self.handles,
            num_event_sets=self.num_event_sets,
        )

    def _packed_ids(self, page_ids: Any, num_blocks: int) -> bytes:
        """Return page ids as they travel. Raises InvalidRequest when they are not as many as the blocks
        need."""
        ids = np.asarray(page_ids, np.int64).ravel()
        wanted = num_blocks * self.pages_per_block
        if len(ids) != wanted or (wanted and not 0 <= ids.min() <= ids.max() < self.description.num_pages):
            raise InvalidRequest(
                f"{num_blocks} blocks need {wanted} ids of {self.description.num_pages} pages, got {len(ids)}"
                + (f" from {ids.min()} to {ids.max()}" if len(ids) else ""),
                reason="BAD_PAGES",
            )
        return ids.astype("<u4").tobytes()

    def _number_of(self, after: Any) -> int:
        """Return the number of one of `events` on the wire."""
        if after is None:
            return 0
        for place, event in enumerate(self.events, 1):
            if event is after:
                return place
        raise InvalidRequest("`after` must be one of `events` of these pages", reason="BAD_PAGES")


def pages_registration(
    operations: Operations,
    namespace: Namespace,
    preset: str,
    tensors: Sequence[Any],
    exporter: Exporter,
    page_tokens: int | None,
    num_events: int,
    num_event_sets: int,
) -> PagesRegistration:
    """Describe the tensors, make the events; nothing is sent. Raises InvalidRequest, PreconditionFailed."""
    description = describe(preset, tensors, namespace.geometry, page_tokens)
    made = [exporter.new_event() for _ in range(num_events)]
    return PagesRegistration(
        operations,
        namespace,
        description,
        exporter,
        num_event_sets,
        tuple(event for event, _ in made),
        tuple(handle for _, handle in made),
    )


class DirectGet:
    """One get into pages, from request to last answer. `report` is None until then."""

    def __init__(self, pages: PagesRegistration, terms: ReadTerms) -> None:
        self.report: PagesReport | None = None
        self._pages = pages
        self._terms = terms
        self._first_block = terms.first_block
        self._attachment: Attachment | None = None
        self._ticket = 0
        self._request_id = ""
        self._num_named = 0  # blocks
        self._next_group = 0  # the first layer group that no answer has named

    def open(
        self, namespace: Namespace, hashes: Any, page_ids: Any, after: Any, with_events: bool
    ) -> Operation[None]:
        """Send the request. Raises InvalidRequest before anything is sent."""
        pages, operations, terms = self._pages, self._pages.operations, self._terms
        packed = pack(hashes)
        num_named = len(packed) // HASH_BYTES
        check_first_block(self._first_block, num_named)
        ids = pages._packed_ids(page_ids, num_named - self._first_block)
        event = pages._number_of(after)
        if self._first_block == num_named:
            self.report = PagesReport(num_named, self._first_block)
            return
        attachment, namespace_id = yield from pages.register(namespace)
        packed, timeout_s = operations.chain(attachment, packed), operations.deadline(terms.deadline_s)
        chain = Chain(namespace, namespace_id, packed, self._first_block, timeout_s, terms)
        acquire = chain.acquire_request(operations, attachment, self._first_block)
        request = direct_pb2.GetPagesRequest(
            registration_id=pages.registration_id,
            acquire=acquire,
            page_ids=ids,
            after_event=event,
            with_events=with_events,
        )
        self._attachment, self._request_id, self._num_named = attachment, acquire.request_id, num_named
        self._ticket = yield from operations.send(attachment, "GetPages", request, chain.timeout_s)

    def whole(self, namespace: Namespace, hashes: Any, page_ids: Any, after: Any) -> Operation[PagesReport]:
        """Send the request and wait until the get is over."""
        yield from self.open(namespace, hashes, page_ids, after, False)
        return (yield from self.finish())

    def next_group(self) -> Operation[LayerGroup | None]:
        """Return the next layer group that is under way as a whole; None when the get is over."""
        if self.report is not None:
            return None
        if (yield Attach(connect=False)) is not self._attachment:
            raise Unavailable("the connection was lost during the call", reason=CONNECTION_LOST)
        try:
            message = (yield Receive(self._ticket)).message
        except KvtierError:
            raise
        except BaseException:
            yield from self.cancel()
            raise
        num_blocks = num_blocks_of(message, self._num_named)
        if not message.last:
            return LayerGroup(message.group, num_blocks, self._event_of(message))
        self.report = PagesReport(
            num_blocks,
            self._first_block,
            tiers_of(message.tiers, self._attachment.tiers),
            message.num_stored,
            message.reason,
        )
        return None

    def _event_of(self, message: direct_pb2.GetPagesResponse) -> Any:
        """Return the event of an answer about a layer group; the daemon names each group once, in order."""
        events = self._pages._group_events
        if not self._next_group <= message.group < len(self._pages.namespace.fragment_bytes):
            raise broken_answer(f"layer group {message.group}, where {self._next_group} is next")
        if message.event >= len(events):
            raise broken_answer(f"event {message.event} of {len(events)}")
        self._next_group = message.group + 1
        return events[message.event]

    def finish(self) -> Operation[PagesReport]:
        """Wait until the get is over."""
        while self.report is None:
            yield from self.next_group()
        return self.report

    def cancel(self) -> Operation[None]:
        """Give up; returns when the daemon has let go of the pages. Idempotent.

        Never raises for a daemon that is gone: the next registration waits for what it may still be doing.
        """
        attachment = self._attachment
        if self.report is not None or attachment is None:
            return
        self.report = PagesReport(0, self._first_block, reason="cancelled")
        request = direct_pb2.CancelPagesRequest(
            registration_id=self._pages.registration_id, request_id=self._request_id
        )
        if (yield Attach(connect=False)) is not attachment:
            return
        with suppress(KvtierError):
            yield Forget(self._ticket)
            yield from self._pages.operations.call(attachment, "CancelPages", request)


def _contains(exported: Exported, address: int) -> bool:
    return exported.address <= address < exported.address + exported.num_bytes
