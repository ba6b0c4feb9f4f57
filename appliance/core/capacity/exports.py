"""Exports: spills to the source, outside of this host. Which bundles are stored there, for other hosts.

    eager     every bundle, when its last block was put
    worth     bundles that were used again after they were put; where prefill and the source have prices, as
              often as reads of the bundle take to save what storing it costs (worth.py): to rent until the
              rent is the price costs at most twice what the best choice does, whatever is used later. Of a
              chain that is computed sooner than the source would bring it nothing is stored. Where no fetch
              has told how fast that is, the first export is a trial, which is read back; other such ones wait

A bundle is exported out of host memory while all its blocks are there, which they are when they were just
put or read. Its places are held until the shell has stored it. In flight is at most a share of the put
tier, so that exports never stand in the way of puts; a bundle that left memory before its turn is exported
when it is used again. Beyond the day's budget nothing is exported. Tenants take turns, and each has its
share of queue and budget. Blocks that a lossy codec decoded are not exported: other hosts get what was put.
The source deduplicates; a bundle that it is known to hold is not sent again. An export that failed is tried
again, after a delay that doubles from RETRY_S and MAX_RETRIES times, and at the next use: the rest of a
chain that is not used again on this host would not be found without it.

A drain exports everything in memory that may be stored anew (drained_bundles.py), until the grace period
ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ....policies.base import Use
from ....tiers.block import FragmentLabel, Tier, tenant_of
from ..catalog.catalog import NO_ROW, NamespaceEntry
from ..catalog.core_state import CoreState
from ..catalog.policy_listeners import Listener
from ..catalog.residency import Residency
from ..catalog.states import State
from ..copying.source_index import SourceIndex
from ..copying.source_speed import MARGIN
from ..copying.write_budget import WriteBudget
from ..events import ExportFinished, SourceChanged
from ..instructions import BundleBlocks, ExportBundle
from ..options import ShareMode
from ..remembered import Remembered
from ..worth import KEPT_DAYS, reads_to_earn
from .drained_bundles import DrainedBundles
from .export_queue import ExportQueue, WaitingBundle

MAX_STEPS: Final = 16  # bundles looked at in one step
MAX_COUNTED = 65_536  # bundles of which uses are counted, divided among tenants
RETRY_S: Final = 1.0  # after the first failure of an export
MAX_RETRIES: Final = 8  # about four minutes
#: For so long a trial, or a fetch, tells how fast the source is.
SPEED_TRUST_S: Final = 3600.0
KEPT_S: Final = KEPT_DAYS * 86_400.0


@dataclass(slots=True)
class _HeldBundle:
    tenant: str
    namespace_id: int
    name: bytes
    held: list[tuple[int, Tier]]
    num_bytes: int
    waiting: WaitingBundle  # as it waited


@dataclass(slots=True)
class _Uses:
    """Uses of one bundle since `first_at`."""

    first_at: float
    num: int = 0


class Exports:
    """Chooses bundles, holds them, and settles their exports."""

    def __init__(self, core: CoreState, residency: Residency, index: SourceIndex) -> None:
        self._core = core
        self._residency = residency
        self._index = index
        self._host_tiers = [tier for tier in core.ladder.host_tiers if tier in core.rooms]
        self.budget = WriteBudget(core.options.daily_export_bytes, core.options.num_tenants)
        self.is_open = False
        self._has_joined = False
        self._queue = ExportQueue(core.options.num_tenants)
        self._drained = DrainedBundles(core, index)
        self._is_full = False  # the queue, for bundles of a drain
        #: By handle of the last block; with prices.
        self._uses: Remembered[int, _Uses] = Remembered(MAX_COUNTED)
        self._jobs: dict[int, _HeldBundle] = {}
        self._num_exports = 0
        self._trial = 0  # export that is one, in flight
        self._tried_at = float("-inf")  # when the last one ended
        self.bytes_in_flight = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_busy(self) -> bool:
        """Whether there is more to do right now than one step did: a Tick is due at once."""
        if not self.is_open or self._drained.is_looking:
            return self.is_open
        has_more = self._queue.has_ready or (bool(self._drained) and not self._is_full)
        return has_more and self.bytes_in_flight < self._most_bytes()

    @property
    def num_pending(self) -> int:
        """Return the bundles that are in flight, and while the source is open those that wait."""
        num_waiting = self._drained.is_looking + len(self._drained) + len(self._queue)
        return len(self._jobs) + (num_waiting if self.is_open else 0)

    def next_deadline(self) -> float | None:
        """When an export that failed is due again."""
        return self._queue.next_time() if self.is_open else None

    def changed(self, event: SourceChanged) -> None:
        """The source takes bundles from now on, or does not."""
        self.is_open = event.is_open and event.takes_exports
        if self.is_open and not self._has_joined:  # a daemon without a source hears of no use
            self._has_joined = True
            self._core.listeners.join(Listener(used=self._used, stored=self._stored))

    def options_changed(self) -> None:
        """Let another budget and other tenants be in force."""
        options = self._core.options
        self.budget.limit(options.daily_export_bytes, self._core.now, options.num_tenants)
        self._queue.resize(options.num_tenants)

    def _used(self, rows: Sequence[int], use: Use) -> None:
        if self.is_open and self._share(rows[0]) != "off":
            self._enqueue(rows, is_use=True)

    def _stored(self, rows: Sequence[int], use: Use) -> None:
        if self.is_open and self._share(rows[0]) == "eager":
            self._enqueue(rows)

    def _share(self, row: int) -> ShareMode:
        return self._core.options.share_of(self._core.catalog.namespace_of(row).identity)

    def _enqueue(self, rows: Sequence[int], *, is_use: bool = False) -> None:
        catalog = self._core.catalog
        namespace = catalog.namespace_of(rows[0])
        size = self._index.num_blocks(namespace)
        ends = [
            row
            for row in rows
            if (catalog.position[row] + 1) % size == 0
            and not self._index.is_stored(namespace.id, catalog.prefix_hash[row])
        ]
        num_blocks = 0
        if ends and self._share(rows[0]) == "worth":
            num_blocks = catalog.position[rows[-1]] + 1
            if not self._is_fetched_sooner(namespace, num_blocks):
                self._core.story.count("exports_not_worth", len(ends))
                return
        tenant = tenant_of(namespace.identity.domain)
        for row in ends:
            if not self._queue.add(tenant, WaitingBundle(catalog.handle(row), num_blocks)):
                self._core.story.count("exports_dropped")
            if is_use and self._core.options.prices.gpu_hour:
                self._count_use(tenant, catalog.handle(row))

    def _is_fetched_sooner(self, namespace: NamespaceEntry, num_blocks: int) -> bool:
        """Whether fetching the first `num_blocks` blocks of a chain is sooner than computing them, by MARGIN,
        if nothing else is on its way. True where the speed of the source or of prefill is not known."""
        core, speed = self._core, self._index.store_speed
        if not self._is_prefill_known(namespace) or not speed.is_known(core.now, SPEED_TRUST_S):
            return True
        fetch_s = speed.alone_s(num_blocks * namespace.block_bytes, core.now, SPEED_TRUST_S)
        return MARGIN * fetch_s < core.costs.recompute_s(namespace.id, 0, num_blocks)

    def _is_prefill_known(self, namespace: NamespaceEntry) -> bool:
        return self._core.costs.prefill_speed(namespace.id)[1] != "geometry"

    def drain(self) -> None:
        """Export each bundle that may be stored and is not known to be. Replaces the queue."""
        if self.is_open:
            self._queue.clear()
            self._is_full = False
            self._drained.begin()

    def _count_use(self, tenant: str, handle: int) -> None:
        """Count a use of the bundle that ends with a block; those before KEPT_S are forgotten."""
        now = self._core.now
        uses = self._uses.get(tenant, handle) or _Uses(now)
        self._uses.put(tenant, handle, uses)
        if now - uses.first_at > KEPT_S:
            uses.first_at, uses.num = now, 0
        uses.num += 1

    def run(self) -> None:
        """Begin exports, as many as may be in flight."""
        catalog, now = self._core.catalog, self._core.now
        if not self.is_open:
            return
        if self._drained.is_looking:
            self._drained.look()
            return
        self._queue.bring_due(now)
        if self._drained and not self._queue.has_ready:
            self._drained.feed(self._queue, MAX_STEPS)
            self._is_full = not self._queue.has_ready  # of what failed and waits for its time
        for _ in range(MAX_STEPS):
            if not self._queue.has_ready or self.bytes_in_flight >= self._most_bytes():
                return
            waiting, self._is_full = self._queue.pop(), False
            row = catalog.row_of(waiting.last)
            if row != NO_ROW:
                self._begin(row, waiting)

    def _most_bytes(self) -> float:
        statistics = self._core.rooms[self._core.ladder.put_tier].statistics()
        options = self._core.options
        return min(options.max_export_bytes, options.max_export_fraction * statistics.capacity_bytes)

    def _begin(self, last: int, waiting: WaitingBundle) -> None:
        """Export the bundle that ends with block `last`, if it may be, and memory has all of it."""
        catalog, core = self._core.catalog, self._core
        namespace = catalog.namespace_of(last)
        name = catalog.prefix_hash[last]
        share = core.options.share_of(namespace.identity)
        if core.is_erased(namespace) or share == "off" or self._index.is_stored(namespace.id, name):
            return
        if any((job.namespace_id, job.name) == (namespace.id, name) for job in self._jobs.values()):
            return
        size = self._index.num_blocks(namespace)
        num_bytes = size * namespace.block_bytes
        if num_bytes > self._most_bytes():
            core.story.count("exports_too_large")
            return
        asks_speed = share == "worth" and waiting.num_blocks > 0
        if (share == "worth" and not self._is_earned(last, namespace, num_bytes)) or (
            asks_speed and not self._is_fetched_sooner(namespace, waiting.num_blocks)
        ):
            core.story.count("exports_not_worth")
            return
        tenant = tenant_of(namespace.identity.domain)
        is_trial = asks_speed and self._is_speed_wanted(namespace)
        if is_trial and self._trial:  # the answer is on its way
            self._queue.add_later(core.now + RETRY_S, tenant, waiting)
            return
        rows = self._rows(last, size)
        places = self._places(rows, namespace.num_groups)
        if not places:
            core.story.count("exports_not_in_memory")
            return
        if not self.budget.allows(num_bytes, core.now, tenant):
            core.story.count("exports_over_budget")
            return
        self.budget.wrote(num_bytes, core.now, tenant)
        for fragment, tier in places:
            core.transitions.hold(fragment, tier)
        self._num_exports += 1
        self._jobs[self._num_exports] = _HeldBundle(tenant, namespace.id, name, places, num_bytes, waiting)
        self.bytes_in_flight += num_bytes
        labels = catalog.labels_of([fragment for fragment, _ in places])
        names = [catalog.prefix_hash[row] for row in rows]
        bundle = BundleBlocks(namespace.identity, labels[0].parent_hash, labels[0].position, names)
        fragments: list[tuple[Tier, int, FragmentLabel]] = [
            (tier, catalog.place[tier][fragment], label)
            for (fragment, tier), label in zip(places, labels, strict=True)
        ]
        if is_trial:
            self._trial = self._num_exports
        core.outbox.emit(ExportBundle(self._num_exports, bundle, fragments, is_trial))

    def _is_speed_wanted(self, namespace: NamespaceEntry) -> bool:
        """Whether a trial is to tell how fast the source is."""
        now, is_known = self._core.now, self._index.store_speed.is_known(self._core.now, SPEED_TRUST_S)
        return self._is_prefill_known(namespace) and not is_known and now - self._tried_at > SPEED_TRUST_S

    def _is_earned(self, last: int, namespace: NamespaceEntry, num_bytes: int) -> bool:
        """Whether reads as many as there were would have paid for storing the bundle that ends with `last`.
        True where prices or the speed of prefill are not known."""
        core, prices = self._core, self._core.options.prices
        if not prices.gpu_hour or not self._is_prefill_known(namespace):
            return True
        size = self._index.num_blocks(namespace)
        recompute_s = core.costs.recompute_s(namespace.id, core.catalog.position[last] + 1 - size, size)
        uses = self._uses.get(tenant_of(namespace.identity.domain), core.catalog.handle(last))
        return uses is not None and uses.num >= reads_to_earn(prices, num_bytes, recompute_s)

    def _rows(self, last: int, size: int) -> list[int]:
        """Return the blocks of a bundle, the first one first; fewer when one of them is not known."""
        parents, rows = self._core.catalog.parent, [last]
        while len(rows) < size and parents[rows[-1]] != NO_ROW:
            rows.append(parents[rows[-1]])
        return rows[::-1] if len(rows) == size else []

    def _places(self, rows: Sequence[int], num_groups: int) -> list[tuple[int, Tier]]:
        """Return (fragment, tier) of a bundle, group-major; empty when not all of it is in host memory."""
        catalog, places = self._core.catalog, []
        for group in range(num_groups if rows else 0):
            for row in rows:
                fragment = catalog.first_fragment[row] + group
                if fragment in catalog.spent:
                    return []
                for tier in self._host_tiers:
                    if catalog.state[tier][fragment] == State.RESIDENT and tier not in self._core.offline:
                        places.append((fragment, tier))
                        break
                else:
                    return []
        return places

    def finished(self, event: ExportFinished) -> None:
        """Give the holds of an export back."""
        job = self._jobs.pop(event.export)
        self.bytes_in_flight -= job.num_bytes
        for fragment, tier in reversed(job.held):
            self._residency.drop(fragment, tier)
        if (unwritten := job.num_bytes - event.num_bytes) > 0:
            self.budget.not_written(unwritten, self._core.now, job.tenant)
        else:
            self.budget.wrote(-unwritten, self._core.now, job.tenant)
        if event.export == self._trial:
            self._trial = 0
            if event.is_stored:
                self._tried_at = self._core.now
            if event.read_s:
                self._index.store_speed.tried(job.num_bytes, event.read_s, self._core.now)
        if event.is_stored:
            self._index.note(job.namespace_id, job.name, True)
            self._core.story.count("bundles_exported" if event.num_bytes else "bundles_shared_already")
            self._core.story.count("bytes_exported", event.num_bytes)
        elif not event.has_key:
            self._core.story.count("exports_no_key")
        else:
            self._core.story.count("exports_failed")
            self._try_later(job)

    def _try_later(self, job: _HeldBundle) -> None:
        """Queue an export that failed again, after a while."""
        last, num_blocks, num_failures = job.waiting
        if num_failures < MAX_RETRIES:
            at = self._core.now + RETRY_S * 2.0**num_failures
            self._queue.add_later(at, job.tenant, WaitingBundle(last, num_blocks, num_failures + 1))

    def check_integrity(self) -> list[str]:
        """Audit: the bytes in flight are those of the exports."""
        num_bytes = sum(job.num_bytes for job in self._jobs.values())
        is_right = num_bytes == self.bytes_in_flight
        return [] if is_right else [f"exports: {self.bytes_in_flight} bytes, not {num_bytes}"]

    def held(self) -> list[tuple[int, Tier]]:
        """Return (fragment, tier) of every hold. For audits."""
        return [pair for job in self._jobs.values() for pair in job.held]
