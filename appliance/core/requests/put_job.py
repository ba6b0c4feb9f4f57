"""Put: reserve room, take the bytes, make them visible. Dedup is answered per block.

    decide each block (stored? being written? parent there?) -> reserve slots, waiting for room if need be
    -> [Reserve stops here until Commit] -> copy from the staging extent -> all landed: reply

Nothing is visible before its bytes are complete and hashed: a slot is published by its landing, and a
block is found only when all its fragments landed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ....policies.base import Newcomer
from ....tiers.base import Cause
from ....tiers.block import Urgency
from ..capacity.pressure import Pressure, Progress
from ..catalog.catalog import NO_ROW, NamespaceEntry
from ..catalog.core_state import CoreState
from ..catalog.fresh import FreshRun
from ..catalog.residency import Residency
from ..catalog.runs import MIN_RUN, admit_run, num_new, unkeep_run
from ..catalog.states import State
from ..copying.copies import Copies, Move
from ..events import ReserveRequested
from ..instructions import Reply
from ..results import PutOutcome, PutResult, ReserveResult
from .leases import ClientEntry
from .retention import highest_priorities

MAX_STEP_FRAGMENTS = 64  # decided in one step, a block at least
NEEDED, STORED = bytes([PutOutcome.NEEDED]), bytes([PutOutcome.STORED])


class Put(NamedTuple):
    """A put as it arrived, with what its ids name."""

    request: ReserveRequested
    client: ClientEntry
    namespace: NamespaceEntry
    session: int  # its number; 0: none that is known
    reservation_id: int


class PutJob:
    """One put from request to reply. Implements waiting.Job."""

    def __init__(
        self,
        core: CoreState,
        residency: Residency,
        copies: Copies,
        pressure: Pressure,
        put: Put,
        on_done: Callable[["PutJob"], None],
    ) -> None:
        self.request = request = put.request
        self.client = put.client
        self.reservation_id = put.reservation_id
        self.is_done = False
        self.wants_turn = False
        self.is_decided = False
        self.reserve_calls: list[int] = []  # calls that wait for the decision
        self.commit_calls: list[int] = []  # calls that wait for the bytes to be visible
        self.deadline_at = request.deadline_at
        self.outcomes = bytearray(len(request.prefix_hashes))
        self.namespace = put.namespace
        self.session = put.session
        self._core = core
        self._put_tier = core.ladder.put_tier
        self._residency = residency
        self._copies = copies
        self._pressure = pressure
        self._on_done = on_done
        self._next = 0
        self._is_declined = False
        self._known_priorities: Sequence[int] = ()
        self._kept: list[int] = []
        self.rows: list[int] = []  # of the blocks decided so far, NO_ROW for refused ones
        #: What has slots and waits for its bytes: runs, and single fragments by (block, fragment).
        self._fresh: list[FreshRun] = []
        self._taken: list[tuple[int, int]] = []
        self._spans: Sequence[tuple[int, int]] | None = None
        self._num_copying = 0  # fragments, with bytes on their way
        self._parent = self._find_parent()

    @property
    def told_id(self) -> int:
        """The reservation as callers know it; 0 of a put in one step, which they do not commit."""
        return max(0, self.reservation_id)

    @property
    def first_position(self) -> int | None:
        """Where the first block stands in its chain, told before it is decided; None without its parent."""
        if self._parent is None:
            return None
        return self._core.catalog.position[self._parent] + 1 if self._parent != NO_ROW else 0

    # ---------------------------------------------------------------------------------- admission

    def advance(self) -> bool:
        """Decide and make room for the next blocks; True when all are decided.

        At most MAX_STEP_FRAGMENTS at a time, so that a lookup meanwhile does not wait for a thousand
        evictions. The rest follows at the Tick that this asks for."""
        self.wants_turn = False
        hashes = self.request.prefix_hashes
        end_of_step = self._next + max(1, MAX_STEP_FRAGMENTS // self.namespace.num_groups)
        while self._next < len(hashes):
            if self._next >= end_of_step:
                self.wants_turn = True
                self._copy_taken()
                return False
            if self._admit_run(end_of_step):
                continue
            if not self._decide(self._next, hashes[self._next]):
                if self._is_declined:
                    self._decline_rest()
                    break
                self._copy_taken()
                return False
            self._next += 1
        self._decided()
        return True

    def _admit_run(self, end_of_step: int) -> bool:
        """Admit many new blocks at once; False when there are few, or no room for them right now."""
        start = self._next
        if self._parent is None or len(self.outcomes) - start < MIN_RUN or self.outcomes[start]:
            return False
        namespace = self.namespace
        num_new_blocks = num_new(namespace, self.request.prefix_hashes[start:end_of_step])
        if num_new_blocks < MIN_RUN:
            return False
        places = self._places(num_new_blocks)
        num_blocks = len(places) // namespace.num_groups
        if not num_blocks:
            if self._is_declined:
                self._decline_rest()
            return self._is_declined
        end = start + num_blocks
        names = self.request.prefix_hashes[start:end]
        run = admit_run(self._core, namespace, start, names, self._parent, places)
        self._fresh.append(run)
        self._kept += run.rows
        self._core.writers.update(dict.fromkeys(run.rows, self.reservation_id))
        self.outcomes[start:end] = NEEDED * num_blocks
        self.rows += run.rows
        self._parent = run.rows[-1]
        self._next = end
        return True

    def _places(self, num_blocks: int) -> list[int]:
        """Reserve places for a run of new blocks, for as many as there is or can be made room now."""
        namespace = self.namespace
        reserve_many = self._core.put_room.reserve_many
        places = reserve_many(namespace.domain, namespace.fragment_bytes, num_blocks)
        num_placed = len(places) // namespace.num_groups
        missing = num_blocks - num_placed
        if missing:
            step = self._pressure.make_room(
                self._put_tier,
                namespace.domain,
                missing,
                lambda num_left: self._newcomer(num_placed + num_left),
            )
            self._is_declined = step is Progress.DECLINED
            places += reserve_many(namespace.domain, namespace.fragment_bytes, missing)
        return places

    def _newcomer(self, num_placed: int) -> Newcomer:
        """Describe to admission what wants to come in: all blocks from the next one, without `num_placed`.
        What the last ones are says what the first ones are worth, so the policy hears of all of them,
        whatever fits in one step."""
        parent = self._parent if self._parent is not None else NO_ROW
        position = self._core.catalog.position[parent] + 1 if parent != NO_ROW else 0
        asked = self._expected()
        names = self._core.facts.names(self.namespace.id, asked)
        newcomer = Newcomer(
            self._core.now, parent, position, len(names), self.session, Urgency.PREFILL, names
        )
        if self.request.retention and self._next + num_placed < len(self.outcomes):
            newcomer = newcomer._replace(priority=self._priorities(position)[self._next + num_placed])
        return newcomer.after(num_placed) if num_placed else newcomer

    def _expected(self) -> Sequence[bytes]:
        """Return the names of the blocks from the next one on that want to come in."""
        return self.request.prefix_hashes[self._next :]

    def _priorities(self, position: int) -> Sequence[int]:
        """Return the highest priority of each block and those behind it; the next one is at `position`."""
        if not self._known_priorities:
            first, count = position - self._next, len(self.outcomes)
            tokens = self.namespace.identity.geometry.block_tokens
            self._known_priorities = highest_priorities(self.request.retention, first, count, tokens)
        return self._known_priorities

    def _decline_rest(self) -> None:
        """Decline what is left of this put: what is stored is worth more."""
        num_declined = len(self.outcomes) - self._next
        self.outcomes[self._next :] = bytes([PutOutcome.DECLINED]) * num_declined
        self._next = len(self.outcomes)
        self._core.story.count("blocks_declined", num_declined)

    def give_up(self) -> None:
        """No room came in time: the rest is refused, what has room goes on."""
        for block in range(self._next, len(self.outcomes)):
            if self.outcomes[block] == 0 or self.outcomes[block] == PutOutcome.NEEDED:
                self._give_back(block)
                self.outcomes[block] = PutOutcome.NO_ROOM
        self._next = len(self.outcomes)
        if self.reserve_calls or self.commit_calls:  # not of a fetch
            self._core.story.count("puts_without_room")
        self._decided()

    def _decide(self, block: int, prefix_hash: bytes) -> bool:
        """Find out what block number `block` needs and reserve it; False when there is no room yet."""
        catalog = self._core.catalog
        row = self.namespace.rows.get(prefix_hash, NO_ROW)
        if row == NO_ROW:
            if self._parent is None:
                self.outcomes[block] = PutOutcome.PARENT_MISSING
                self.rows.append(NO_ROW)
                return True
            row = catalog.add(self.namespace, prefix_hash, self._parent, self._core.now)
        if self.outcomes[block] == 0:
            self._keep(row)
            self._residency.adopt_child(row, self._parent)
        if self.outcomes[block] in (0, PutOutcome.NEEDED):
            # Looked at anew after waiting: another put may have begun the same block meanwhile.
            outcome = self._needs(row)
            self.outcomes[block] = outcome
            if outcome is PutOutcome.NEEDED and self._parent is None:
                self.outcomes[block] = PutOutcome.PARENT_MISSING
        if self.outcomes[block] == PutOutcome.NEEDED and not self._reserve(block, row):
            return False
        self.rows.append(row)
        self._parent = row if self.outcomes[block] != PutOutcome.PARENT_MISSING else None
        return True

    def _needs(self, row: int) -> PutOutcome:
        """Whether a block is stored, being written, or needs bytes."""
        catalog = self._core.catalog
        writer = self._core.writers.get(row)
        if writer == self.reservation_id or (writer is None and self._is_nowhere(row)):
            return PutOutcome.NEEDED
        outcome = PutOutcome.DEDUPLICATED
        for fragment in catalog.fragments(row):
            if self._is_readable(fragment):
                continue
            if self._is_coming(fragment) or catalog.state[self._put_tier][fragment] != State.ABSENT:
                return PutOutcome.IN_PROGRESS
            # One put at a time: two with a half each would both call the whole theirs.
            outcome = PutOutcome.NEEDED if writer is None else PutOutcome.IN_PROGRESS
        return outcome

    def _is_readable(self, fragment: int) -> bool:
        tier = self._core.catalog.fastest(fragment)
        return tier is not None and tier not in self._core.offline

    def _is_coming(self, fragment: int) -> bool:
        """Whether a copy is on its way into some tier, with the checksum of the bytes it carries."""
        return any(state[fragment] == State.ARRIVING for state in self._core.catalog.state)

    def _is_nowhere(self, row: int) -> bool:
        return self._core.catalog.num_places(row) == 0

    def _reserve(self, block: int, row: int) -> bool:
        core = self._core
        residency = self._residency
        catalog = core.catalog
        all_absent = self._is_nowhere(row)
        self._is_declined = False  # of this block; a run before it may have been
        domain = self.namespace.domain
        for fragment, length in zip(catalog.fragments(row), self.namespace.fragment_bytes, strict=True):
            if not all_absent and (
                catalog.state[self._put_tier][fragment] != State.ABSENT
                or self._is_coming(fragment)
                or self._is_readable(fragment)
            ):
                continue
            place = core.put_room.reserve(domain, length)
            if place is None:
                if all_absent:
                    step = self._pressure.make_room(self._put_tier, domain, 1, self._newcomer)
                    self._is_declined = step is Progress.DECLINED
                if self._is_declined:
                    return False
                place = self._pressure.place_for(self._put_tier, domain, length)
            if place is None:
                return False
            all_absent = False  # asked once per block: the rest of one that was let in comes in too
            residency.arrive(fragment, self._put_tier, place)
            # New bytes, new checksum: that of lost ones may still be there.
            catalog.set_checksum(fragment, b"")
            self._taken.append((block, fragment))
            core.writers[row] = self.reservation_id
        return True

    def _find_parent(self) -> int | None:
        """Return the row of the block before the first one (NO_ROW at the start of a chain), or None
        when it is not stored and not being written."""
        parent_hash = self.request.parent_hash
        if not parent_hash:
            return NO_ROW
        row = self.namespace.rows.get(parent_hash, NO_ROW)
        if row == NO_ROW:
            return None
        catalog = self._core.catalog
        is_coming = catalog.num_placed[self._put_tier][row] == self.namespace.num_groups
        if catalog.tier_of(row) is None and not is_coming:
            return None
        self._keep(row)
        return row

    def _decided(self) -> None:
        self._answer_reserves()
        self._copy_taken()
        self._finish_if_landed()

    def _answer_reserves(self) -> None:
        self.is_decided = True
        num_needed = self.outcomes.count(PutOutcome.NEEDED)
        reservation_id = self.told_id if num_needed else 0
        for call in self.reserve_calls:
            self._core.outbox.emit(Reply(call, ReserveResult(reservation_id, bytes(self.outcomes))))
        self.reserve_calls = []

    # -------------------------------------------------------------------------------------- bytes

    def commit(self, call: int, spans: Sequence[tuple[int, int]]) -> None:
        """The bytes are in the staging extent: one span per block, empty ones for blocks not needed."""
        self.commit_calls.append(call)
        if self._spans is None:
            self._spans = spans
            self.deadline_at = float("inf")
            self._copy_taken()
            self._finish_if_landed()

    @property
    def is_committed(self) -> bool:
        """Whether the bytes were announced."""
        return self._spans is not None

    def _copy_taken(self) -> None:
        """Start copying what has both a slot and bytes."""
        if self._spans is None:
            return
        fresh, self._fresh = self._fresh, []
        for run in fresh:
            spans = self._spans[run.first_block : run.first_block + len(run.rows)]
            self._num_copying += len(run.fragments)
            self._copies.start_run(run, spans, Urgency.PREFILL, self.client.id, self)
        if self._taken:
            self._copy_single(self._spans)

    def _copy_single(self, spans: Sequence[tuple[int, int]]) -> None:
        catalog, offsets = self._core.catalog, self.namespace.group_offsets
        block_of, first_fragment, place = (
            catalog.block_of,
            catalog.first_fragment,
            catalog.place[self._put_tier],
        )
        moves = [
            Move(
                fragment,
                spans[block][0] + offsets[fragment - first_fragment[block_of[fragment]]],
                place[fragment],
            )
            for block, fragment in self._taken
        ]
        self._num_copying += len(moves)
        self._taken = []
        self._copies.start(None, self._put_tier, moves, Urgency.PREFILL, client=self.client.id, owner=self)

    def landed(self, fragments: Sequence[int], cause: Cause | None) -> None:
        """Count the copies that ended; note the blocks of those that failed. Answers after the last one."""
        self._num_copying -= len(fragments)
        for fragment in fragments if cause is not None else ():
            row = self._core.catalog.block_of[fragment]
            # A block that waits for room for its other fragments is not among the decided ones yet; one for
            # which there was none has its outcome already.
            # A client that names a block twice hears of both.
            blocks = [block for block, decided in enumerate(self.rows) if decided == row] or [self._next]
            for block in blocks:
                if block < len(self.outcomes):
                    self.outcomes[block] = PutOutcome.FAILED
        if not self._num_copying:
            self._finish_if_landed()

    # ---------------------------------------------------------------------------------------- end

    def abort(self) -> None:
        """Give back what has no bytes on their way; what is being copied lands as if nothing was said."""
        fresh, self._fresh = self._fresh, []
        for run in fresh:
            self._fail(run.fragments)
        taken, self._taken = self._taken, []
        self._fail([fragment for _, fragment in taken])
        for block in range(len(self.outcomes)):
            if self.outcomes[block] in (0, PutOutcome.NEEDED):
                self.outcomes[block] = PutOutcome.FAILED
        self._next = len(self.outcomes)
        self._answer_reserves()
        self._spans = self._spans or ()
        self._finish_if_landed()

    def _give_back(self, block: int) -> None:
        mine = [fragment for number, fragment in self._taken if number == block]
        self._taken = [pair for pair in self._taken if pair[0] != block]
        self._fail(mine)

    def _fail(self, fragments: Sequence[int]) -> None:
        for fragment in fragments:
            self._copies.tell_listeners(fragment, self._put_tier, Cause.CANCELLED)
            self._residency.fail(fragment, self._put_tier, Cause.CANCELLED)

    def _finish_if_landed(self) -> None:
        if self.is_done or not self.is_decided or self._num_copying:
            return
        if self._spans is None and self.outcomes.count(PutOutcome.NEEDED):
            return
        self.is_done = True
        self.outcomes = self.outcomes.replace(NEEDED, STORED)
        for call in self.commit_calls:
            self._core.outbox.emit(Reply(call, PutResult(bytes(self.outcomes))))
        self._on_done(self)

    def let_go(self) -> None:
        """Give back what the job kept. Once, when it is done and sessions and policies were told."""
        writers, mine = self._core.writers, self.reservation_id
        for row in self._kept if writers else ():
            if writers.get(row) == mine:
                del writers[row]
        if len(self._kept) >= MIN_RUN:
            unkeep_run(self._residency, self._kept)
        else:
            for row in reversed(self._kept):
                self._residency.unkeep(row)

    def _keep(self, row: int) -> None:
        self._core.transitions.keep(row)
        self._kept.append(row)
