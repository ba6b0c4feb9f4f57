"""One fetch: a put that the daemon makes for itself. Its bytes come from the source, not from a client.

Blocks are decided and get room as those of a put, and land through the same steps. What differs: the bytes
travel in one batch a layer group, so that a reader gets the first layers before the last byte arrived; and a
fetch waits for no room. What has none at once is not fetched.
"""

from collections.abc import Callable, Sequence
from typing import Final

from ....tiers.base import Cause
from ..capacity.pressure import Pressure
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..copying.copies import Copies, Move
from ..instructions import BundleBlocks
from .put_job import Put, PutJob

MAX_EXPECTED: Final = 128  # blocks: each bundle of a chain is priced with those behind it


class FetchJob(PutJob):
    """A put of the last blocks of one bundle: those that its request names."""

    def __init__(
        self,
        core: CoreState,
        residency: Residency,
        copies: Copies,
        pressure: Pressure,
        put: Put,
        on_done: Callable[[PutJob], None],
        bundle: BundleBlocks,
    ) -> None:
        super().__init__(core, residency, copies, pressure, put, on_done)
        self.bundle = bundle
        #: From the first of these blocks to the last one that its acquire asks for.
        self.chain: Sequence[bytes] = put.request.prefix_hashes
        self.coming: list[int] = []  # rows of the blocks that are on their way, in order
        self.num_bytes = 0  # of these
        self.landed_bytes = 0  # that arrived
        self.num_failed = 0  # fragments that did not arrive
        self.is_late = False  # time was over for one of them

    def begin(self, deadline_at: float) -> None:
        """Reserve what there is room for, and start to fetch it. Tells `on_done` at once if it is nothing."""
        while not self.advance():
            if not self.wants_turn:
                self.give_up()
                break
        self.deadline_at = float("inf")  # of the reservation: the shell ends what it began
        self._spans = ()
        self._take_apart()
        if self._taken:
            self._fetch(deadline_at)
        self._finish_if_landed()

    def landed(self, fragments: Sequence[int], cause: Cause | None) -> None:
        """Count the fragments that ended, as a put does, and those that did not arrive."""
        if cause is not None:
            self.num_failed += len(fragments)
            self.is_late = self.is_late or cause is Cause.CANCELLED
        else:
            self.landed_bytes += sum(map(self._core.catalog.length_of, fragments))
        super().landed(fragments, cause)

    def _take_apart(self) -> None:
        """Take the fragments of runs one by one: they land layer by layer, those of a layer in order."""
        set_checksum, num_groups = self._core.catalog.set_checksum, self.namespace.num_groups
        for run in self._fresh:
            for number, fragment in enumerate(run.fragments):
                set_checksum(fragment, b"")  # its row may have been another block's
                self._taken.append((run.first_block + number // num_groups, fragment))
        self._fresh = []
        self._taken.sort()

    def _expected(self) -> Sequence[bytes]:
        """Return the names of the blocks that come with these: they are admitted for what they are, part of a
        long chain. One bundle for itself would be a short prompt, of which more come back sooner."""
        return self.chain[self._next : self._next + MAX_EXPECTED]

    def _fetch(self, deadline_at: float) -> None:
        catalog = self._core.catalog
        place, block_of = catalog.place[self._put_tier], catalog.block_of
        skipped = len(self.bundle.names) - len(self.request.prefix_hashes)
        groups: list[list[Move]] = [[] for _ in range(self.namespace.num_groups)]
        for block, fragment in self._taken:
            group = fragment - catalog.first_fragment[block_of[fragment]]
            groups[group].append(Move(fragment, skipped + block, place[fragment]))
            self.num_bytes += catalog.length_of(fragment)
        self.coming = list(dict.fromkeys(block_of[fragment] for _, fragment in self._taken))
        self._num_copying += len(self._taken)
        self._taken = []
        batches = [moves for moves in groups if moves]
        self._copies.start_fetch(self.bundle, batches, deadline_at, owner=self)
