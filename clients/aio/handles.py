"""What calls of AsyncClient return and the caller ends: AsyncLease, AsyncPin, AsyncSession."""

import warnings
from collections.abc import AsyncIterator
from functools import partial

from ...v1.types import Tier, Urgency
from ..errors import PreconditionFailed
from ..memory.fragments import Fragment
from ..operations.leases import LeaseState
from .driver import AsyncDriver


class AsyncLease:
    """Blocks pinned and readable in place. Ends with its `async with`, by `release`, or when its TTL passes.

    Iterating yields fragments as they become readable, in layer order. All views die with the lease; what
    was made from them has to be gone before.
    """

    def __init__(self, client: AsyncDriver, state: LeaseState) -> None:
        self._client = client
        self._state = state

    @property
    def num_blocks(self) -> int:
        """End of the prefix: pinned so far, and readable once iteration or `wait` has ended."""
        return self._state.num_blocks

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Where each block was found."""
        return self._state.tiers

    @property
    def num_stored(self) -> int:
        """Length of the stored prefix: more than `num_blocks` when the rest is not worth loading."""
        return self._state.num_stored

    @property
    def reason(self) -> str:
        """Why not all that is stored is loaded; empty when it is."""
        return self._state.reason

    @property
    def is_complete(self) -> bool:
        """Whether nothing of it is on its way up any more."""
        return self._state.finished

    async def __aiter__(self) -> AsyncIterator[Fragment]:
        while fragments := await self._client.run(self._state.next_fragments, repeat=False):
            for fragment in fragments:
                yield fragment

    async def wait(self) -> int:
        """Wait for every fragment; return how many blocks are readable."""
        async for _ in self:
            pass
        return self.num_blocks

    def view(self, block: int, group: int) -> memoryview:
        """Return a fragment's bytes in place, read-only. Raises NotFound when it has not arrived."""
        return self._state.view(block, group)

    def still_valid(self) -> bool:
        """Whether what was read is right; ask after the last read."""
        return self._state.still_valid()

    async def extend(self, ttl_s: float) -> None:
        """Ask for more time. Raises NotFound when the lease has ended."""
        await self._client.run(partial(self._state.extend, ttl_s), repeat=False)

    async def release(self) -> None:
        """End the lease. Idempotent.

        Raises PreconditionFailed (VIEWS_IN_USE), with the lease ended, when an array or tensor made from a
        view is still referenced.
        """
        await self._end()

    async def _end(self) -> None:
        if not self._state.released:
            await self._client.run(self._state.close, repeat=False)
            if self._state.warning:
                warnings.warn(self._state.warning, RuntimeWarning, stacklevel=3)

    async def __aenter__(self) -> "AsyncLease":
        return self

    async def __aexit__(self, kind: object, value: object, trace: object) -> None:
        try:
            await self._end()
        except PreconditionFailed:
            if value is None:  # what is raised refers to everything that its frames do
                raise


class AsyncPin:
    """A promise of the daemon to keep blocks. Ends with its `async with` or its TTL, not with the client."""

    def __init__(self, client: AsyncDriver, pin_id: int, num_blocks: int) -> None:
        self._client = client
        self.pin_id = pin_id
        self.num_blocks = num_blocks

    async def unpin(self) -> None:
        """End the pin. Idempotent."""
        await self._client.run(partial(self._client.operations.unpin, self.pin_id))

    async def __aenter__(self) -> "AsyncPin":
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.unpin()


class AsyncSession:
    """One conversation or agent run. Ends with its `async with`."""

    def __init__(self, client: AsyncDriver, session_id: str) -> None:
        self._client = client
        self.session_id = session_id

    async def update(
        self,
        urgency: Urgency,
        deadline_s: float | None = None,
        back_in_s: float | None = None,
        num_decoded_tokens: int = 0,
    ) -> None:
        """Say how soon the session needs its blocks.

        `deadline_s` is when what it waits for is due; `back_in_s` is when it expects to return ("tool call,
        back in 30 s"): its blocks are brought up shortly before; `num_decoded_tokens` is how long the answer
        was that it got since its last request, from which the appliance learns when it will return.
        """
        operations = self._client.operations
        await self._client.run(
            partial(
                operations.update_session, self.session_id, urgency, deadline_s, back_in_s, num_decoded_tokens
            )
        )

    async def fork(self, new_session_id: str) -> "AsyncSession":
        """Return a new session that holds the blocks of this one; of none when this one has ended."""
        await self._client.run(partial(self._client.operations.fork_session, self.session_id, new_session_id))
        return AsyncSession(self._client, new_session_id)

    async def end(self, archive: bool = True, num_decoded_tokens: int = 0) -> int:
        """End it; return how many blocks are being archived in the cold store.

        `num_decoded_tokens` as in `update`."""
        end = partial(self._client.operations.end_session, self.session_id, archive, num_decoded_tokens)
        return await self._client.run(end)

    async def __aenter__(self) -> "AsyncSession":
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.end()
