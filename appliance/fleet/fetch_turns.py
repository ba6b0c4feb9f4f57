"""FetchTurns: how many fetches from one host may be under way. asyncio.Semaphore serves the first that asked,
and so all that one tenant asked for; here tenants take turns."""

import asyncio

from ..core.turns import TenantTurns


class FetchTurns:
    """A semaphore of `num_free` fetches at a time. Owned by the event loop."""

    def __init__(self, num_free: int) -> None:
        self._num_free = num_free
        self._waiting: TenantTurns[asyncio.Future[None]] = TenantTurns()

    async def acquire(self, tenant: str) -> None:
        """Wait until another fetch may begin and it is the tenant's turn. `release` has to follow."""
        if self._num_free:  # then nothing waits
            self._num_free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, given)
        try:
            await given
        except asyncio.CancelledError:
            if given.cancelled():  # its place is no turn of its tenant
                self._waiting.take(lambda one: one is given)
            else:  # it was given in the same moment
                self.release()
            raise

    def release(self) -> None:
        """Let the next one begin."""
        while self._waiting:
            given = self._waiting.pop()[1]
            if not given.done():
                given.set_result(None)
                return
        self._num_free += 1
