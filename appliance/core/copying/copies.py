"""Copies in flight: which batch moves which fragments, and what happens when it ends.

A copy belongs to no request: a load that a lease waits for goes on when the lease ends, and its block is then
simply resident. Code that has to know when a fragment arrives registers a listener.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from ....tiers.base import Cause, CopyItem, CopyOutcome
from ....tiers.block import FragmentLabel, Tier, Urgency, tenant_of
from ....tiers.cold.log import record_bytes
from ....v1.shm import extent_of
from ..catalog.core_state import CoreState
from ..catalog.fresh import FreshRun
from ..catalog.residency import Residency
from ..catalog.runs import land_run
from ..encodings import is_lossy
from ..instructions import BundleBlocks, CancelCopy, Copy, FetchBundle, HastenCopy
from .refusals import Refusals
from .write_budget import WriteBudget

#: Causes that make reading the same record again pointless.
LOST = frozenset(
    {
        Cause.WRONG_CHECKSUM,
        Cause.WRONG_IDENTITY,
        Cause.SHORT_TRANSFER,
        Cause.IO_ERROR,
        Cause.NOT_AUTHENTIC,
        Cause.NO_KEY,
    }
)

#: Fragments of one spill, and bytes of one into the cold store at least, where there are more.
MAX_SPILL_BATCH, MAX_SPILL_BYTES = 32, 4 << 20

Listener: TypeAlias = Callable[[int, Cause | None], None]  # fragment, why it did not arrive


class Owner(Protocol):
    """A part that started copies and has to know what became of them, such as a put."""

    def landed(self, fragments: Sequence[int], cause: Cause | None) -> None:
        """Take in that the copies of these fragments ended, well when `cause` is None."""
        ...


class Move(NamedTuple):
    """One fragment of a batch."""

    fragment: int
    source: int  # place in the source tier, or offset in the staging extent
    target: int  # place in the target tier


@dataclass(slots=True)
class _Batch:
    source: Tier | None  # None: bytes from outside (a client's staging, the source)
    target: Tier
    fragments: Sequence[int]
    items: Sequence[CopyItem]  # one per fragment
    num_bytes: int
    urgency: Urgency
    owner: "Owner | None"
    run: FreshRun | None = None


class Copies:
    """Starts copies and settles them. Holds on sources are taken here, when the copy is queued."""

    def __init__(
        self, core: CoreState, residency: Residency, refusals: Refusals, budget: WriteBudget
    ) -> None:
        self._core = core
        ladder = core.ladder
        self._device_tier, self._put_tier, self._log_tier = (
            ladder.device_tier,
            ladder.put_tier,
            ladder.log_tier,
        )
        self._residency = residency
        self._refusals = refusals
        self._budget = budget
        self._batches: dict[int, _Batch] = {}
        self._next_copy = 1
        self._listeners: dict[tuple[int, Tier], list[Listener]] = {}
        #: Batches of promotions that no request waits for, and fragments with a copy being cancelled.
        self._background: dict[int, _Batch] = {}
        self._cancelled: set[tuple[int, Tier]] = set()
        self._disowned: dict[int, frozenset[int]] = {}  # by copy: fragments of these namespaces do not land
        #: Records being read, per segment: a segment is not freed under a reader.
        self.num_reads_of_segment: dict[int, int] = {}
        #: Handles of blocks of which a fragment was too long once it was encoded.
        self._unfit: list[int] = []

    def __len__(self) -> int:
        return len(self._batches)

    def start(
        self,
        source: Tier | None,
        target: Tier,
        moves: Sequence[Move],
        urgency: Urgency,
        deadline_at: float = float("inf"),
        client: int = 0,
        owner: "Owner | None" = None,
        *,
        in_one: bool = False,
    ) -> None:
        """Queue one batch. Targets are ARRIVING already, except where a fragment moves inside its tier.

        `owner` hears about every fragment of this batch. `in_one`: one thread makes it.
        """
        core = self._core
        fragments, sources, targets = zip(*moves, strict=True)
        labels = core.catalog.labels_of(fragments)
        if self._log_tier in (source, target):
            core.catalog.tell_encodings(labels, fragments)
        items = list(map(CopyItem._make, zip(sources, targets, labels, strict=True)))
        num_bytes = sum(item.label.raw_length for item in items)
        if source is not None:
            for move in moves:
                core.transitions.hold(move.fragment, source)
        if source == self._log_tier:
            for move in moves:
                self._count_read(move.source, +1)
        if target == self._log_tier:
            for tenant, num_written in self._record_bytes(fragments, labels).items():
                self._budget.wrote(num_written, self._core.now, tenant)
        batch = _Batch(source, target, fragments, items, num_bytes, urgency, owner)
        copy = self._begin(batch, deadline_at, client, in_one)
        if urgency > Urgency.QUEUED and target < self._log_tier and source != target:
            self._background[copy] = batch

    def spill(
        self, source: Tier, target: Tier, moves: Sequence[Move], urgency: Urgency, *, in_one: bool
    ) -> None:
        """Queue copies down: into the cold store many of MAX_SPILL_BYTES, as room returns copy by copy."""
        most_bytes = MAX_SPILL_BYTES if target == self._log_tier else float("inf")
        batch: list[Move] = []
        num_bytes = 0
        for move in moves:
            batch.append(move)
            num_bytes += self._core.catalog.length_of(move.fragment)
            if len(batch) == MAX_SPILL_BATCH or num_bytes >= most_bytes or move is moves[-1]:
                self.start(source, target, batch, urgency, in_one=in_one)
                batch, num_bytes = [], 0

    def start_run(
        self, run: FreshRun, spans: Sequence[tuple[int, int]], urgency: Urgency, client: int, owner: "Owner"
    ) -> None:
        """Queue the copy of new blocks from the staging extent of `client` into the put tier.
        spans: one per block."""
        num_bytes = len(run.rows) * run.namespace.block_bytes
        batch = _Batch(None, self._put_tier, run.fragments, run.items(spans), num_bytes, urgency, owner, run)
        self._begin(batch, float("inf"), client)

    def start_fetch(
        self, bundle: BundleBlocks, groups: Sequence[Sequence[Move]], deadline_at: float, owner: "Owner"
    ) -> None:
        """Queue the fetch of blocks of a bundle into the put tier, one batch for the moves of each group.
        `Move.source` is the block's number in the bundle."""
        batches = []
        for moves in groups:
            fragments, sources, targets = zip(*moves, strict=True)
            labels = self._core.catalog.labels_of(fragments)
            items = list(map(CopyItem._make, zip(sources, targets, labels, strict=True)))
            num_bytes = sum(item.label.raw_length for item in items)
            batch = _Batch(None, self._put_tier, fragments, items, num_bytes, Urgency.PREFILL, owner)
            copy, self._next_copy = self._next_copy, self._next_copy + 1
            self._batches[copy] = batch
            self._count_bytes(batch, num_bytes)
            batches.append((copy, items))
        self._core.outbox.emit(FetchBundle(bundle, self._put_tier, batches, deadline_at))

    def _begin(self, batch: _Batch, deadline_at: float, client: int, in_one: bool = False) -> int:
        copy, self._next_copy = self._next_copy, self._next_copy + 1
        self._batches[copy] = batch
        self._count_bytes(batch, batch.num_bytes)
        instruction = Copy(
            copy, batch.source, batch.target, batch.items, batch.urgency, deadline_at, client, in_one
        )
        self._core.outbox.emit(instruction)
        return copy

    def hasten(self, fragments: set[int], tier: Tier, urgency: Urgency, deadline_at: float) -> None:
        """Raise the urgency of fragments that are being prefetched: a request waits for them now."""
        for copy, batch in list(self._background.items()):
            if batch.target != tier or urgency >= batch.urgency:
                continue
            if not fragments.isdisjoint(batch.fragments):
                self._count_bytes(batch, -batch.num_bytes)
                batch.urgency = urgency
                self._count_bytes(batch, batch.num_bytes)
                if urgency <= Urgency.QUEUED:
                    del self._background[copy]
                self._core.outbox.emit(HastenCopy(copy, urgency, deadline_at))

    def cancel(self, fragments: set[int]) -> None:
        """Give up fragments that are being prefetched. A batch is cancelled when none of it is wanted."""
        for copy, batch in list(self._background.items()) if fragments else ():
            pairs = [(fragment, batch.target) for fragment in batch.fragments]
            if all(pair[0] in fragments and pair not in self._listeners for pair in pairs):
                del self._background[copy]
                self._cancelled.update(pairs)
                self._core.outbox.emit(CancelCopy(copy))

    def is_cancelled(self, fragment: int, tier: Tier) -> bool:
        """Whether the copy under way will hardly arrive: another one is begun afterwards."""
        return (fragment, tier) in self._cancelled

    def disown(self, namespace_ids: frozenset[int]) -> None:
        """What is under way of these namespaces does not count as landed, whatever becomes of it."""
        catalog = self._core.catalog
        for copy, batch in self._batches.items():
            rows = [catalog.block_of[fragment] for fragment in batch.fragments]
            if any(catalog.namespace_id[row] in namespace_ids for row in rows):
                self._disowned[copy] = self._disowned.get(copy, frozenset()) | namespace_ids

    def is_disowning(self, namespace_ids: frozenset[int]) -> bool:
        """Whether a copy that was disowned for these namespaces is still under way."""
        return any(namespace_ids & disowned for disowned in self._disowned.values())

    def listen(self, fragment: int, tier: Tier, listener: Listener) -> None:
        """Call `listener` once, when the copy of `fragment` into `tier` has ended."""
        self._listeners.setdefault((fragment, tier), []).append(listener)

    def tell_listeners(self, fragment: int, tier: Tier, cause: Cause | None) -> None:
        """What they listened for has arrived, or will not."""
        for listener in self._listeners.pop((fragment, tier), ()):
            listener(fragment, cause)

    def finish(self, copy: int, outcomes: Sequence[CopyOutcome]) -> None:
        """End a batch: land what arrived, fail what did not, tell the listeners."""
        batch = self._batches.pop(copy)
        self._background.pop(copy, None)
        if self._cancelled:
            self._cancelled.difference_update([(fragment, batch.target) for fragment in batch.fragments])
        assert len(outcomes) == len(batch.fragments)
        self._count_bytes(batch, -batch.num_bytes)
        if batch.target == self._log_tier:
            self._note_written(batch, [outcome.cause for outcome in outcomes])
        if copy in self._disowned:
            outcomes = self._without(self._disowned.pop(copy), batch, outcomes)
        is_inside = batch.source == batch.target
        if batch.source is None and self._land_all(batch, outcomes):
            return
        for fragment, item, outcome in zip(batch.fragments, batch.items, outcomes, strict=True):
            if is_inside:
                self._finish_inside(batch, fragment, item, outcome)
            else:
                self._finish_one(batch, fragment, item, outcome)

    def _note_written(self, batch: _Batch, causes: Sequence[Cause | None]) -> None:
        """Take in how a batch into the cold store ended; what was not written is given back to the budget."""
        if batch.source != self._log_tier:
            self._refusals.spilled(causes)
        failed = [number for number, cause in enumerate(causes) if cause is not None]
        if failed:
            labels = [batch.items[number].label for number in failed]
            sizes = self._record_bytes([batch.fragments[number] for number in failed], labels)
            for tenant, num_bytes in sizes.items():
                self._budget.not_written(num_bytes, self._core.now, tenant)

    def _record_bytes(self, fragments: Sequence[int], labels: Sequence[FragmentLabel]) -> dict[str, int]:
        """Return the bytes of records by tenant, all for "" where the budget is not divided among tenants."""
        sizes = [record_bytes(label.stored_length or label.raw_length) for label in labels]
        if not self._budget.num_tenants:
            return {"": sum(sizes)}
        catalog, of_tenant = self._core.catalog, dict[str, int]()
        for fragment, num_bytes in zip(fragments, sizes, strict=True):
            tenant = tenant_of(catalog.namespace_of(catalog.block_of[fragment]).identity.domain)
            of_tenant[tenant] = of_tenant.get(tenant, 0) + num_bytes
        return of_tenant

    def _without(
        self, namespace_ids: frozenset[int], batch: _Batch, outcomes: Sequence[CopyOutcome]
    ) -> list[CopyOutcome]:
        """Return the outcomes with those of disowned fragments failed."""
        catalog = self._core.catalog
        rows = [catalog.block_of[fragment] for fragment in batch.fragments]
        return [
            CopyOutcome(Cause.NO_KEY) if catalog.namespace_id[row] in namespace_ids else outcome
            for row, outcome in zip(rows, outcomes, strict=True)
        ]

    def _land_all(self, batch: _Batch, outcomes: Sequence[CopyOutcome]) -> bool:
        """Land new bytes at once; False when something happened to a part of them."""
        checksums = [outcome.checksum for outcome in outcomes if outcome.cause is None]
        if len(checksums) < len(outcomes) or batch.target in self._core.offline:
            return False
        if batch.run is not None:
            land_run(self._core, batch.run, checksums)
        else:
            labels = [item.label for item in batch.items]
            for fragment, label, checksum in zip(batch.fragments, labels, checksums, strict=True):
                self._ready_label(batch, fragment, label, checksum)
            self._residency.land(batch.fragments, batch.target, labels)
        for fragment in batch.fragments if self._listeners else ():
            self.tell_listeners(fragment, batch.target, None)
        if batch.owner is not None:
            batch.owner.landed(batch.fragments, None)
        return True

    def take_unfit(self) -> list[int]:
        """Return and forget the handles of blocks to be copied into the cold store again, as they are.
        A fragment of each was too long once it was encoded."""
        unfit, self._unfit = self._unfit, []
        return unfit

    def forward_targets(self) -> list[tuple[int, int]]:
        """Return (place, bytes) of the records being copied forward: taken, but in no catalog entry yet."""
        forwards = [
            b for b in self._batches.values() if b.source == self._log_tier and b.target == self._log_tier
        ]
        length = self._core.catalog.stored_length
        return [
            (item.target, length(fragment, self._log_tier))
            for batch in forwards
            for fragment, item in zip(batch.fragments, batch.items, strict=True)
        ]

    def _finish_one(self, batch: _Batch, fragment: int, item: CopyItem, outcome: CopyOutcome) -> None:
        core = self._core
        residency = self._residency
        label = item.label
        if batch.source is not None:
            self._release_source(batch.source, fragment, item, outcome)
        if batch.target != self._log_tier and batch.target in core.offline:
            outcome = CopyOutcome(Cause.TIER_OFFLINE)  # it landed, in memory that was lost a moment later
        if outcome.cause is None:
            self._ready_label(batch, fragment, label, outcome.checksum)
            residency.land((fragment,), batch.target, (label,))
        if batch.owner is not None:
            batch.owner.landed((fragment,), outcome.cause)
        self.tell_listeners(fragment, batch.target, outcome.cause)
        if outcome.cause is not None:  # last, because the block may be forgotten by this
            row = core.catalog.block_of[fragment]
            residency.fail(fragment, batch.target, outcome.cause)
            if outcome.cause is Cause.DOES_NOT_FIT and core.catalog.prefix_hash[row]:
                self._unfit.append(self._core.catalog.handle(row))

    def _ready_label(self, batch: _Batch, fragment: int, label: FragmentLabel, checksum: bytes) -> None:
        """Complete the label of a fragment that is about to land. The copy has ended: no other holds it."""
        if not label.checksum or (batch.source == self._log_tier and checksum):
            label.checksum = checksum  # what a lossy codec decoded has one of its own
        self._note_spent(batch, fragment, label)
        if batch.source is None:  # a record that was out of reach may be of other bytes than these
            self._residency.condemn(fragment, self._log_tier, "put again")

    def _note_spent(self, batch: _Batch, fragment: int, label: FragmentLabel) -> None:
        """What came out of a lossy record loses nothing more; what a client put anew has lost nothing yet.

        The label says what the record was when its reading began: it may have been condemned meanwhile.
        """
        catalog = self._core.catalog
        if batch.source is None:
            catalog.spent.discard(fragment)
        elif batch.source == self._log_tier and is_lossy(label.codec_id):
            catalog.spent.add(fragment)
        label.is_spent = fragment in catalog.spent

    def _finish_inside(self, batch: _Batch, fragment: int, item: CopyItem, outcome: CopyOutcome) -> None:
        """A fragment was copied to another place of its tier."""
        residency, tier = self._residency, batch.target
        if batch.owner is not None:
            batch.owner.landed((fragment,), outcome.cause)
        if outcome.cause is None and residency.may_move(fragment, tier):
            residency.move(fragment, tier, item.target)
        else:
            residency.abandon_place(fragment, tier, item.target)
        self._release_source(tier, fragment, item, outcome)

    def _release_source(self, source: Tier, fragment: int, item: CopyItem, outcome: CopyOutcome) -> None:
        if source == self._log_tier:
            self._count_read(item.source, -1)
            if outcome.cause in LOST:
                self._residency.condemn(fragment, source, outcome.cause.value)
        elif source == self._device_tier and outcome.cause is Cause.WRONG_CHECKSUM:
            # What the host fetched is not what was put: it must not be read on the device either.
            self._residency.condemn(fragment, source, outcome.cause.value)
        self._residency.drop(fragment, source)

    def _count_read(self, place: int, by: int) -> None:
        segment = extent_of(place)
        count = self.num_reads_of_segment.get(segment, 0) + by
        if count:
            self.num_reads_of_segment[segment] = count
        else:
            self.num_reads_of_segment.pop(segment, None)

    def _count_bytes(self, batch: _Batch, by: int) -> None:
        edge = (batch.source, batch.target)
        self._core.bytes_in_flight[edge] = self._core.bytes_in_flight.get(edge, 0) + by
        if batch.urgency <= Urgency.QUEUED:
            self._core.urgent_bytes[edge] = self._core.urgent_bytes.get(edge, 0) + by
