"""The two ways of bytes between the engine's pages and the appliance. Each worker thread has a Transfer.

    HostTransfer    pages in host memory: this process copies, from shared memory and into staging memory
    DeviceTransfer  pages on a GPU: the daemon copies, into and out of the pages themselves (docs/direct.md)

What is asked of both is a value (Fetch, Store); a Transfer adds where the bytes go, and what that takes.

On a device "the step has written its blocks" is a place in a stream, not a moment: `mark` records an event
there, on the engine's thread, and the daemon waits for it before it touches a page. Events are made with the
Transfer and not when it registers: a step may be marked before the daemon is there. They are used in turn:
the daemon can only ask for an event as it was recorded last, and an engine that enqueues one step after
another would record a single event again before it was ever done.

The engine reuses a block when its load or save is over. A call that was never answered leaves its pages in
doubt, so a DeviceTransfer does not come back from it before the daemon has let go of them, or is gone.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ....v1.types import NamespaceIdentity, Urgency
from ...connector.breaker import OPENS
from ...errors import NOT_RUNNING, SOCKET_DENIED, InvalidRequest, KvtierError, PreconditionFailed
from ...operations.direct import Exported, Exporter
from ...operations.page_layouts import describe
from ...sync import Client, Pages
from ...values.namespace import Namespace
from ...values.types import ExpectedBlocks, PutReport, Retention
from ..identity import salted
from .pages import PagedGroup

LOAD_STAGING_BYTES = 1 << 16  # of a client that stages nothing: loads need none, nor does a device
NUM_MARKS = 4  # steps that an engine enqueues ahead of its device, and some that wait for the daemon
DOUBT_PERIOD_S = 0.5  # between two questions whether the daemon has let go of pages
LAST_COPIES_S = 0.5  # for what a daemon that has just died had given its device to do

R = TypeVar("R")


class Fetch(NamedTuple):
    """Blocks of a chain, from `first_block` on, that are to fill these blocks of the engine."""

    group: int
    namespace: Namespace
    hashes: bytes
    block_ids: Sequence[int]
    first_block: int
    session: str
    deadline_s: float
    expected: ExpectedBlocks | None = None

    def through(self, get: Callable[..., R], into: Any, **where: Any) -> R:
        """Call `get` of a client or of its pages."""
        return get(
            self.namespace,
            self.hashes,
            into,
            first_block=self.first_block,
            session=self.session,
            urgency=Urgency.PREFILL,
            deadline_s=self.deadline_s,
            expected=self.expected,
            **where,
        )


class Store(NamedTuple):
    """Blocks of the engine that are to be stored behind `parent`; `prefill_s` is what computing them took."""

    group: int
    namespace: Namespace
    hashes: bytes
    block_ids: Sequence[int]
    parent: bytes
    session: str
    deadline_s: float
    prefill_s: float
    retention: tuple[Retention, ...] = ()

    def through(self, put: Callable[..., PutReport], data: Any, **where: Any) -> PutReport:
        """Call `put` of a client or of its pages."""
        return put(
            self.namespace,
            self.hashes,
            data,
            parent=self.parent,
            session=self.session,
            deadline_s=self.deadline_s,
            prefill_s=self.prefill_s,
            retention=self.retention,
            **where,
        )


class Got(NamedTuple):
    """Blocks that a fetch brought, and whether the daemon was asked (and has answered)."""

    num_loaded: int
    was_asked: bool


class Transfer(ABC):
    """One connection to the daemon, and its namespaces."""

    def __init__(self, client: Client, identities: Sequence[NamespaceIdentity]) -> None:
        self.client = client
        self._identities = list(identities)
        self._namespaces: dict[tuple[int, str, bytes], Namespace] = {}
        self.is_in_doubt = False  # waits until a call that was not answered touches no page any more

    def connect(self) -> None:
        """Make known what the first request will need. Raises KvtierError."""
        for group in range(len(self._identities)):
            self.namespace(group, "", b"")

    def namespace(self, group: int, salt: str, adapter: bytes) -> Namespace:
        """Return a group's namespace. Raises KvtierError."""
        key = (group, salt, adapter)
        if key not in self._namespaces:
            self._namespaces[key] = self.client.register(salted(self._identities[group], salt, adapter))
        return self._namespaces[key]

    @abstractmethod
    def mark(self) -> int:
        """Return the number that names this moment in `get` and `put`.

        On the engine's thread: what it has enqueued so far comes before what is handed over now."""

    @abstractmethod
    def get(self, fetch: Fetch, mark: int) -> Got:
        """Fill blocks of the engine, not before `mark`. Raises KvtierError."""

    @abstractmethod
    def put(self, store: Store, mark: int) -> PutReport:
        """Store blocks of the engine, not before `mark`. Raises KvtierError."""

    def close(self) -> None:
        """Give everything back."""
        self.client.close()


class HostTransfer(Transfer):
    """Copies between shared memory and pages in host memory."""

    def __init__(
        self, client: Client, identities: Sequence[NamespaceIdentity], groups: Sequence[PagedGroup]
    ) -> None:
        super().__init__(client, identities)
        self._groups = list(groups)

    def mark(self) -> int:
        """Return 0: what a step has written in host memory is there when it ends."""
        return 0

    def get(self, fetch: Fetch, mark: int) -> Got:
        """Copy from shared memory into the pages."""
        report = fetch.through(self.client.get, self._groups[fetch.group].pieces(fetch.block_ids))
        return Got(report.num_loaded, report.num_one_sided < len(fetch.block_ids))

    def put(self, store: Store, mark: int) -> PutReport:
        """Copy from the pages into staging memory, and commit."""
        return store.through(self.client.put, self._groups[store.group].pieces(store.block_ids))


@dataclass(frozen=True)
class DevicePages:
    """A rank's blocks on a device, by KV cache group.

    `record(event)` records on the stream that the engine computes on."""

    groups: Sequence[PagedGroup]
    exporter: Exporter
    record: Callable[[Any], None]

    def check(self, identities: Sequence[NamespaceIdentity]) -> None:
        """See that the daemon can be given these pages. Raises InvalidRequest, PreconditionFailed."""
        for group, identity in zip(self.groups, identities, strict=True):
            pages = describe(*group.described(identity.geometry), identity.geometry)
            for placed in pages.tensors:
                self.exporter.export(placed.address)


class DeviceTransfer(Transfer):
    """Lets the daemon copy between its tiers and pages on a device. Make it on the engine's thread."""

    def __init__(self, client: Client, identities: Sequence[NamespaceIdentity], device: DevicePages) -> None:
        super().__init__(client, identities)
        self._device = device
        self._marks = [[device.exporter.new_event() for _ in range(NUM_MARKS)] for _ in device.groups]
        self._num_marked = 0
        self._pages: dict[int, Pages] = {}

    def connect(self) -> None:
        """Make namespaces and pages known to the daemon. Raises KvtierError."""
        super().connect()
        for group in range(len(self._identities)):
            self._pages_of(group)

    def mark(self) -> int:
        """Record an event per group, on the engine's thread; return its number."""
        number = self._num_marked % NUM_MARKS
        self._num_marked += 1
        for marks in self._marks:
            self._device.record(marks[number][0])
        return number

    def get(self, fetch: Fetch, mark: int) -> Got:
        """Have the daemon fill the pages after `mark`."""
        with self._settled(fetch.group) as pages:
            report = fetch.through(pages.get, fetch.block_ids, after=pages.events[mark])
        return Got(report.num_loaded, True)

    def put(self, store: Store, mark: int) -> PutReport:
        """Have the daemon read the pages after `mark`."""
        with self._settled(store.group) as pages:
            return store.through(pages.put, store.block_ids, after=pages.events[mark])

    def close(self) -> None:
        """Take the pages back from the daemon, and disconnect."""
        for pages in self._pages.values():
            pages.unregister()
        super().close()

    def _pages_of(self, group: int) -> Pages:
        if group not in self._pages:
            namespace = self.namespace(group, "", b"")
            axes, views = self._device.groups[group].described(namespace.geometry)
            self._pages[group] = self.client.register_pages(
                namespace,
                axes,
                views,
                _Marked(self._device.exporter, self._marks[group]),
                num_events=NUM_MARKS,
            )
        return self._pages[group]

    @contextmanager
    def _settled(self, group: int) -> Iterator[Pages]:
        """Yield a group's pages. A call that fails is over when the daemon touches them no more, however long
        that takes: a daemon that stands still may go on. Costs nothing where the daemon has answered."""
        pages = self._pages_of(group)
        try:
            yield pages
        except KvtierError as problem:
            self.is_in_doubt = isinstance(problem, OPENS)
            try:
                _settle(pages)
            finally:
                self.is_in_doubt = False
            raise


def transfers_of(
    make_client: Callable[[int], Client],
    identities: Sequence[NamespaceIdentity],
    groups: Sequence[PagedGroup],
    device: DevicePages | None = None,
) -> Callable[[int], Transfer]:
    """Return what makes a Transfer with so many bytes of staging memory, for one thread.

    `identities[i]` and `groups[i]` belong to KV cache group i. `device` has the pages where they are not in
    host memory."""

    def make(staging_bytes: int) -> Transfer:
        if device is None:
            return HostTransfer(make_client(staging_bytes), identities, groups)
        return DeviceTransfer(make_client(LOAD_STAGING_BYTES), identities, device)

    return make


def _settle(pages: Pages) -> None:
    pause = threading.Event()
    while True:
        try:
            pages.settle()
            return
        except (InvalidRequest, PreconditionFailed):
            return  # another daemon, without this device
        except KvtierError as problem:
            if problem.reason in (NOT_RUNNING, SOCKET_DENIED):
                pause.wait(LAST_COPIES_S)
                return
        pause.wait(DOUBT_PERIOD_S)


class _Marked:
    """An exporter with events that exist already."""

    def __init__(self, exporter: Exporter, marks: Sequence[tuple[Any, bytes]]) -> None:
        self.device_uuid = exporter.device_uuid
        self._exporter = exporter
        self._marks = iter(marks)

    def export(self, address: int) -> Exported:
        return self._exporter.export(address)

    def new_event(self) -> tuple[Any, bytes]:
        return next(self._marks)

    def open_event(self, handle: bytes) -> Any:
        return self._exporter.open_event(handle)
