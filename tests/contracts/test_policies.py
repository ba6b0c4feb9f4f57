"""What every eviction and admission policy promises, by name: whatever is registered is tested here.

`Tree` drives them as the planner does and checks every answer; what is added here are the workloads: seeded
random ones for each policy, and a state machine that looks for short sequences that break one.
"""

import math
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.policies.base import EvictionPolicy, Newcomer, Surroundings, Use, Victim
from kvtier.policies.baselines.clairvoyant import ReplayOnly
from kvtier.policies.options import BadPolicyOption
from kvtier.policies.registry import ADMISSION, EVICTION, resolve
from kvtier.tiers.block import Tier, Urgency
from tests.policies.own import LONGEST_FIRST
from tests.policies.tree import NO_ROW, Facts, Tree, name, surroundings_of

#: All of ours, and one of an administrator's own.
EVERY_EVICTION = {**EVICTION, LONGEST_FIRST: resolve(EVICTION, LONGEST_FIRST, ("tests",))}
each_eviction = pytest.mark.parametrize("policy_name", sorted(EVERY_EVICTION))
each_admission = pytest.mark.parametrize("policy_name", sorted(ADMISSION))


class Schedule:
    """A future: every block is asked for again and again, each in a rhythm that follows from its name."""

    def next_use(self, prefix_hash: bytes, now: float) -> float:
        """Return the next beat after `now`; one block in four has none."""
        period = prefix_hash[0]
        return math.inf if period % 4 == 0 else (now // period + 1) * period


def plant(policy_name: str, capacity_blocks: int, **more: Any) -> Tree:
    """Return a tree under this policy."""
    return Tree(EVERY_EVICTION[policy_name], capacity_blocks, future=Schedule(), **more)


def build(policy_name: str) -> tuple[EvictionPolicy, Facts]:
    """Return a policy by itself, and its facts: twenty blocks without parents, stored one after the other."""
    facts = Facts()
    policy: EvictionPolicy = EVERY_EVICTION[policy_name](surroundings_of(facts, future=Schedule()))
    for number in range(20):
        now = float(number)
        row = facts.add(name(number), NO_ROW, now)
        policy.stored([row], Use(now, 0, 1, Urgency.QUEUED))
    return policy, facts


def drain(policy: EvictionPolicy, now: float) -> list[int]:
    """Choose until nobody is left."""
    chosen: list[int] = []
    while (victim := policy.choose(now)) is not None:
        chosen.append(victim.row)
    return chosen


def workload(seed: int, num_requests: int, num_topics: int = 12) -> Iterator[tuple[list[bytes], int, int]]:
    """Yield (chain, session, urgency): topics that share a beginning, branch, grow and are left alone."""
    rng = Random(seed)
    turns = [0] * num_topics
    for number in range(num_requests):
        if rng.random() < 0.4:  # never seen again
            yield [name(seed, "once", number, i) for i in range(rng.randint(1, 6))], 0, Urgency.PREFILL
            continue
        topic = min(int(rng.expovariate(0.3)), num_topics - 1)
        turns[topic] = turns[topic] + 1 if rng.random() < 0.9 else 0
        chain = [name(seed, "system", i) for i in range(2)]
        chain += [name(seed, "topic", topic, i) for i in range(1 + turns[topic] % 20)]
        if rng.random() < 0.2:
            chain += [name(seed, "branch", number, i) for i in range(rng.randint(1, 3))]
        yield chain, topic + 1, rng.choice(list(Urgency))


# ------------------------------------------------------------------------------------------- by itself


@each_eviction
def test_an_empty_one_has_no_victim(policy_name: str) -> None:
    policy: EvictionPolicy = EVERY_EVICTION[policy_name](surroundings_of(Facts(), future=Schedule()))
    assert policy.choose(0.0) is None
    assert len(policy) == 0


@each_eviction
def test_what_was_offered_comes_out_once_and_nothing_else(policy_name: str) -> None:
    policy, _ = build(policy_name)
    offered = [3, 1, 4, 15, 9, 2, 6]
    policy.offer(offered[:4], 30.0)
    policy.offer(offered[4:], 31.0)
    assert len(policy) == len(offered)
    assert sorted(drain(policy, 32.0)) == sorted(offered)
    assert len(policy) == 0
    assert policy.choose(33.0) is None


@each_eviction
def test_offering_again_changes_nothing_but_the_price(policy_name: str) -> None:
    policy, facts = build(policy_name)
    for now in range(30, 40):
        facts.last_used[1] = float(now)
        policy.offer([1, 2, 3], float(now))
        assert len(policy) == 3
    assert sorted(drain(policy, 50.0)) == [1, 2, 3]


@each_eviction
def test_who_was_chosen_may_be_offered_again(policy_name: str) -> None:
    policy, _ = build(policy_name)
    policy.offer([5], 30.0)
    for now in (31.0, 32.0, 33.0):
        victim = policy.choose(now)
        assert victim is not None
        assert victim.row == 5
        assert math.isfinite(victim.price)
        assert math.isnan(victim.runner_up), "there was nobody else"
        assert victim.runner_up_row == -1
        policy.offer([5], now)
    assert len(policy) == 1


@each_eviction
def test_who_left_is_no_victim_and_its_row_is_free_for_another(policy_name: str) -> None:
    policy, facts = build(policy_name)
    policy.offer([0, 1, 2], 30.0)
    policy.left([1])
    policy.forgotten([1])
    assert len(policy) == 2
    facts.remove(1)
    assert facts.add(name("another"), NO_ROW, 31.0) == 1
    policy.stored([1], Use(31.0, 0, 1, Urgency.QUEUED))
    assert sorted(drain(policy, 32.0)) == [0, 2], "the new block was not offered"
    policy.offer([1], 33.0)
    assert drain(policy, 34.0) == [1]


@each_eviction
def test_rows_nobody_spoke_of_do_no_harm(policy_name: str) -> None:
    """A tier's policy hears of blocks that were never in its tier."""
    policy, facts = build(policy_name)
    row = 5000
    while len(facts.prefix_hash) <= row:
        facts.add(name("filler", len(facts.prefix_hash)), NO_ROW, 0.0)
    policy.used([row], Use(30.0, 0, 1, Urgency.QUEUED))
    assert math.isfinite(policy.price(row, 30.0))
    policy.left([row])
    policy.forgotten([row])
    policy.offer([row - 1], 31.0)
    assert drain(policy, 32.0) == [row - 1]


@each_eviction
def test_an_option_it_does_not_have_is_an_error_that_says_so(policy_name: str) -> None:
    surroundings = surroundings_of(Facts(), options={"no_such_option": 1}, future=Schedule())
    with pytest.raises(BadPolicyOption, match="option"):
        EVERY_EVICTION[policy_name](surroundings)


# --------------------------------------------------------------------------------------------- in a tree


@each_eviction
@pytest.mark.parametrize("shape", ["nothing below", "a tier below", "hbm"])
def test_random_requests(policy_name: str, shape: str) -> None:
    seed = 7
    tier = Tier.HBM if shape == "hbm" else Tier.DRAM
    tree = plant(policy_name, 60, keeps_below=shape != "nothing below", tier=tier)
    rng = Random(seed)
    for chain, session, urgency in workload(seed, 400):
        tree.request(chain, session, urgency)
        if rng.random() < 0.1:
            tree.change_session(session, Urgency.ENDED)
            tree.offer(sorted(tree.here))
        if rng.random() < 0.05:
            leaves = [row for row in sorted(tree.here) if tree.may_leave(row)]
            tree.drop(rng.choice(leaves))
        for row in range(len(tree.facts.prefix_hash)):
            if rng.random() < 0.01 and is_below_only(tree, row):
                tree.forget_below(row)
    assert len(tree.evicted) > 400
    while tree.evict_one():
        pass
    assert tree.here == set(), "every block leaves in the end"
    assert len(tree.policy) == 0


def is_below_only(tree: Tree, row: int) -> bool:
    """Whether the slower tier may forget a block."""
    is_known = tree.facts.prefix_hash[row] != b""
    return is_known and row not in tree.here and tree.facts.first_child[row] == NO_ROW


@each_eviction
def test_the_same_requests_have_the_same_victims(policy_name: str) -> None:
    evicted = []
    for _ in range(2):
        tree = plant(policy_name, 50)
        for chain, session, urgency in workload(11, 200):
            tree.request(chain, session, urgency)
        evicted.append(tree.evicted)
    assert evicted[0] == evicted[1]
    assert len(evicted[0]) > 200


@each_eviction
def test_memory_follows_what_is_in_the_tier_not_what_was(policy_name: str) -> None:
    tree = plant(policy_name, 100)
    sizes = []
    for number, (chain, session, urgency) in enumerate(workload(13, 4000)):
        tree.request(chain, session, urgency)
        tree.offer(sorted(tree.here)[:10])
        if number in (1499, 3999):
            sizes.append(deep_bytes(tree.policy, {id(tree.facts)}))
    assert sizes[1] < 1.5 * sizes[0] + 50_000


@each_eviction
def test_memory_is_bounded_where_nobody_chooses(policy_name: str) -> None:
    """A tier that is never full: blocks come, are used, offered, and leave for other reasons."""
    policy, facts = build(policy_name)
    sizes = []
    for number in range(25_000):
        row = number % 20
        now = 30.0 + number
        if number % 7 == 0:
            policy.left([row])
            policy.forgotten([row])
            facts.prefix_hash[row] = name("new", number)
            policy.stored([row], Use(now, 0, 1, Urgency.QUEUED))
        facts.last_used[row] = now
        facts.urgency[row] = number % 6
        policy.offer([row, (row + 5) % 20, (row + 10) % 20, (row + 15) % 20], now)
        if number in (2_499, 24_999):
            sizes.append(deep_bytes(policy, {id(facts)}))
    assert sizes[1] < 1.5 * sizes[0] + 50_000
    assert len(drain(policy, 1e6)) == 20


def deep_bytes(root: object, seen: set[int]) -> int:
    """Return the bytes of everything that hangs on an object."""
    total, todo = 0, [root]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type) or callable(each):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        if isinstance(each, dict):
            todo += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            todo += each
        elif not isinstance(each, bytes | bytearray | str | int | float | array):
            todo += getattr(each, "__dict__", {}).values()
            todo += [getattr(each, slot, None) for slot in getattr(each, "__slots__", ())]
    return total


def run_all(tree: Tree, seed: int) -> None:
    """Let a short workload go through the tree."""
    for chain, session, urgency in workload(seed, 100):
        tree.request(chain, session, urgency)


# ----------------------------------------------------------------------------------------- state machine


class PolicyMachine(RuleBasedStateMachine):
    """Any short sequence of what can happen to a tier. Chains are paths in a tree of three names per step."""

    tree: Tree

    @initialize(
        policy_name=st.sampled_from(sorted(EVERY_EVICTION)),
        capacity=st.integers(3, 12),
        keeps_below=st.booleans(),
        tier=st.sampled_from([Tier.HBM, Tier.DRAM]),
    )
    def begin(self, policy_name: str, capacity: int, keeps_below: bool, tier: Tier) -> None:
        self.tree = plant(policy_name, capacity, keeps_below=keeps_below, tier=tier)

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=6), urgency=st.sampled_from(list(Urgency)))
    def request(self, path: list[int], urgency: Urgency) -> None:
        chain = [name(*path[:end]) for end in range(1, len(path) + 1)]
        before = len(self.tree.here)
        num_here = self.tree.request(chain, 1 + path[0], urgency)
        assert num_here <= min(before, len(chain))

    @rule(urgency=st.sampled_from(list(Urgency)), session=st.integers(0, 4))
    def change_session(self, urgency: Urgency, session: int) -> None:
        self.tree.change_session(session, urgency)

    @rule()
    def evict(self) -> None:
        num_before = len(self.tree.here)
        assert self.tree.evict_one() == (num_before > 0)
        assert len(self.tree.here) < max(num_before, 1)

    @rule()
    def offer_everyone_again(self) -> None:
        self.tree.offer(sorted(self.tree.here))

    @precondition(lambda self: self.tree.here)
    @rule(number=st.integers(0, 100))
    def drop(self, number: int) -> None:
        leaves = [row for row in sorted(self.tree.here) if self.tree.may_leave(row)]
        self.tree.drop(leaves[number % len(leaves)])

    @rule(number=st.integers(0, 100))
    def forget_below(self, number: int) -> None:
        rows = [row for row in range(len(self.tree.facts.prefix_hash)) if is_below_only(self.tree, row)]
        if rows:
            self.tree.forget_below(rows[number % len(rows)])

    @invariant()
    def every_price_is_a_number(self) -> None:
        for row in self.tree.here:
            assert math.isfinite(self.tree.policy.price(row, self.tree.now))


PolicyMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True
)
test_no_sequence_breaks_one = PolicyMachine.TestCase


# --------------------------------------------------------------------------------------------- admission


@each_admission
def test_an_admission_answers_for_new_blocks_and_for_spilled_ones(policy_name: str) -> None:
    facts = Facts()
    row = facts.add(name("stored"), NO_ROW, 0.0)
    admission = ADMISSION[policy_name](surroundings_of(facts, future=Schedule()))
    new = Newcomer(1.0, NO_ROW, 0, 2, 0, Urgency.QUEUED, prefix_hashes=[name(1), name(2)])
    spilled = Newcomer(1.0, NO_ROW, 0, 1, 0, Urgency.IDLE, (name("stored"),), row)
    for newcomer in (new, spilled):
        assert admission.admits(newcomer, None) in (True, False)
        assert admission.admits(newcomer, Victim(row, 0.5)) in (True, False)


@each_admission
def test_an_admission_that_declines_leaves_the_tree_in_order(policy_name: str) -> None:
    eviction = policy_name if policy_name in EVICTION else "lru"
    tree = plant(eviction, 40, admission=ADMISSION[policy_name])
    for chain, session, urgency in workload(17, 300):
        tree.request(chain, session, urgency)
    assert len(tree.here) <= 40


@pytest.mark.parametrize("known", [EVICTION, ADMISSION])
def test_nobody_is_clairvoyant_outside_of_a_replay(known: dict[str, Callable[[Surroundings], Any]]) -> None:
    with pytest.raises(ReplayOnly, match="replay"):
        known["clairvoyant"](surroundings_of(Facts()))


def test_this_suite_sees_a_policy_that_cheats() -> None:
    """The tree is what finds violations here, so it must find them."""

    class Doubled(type(build("lru")[0])):  # type: ignore[misc]
        def choose(self, now: float) -> Victim | None:
            victim: Victim | None = super().choose(now)
            if victim is not None:
                super().offer([victim.row], now)
            return victim

    class Forgetful(type(build("lru")[0])):  # type: ignore[misc]
        def offer(self, rows: Sequence[int], now: float) -> None:
            super().offer(rows[1:], now)

    for cheat in (Doubled, Forgetful):
        tree = Tree(cheat, 20)
        with pytest.raises(AssertionError):
            run_all(tree, 19)
