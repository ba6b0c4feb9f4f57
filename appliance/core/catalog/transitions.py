"""The transition table, and the only code that writes the columns it governs.

A step changes one fragment in one tier, or the fragments of many blocks at once. Both kinds are here, side by
side: the scalar ones are the specification, the bulk ones do the same in one pass over the columns, and
tests/appliance/core/catalog/test_transitions.py holds them against each other. A step that is not in the
table is a programmer error and raises InvalidTransition with the history of the block. docs/states.md is
generated from the table.

Nothing is decided here and nothing follows from it: rooms, instructions and policies are the business of
residency.py, which calls this. tests/test_core_structure.py fails when another module writes one of these
columns.

A *hold* is one reader, writer or queued copy of a fragment in a tier. It is taken when the copy is queued,
not when it starts: a victim chosen in between was the one real bug of the prototype behind this design.
"""

import struct
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....tiers.block import NO_PLACE, FragmentLabel, Tier
from ....v1.shm import extent_of
from ..encodings import AS_IT_IS
from .catalog import NO_ROW, Catalog
from .columns import extend
from .states import InvalidTransition, State, Step

TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.ABSENT, Step.RESERVE): State.ARRIVING,
    (State.ARRIVING, Step.LAND): State.RESIDENT,
    (State.ARRIVING, Step.FAIL): State.ABSENT,
    (State.RESIDENT, Step.EVICT): State.ABSENT,
    (State.RESIDENT, Step.CONDEMN): State.CONDEMNED,
    (State.CONDEMNED, Step.QUIET): State.ABSENT,
}


#: The same table by position: following state, None for no transition. _NEXT[state][step].
_NEXT: list[list[State | None]] = [[TRANSITIONS.get((state, step)) for step in Step] for state in State]


class Vacated(NamedTuple):
    """What a fragment that became ABSENT leaves behind."""

    place: int  # to be given back to the tier's room
    num_bytes: int  # that it took there
    is_last: bool  # nothing of its block has a place in the tier any more


class Transitions:
    """Takes steps. `history`: what happened to a block, by row, for the error of an invalid step.

    Written here and nowhere else: the columns place, state, holds, encoding, num_placed, num_resident,
    num_holds, num_children_placed and num_keepers of the catalog, and the sums below.
    """

    def __init__(self, catalog: Catalog, history: Callable[[int], Sequence[str]]) -> None:
        self._catalog = catalog
        self._history = history
        ladder = self._ladder = catalog.ladder
        self._put_tier, self._log_tier = ladder.put_tier, ladder.log_tier
        placed = catalog.num_placed
        self._placed_in_log = placed[ladder.log_tier]
        #: `num_placed` of the memory tiers that take no puts.
        self._placed_beside = [placed[tier] for tier in ladder.memory_tiers if tier != ladder.put_tier]
        #: Fragments with a place (now or before; readers check) in a segment of the cold store, by segment.
        self.in_segment: defaultdict[int, array[int]] = defaultdict(lambda: array("i"))
        #: By tier: bytes that are promised to copies, readable, and unreadable but still touched.
        self.arriving_bytes = dict.fromkeys(ladder.tiers, 0)
        self.resident_bytes = dict.fromkeys(ladder.tiers, 0)
        self.condemned_bytes = dict.fromkeys(ladder.tiers, 0)
        self.num_resident = dict.fromkeys(ladder.tiers, 0)  # fragments
        self.num_landings = 0  # ever: as long as it stays, nothing came to be readable
        #: Blocks that came to be readable from a tier, or no longer are: (namespace, rows, names), in order.
        #: None while nothing reads it.
        self.changed: list[tuple[int, Sequence[int], Sequence[bytes]]] | None = None
        #: Bytes with a place in the cold store, by namespace.
        self.cold_bytes: defaultdict[int, int] = defaultdict(int)

    # --------------------------------------------------------------------------- one fragment, one tier

    def forget_namespace(self, namespace_id: int) -> None:
        """Drop what is counted of a namespace without blocks."""
        self.cold_bytes.pop(namespace_id, None)

    def reserve(self, fragment: int, tier: Tier, place: int, encoding: int = AS_IT_IS) -> None:
        """ABSENT -> ARRIVING at `place`, held once by the copy that brings it.
        `encoding`: of its record, when the tier is the cold store."""
        catalog = self._catalog
        self._step(fragment, tier, Step.RESERVE)
        row = catalog.block_of[fragment]
        catalog.place[tier][fragment] = place
        num_placed = catalog.num_placed[tier]
        num_placed[row] += 1
        if num_placed[row] == 1 and catalog.parent[row] != NO_ROW:
            catalog.num_children_placed[tier][catalog.parent[row]] += 1
        if tier == self._log_tier:
            catalog.encoding[fragment] = encoding
            self.in_segment[extent_of(place)].append(fragment)
            self.cold_bytes[catalog.namespace_id[row]] += catalog.stored_length(fragment, tier)
        self.arriving_bytes[tier] += catalog.stored_length(fragment, tier)
        self.hold(fragment, tier)

    def land(self, fragment: int, tier: Tier, label: FragmentLabel) -> None:
        """ARRIVING -> RESIDENT, with the checksum in `label`. The copy's hold stays: `drop` gives it back."""
        catalog = self._catalog
        self._step(fragment, tier, Step.LAND)
        catalog.set_checksum(fragment, label.checksum)
        num_bytes = label.raw_length if tier != self._log_tier else catalog.stored_length(fragment, tier)
        self.arriving_bytes[tier] -= num_bytes
        self.resident_bytes[tier] += num_bytes
        self.num_resident[tier] += 1
        self.num_landings += 1
        catalog.num_resident[tier][catalog.block_of[fragment]] += 1
        if self.changed is not None:
            self._note_changed((catalog.block_of[fragment],))

    def fail(self, fragment: int, tier: Tier) -> Vacated:
        """ARRIVING -> ABSENT, with the copy's hold: a fragment that never landed has no other."""
        self.arriving_bytes[tier] -= self._catalog.stored_length(fragment, tier)
        num_left = self.drop(fragment, tier)
        assert num_left == 0, "a fragment that never landed has no readers"
        self._step(fragment, tier, Step.FAIL)
        return self._vacate(fragment, tier)

    def evict(self, fragment: int, tier: Tier) -> Vacated:
        """RESIDENT -> ABSENT. Nothing may hold the fragment here."""
        self._leave(fragment, tier, Step.EVICT)
        assert self._catalog.holds[tier][fragment] == 0, "what is held does not leave"
        return self._vacate(fragment, tier)

    def condemn(self, fragment: int, tier: Tier) -> None:
        """RESIDENT -> CONDEMNED: unreadable; the place stays taken until `quiet`."""
        self._leave(fragment, tier, Step.CONDEMN)
        self.condemned_bytes[tier] += self._catalog.stored_length(fragment, tier)

    def quiet(self, fragment: int, tier: Tier) -> Vacated:
        """CONDEMNED -> ABSENT. Nothing holds the fragment any more."""
        assert self._catalog.holds[tier][fragment] == 0, "it is still held"
        self._step(fragment, tier, Step.QUIET)
        self.condemned_bytes[tier] -= self._catalog.stored_length(fragment, tier)
        return self._vacate(fragment, tier)

    def move(self, fragment: int, tier: Tier, place: int) -> int:
        """Give a fragment another place in the same tier, in the same state. Returns the old one."""
        places = self._catalog.place[tier]
        old, places[fragment] = places[fragment], place
        if tier == self._log_tier:
            self.in_segment[extent_of(place)].append(fragment)
        return old

    def hold(self, fragment: int, tier: Tier) -> None:
        """Count one more reader, writer or queued copy of a fragment."""
        self._catalog.holds[tier][fragment] += 1
        self._catalog.num_holds[tier][self._catalog.block_of[fragment]] += 1

    def drop(self, fragment: int, tier: Tier) -> int:
        """Undo one `hold`. Returns how many the fragment has left."""
        catalog = self._catalog
        num_left = catalog.holds[tier][fragment] - 1
        assert num_left >= 0, "dropped more often than held"
        catalog.holds[tier][fragment] = num_left
        catalog.num_holds[tier][catalog.block_of[fragment]] -= 1
        return num_left

    def keep(self, row: int) -> None:
        """Protect a block from eviction in every tier (a decoding session, a put being admitted)."""
        self._catalog.num_keepers[row] += 1

    def unkeep(self, row: int) -> int:
        """Undo one `keep`. Returns how many the block has left."""
        keepers = self._catalog.num_keepers
        num_left = keepers[row] - 1
        assert num_left >= 0, "unkept more often than kept"
        keepers[row] = num_left
        return num_left

    def link(self, row: int, parent: int) -> None:
        """Link a block that was found at start without its parent; count it among the parent's children."""
        catalog = self._catalog
        catalog.link(row, parent)
        for tier in self._ladder.tiers:
            if catalog.num_placed[tier][row]:
                catalog.num_children_placed[tier][parent] += 1

    def forget_segment(self, segment: int) -> None:
        """Drop the list of fragments of a segment that holds none any more."""
        self.in_segment.pop(segment, None)

    # --------------------------------------------------------------------------------------- many blocks

    def hold_block(self, row: int, fragments: range, tier: Tier) -> None:
        """`hold` for all fragments of a block."""
        holds = self._catalog.holds[tier]
        for fragment in fragments:
            holds[fragment] += 1
        self._catalog.num_holds[tier][row] += len(fragments)

    def drop_block(self, row: int, fragments: range, tier: Tier) -> int:
        """`drop` for all fragments of a block. Returns how many holds they have left together."""
        catalog = self._catalog
        holds = catalog.holds[tier]
        for fragment in fragments:
            num_left = holds[fragment] - 1
            assert num_left >= 0, "dropped more often than held"
            holds[fragment] = num_left
        num_left = catalog.num_holds[tier][row] - len(fragments)
        catalog.num_holds[tier][row] = num_left
        return num_left

    def keep_run(self, rows: Sequence[int]) -> None:
        """`keep` for each row (a row may occur more than once)."""
        keepers = self._catalog.num_keepers
        for row in rows:
            keepers[row] += 1

    def unkeep_run(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """`unkeep` for each row (a row may occur more than once). Returns two lists of rows without keepers:
        those that may be evicted from memory as far as their children there say, and those that have no
        place."""
        catalog, beside = self._catalog, self._placed_beside
        keepers, placed, in_log = catalog.num_keepers, catalog.num_placed[self._put_tier], self._placed_in_log
        children = catalog.num_children_placed[self._put_tier]
        free: list[int] = []
        nowhere: list[int] = []
        for row in rows:
            count = keepers[row] - 1
            assert count >= 0, "unkept more often than kept"
            keepers[row] = count
            if count:
                continue
            num_beside = 0
            for column in beside:
                num_beside += column[row]
            if children[row] and not num_beside:  # a block with a child in the put tier stays there
                continue
            if placed[row] or num_beside:
                free.append(row)
            elif not in_log[row]:
                nowhere.append(row)
        return free, nowhere

    def reserve_run(self, rows: Sequence[int], fragments: Sequence[int], places: Sequence[int]) -> None:
        """`reserve` in the put tier for all fragments of new blocks, and `keep` for each block.

        rows: blocks of one namespace, each the only child of the one before, nowhere yet. fragments, places:
        theirs, block by block in group order.
        """
        catalog, tier = self._catalog, self._put_tier
        states, place_of, holds = catalog.state[tier], catalog.place[tier], catalog.holds[tier]
        arriving = int(State.ARRIVING)
        num_placed, num_holds = catalog.num_placed[tier], catalog.num_holds[tier]
        if any(map(num_placed.__getitem__, rows)):  # one test in C for all: this is run for every put
            wrong = next(f for f in fragments if states[f] != State.ABSENT)
            raise self._invalid(wrong, tier, Step.RESERVE)
        for fragment, place in zip(fragments, places, strict=True):
            place_of[fragment] = place
            states[fragment] = arriving
            holds[fragment] = 1
        keepers, children = catalog.num_keepers, catalog.num_children_placed[tier]
        num_groups = len(fragments) // len(rows)
        for row in rows:
            keepers[row] = children[row] = 1
            num_placed[row] = num_holds[row] = num_groups
        children[rows[-1]] = 0
        parent = catalog.parent[rows[0]]
        if parent != NO_ROW:
            children[parent] += 1
        self.arriving_bytes[tier] += len(rows) * catalog.block_bytes(rows[0])

    def land_run(self, rows: Sequence[int], fragments: Sequence[int], checksums: Sequence[bytes]) -> None:
        """`land` in the put tier and `drop` for all fragments of new blocks.
        rows, fragments: as in `reserve_run`, and only the put touched them since. checksums: 16 bytes for
        each fragment."""
        catalog, tier = self._catalog, self._put_tier
        states, holds = catalog.state[tier], catalog.holds[tier]
        lows, highs = catalog.checksum_low, catalog.checksum_high
        arriving, resident = int(State.ARRIVING), int(State.RESIDENT)
        halves = struct.unpack(f">{2 * len(checksums)}Q", b"".join(checksums))
        for fragment, high, low in zip(fragments, halves[::2], halves[1::2], strict=True):
            if states[fragment] != arriving:
                raise self._invalid(fragment, tier, Step.LAND)
            states[fragment] = resident
            highs[fragment], lows[fragment] = high, low
            holds[fragment] = 0
        num_holds, num_resident = catalog.num_holds[tier], catalog.num_resident[tier]
        num_groups = len(fragments) // len(rows)
        for row in rows:
            num_holds[row] = 0
            num_resident[row] = num_groups
        num_bytes = len(rows) * catalog.block_bytes(rows[0])
        self.arriving_bytes[tier] -= num_bytes
        self.resident_bytes[tier] += num_bytes
        self.num_resident[tier] += len(fragments)
        self.num_landings += 1
        if self.changed is not None:
            self._note_changed(rows)

    def withdraw_run(self, rows: Sequence[int], tier: Tier) -> int:
        """Do the first half of `evict` for a chain of whole blocks, which are no candidates any more.
        rows: deepest first, each the only child of the next in the tier. Returns how many children their
        parent has left there; NO_ROW: there is no parent. `evict_run` must follow."""
        catalog = self._catalog
        num_resident = catalog.num_resident[tier]
        for row in rows:
            num_resident[row] = 0
        if self.changed is not None:
            self._note_changed(rows)
        parent = catalog.parent[rows[-1]]
        if parent == NO_ROW:
            return NO_ROW
        children = catalog.num_children_placed[tier]
        children[parent] -= 1
        return children[parent]

    def evict_run(self, rows: Sequence[int], tier: Tier) -> list[int]:
        """Do the second half of `evict` for blocks of one namespace that `withdraw_run` took.
        Returns their places, to be given back to the room of the tier: in memory, whatever their order."""
        catalog = self._catalog
        states, place_of = catalog.state[tier], catalog.place[tier]
        resident, absent = int(State.RESIDENT), int(State.ABSENT)
        namespace = catalog.namespace_of(rows[0])
        fragments = catalog.fragments_of(rows, namespace.num_groups)
        places = [place_of[fragment] for fragment in fragments]
        for fragment in fragments:
            if states[fragment] != resident:
                raise self._invalid(fragment, tier, Step.EVICT)
            states[fragment] = absent
            place_of[fragment] = NO_PLACE
        num_placed, num_children = catalog.num_placed[tier], catalog.num_children_placed[tier]
        num_holds = catalog.num_holds[tier]
        assert not any(map(num_holds.__getitem__, rows)), "what is held does not leave"
        for row in rows:
            num_placed[row] = num_children[row] = 0
        self.resident_bytes[tier] -= len(rows) * namespace.block_bytes
        self.num_resident[tier] -= len(places)
        return places

    def append_recovered(
        self,
        namespace_id: int,
        parents: "npt.NDArray[np.int32]",
        fragments: "npt.NDArray[np.int64]",
        places: "npt.NDArray[np.int64]",
        encodings: "npt.NDArray[np.uint16]",
        stored_bytes: int,
    ) -> None:
        """`reserve` and `land` in the cold store, and `drop`, for the records of recovered blocks.

        Appends those columns of the blocks that the catalog does not append. parents: (blocks,) rows, NO_ROW
        for none; every parent is one of these blocks. fragments: (records,) fragment rows, each once. places,
        encodings: (records,) of each record. stored_bytes: of all of them."""
        catalog = self._catalog
        first_row, num_rows = len(catalog.num_keepers), len(parents)
        first_fragment, num_fragments = len(catalog.encoding), len(catalog.block_of) - len(catalog.encoding)
        rows = (fragments - first_fragment) // (num_fragments // num_rows)
        placed = np.bincount(rows, minlength=num_rows)
        children = np.bincount(parents[parents != NO_ROW] - first_row, minlength=num_rows)
        extend(catalog.num_keepers, np.zeros(num_rows, np.uint32))
        for tier in self._ladder.tiers:
            is_cold = tier == self._log_tier
            for columns, counts in (
                (catalog.num_placed, placed),
                (catalog.num_resident, placed),
                (catalog.num_children_placed, children),
            ):
                extend(columns[tier], counts if is_cold else np.zeros(num_rows, np.int32))
            extend(catalog.num_holds[tier], np.zeros(num_rows, np.uint32))
            place = np.full(num_fragments, NO_PLACE, np.int64)
            state = np.full(num_fragments, State.ABSENT, np.uint8)
            if is_cold:
                place[fragments - first_fragment] = places
                state[fragments - first_fragment] = State.RESIDENT
            extend(catalog.place[tier], place)
            extend(catalog.state[tier], state)
            extend(catalog.holds[tier], np.zeros(num_fragments, np.uint32))
        encoding = np.zeros(num_fragments, np.uint16)
        encoding[fragments - first_fragment] = encodings
        extend(catalog.encoding, encoding)
        self.resident_bytes[self._log_tier] += stored_bytes
        self.cold_bytes[namespace_id] += stored_bytes
        self.num_resident[self._log_tier] += len(fragments)
        self._list_in_segments(fragments, places)

    def _step(self, fragment: int, tier: Tier, step: Step) -> None:
        states = self._catalog.state[tier]
        following = _NEXT[states[fragment]][step]
        if following is None:
            raise self._invalid(fragment, tier, step)
        states[fragment] = following

    def _invalid(self, fragment: int, tier: Tier, step: Step) -> InvalidTransition:
        catalog = self._catalog
        row = catalog.block_of[fragment]
        state = State(catalog.state[tier][fragment])
        subject = f"{catalog.prefix_hash[row].hex()} {tier.label}"
        return InvalidTransition(state, step, subject, self._history(row))

    def _leave(self, fragment: int, tier: Tier, step: Step) -> None:
        """From RESIDENT to wherever `step` leads."""
        catalog = self._catalog
        self._step(fragment, tier, step)
        catalog.num_resident[tier][catalog.block_of[fragment]] -= 1
        if self.changed is not None:
            self._note_changed((catalog.block_of[fragment],))
        self.resident_bytes[tier] -= catalog.stored_length(fragment, tier)
        self.num_resident[tier] -= 1

    def take_changed(self) -> list[tuple[int, Sequence[int], Sequence[bytes]]]:
        """Return `changed`, and begin to note what changes from now on."""
        taken, self.changed = self.changed or [], []
        return taken

    def _note_changed(self, rows: Sequence[int]) -> None:
        """Note blocks of one namespace. By name too: their rows may name others when this is read."""
        assert self.changed is not None
        names = self._catalog.prefix_hash
        self.changed.append((self._catalog.namespace_id[rows[0]], rows, [names[row] for row in rows]))

    def _vacate(self, fragment: int, tier: Tier) -> Vacated:
        """Clear the place of a fragment that is ABSENT now."""
        catalog = self._catalog
        row = catalog.block_of[fragment]
        place, num_bytes = catalog.place[tier][fragment], catalog.stored_length(fragment, tier)
        catalog.place[tier][fragment] = NO_PLACE
        if tier == self._log_tier:
            self.cold_bytes[catalog.namespace_id[row]] -= num_bytes
            catalog.encoding[fragment] = AS_IT_IS
        num_placed = catalog.num_placed[tier]
        num_placed[row] -= 1
        is_last = num_placed[row] == 0
        if is_last and catalog.parent[row] != NO_ROW:
            catalog.num_children_placed[tier][catalog.parent[row]] -= 1
        return Vacated(place, num_bytes, is_last)

    def _list_in_segments(self, fragments: "npt.NDArray[np.int64]", places: "npt.NDArray[np.int64]") -> None:
        """Add fragments to the lists of their segments. fragments, places: (records,)."""
        segments = places >> 32
        order = np.argsort(segments, kind="stable")
        numbers, starts = np.unique(segments[order], return_index=True)
        for number, part in zip(numbers, np.split(fragments[order], starts[1:]), strict=True):
            extend(self.in_segment[int(number)], part)
