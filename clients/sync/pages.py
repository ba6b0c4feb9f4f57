# Generated from clients/aio/pages.py by `make docs`. Change that file, not this one.
"""Pages and Delivery: what `Client.register_pages` returns and the caller ends.

    pages = client.register_pages(namespace, "vllm", kv_caches, CudaExporter(device))
    report = pages.get(namespace, hashes, page_ids)      # returns when the bytes are in the pages
    pages.put(namespace, hashes, page_ids, after=event)  # after: recorded behind the writing kernel

A failure is a miss: get raises KvtierError like every call, and a Guard makes that None. A page must not be
used while the daemon writes it, so every way out of a call waits for the daemon's answer.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ...v1.types import Urgency
from ..operations.direct import DirectGet, LayerGroup, PagesRegistration, PagesReport
from ..operations.terms import PutTerms, ReadTerms
from ..values.namespace import Namespace
from ..values.types import ExpectedBlocks, PutReport, Retention
from .driver import Driver


class Delivery:
    """A get that is under way. Iterating yields layer groups, first layers first; `wait` returns the report.

    Ends with its `with`: what was not waited for is cancelled.
    """

    def __init__(self, client: Driver, state: DirectGet) -> None:
        self._client = client
        self._state = state

    def __iter__(self) -> Iterator[LayerGroup]:
        while (group := self._client.run(self._state.next_group, repeat=False)) is not None:
            yield group

    def wait(self) -> PagesReport:
        """Wait until everything has arrived or will not."""
        return self._client.run(self._state.finish, repeat=False)

    def cancel(self) -> None:
        """Give up; returns when the pages are the caller's again. Idempotent."""
        self._client.run(self._state.cancel, repeat=False)

    def __enter__(self) -> "Delivery":
        return self

    def __exit__(self, *problem: object) -> None:
        self.cancel()


class Pages:
    """Paged KV tensors that the daemon fills and reads itself.

    Ends with its `with`, or with the client.
    """

    def __init__(self, client: Driver, state: PagesRegistration) -> None:
        self._client = client
        self._state = state

    @property
    def events(self) -> tuple[Any, ...]:
        """Events for the caller's streams to record, for `after`."""
        return self._state.events

    def get(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes] | bytes,
        page_ids: Any,
        *,
        first_block: int = 0,
        session: str = "",
        urgency: Urgency = Urgency.QUEUED,
        deadline_s: float | None = None,
        load_anyway: bool = False,
        after: Any = None,
        expected: ExpectedBlocks | None = None,
    ) -> PagesReport:
        """Fetch the stored part of a chain into pages; returns when the device has written them.

        `page_ids` are the pages of the blocks from `first_block` on, block after block; none may stand twice.
        They are written from now until this returns, but not before `after`, one of `events`. Blocks that are
        `expected` are waited for.
        """
        terms = ReadTerms(first_block, session, urgency, deadline_s, load_anyway, expected=expected)
        get = DirectGet(self._state, terms)
        return self._client.run(partial(get.whole, namespace, hashes, page_ids, after))

    def begin_get(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes] | bytes,
        page_ids: Any,
        *,
        first_block: int = 0,
        session: str = "",
        urgency: Urgency = Urgency.QUEUED,
        deadline_s: float | None = None,
        load_anyway: bool = False,
        after: Any = None,
    ) -> Delivery:
        """Start a get and return at once, to begin with the first layers while later ones are on their way.

        Layer groups come with events only where pages were registered with `num_event_sets`.
        """
        get = DirectGet(self._state, ReadTerms(first_block, session, urgency, deadline_s, load_anyway))
        self._client.run(partial(get.open, namespace, hashes, page_ids, after, True))
        return Delivery(self._client, get)

    def put(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes] | bytes,
        page_ids: Any,
        *,
        parent: bytes = b"",
        session: str = "",
        deadline_s: float | None = None,
        prefill_s: float = 0.0,
        retention: Sequence[Retention] = (),
        after: Any = None,
    ) -> PutReport:
        """Store blocks from pages; returns when they are stored.

        The pages are read from now until then, but not before `after`, one of `events`. The rest is as in
        Client.put.
        """
        terms = PutTerms(parent, session, deadline_s, prefill_s, retention)
        return self._client.run(partial(self._state.put, namespace, hashes, page_ids, after, terms))

    def settle(self) -> None:
        """Return when no call that was never answered touches the pages any more.

        Raises KvtierError while that is not known. Costs nothing as long as the connection stands.
        """
        self._client.run(partial(self._state.register, self._state.namespace))

    def unregister(self) -> None:
        """Let the daemon forget the pages; returns when nothing touches them. Idempotent."""
        self._client.run(self._state.unregister, repeat=False)

    def __enter__(self) -> "Pages":
        return self

    def __exit__(self, *problem: object) -> None:
        self.unregister()
