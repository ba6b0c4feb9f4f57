"""FakeAppliance: a daemon inside the process, for tests of code that uses kvtier. No sockets, no files.

    appliance = FakeAppliance(capacity_bytes=1 << 20)
    with appliance.client() as client: ...

`client()` returns the real Client over a link that ends in this file, so its shape cannot differ; the
contract tests (tests/contracts/test_client.py) hold the answers to the daemon's. It evicts honestly when full
and fails on request: `fail_next`, `unavailable`, `restart`.

It has one tier, no shared index (no one-sided gets) and no clock of its own: give it one to let leases
expire.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from .aio import AsyncClient
from .errors import NOT_RUNNING, KvtierError, Unavailable
from .fake.connector_checks import ConnectorCheck, MakeRuntime, RuntimeUnderTest, checks_of
from .fake.link import AsyncFakeLink, FakeLink
from .fake.server import FakeServer
from .operations.base import ClientSettings
from .sync import Client

__all__ = ["ConnectorCheck", "FakeAppliance", "RuntimeUnderTest", "connector_checks"]
L = TypeVar("L", bound=FakeLink)


class FakeAppliance:
    """An in-process stand-in for the daemon. Its clients may be used on several threads."""

    def __init__(
        self,
        capacity_bytes: int = 64 << 20,
        *,
        staging_bytes: int = 4 << 20,
        max_blocks_per_request: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.server = FakeServer(capacity_bytes, staging_bytes, max_blocks_per_request, clock)
        self._unavailable = False
        self._links: list[FakeLink] = []

    # --------------------------------------------------------------------------- for test authors

    def client(self, **settings: Any) -> Client:
        """Return a new Client of this appliance; `settings` as for Client (name, timeout, retry, ...)."""
        chosen = ClientSettings("in this process", **settings)
        return Client.over(lambda: self._linked(FakeLink), chosen)

    def async_client(self, **settings: Any) -> AsyncClient:
        """Return a new AsyncClient of this appliance."""
        chosen = ClientSettings("in this process", **settings)

        async def open_link() -> AsyncFakeLink:
            return self._linked(AsyncFakeLink)

        return AsyncClient.over(open_link, chosen)

    def fail_next(self, problem: KvtierError, num_calls: int = 1) -> None:
        """Answer the next calls with `problem`."""
        self.server.failures.extend([problem] * num_calls)

    @property
    def unavailable(self) -> bool:
        """Whether calls fail as if no daemon ran. Setting it breaks every connection."""
        return self._unavailable

    @unavailable.setter
    def unavailable(self, value: bool) -> None:
        """Set whether calls fail; True breaks every connection."""
        with self.server.lock:  # no client connects between the two steps
            self._unavailable = value
            if value:
                self._disconnect()

    def restart(self) -> None:
        """Forget everything, as a daemon without a cold store would, and start anew."""
        with self.server.lock:
            self._disconnect()
            self.server.restart()

    @property
    def calls(self) -> list[str]:
        """Names of all calls so far."""
        return self.server.calls

    @property
    def num_blocks(self) -> int:
        """Blocks stored now."""
        return len(self.server.state.store.blocks)

    @property
    def used_bytes(self) -> int:
        """Bytes stored now."""
        return self.server.state.store.used_bytes

    @property
    def num_evicted(self) -> int:
        """Blocks evicted so far."""
        return self.server.state.store.num_evicted

    def evict_all(self) -> int:
        """Evict every block without a hold; return how many were evicted."""
        with self.server.lock:
            self.server.expire()
        before = self.num_evicted
        store = self.server.state.store
        store.make_room(store.capacity_bytes)
        return self.num_evicted - before

    def check_integrity(self) -> list[str]:
        """Audit the store, and that leases, pins and blocks agree."""
        return self.server.check_integrity()

    def _linked(self, kind: type[L]) -> L:
        with self.server.lock:
            if self._unavailable:
                raise Unavailable("the fake appliance is switched off", reason=NOT_RUNNING)
            link = kind(self.server)
            self._links = [*(one for one in self._links if not one.closed), link]
            return link

    def _disconnect(self) -> None:
        for link in self._links:
            link.lose()
        self._links = []


def connector_checks(make_runtime: MakeRuntime, *, block_tokens: int) -> list[ConnectorCheck]:
    """Return checks that a runtime's adapter must pass: call each, or parametrise a test with them.

    `make_runtime(make_client)` returns a fresh RuntimeUnderTest with blocks of `block_tokens` tokens; those
    of one check have the same weights and share blocks."""
    return checks_of(make_runtime, FakeAppliance, block_tokens)
