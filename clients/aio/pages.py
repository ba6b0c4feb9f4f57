"""AsyncPages and AsyncDelivery: what `AsyncClient.register_pages` returns and the caller ends.

    pages = await client.register_pages(namespace, "vllm", kv_caches, CudaExporter(device))
    report = await pages.get(namespace, hashes, page_ids)      # returns when the bytes are in the pages
    await pages.put(namespace, hashes, page_ids, after=event)  # after: recorded behind the writing kernel

A failure is a miss: get raises KvtierError like every call, and a Guard makes that None. A page must not be
used while the daemon writes it, so every way out of a call waits for the daemon's answer.
"""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from ...v1.types import Urgency
from ..operations.direct import DirectGet, LayerGroup, PagesRegistration, PagesReport
from ..operations.terms import PutTerms, ReadTerms
from ..values.namespace import Namespace
from ..values.types import ExpectedBlocks, PutReport, Retention
from .driver import AsyncDriver


class AsyncDelivery:
    """A get that is under way. Iterating yields layer groups, first layers first; `wait` returns the report.

    Ends with its `async with`: what was not waited for is cancelled.
    """

    def __init__(self, client: AsyncDriver, state: DirectGet) -> None:
        self._client = client
        self._state = state

    async def __aiter__(self) -> AsyncIterator[LayerGroup]:
        while (group := await self._client.run(self._state.next_group, repeat=False)) is not None:
            yield group

    async def wait(self) -> PagesReport:
        """Wait until everything has arrived or will not."""
        return await self._client.run(self._state.finish, repeat=False)

    async def cancel(self) -> None:
        """Give up; returns when the pages are the caller's again. Idempotent."""
        await self._client.run(self._state.cancel, repeat=False)

    async def __aenter__(self) -> "AsyncDelivery":
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.cancel()


class AsyncPages:
    """Paged KV tensors that the daemon fills and reads itself.

    Ends with its `async with`, or with the client.
    """

    def __init__(self, client: AsyncDriver, state: PagesRegistration) -> None:
        self._client = client
        self._state = state

    @property
    def events(self) -> tuple[Any, ...]:
        """Events for the caller's streams to record, for `after`."""
        return self._state.events

    async def get(
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
        return await self._client.run(partial(get.whole, namespace, hashes, page_ids, after))

    async def begin_get(
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
    ) -> AsyncDelivery:
        """Start a get and return at once, to begin with the first layers while later ones are on their way.

        Layer groups come with events only where pages were registered with `num_event_sets`.
        """
        get = DirectGet(self._state, ReadTerms(first_block, session, urgency, deadline_s, load_anyway))
        await self._client.run(partial(get.open, namespace, hashes, page_ids, after, True))
        return AsyncDelivery(self._client, get)

    async def put(
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
        AsyncClient.put.
        """
        terms = PutTerms(parent, session, deadline_s, prefill_s, retention)
        return await self._client.run(partial(self._state.put, namespace, hashes, page_ids, after, terms))

    async def settle(self) -> None:
        """Return when no call that was never answered touches the pages any more.

        Raises KvtierError while that is not known. Costs nothing as long as the connection stands.
        """
        await self._client.run(partial(self._state.register, self._state.namespace))

    async def unregister(self) -> None:
        """Let the daemon forget the pages; returns when nothing touches them. Idempotent."""
        await self._client.run(self._state.unregister, repeat=False)

    async def __aenter__(self) -> "AsyncPages":
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.unregister()
