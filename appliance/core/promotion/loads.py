"""Loads: bringing fragments up to a faster tier. Shared by acquire, prefetch and pin.

One fragment has one place per tier, so a fragment that is on its way already is never loaded twice: a second
request for it listens. Batches are cut by layer group, because prefill consumes layer 0 first: the mover
orders them by urgency, deadline and group."""

from collections import defaultdict

from ....tiers.base import Cause
from ....tiers.block import Tier, Urgency
from ..capacity.pressure import Pressure
from ..capacity.promotion_rules import PromotionRules
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..catalog.states import State
from ..copying.copies import Copies, Listener, Move, Owner

#: Fragments in one batch: small enough that the first ones are not reported with the last ones.
MAX_BATCH = 32


class Loads:
    """Collects moves and starts them in batches when told to."""

    def __init__(self, core: CoreState, residency: Residency, copies: Copies, pressure: Pressure) -> None:
        self._core = core
        self._put_tier, self._log_tier = core.ladder.put_tier, core.ladder.log_tier
        self.residency = residency
        self._copies = copies
        self._pressure = pressure
        self.rules = PromotionRules(core, residency, pressure.victims)
        self._collected: defaultdict[tuple[Tier, Tier, int], list[Move]] = defaultdict(list)
        #: Fragments that are on their way into a tier, and waited for now.
        self._joined: defaultdict[Tier, set[int]] = defaultdict(set)

    def source_of(self, fragment: int, target: Tier) -> Tier | None:
        """Return the fastest working tier other than `target` that holds this fragment."""
        catalog = self._core.catalog
        for tier in self._core.ladder.tiers:
            if (
                tier != target
                and tier not in self._core.offline
                and catalog.state[tier][fragment] == State.RESIDENT
            ):
                return tier
        return None

    def bring(self, fragment: int, target: Tier, listener: Listener | None) -> bool:
        """Collect the load of one fragment, or join the one under way.

        Returns False when there is no room yet, or the one under way is being cancelled: try again when a
        copy has ended. The fragment must not be RESIDENT in `target` and must be somewhere else, or arriving.
        """
        core = self._core
        residency = self.residency
        catalog = core.catalog
        if catalog.state[target][fragment] == State.ABSENT:
            source = self.source_of(fragment, target)
            if source is None:  # it is arriving elsewhere, out of a tier that has gone offline
                return False
            # The hold keeps the source while room is made, for this load and the others collected with
            # it: making room could evict it. It lasts until `start` has queued the copy.
            core.transitions.hold(fragment, source)
            domain = catalog.namespace_of(catalog.block_of[fragment]).domain
            place = self._pressure.place_for(target, domain, catalog.length_of(fragment))
            if place is not None:
                residency.arrive(fragment, target, place)
                group = fragment - catalog.first_fragment[catalog.block_of[fragment]]
                move = Move(fragment, catalog.place[source][fragment], place)
                self._collected[source, target, group].append(move)
            else:
                residency.drop(fragment, source)
                return False
        elif self._copies.is_cancelled(fragment, target):
            return False
        elif listener is not None:
            self._joined[target].add(fragment)
        if listener is not None:
            self._copies.listen(fragment, target, listener)
        return True

    def start(self, urgency: Urgency, deadline_at: float, owner: Owner | None = None) -> int:
        """Start what was collected, earliest layers first, and hasten what was joined.
        Returns the number of fragments started; `owner` hears about each of them."""
        if self._joined:
            for target, fragments in self._joined.items():
                self._copies.hasten(fragments, target, urgency, deadline_at)
            self._joined.clear()
        collected, self._collected = self._collected, defaultdict(list)
        for (source, target, _), moves in sorted(collected.items(), key=lambda entry: entry[0][2]):
            for first in range(0, len(moves), MAX_BATCH):
                batch = moves[first : first + MAX_BATCH]
                self._copies.start(source, target, batch, urgency, deadline_at, owner=owner)
                for move in batch:
                    self.residency.drop(move.fragment, source)
        return sum(len(moves) for moves in collected.values())

    def promote(self, row: int, target: Tier, urgency: Urgency, deadline_at: float) -> bool:
        """Bring a whole block to `target` for no request; False when nothing was queued.

        From below the put tier to above it it goes through that, one edge after the other, unless it may go
        straight.
        """
        if target in self._core.offline:
            return False
        catalog = self._core.catalog
        queued = False
        for fragment in catalog.fragments(row):
            if catalog.state[target][fragment] != State.ABSENT:
                continue
            source = self.source_of(fragment, target)
            if source is None or (source < target and target == self._log_tier):
                continue
            has_stop = target < self._put_tier < source and not self.rules.comes_straight(fragment)
            first_stop = self._put_tier if has_stop else target
            onward = None if first_stop == target else self._onward(target, urgency, deadline_at)
            queued |= self.bring(fragment, first_stop, onward)
        return queued

    def _onward(self, target: Tier, urgency: Urgency, deadline_at: float) -> Listener:
        def continue_up(fragment: int, cause: Cause | None) -> None:
            state = self._core.catalog.state[target][fragment]
            if cause is None and state == State.ABSENT:
                self.bring(fragment, target, None)
                self.start(urgency, deadline_at)

        return continue_up
