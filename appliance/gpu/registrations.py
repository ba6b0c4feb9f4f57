"""Registrations: pages that a runtime opened to us, and what is under way with them.

A registration has a client of its own in the planner. That client is why leases of the direct path are the
daemon's: the runtime may die at any moment, and what a device is reading is held until the *device* says that
it is done (I-6). It also counts against the same limits as any other client's.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ...tiers.base import CopyItem, CopyOutcome
from ...tiers.gpu.pages.gather import GatherCopier
from ..security.client_registry import ConnectedClient
from .deliveries import PageDelivery
from .mapping import PageMapping

# Limits of the direct path. What is beyond one is refused at once, most with a time after which to retry.
MAX_REGISTRATIONS = 64  # being opened, open or being closed; vLLM workers have three for each KV cache group
MAX_REGISTERING = 16  # RegisterPages of one client under way: each is a thread that the device may keep
MAX_EVENTS = 64  # that one runtime may open to us
MAX_HANDLE_BYTES = 256
MAX_EVENT_SETS = 16
MAX_DELIVERIES = 32  # of one registration at a time
MAX_WAITING_PUTS = 64  # of one client, with events that have not happened: each is asked every 50 us


class Registration:
    """Pages of one runtime. Lives on the event loop. Implements `Copier` for puts from the pages.

    `client` holds the leases and makes the puts. `on_quiet` is called once, when the registration has ended
    and no stream touches the pages on our behalf.
    """

    client: ConnectedClient  # opened last, because the planner then has a route to the pages

    def __init__(
        self,
        number: int,
        owner: ConnectedClient,
        mapping: PageMapping,
        gather: GatherCopier,
        on_quiet: Callable[["Registration"], None],
    ) -> None:
        self.id = number
        self.owner = owner.id  # the runtime's client
        self.pid = owner.pid
        self.mapping = mapping
        self.gather = gather
        self.deliveries: dict[str, PageDelivery] = {}  # by request id
        self.num_gathering = 0  # batches of puts under way
        self.num_waiting = 0  # puts with an event that has not happened yet
        self.free_sets = list(range(len(mapping.event_sets)))  # event sets that no delivery uses
        self._on_quiet = on_quiet
        self._is_given_back = False
        self._loop = asyncio.get_running_loop()
        self.ending: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_ending(self) -> bool:
        """Whether nothing new is begun."""
        return self.ending.done()

    @property
    def is_quiet(self) -> bool:
        """Whether no stream touches the pages on our behalf."""
        return not self.deliveries and not self.num_gathering and not self.num_waiting

    def end(self) -> None:
        """Begin nothing new; what is under way decides when it is over."""
        self.ending.set_result(None)
        self.gather.is_closed = True
        for delivery in list(self.deliveries.values()):
            delivery.cancel()
        self.look()

    def look(self) -> None:
        """Report an ending registration that has become quiet. To be called when something has ended."""
        if self.is_ending and self.is_quiet and not self._is_given_back:
            self._is_given_back = True
            self._on_quiet(self)

    def start(self, items: Sequence[CopyItem]) -> "Future[list[CopyOutcome]]":
        """See Copier.start. Counts the batch until it has ended."""
        self.num_gathering += 1
        future = self.gather.start(items)
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._gathered))
        return future

    def _gathered(self) -> None:
        self.num_gathering -= 1
        self.look()

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
