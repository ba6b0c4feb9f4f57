"""Erasing: everything of a tenant, or of a namespace that was not used for long and stands in the way of a
new one, is forgotten, in every tier, also what is held.

What it had in the cold store is unreadable already when this begins: its key is gone. Here its blocks are
removed from the catalog, so that memory keeps no copy and no disk is asked in vain. Copies that began before
do not count as landed: a load may carry what was decrypted a moment ago, a spill would be found after a
restart. The answer therefore waits for their ends, and until then the cold store gives the tenant no new key.
A block that is being read becomes unreadable for all other readers at once, and its place is free when the
reader lets go, as with any block that is condemned.

In steps of bounded size, because a tenant may have a million blocks. What it puts meanwhile may be forgotten,
too; what it puts after the answer stays."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ....tiers.block import tenant_of
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..catalog.table import NUM_PARTS
from ..copying.copies import Copies
from ..events import TenantErased
from ..results import CountResult
from .request_registry import RequestRegistry

#: Blocks forgotten in one step: a few milliseconds.
STEP_BLOCKS = 256
ERASED, UNUSED = "tenant erased", "namespace unused"


@dataclass(slots=True)
class _Erasure:
    """One tenant that is being erased, or one namespace: then no call waits for it."""

    call: int | None
    namespace_ids: frozenset[int]
    handles: Iterator[int]  # of blocks still to forget
    is_swept: bool = False  # there are none
    num_forgotten: int = 0


class Erasing:
    """Carries out TenantErased, one tenant after the other."""

    def __init__(
        self, core: CoreState, requests: RequestRegistry, residency: Residency, copies: Copies
    ) -> None:
        self._requests = requests
        self._core = core
        self._residency = residency
        self._copies = copies
        self._jobs: deque[_Erasure] = deque()
        requests.empty = self.empty

    @property
    def is_busy(self) -> bool:
        """Whether there are blocks left to forget: a Tick is due at once.
        False while only copies under way are waited for: their ends are events anyway."""
        return bool(self._jobs) and not self._jobs[0].is_swept

    def begin(self, event: TenantErased) -> None:
        """What is on its way does not arrive; what is there goes, from this event on."""
        namespaces = self._core.catalog.namespaces.values()
        mine = frozenset(one.id for one in namespaces if tenant_of(one.identity.domain) == event.tenant)
        self._core.erased_tenants.add(event.tenant)
        self._jobs.append(_Erasure(event.call, mine, self._handles(mine)))
        self._core.story.count("tenants_erased")

    def empty(self, namespace_id: int) -> None:
        """Erase a namespace's blocks; not while another is being erased."""
        if not self._jobs:
            chosen = frozenset({namespace_id})
            self._jobs.append(_Erasure(None, chosen, self._handles(chosen)))
            self._core.story.count("namespaces_emptied")

    def namespaces(self) -> set[int]:
        """Return the namespaces that are being erased."""
        return {number for job in self._jobs for number in job.namespace_ids}

    def run(self) -> None:
        """Forget the next blocks; answer when none are left and no copy is under way that began before."""
        if not self._jobs:
            return
        job = self._jobs[0]
        if not job.is_swept:  # with every step: a copy may have begun from a block that goes only now
            self._copies.disown(job.namespace_ids)
        handles = list(islice(job.handles, STEP_BLOCKS))
        for handle in handles:
            row = self._core.catalog.row_of(handle)
            if row != NO_ROW:
                self._forget(row, UNUSED if job.call is None else ERASED)
                job.num_forgotten += 1
        job.is_swept |= len(handles) < STEP_BLOCKS
        if job.is_swept and not self._copies.is_disowning(job.namespace_ids):
            if job.call is not None:
                self._requests.reply(job.call, CountResult(job.num_forgotten))
            self._jobs.popleft()

    def _handles(self, namespace_ids: frozenset[int]) -> Iterator[int]:
        """Name every block of these namespaces; what comes while they are gone through may be missing."""
        catalog = self._core.catalog
        for namespace_id in sorted(namespace_ids):
            rows = catalog.namespaces[namespace_id].rows
            for number in range(NUM_PARTS):
                yield from [catalog.handle(row) for row in rows.part(number)]

    def _forget(self, row: int, reason: str) -> None:
        core = self._core
        residency = self._residency
        for fragment in core.catalog.fragments(row):
            for tier in core.ladder.tiers:
                residency.condemn(fragment, tier, reason, verb="erased")  # nothing, where nothing is
