"""A small prefix tree that drives policies the way the planner does, and watches them while it does.

One tier of equal blocks, by count, over a slower one that keeps everything it is given (or nothing). Rules:
only leaves that nobody touches leave; parents leave with a victim when their price is no higher; rows are
used again for other blocks as soon as they are forgotten. Whatever a policy does against its contract is an
AssertionError here, at the step where it happens.
"""

import hashlib
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtier.policies.base import (
    DEFAULT_PRIORITY,
    AdmissionPolicy,
    EvictionPolicy,
    Future,
    Newcomer,
    SessionChange,
    Surroundings,
    Use,
    Victim,
)
from kvtier.policies.costs import CostModel
from kvtier.policies.urgency.forecast import Forecast
from kvtier.policies.urgency.policy import UrgencyEviction
from kvtier.tiers.block import Geometry, Tier, Urgency

NO_ROW = -1
GEOMETRY = Geometry(num_layers=2, num_kv_heads=1, head_dim=64, block_tokens=16, dtype="float16")


def name(*path: object) -> bytes:
    """Return a prefix hash for tests."""
    return hashlib.sha256(repr(path).encode()).digest()


def chain_of(*path: object, length: int) -> list[bytes]:
    """Return the names of a chain's blocks."""
    return [name(*path, number) for number in range(length)]


class Facts:
    """Columns of blocks that grow row by row."""

    def __init__(self) -> None:
        self.prefix_hash: list[bytes] = []
        self.namespace_id = array("H")
        self.parent = array("i")
        self.first_child = array("i")
        self.next_sibling = array("i")
        self.position = array("i")
        self.last_used = array("d")
        self.num_uses = array("I")
        self.urgency = array("B")
        self._free: list[int] = []

    def block_bytes(self, row: int) -> int:
        """Return the raw bytes of the block, all layers."""
        return GEOMETRY.block_bytes

    def block_tokens(self, row: int) -> int:
        """Return the tokens in the block."""
        return GEOMETRY.block_tokens

    def tier_of(self, row: int) -> Tier | None:
        """Return where the block is: policies under test do not ask."""
        return Tier.DRAM

    @property
    def has_retention(self) -> bool:
        """Nobody gave priorities."""
        return False

    def retention(self, row: int, now: float) -> int:
        """Return the priority of a block."""
        return DEFAULT_PRIORITY

    def add(self, prefix_hash: bytes, parent: int, now: float) -> int:
        """Take a row, of a forgotten block if there is one, and link it."""
        if self._free:
            row = self._free.pop()
        else:
            row = len(self.prefix_hash)
            self.prefix_hash.append(b"")
            for column in (self.namespace_id, self.parent, self.first_child, self.next_sibling):
                column.append(0)
            for column in (self.position, self.num_uses, self.urgency):
                column.append(0)
            self.last_used.append(0.0)
        self.prefix_hash[row] = prefix_hash
        self.namespace_id[row] = 1
        self.parent[row] = parent
        self.first_child[row] = NO_ROW
        self.next_sibling[row] = self.first_child[parent] if parent != NO_ROW else NO_ROW
        if parent != NO_ROW:
            self.first_child[parent] = row
        self.position[row] = self.position[parent] + 1 if parent != NO_ROW else 0
        self.last_used[row] = now
        self.num_uses[row] = 0
        self.urgency[row] = Urgency.QUEUED
        return row

    def remove(self, row: int) -> None:
        """Give a row back."""
        parent = self.parent[row]
        if parent != NO_ROW:
            if self.first_child[parent] == row:
                self.first_child[parent] = self.next_sibling[row]
            else:
                before = self.first_child[parent]
                while self.next_sibling[before] != row:
                    before = self.next_sibling[before]
                self.next_sibling[before] = self.next_sibling[row]
        self.prefix_hash[row] = b""
        self.parent[row] = NO_ROW
        self._free.append(row)


def surroundings_of(
    facts: Facts,
    tier: Tier = Tier.DRAM,
    options: Mapping[str, Any] | None = None,
    future: Future | None = None,
    shared: dict[str, Any] | None = None,
    capacity_blocks: int = 1000,
) -> Surroundings:
    """Return what a policy is built with."""
    costs = CostModel(3e9, 1e-4)
    costs.add_namespace(1, GEOMETRY)
    shared = {} if shared is None else shared
    capacity_bytes = capacity_blocks * GEOMETRY.block_bytes
    return Surroundings(facts, costs, tier, capacity_bytes, dict(options or {}), shared, future)


class Tree:
    """The tier, the tree, and the policy under watch."""

    def __init__(
        self,
        make: Callable[[Surroundings], EvictionPolicy],
        capacity_blocks: int,
        *,
        admission: Callable[[Surroundings], AdmissionPolicy] | None = None,
        keeps_below: bool = False,
        tier: Tier = Tier.DRAM,
        options: Mapping[str, Any] | None = None,
        future: Future | None = None,
    ) -> None:
        self.facts = Facts()
        shared: dict[str, Any] = {}
        surroundings = surroundings_of(self.facts, tier, options, future, shared, capacity_blocks)
        self.policy = make(surroundings)
        self.admission = admission(surroundings) if admission else None
        self.observers = [each for each in shared.values() if hasattr(each, "used")] + [self.policy]
        self.capacity_blocks = capacity_blocks
        self.keeps_below = keeps_below
        self.rows: dict[bytes, int] = {}
        self.here: set[int] = set()
        self.held: set[int] = set()
        self.offered: set[int] = set()
        self.num_children_here: dict[int, int] = {}
        self.evicted: list[bytes] = []  # in order
        self.now = 0.0
        self._gone: list[int] = []  # left, and the policy does not know yet

    # ------------------------------------------------------------------------------------- requests

    def request(self, chain: Sequence[bytes], session: int = 0, urgency: int = Urgency.QUEUED) -> int:
        """Use the stored prefix of a chain, bring up or put the rest. Returns the blocks that were here."""
        self.now += 1.0
        use = Use(self.now, session, len(chain), urgency)
        known: list[int] = []
        for prefix_hash in chain:
            if prefix_hash not in self.rows:
                break
            known.append(self.rows[prefix_hash])
        num_here = next((i for i, row in enumerate(known) if row not in self.here), len(known))
        for row in known:
            self.facts.last_used[row] = self.now
            self.facts.num_uses[row] += 1
            self.facts.urgency[row] = urgency
        if known:
            for observer in self.observers:
                observer.used(known, use)
        self.held.update(known)
        for row in known[num_here:]:
            if not self._make_room(1, None):
                break
            self._enter(row)
        else:
            known += self._put(chain, known, use)
        self.held.clear()
        self.offer([row for row in known if row in self.here])
        return num_here

    def offer(self, rows: Sequence[int]) -> None:
        """Offer those that may leave."""
        ready = [row for row in rows if self.may_leave(row)]
        if ready:
            self.policy.offer(ready, self.now)
            self.offered.update(ready)
        self.check()

    def evict_one(self) -> bool:
        """Give up one victim and the parents that are worth no more; False when nobody may leave."""
        while (victim := self.choose()) is not None:
            if self.may_leave(victim.row):
                self._leave_with_parents(victim, len(self.here))
                self._tell_who_left()
                return True
        return False

    def choose(self) -> Victim | None:
        """Ask the policy, and check the answer."""
        victim = self.policy.choose(self.now)
        if victim is None:
            assert not self.offered, f"no victim, though {sorted(self.offered)} were offered"
            return None
        assert victim.row in self.offered, f"{victim.row} was not offered, or was chosen twice"
        self.offered.discard(victim.row)
        assert math.isfinite(victim.price)
        assert not math.isinf(victim.runner_up)
        assert math.isnan(victim.runner_up) == (victim.runner_up_row < 0)
        assert victim.runner_up_row < 0 or victim.runner_up_row in self.offered, (
            "no candidate is the next one"
        )
        self.check()
        return victim

    def drop(self, row: int) -> None:
        """A leaf leaves for a reason of its own: its record went bad, an administrator dropped it."""
        assert self.may_leave(row)
        self._leave([row])
        self._tell_who_left()

    def forget_below(self, row: int) -> None:
        """The slower tier gives up a block that is nowhere else and has no children."""
        assert row not in self.here
        assert self.facts.first_child[row] == NO_ROW
        self._forget([row])

    def change_session(self, session: int, urgency: int) -> None:
        """A session says something."""
        for observer in self.observers:
            observer.session_changed(SessionChange(self.now, session, urgency))

    # ---------------------------------------------------------------------------------------- rules

    def may_leave(self, row: int) -> bool:
        """Whether a block is a leaf of the tier that nobody touches."""
        return row in self.here and row not in self.held and not self.num_children_here.get(row)

    def check(self) -> None:
        """Check what holds after every step."""
        if not self._gone:
            assert len(self.policy) == len(self.offered)
        assert len(self.here) <= self.capacity_blocks

    # ------------------------------------------------------------------------------------ internals

    def _put(self, chain: Sequence[bytes], known: Sequence[int], use: Use) -> list[int]:
        rows: list[int] = []
        parent = known[-1] if known else NO_ROW
        for position in range(len(known), len(chain)):
            if not self._make_room(len(chain) - position, self._newcomer(chain, position, parent, use)):
                break
            parent = self.facts.add(chain[position], parent, self.now)
            self.rows[chain[position]] = parent
            rows.append(parent)
            self.held.add(parent)
            self._enter(parent)
        if rows:
            for observer in self.observers:
                observer.stored(rows, use)
        return rows

    def _make_room(self, num_blocks: int, newcomer: Newcomer | None) -> bool:
        """Make room for `num_blocks`, if possible; False when there is none for the first of them.

        Runs leave one after the other; the policy is told about all of them at the end, as the planner does.
        """
        num_free = self.capacity_blocks - len(self.here)
        if num_free:
            return self._admits(newcomer, None)
        while num_free < num_blocks and (victim := self.choose()) is not None:
            if not self.may_leave(victim.row):
                continue
            if newcomer is not None and not self._admits(newcomer.after(num_free), victim):
                self.offer([victim.row])
                break
            num_free += self._leave_with_parents(victim, num_blocks - num_free)
        self._tell_who_left()
        return num_free > 0

    def _newcomer(self, chain: Sequence[bytes], position: int, parent: int, use: Use) -> Newcomer:
        rest = chain[position:]
        return Newcomer(use.now, parent, position, len(rest), use.session, use.urgency, prefix_hashes=rest)

    def _admits(self, newcomer: Newcomer | None, victim: Victim | None) -> bool:
        return self.admission is None or newcomer is None or self.admission.admits(newcomer, victim)

    def _enter(self, row: int) -> None:
        self.here.add(row)
        parent = self.facts.parent[row]
        if parent != NO_ROW:
            self.num_children_here[parent] = self.num_children_here.get(parent, 0) + 1

    def _leave_with_parents(self, victim: Victim, max_blocks: int) -> int:
        run = [victim.row]
        parent = self.facts.parent[victim.row]
        while parent != NO_ROW and parent not in self.held and self.num_children_here.get(parent) == 1:
            if len(run) == max_blocks:
                break
            run.append(parent)
            parent = self.facts.parent[parent]
        above, policy = run[1:], self.policy
        num_above = policy.num_no_dearer(above, victim.price, self.now)
        as_dear = victim.price + 1e-6 * abs(victim.price)  # prices made together are rounded otherwise
        at_least, at_most = (
            EvictionPolicy.num_no_dearer(policy, above, price, self.now) for price in (victim.price, as_dear)
        )
        assert at_least <= num_above <= at_most, "one by one"
        assert all(math.isfinite(policy.price(row, self.now)) for row in above)
        run = run[: 1 + num_above]
        self._leave(run)
        return len(run)

    def _leave(self, run: Sequence[int]) -> None:
        """A leaf and some of its ancestors leave, tail first."""
        for row in run:
            assert self.may_leave(row), "a parent left before its child"
            self.here.discard(row)
            self.evicted.append(self.facts.prefix_hash[row])
            parent = self.facts.parent[row]
            if parent != NO_ROW:
                self.num_children_here[parent] -= 1
        self._gone += run
        if parent != NO_ROW:
            self.offer([parent])
        self.check()

    def _tell_who_left(self) -> None:
        """The policy hears of those that left since the last time, after their parents were offered."""
        gone, self._gone = self._gone, []
        if gone:
            self.policy.left(gone)
            self.offered.difference_update(gone)
            if not self.keeps_below:
                self._forget(gone)
        self.check()

    def _forget(self, rows: Sequence[int]) -> None:
        for observer in self.observers:
            observer.forgotten(rows)  # the facts still hold, as in the planner
        for row in rows:
            del self.rows[self.facts.prefix_hash[row]]
            self.num_children_here.pop(row, None)
            self.facts.remove(row)


def plant(capacity: int) -> tuple[Tree, Forecast]:
    """Return a tree under the urgency policy, and what that learns."""
    tree = Tree(UrgencyEviction, capacity)
    return tree, next(one for one in tree.observers if isinstance(one, Forecast))
