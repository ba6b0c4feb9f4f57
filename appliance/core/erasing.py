"""Erasing: everything of a tenant is forgotten, in every tier, whoever holds it.

What it held in the cold store is unreadable already when this begins: its key is gone. Here its blocks leave
the catalog, so that memory keeps no copy and nobody asks a disk in vain. Copies under way may carry bytes
that were decrypted a moment ago: those that began before do not count as landed. A block somebody is reading
becomes unreadable for everybody else at once, and its place is free when the reader lets go, as with any
block that is condemned.

In steps of bounded size, because a tenant may have a million blocks. What it puts meanwhile may go, too; what
it puts after the answer stays.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from ...tiers.block import tenant_of
from .catalog import NO_ROW, TIERS
from .copies import Copies
from .desk import Desk
from .events import TenantErased
from .residency import Residency
from .results import CountResult

#: Blocks forgotten in one step: a few milliseconds.
STEP_BLOCKS = 256
REASON = "tenant erased"


class Erasing:
    """Carries out TenantErased, one tenant after the other."""

    def __init__(self, desk: Desk, residency: Residency, copies: Copies) -> None:
        self._desk = desk
        self._residency = residency
        self._copies = copies
        self._jobs: deque[tuple[int, Iterator[int]]] = deque()  # call, blocks still to forget
        self._num_forgotten = 0  # of the first job

    @property
    def is_busy(self) -> bool:
        """Whether there is something left to forget: a Tick is due at once."""
        return bool(self._jobs)

    def begin(self, event: TenantErased) -> None:
        """What is on its way does not arrive; what is there goes, from this event on."""
        namespaces = self._residency.catalog.namespaces.values()
        mine = [one.id for one in namespaces if tenant_of(one.identity.domain) == event.tenant]
        self._copies.disown(frozenset(mine))
        self._jobs.append((event.call, self._handles(mine)))
        self._residency.story.count("tenants_erased")

    def run(self) -> None:
        """Forget the next blocks; answer whoever asked when there are none left."""
        if not self._jobs:
            return
        call, handles = self._jobs[0]
        handle = None
        for handle in islice(handles, STEP_BLOCKS):
            row = self._residency.catalog.row_of(handle)
            if row != NO_ROW:
                self._forget(row)
                self._num_forgotten += 1
        if handle is None:
            self._desk.reply(call, CountResult(self._num_forgotten))
            self._jobs.popleft()
            self._num_forgotten = 0

    def _handles(self, namespace_ids: list[int]) -> Iterator[int]:
        """Name every block of these namespaces; what comes while they are gone through may be missing."""
        catalog = self._residency.catalog
        for namespace_id in namespace_ids:
            for shard in catalog.namespaces[namespace_id].rows.shards:
                yield from [catalog.handle(row) for row in shard.values()]

    def _forget(self, row: int) -> None:
        residency = self._residency
        for fragment in residency.catalog.fragments(row):
            for tier in TIERS:
                residency.condemn(fragment, tier, REASON)  # what is not there is not there any more
