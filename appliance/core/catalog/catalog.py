"""The catalog: the metadata of all blocks, in columns.

A block is a row number; a fragment is a row number in a second table; one attribute is one `array`. At a
million fragments an object per block would cost kilobytes and a garbage-collector pass per second; columns
cost about 0.25 KiB a block (bench/catalog.py prints it) and survive `gc.freeze`. numpy columns were rejected
for the live tables: reading one scalar costs three times as much as from `array`. They are used where a
million rows arrive at once, in recovery.py.

The prefix tree is in the columns too: parent, first child, siblings. A row exists as long as it has a place
anywhere, a child, or a keeper; rows without bytes are misses.

`Catalog` adds, links and removes rows. Which fragment is where is written by transitions.py only, and which
block may be evicted is decided by rules.py."""

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ....policies.base import DEFAULT_PRIORITY
from ....tiers.block import NO_PLACE, NO_SESSION, FragmentLabel, NamespaceIdentity, Tier
from ....tiers.ladder import STANDARD, Ladder
from ..encodings import AS_IT_IS, Encodings
from .columns import append, fit, renew
from .states import State
from .table import BlockTable, block_table

NO_ROW: Final = -1
#: Priorities of prefetched blocks: inside the window in which they should be used, and after it.
AWAITED_PRIORITY: Final = 60
STALE_PRIORITY: Final = 10
GROWTH: Final = 1024  # rows added at a time: growing by one costs as much as filling one


@dataclass(slots=True)
class NamespaceEntry:
    """A registered namespace: its identity, its short name, and its rows by prefix hash."""

    id: int
    identity: NamespaceIdentity
    domain: int
    rows: BlockTable
    #: Raw bytes of the fragment of each layer group.
    fragment_bytes: tuple[int, ...]
    num_groups: int
    block_bytes: int
    #: Where the fragment of each layer group begins in a block's payload.
    group_offsets: tuple[int, ...]
    #: Number of the encoding in which fragments of each layer group enter the cold store from now on.
    encodings: tuple[int, ...] = ()
    #: The same for fragments that have spent their error budget.
    exact_encodings: tuple[int, ...] = ()
    #: How likely a search of the source for its blocks finds something.
    search_chance: float = 1.0
    used_at: float = 0.0  # when a request named it last; 0: not since the start


class Catalog:
    """Columns of blocks and fragments for the tiers of a ladder, read by all parts of the core.
    Those that say where fragments are, and what holds them, are written by `Transitions` only; a new row has
    zeros."""

    def __init__(self, ladder: Ladder = STANDARD, present: Container[Tier] | None = None) -> None:
        """`present`: the tiers that anything can be in, None for all; the columns of others are narrow."""
        self.ladder = ladder
        self._tiers, self._log_tier = ladder.tiers, ladder.log_tier
        self.namespaces: dict[int, NamespaceEntry] = {}
        self.num_namespace_changes = 0  # namespaces that were added or removed, ever
        self.encodings = Encodings()
        self.num_blocks = 0
        # One entry per block row.
        self.prefix_hash: list[bytes] = []
        self.namespace_id = array("I")
        self.serial = array("I")  # how often the row was reused; part of a row's handle
        self.parent = array("i")
        self.first_child = array("i")
        self.next_sibling = array("i")
        self.previous_sibling = array("i")
        self.position = array("i")  # in the chain, from 0
        self.first_fragment = array("i")
        self.last_used = array("d")  # seconds
        self.num_uses = array("Q")  # what every prompt begins with is used a thousand times a second
        self.num_keepers = array("I")  # decoding sessions, puts being admitted: never evict while > 0
        self.urgency = array("B")  # of the session that used it last, or NO_SESSION
        # Per tier: fragments with a place, fragments readable, holds on fragments, children with a place.
        is_there = [present is None or tier in present for tier in ladder.tiers]
        self.num_placed = [array("H" if there else "B") for there in is_there]
        self.num_resident = [array("H" if there else "B") for there in is_there]
        self.num_holds = [array("I" if there else "B") for there in is_there]
        self.num_children_placed = [array("i" if there else "b") for there in is_there]
        # One entry per fragment row.
        self.block_of = array("i")
        self.checksum_low = array("Q")
        self.checksum_high = array("Q")
        self.place = [array("q" if there else "b") for there in is_there]
        self.state = [array("B") for _ in ladder.tiers]
        self.holds = [array("I" if there else "B") for there in is_there]
        self.encoding = array("H")  # of its record in the cold store; AS_IT_IS when there is none
        #: Fragments that were too long encoded: their blocks are stored as they are. Sparse.
        self.unfit: set[int] = set()
        #: Fragments decoded from a lossy record: they lose nothing more. Sparse.
        self.spent: set[int] = set()
        #: Prefix hash of the parent of blocks that recovery found without it: their records name it.
        self.lost_parent: dict[int, bytes] = {}
        #: Priority and until when, of blocks that were given one. Sparse; see retention.py.
        self.retained: dict[int, tuple[int, float]] = {}
        #: End of the window in which a prefetched block should be used, until it is; see prefetch.py.
        self.awaited: dict[int, float] = {}
        #: By number of groups. A free row keeps its fragments, its links are NO_ROW and its counts 0.
        self._free_rows: dict[int, list[int]] = {}

    # ---------------------------------------------------------------------------------- namespaces

    def add_namespace(self, identity: NamespaceIdentity, domain: int, number: int) -> NamespaceEntry:
        """Add `identity` under the id `number`, which is no other one's."""
        assert number not in self.namespaces
        geometry = identity.geometry
        sizes = geometry.fragment_bytes
        offsets = tuple(sum(sizes[:group]) for group in range(len(sizes)))
        namespace = NamespaceEntry(
            number, identity, domain, block_table(self.prefix_hash), sizes, len(sizes), sum(sizes), offsets
        )
        namespace.encodings = namespace.exact_encodings = (AS_IT_IS,) * len(sizes)
        self.namespaces[namespace.id] = namespace
        self.num_namespace_changes += 1
        return namespace

    def remove_namespace(self, namespace: NamespaceEntry) -> None:
        """Forget a namespace without blocks."""
        assert not namespace.rows
        del self.namespaces[namespace.id]
        self.num_namespace_changes += 1

    # ---------------------------------------------------------------------------------------- rows

    def add(self, namespace: NamespaceEntry, prefix_hash: bytes, parent: int, now: float) -> int:
        """Create the row of a block that is nowhere yet, linked under `parent`; return it."""
        assert namespace.rows.get(prefix_hash, NO_ROW) == NO_ROW
        row = self._take_rows(namespace, 1)[0]
        self.prefix_hash[row] = prefix_hash
        namespace.rows.add((prefix_hash,), (row,))
        self.namespace_id[row] = namespace.id
        for fragment in self.fragments(row):
            self.checksum_low[fragment] = self.checksum_high[fragment] = 0
        self.last_used[row] = now
        self.num_uses[row] = 0
        self.urgency[row] = NO_SESSION
        self.position[row] = self.position[parent] + 1 if parent != NO_ROW else 0
        self.link(row, parent)
        return row

    def add_run(
        self, namespace: NamespaceEntry, prefix_hashes: Sequence[bytes], parent: int, now: float
    ) -> list[int]:
        """Create the rows of new blocks, the first one under `parent`, each other one under the one before.
        Their checksums come with the bytes."""
        rows = self._take_rows(namespace, len(prefix_hashes))
        namespace.rows.add(prefix_hashes, rows)
        names, number = self.prefix_hash, namespace.id
        namespace_ids, positions = self.namespace_id, self.position
        last_used, num_uses, urgencies = self.last_used, self.num_uses, self.urgency
        parents, first_child = self.parent, self.first_child
        position, before = positions[parent] + 1 if parent != NO_ROW else 0, NO_ROW
        for prefix_hash, row in zip(prefix_hashes, rows, strict=True):
            names[row] = prefix_hash
            namespace_ids[row] = number
            positions[row] = position
            last_used[row] = now
            num_uses[row] = 0
            urgencies[row] = NO_SESSION
            if before >= 0:
                parents[row] = before
                first_child[before] = row
            before = row
            position += 1
        self.link(rows[0], parent)
        return rows

    def _take_rows(self, namespace: NamespaceEntry, count: int) -> list[int]:
        """Take free rows, for the caller to fill."""
        free = self._free_rows.setdefault(namespace.num_groups, [])
        while len(free) < count:
            self._grow(namespace.num_groups, free)
        rows = free[: -count - 1 : -1]
        del free[-count:]
        self.num_blocks += count
        return rows

    def remove(self, row: int) -> None:
        """Forget a block that has no place, no child and no keeper."""
        assert self.first_child[row] == NO_ROW
        assert not any(placed[row] for placed in self.num_placed)
        self.unlink(row)
        self.remove_run((row,))

    def remove_run(self, rows: Sequence[int]) -> None:
        """Forget blocks of one namespace that have no place, no keeper and no relatives but themselves."""
        namespace = self.namespaces[self.namespace_id[rows[0]]]
        names = self.prefix_hash
        namespace.rows.remove([names[row] for row in rows], rows)
        parent, first_child, serial = self.parent, self.first_child, self.serial
        for row in rows:
            names[row] = b""
            parent[row] = first_child[row] = NO_ROW
            serial[row] = (serial[row] + 1) & 0xFFFF_FFFF
        if self.lost_parent:
            for row in rows:
                self.lost_parent.pop(row, None)
        for hints in (self.retained, self.awaited):
            if hints:
                for row in rows:
                    hints.pop(row, None)
        for noted in (self.unfit, self.spent):
            if noted:
                for row in rows:
                    noted.difference_update(self.fragments(row))
        # setdefault: the rows of recovered blocks were never taken from this list.
        self._free_rows.setdefault(namespace.num_groups, []).extend(rows)
        self.num_blocks -= len(rows)

    def find(self, namespace_id: int, prefix_hash: bytes) -> int:
        """Return the row of a block, or NO_ROW."""
        return self.namespaces[namespace_id].rows.get(prefix_hash, NO_ROW)

    def namespace_of(self, row: int) -> NamespaceEntry:
        """Return the namespace a block belongs to."""
        return self.namespaces[self.namespace_id[row]]

    def block_bytes(self, row: int) -> int:
        """Return the raw bytes of a block, all layers."""
        return self.namespaces[self.namespace_id[row]].block_bytes

    def block_tokens(self, row: int) -> int:
        """Return the tokens in a block."""
        return self.namespaces[self.namespace_id[row]].identity.geometry.block_tokens

    @property
    def has_retention(self) -> bool:
        """Whether any block has another priority than DEFAULT_PRIORITY."""
        return bool(self.retained or self.awaited)

    def retention(self, row: int, now: float) -> int:
        """Return the priority of a block: what a client said about its tokens, or a prefetch about it."""
        priority, until = self.retained.get(row, (DEFAULT_PRIORITY, 0.0))
        if until <= now:
            priority = DEFAULT_PRIORITY
        if row not in self.awaited:
            return priority
        is_expected = now < self.awaited[row]
        return max(priority, AWAITED_PRIORITY) if is_expected else min(priority, STALE_PRIORITY)

    def fragments(self, row: int) -> range:
        """Return the fragment rows of a block, in group order."""
        first = self.first_fragment[row]
        return range(first, first + self.namespace_of(row).num_groups)

    def children(self, row: int) -> list[int]:
        """Return the rows of the blocks that continue this one."""
        found = []
        child = self.first_child[row]
        while child != NO_ROW:
            found.append(child)
            child = self.next_sibling[child]
        return found

    def handle(self, row: int) -> int:
        """Return a number that names this block until it is forgotten, and never another one."""
        return self.serial[row] << 32 | row

    def row_of(self, handle: int) -> int:
        """Return the row a handle names, or NO_ROW when that block is forgotten."""
        row = handle & 0xFFFF_FFFF
        alive = self.serial[row] == handle >> 32 and self.prefix_hash[row] != b""
        return row if alive else NO_ROW

    # ----------------------------------------------------------------------------------- fragments

    def fragments_of(self, rows: Sequence[int], num_groups: int) -> list[int]:
        """Return the fragments of blocks of one namespace, block by block in group order."""
        firsts = self.first_fragment
        if num_groups == 1:
            return [firsts[row] for row in rows]
        return [fragment for row in rows for fragment in range(firsts[row], firsts[row] + num_groups)]

    def length_of(self, fragment: int) -> int:
        """Return the raw bytes of a fragment."""
        row = self.block_of[fragment]
        return self.namespace_of(row).fragment_bytes[fragment - self.first_fragment[row]]

    def stored_length(self, fragment: int, tier: Tier) -> int:
        """Return the bytes a fragment takes in `tier`, where it is or is about to be."""
        raw_bytes = self.length_of(fragment)
        if tier != self._log_tier:
            return raw_bytes
        return self.encodings.stored_bytes(self.encoding[fragment], raw_bytes)

    def choose_encoding(self, fragment: int, namespace: NamespaceEntry) -> int:
        """Return the number of the encoding in which a fragment would enter the cold store."""
        if fragment in self.unfit:
            return AS_IT_IS
        row = self.block_of[fragment]
        encodings = namespace.exact_encodings if fragment in self.spent else namespace.encodings
        return encodings[fragment - self.first_fragment[row]]

    def label_of(self, fragment: int) -> FragmentLabel:
        """Return the label of a fragment, with its checksum once it was taken."""
        return self.labels_of((fragment,))[0]

    def labels_of(self, fragments: Sequence[int]) -> list[FragmentLabel]:
        """Return the labels of many fragments. Written as one loop: every fragment that moves needs one."""
        block_of, first_fragment, parents = self.block_of, self.first_fragment, self.parent
        names, positions, namespace_ids = self.prefix_hash, self.position, self.namespace_id
        lows, highs = self.checksum_low, self.checksum_high
        lost_parent = self.lost_parent.get
        labels = []
        namespace = None
        for fragment in fragments:
            row = block_of[fragment]
            if namespace is None or namespace.id != namespace_ids[row]:
                namespace = self.namespaces[namespace_ids[row]]
                digest, sizes, number = namespace.identity.digest, namespace.fragment_bytes, namespace.id
            group = fragment - first_fragment[row]
            parent = parents[row]
            low, high = lows[fragment], highs[fragment]
            labels.append(
                FragmentLabel(
                    digest,
                    number,
                    names[row],
                    names[parent] if parent >= 0 else lost_parent(row, b""),
                    positions[row],
                    group,
                    sizes[group],
                    (high << 64 | low).to_bytes(16, "big") if high or low else b"",
                )
            )
        return labels

    def tell_encodings(self, labels: Sequence[FragmentLabel], fragments: Sequence[int]) -> None:
        """Set in the labels of fragments how the cold store stores them."""
        encodings = self.encodings
        for label, fragment in zip(labels, fragments, strict=True):
            number = self.encoding[fragment]
            if number:
                label.codec_id = encodings.codec_id(number)
                label.stored_length = encodings.stored_bytes(number, label.raw_length)
            label.is_spent = fragment in self.spent

    def set_checksum(self, fragment: int, checksum: bytes) -> None:
        """Remember the checksum taken at put."""
        self.checksum_high[fragment] = int.from_bytes(checksum[:8], "big")
        self.checksum_low[fragment] = int.from_bytes(checksum[8:], "big")

    def fastest(self, fragment: int) -> Tier | None:
        """Return the fastest tier this fragment can be read from, None when there is none."""
        for tier in self._tiers:
            if self.state[tier][fragment] == State.RESIDENT:
                return tier
        return None

    def tier_of(self, row: int) -> Tier | None:
        """Return the slowest tier that reading the whole block involves; None when it is a miss."""
        num_groups = self.namespaces[self.namespace_id[row]].num_groups
        for tier in self._tiers:
            if self.num_resident[tier][row] == num_groups:
                return tier
        slowest = self._tiers[0]
        for fragment in self.fragments(row):
            tier_or_none = self.fastest(fragment)
            if tier_or_none is None:
                return None
            slowest = max(slowest, tier_or_none)
        return slowest

    def num_places(self, row: int) -> int:
        """Return how many places the fragments of a block have, in all tiers together."""
        return sum([placed[row] for placed in self.num_placed])

    def link(self, row: int, parent: int) -> None:
        """Make `row` the first child of `parent` (NO_ROW: the start of a chain)."""
        self.parent[row] = parent
        self.previous_sibling[row] = NO_ROW
        if parent == NO_ROW:
            self.next_sibling[row] = NO_ROW
            return
        next_row = self.first_child[parent]
        self.next_sibling[row] = next_row
        if next_row != NO_ROW:
            self.previous_sibling[next_row] = row
        self.first_child[parent] = row

    def unlink(self, row: int) -> None:
        """Take `row` out of its parent's children."""
        parent, before, after = self.parent[row], self.previous_sibling[row], self.next_sibling[row]
        if before != NO_ROW:
            self.next_sibling[before] = after
        elif parent != NO_ROW:
            self.first_child[parent] = after
        if after != NO_ROW:
            self.previous_sibling[after] = before
        self.parent[row] = self.previous_sibling[row] = self.next_sibling[row] = NO_ROW

    def _columns(self) -> "tuple[Sequence[array[Any]], ...]":
        """Return columns by what a free row has there: of blocks NO_ROW, 0 and a number, of fragments
        NO_PLACE, 0 and a number."""
        counts: Sequence[array[Any]] = (
            self.namespace_id,
            self.serial,
            self.num_uses,
            self.num_keepers,
            self.urgency,
            self.position,
            self.last_used,
            *self.num_placed,
            *self.num_resident,
            *self.num_holds,
            *self.num_children_placed,
        )
        links = (self.parent, self.first_child, self.next_sibling, self.previous_sibling)
        zeros = (self.checksum_low, self.checksum_high, *self.state, *self.holds, self.encoding)
        return links, counts, (self.first_fragment,), self.place, zeros, (self.block_of,)

    def fit_columns(self) -> None:
        """Fit the memory of each column to its length.

        After many rows came at once, the next ones would find all columns full together.
        """
        for columns in self._columns():
            fit(columns)

    def _grow(self, num_groups: int, free: list[int]) -> None:
        """Append GROWTH free rows with their fragments; the new ones are taken in order, and last."""
        first_row, first_fragment = len(self.prefix_hash), len(self.block_of)
        rows, num_fragments = range(first_row, first_row + GROWTH), num_groups * GROWTH
        links, counts, _, places, zeros, _ = self._columns()
        self.prefix_hash += [b""] * GROWTH
        append(links, NO_ROW, GROWTH)
        append(counts, 0, GROWTH)
        self.first_fragment.extend(range(first_fragment, first_fragment + num_fragments, num_groups))
        self.block_of.extend(row for row in rows for _ in range(num_groups))
        append(places, NO_PLACE, num_fragments)
        append(zeros, 0, num_fragments)
        renew((*links, *counts, self.first_fragment), first_row)
        renew((*places, *zeros, self.block_of), first_fragment)
        free[:0] = reversed(rows)
