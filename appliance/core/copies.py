"""Copies in flight: which batch moves which fragments, and what happens when it ends.

A copy belongs to nobody: a load that a lease waits for goes on when the lease ends, and its block is then
simply resident. Whoever wants to know that a fragment arrived listens for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from ...tiers.base import Cause, CopyItem, CopyOutcome
from ...tiers.block import Tier, Urgency
from ...v1.shm import extent_of
from .instructions import CancelCopy, Copy, HastenCopy
from .residency import MEMORY_TIERS, Residency
from .runs import MIN_RUN, is_plain, land_run

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

Listener: TypeAlias = Callable[[int, Cause | None], None]  # fragment, why it did not arrive


class Owner(Protocol):
    """Who put bytes and waits until all of them have landed."""

    def landed(self, fragment: int, cause: Cause | None) -> None:
        """The copy of one fragment ended."""
        ...

    def landed_run(self, fragments: Sequence[int]) -> None:
        """The copies of many fragments ended well."""
        ...


class Move(NamedTuple):
    """One fragment of a batch."""

    fragment: int
    source: int  # place in the source tier, or offset in the staging extent
    target: int  # place in the target tier


@dataclass(slots=True)
class _Batch:
    source: Tier | None
    target: Tier
    moves: Sequence[Move]
    items: list[CopyItem]
    num_bytes: int
    urgency: Urgency
    owner: "Owner | None"


class Copies:
    """Starts copies and settles them. Holds on sources are taken here, when the copy is queued."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._batches: dict[int, _Batch] = {}
        self._next_copy = 1
        self._listeners: dict[tuple[int, Tier], list[Listener]] = {}
        #: Batches of promotions that nobody waits for, and fragments whose copy is being cancelled.
        self._background: dict[int, _Batch] = {}
        self._cancelled: set[tuple[int, Tier]] = set()
        self._disowned: dict[int, frozenset[int]] = {}  # copies and whose fragments of them must not land
        #: Records being read, per segment: a segment is not freed under a reader.
        self.num_reads_of_segment: dict[int, int] = {}
        #: Told of a block of which a fragment was too long once it was encoded: it is to be copied again.
        self.on_unfit: Callable[[int], object] = lambda row: None
        #: Bytes in flight per (source, target), and those of them that somebody waits for.
        self.bytes_in_flight: dict[tuple[Tier | None, Tier], int] = {}
        self.urgent_bytes: dict[tuple[Tier | None, Tier], int] = {}

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
    ) -> None:
        """Queue one batch. Targets are ARRIVING already, except where a fragment moves inside its tier.

        `owner` hears about every fragment of this batch.
        """
        residency = self._residency
        labels = residency.catalog.labels_of([move.fragment for move in moves])
        if Tier.NVME in (source, target):
            residency.catalog.tell_encodings(labels, [move.fragment for move in moves])
        _, sources, targets = zip(*moves, strict=True)
        items = list(map(CopyItem._make, zip(sources, targets, labels, strict=True)))
        num_bytes = sum(item.label.raw_length for item in items)
        if source is not None:
            for move in moves:
                residency.hold(move.fragment, source)
        if source is Tier.NVME:
            for move in moves:
                self._count_read(move.source, +1)
        copy, self._next_copy = self._next_copy, self._next_copy + 1
        batch = self._batches[copy] = _Batch(source, target, moves, items, num_bytes, urgency, owner)
        self._count_bytes(batch, num_bytes)
        if urgency > Urgency.QUEUED and target < Tier.NVME and source is not target:
            self._background[copy] = batch
        residency.out.append(Copy(copy, source, target, items, urgency, deadline_at, client))

    def hasten(self, fragments: set[int], tier: Tier, urgency: Urgency, deadline_at: float) -> None:
        """Somebody waits for these fragments now, which come up for nobody in particular."""
        for copy, batch in list(self._background.items()):
            if batch.target is not tier or urgency >= batch.urgency:
                continue
            if any(move.fragment in fragments for move in batch.moves):
                self._count_bytes(batch, -batch.num_bytes)
                batch.urgency = urgency
                self._count_bytes(batch, batch.num_bytes)
                if urgency <= Urgency.QUEUED:
                    del self._background[copy]
                self._residency.out.append(HastenCopy(copy, urgency, deadline_at))

    def cancel(self, fragments: set[int]) -> None:
        """Nobody wants these fragments any more, which come up into dram for nobody in particular. A batch
        is cancelled when nobody wants anything of it."""
        for copy, batch in list(self._background.items()) if fragments else ():
            pairs = [(move.fragment, batch.target) for move in batch.moves]
            if all(pair[0] in fragments and pair not in self._listeners for pair in pairs):
                del self._background[copy]
                self._cancelled.update(pairs)
                self._residency.out.append(CancelCopy(copy))

    def is_cancelled(self, fragment: int, tier: Tier) -> bool:
        """Whether the copy under way will hardly arrive: who wants the fragment begins anew afterwards."""
        return (fragment, tier) in self._cancelled

    def disown(self, namespace_ids: frozenset[int]) -> None:
        """What is under way of these namespaces does not count as landed, whatever becomes of it."""
        catalog = self._residency.catalog
        for copy, batch in self._batches.items():
            rows = [catalog.block_of[move.fragment] for move in batch.moves]
            if any(catalog.namespace_id[row] in namespace_ids for row in rows):
                self._disowned[copy] = self._disowned.get(copy, frozenset()) | namespace_ids

    def listen(self, fragment: int, tier: Tier, listener: Listener) -> None:
        """Call `listener` once, when the copy of `fragment` into `tier` has ended."""
        self._listeners.setdefault((fragment, tier), []).append(listener)

    def tell_listeners(self, fragment: int, tier: Tier, cause: Cause | None) -> None:
        """What they listened for has arrived, or will not."""
        for listener in self._listeners.pop((fragment, tier), ()):
            listener(fragment, cause)

    def finish(self, copy: int, outcomes: Sequence[CopyOutcome]) -> None:
        """A batch ended: land what arrived, fail what did not, tell who listens."""
        batch = self._batches.pop(copy)
        self._background.pop(copy, None)
        if self._cancelled:
            self._cancelled.difference_update([(move.fragment, batch.target) for move in batch.moves])
        assert len(outcomes) == len(batch.moves)
        self._count_bytes(batch, -batch.num_bytes)
        if copy in self._disowned:
            outcomes = self._without(self._disowned.pop(copy), batch, outcomes)
        is_inside = batch.source is batch.target
        if batch.source is None and len(batch.moves) >= MIN_RUN and self._land_run(batch, outcomes):
            return
        for move, item, outcome in zip(batch.moves, batch.items, outcomes, strict=True):
            if is_inside:
                self._finish_inside(batch, move, outcome)
            else:
                self._finish_one(batch, move, item, outcome)

    def _without(
        self, namespace_ids: frozenset[int], batch: _Batch, outcomes: Sequence[CopyOutcome]
    ) -> list[CopyOutcome]:
        """Return the outcomes with those of disowned fragments failed."""
        catalog = self._residency.catalog
        rows = [catalog.block_of[move.fragment] for move in batch.moves]
        return [
            CopyOutcome(Cause.NO_KEY) if catalog.namespace_id[row] in namespace_ids else outcome
            for row, outcome in zip(rows, outcomes, strict=True)
        ]

    def _land_run(self, batch: _Batch, outcomes: Sequence[CopyOutcome]) -> bool:
        """Land a whole put at once; False when it is not as plain as that."""
        fragments = [move.fragment for move in batch.moves]
        if any(outcome.cause is not None for outcome in outcomes) or not is_plain(self._residency, fragments):
            return False
        labels = [item.label for item in batch.items]
        for label, outcome in zip(labels, outcomes, strict=True):
            label.checksum = outcome.checksum  # the copy has ended: nobody else holds this label
        if self._residency.catalog.spent:
            self._residency.catalog.spent.difference_update(fragments)
        land_run(self._residency, fragments, labels)
        for fragment in fragments if self._listeners else ():
            self.tell_listeners(fragment, batch.target, None)
        if batch.owner is not None:
            batch.owner.landed_run(fragments)
        return True

    def forward_targets(self) -> list[tuple[int, int]]:
        """Return (place, bytes) of the records being copied forward: taken, but in no catalog entry yet."""
        forwards = [b for b in self._batches.values() if b.source is Tier.NVME and b.target is Tier.NVME]
        length = self._residency.catalog.stored_length
        return [(move.target, length(move.fragment, Tier.NVME)) for batch in forwards for move in batch.moves]

    def _finish_one(self, batch: _Batch, move: Move, item: CopyItem, outcome: CopyOutcome) -> None:
        residency = self._residency
        label = item.label
        if batch.source is not None:
            self._release_source(batch.source, move, outcome)
        if batch.target in MEMORY_TIERS and batch.target in residency.offline:
            outcome = CopyOutcome(Cause.TIER_OFFLINE)  # it landed, in memory that was lost a moment later
        if outcome.cause is None:
            if not label.checksum or (batch.source is Tier.NVME and outcome.checksum):
                # What a lossy codec decoded has a checksum of its own. The copy has ended: nobody else holds
                # this label.
                label.checksum = outcome.checksum
            self._note_spent(batch, move.fragment)
            residency.land(move.fragment, batch.target, label)
        if batch.owner is not None:
            batch.owner.landed(move.fragment, outcome.cause)
        self.tell_listeners(move.fragment, batch.target, outcome.cause)
        if outcome.cause is not None:  # last, because the block may be forgotten by this
            row = residency.catalog.block_of[move.fragment]
            residency.fail(move.fragment, batch.target, outcome.cause)
            if outcome.cause is Cause.DOES_NOT_FIT and residency.catalog.prefix_hash[row]:
                self.on_unfit(row)

    def _note_spent(self, batch: _Batch, fragment: int) -> None:
        """What came out of a lossy record loses nothing more; what a client put anew has lost nothing yet."""
        catalog = self._residency.catalog
        if batch.source is None:
            catalog.spent.discard(fragment)
        elif batch.source is Tier.NVME and catalog.encodings.is_lossy(catalog.encoding[fragment]):
            catalog.spent.add(fragment)

    def _finish_inside(self, batch: _Batch, move: Move, outcome: CopyOutcome) -> None:
        """A fragment was copied to another place of its tier."""
        residency, tier = self._residency, batch.target
        if batch.owner is not None:
            batch.owner.landed(move.fragment, outcome.cause)
        if outcome.cause is None and residency.may_move(move.fragment, tier):
            residency.move(move.fragment, tier, move.target)
        else:
            residency.abandon_place(move.fragment, tier, move.target)
        self._release_source(tier, move, outcome)

    def _release_source(self, source: Tier, move: Move, outcome: CopyOutcome) -> None:
        if source is Tier.NVME:
            self._count_read(move.source, -1)
            if outcome.cause in LOST:
                self._residency.condemn(move.fragment, source, outcome.cause.value)
        self._residency.drop(move.fragment, source)

    def _count_read(self, place: int, by: int) -> None:
        segment = extent_of(place)
        count = self.num_reads_of_segment.get(segment, 0) + by
        if count:
            self.num_reads_of_segment[segment] = count
        else:
            self.num_reads_of_segment.pop(segment, None)

    def _count_bytes(self, batch: _Batch, by: int) -> None:
        edge = (batch.source, batch.target)
        self.bytes_in_flight[edge] = self.bytes_in_flight.get(edge, 0) + by
        if batch.urgency <= Urgency.QUEUED:
            self.urgent_bytes[edge] = self.urgent_bytes.get(edge, 0) + by
