"""The parts that several policies stand on: candidates and ghosts; and prices that fall."""

import math
from random import Random

import pytest

from kvtier.policies.base import Newcomer, Use, Victim
from kvtier.policies.baselines.clairvoyant import ClairvoyantAdmission, ClairvoyantEviction
from kvtier.policies.baselines.ghosts import Ghosts
from kvtier.policies.candidates import SLACK, Candidates
from kvtier.tiers.block import Urgency
from tests.policies.tree import NO_ROW, Facts, name, surroundings_of


@pytest.mark.parametrize(("share_in_order", "share_popped"), [(0.0, 0.05), (0.7, 0.05), (1.0, 0.001)])
def test_candidates_agree_with_a_sorted_dict_while_they_are_tidied(
    share_in_order: float, share_popped: float
) -> None:
    rng = Random(3)
    candidates, model = Candidates(), dict[int, float]()
    most_entries = 0
    for number in range(30_000):
        row, step = rng.randrange(300), rng.random()
        if step < 0.85:
            model[row] = number if rng.random() < share_in_order else rng.random() * number
            candidates.add(row, model[row])
        elif step < 1 - share_popped:
            model.pop(row, None)
            candidates.discard(row)
        elif model:
            lowest = min((price, row) for row, price in model.items())
            assert candidates.lowest() == lowest
            assert candidates.pop() == lowest
            del model[lowest[1]]
        assert len(candidates) == len(model)
        assert (row in candidates) == (row in model)
        assert candidates.price_of(row) == model.get(row)
        most_entries = max(most_entries, candidates.num_entries)
    assert SLACK < most_entries < 4 * (300 + SLACK), "tidied, and more than once"
    assert [candidates.pop() for _ in model] == sorted((price, row) for row, price in model.items())
    assert candidates.pop() is None


def test_first_candidates_that_stay_keep_no_dead_ones_behind_them() -> None:
    candidates, model = Candidates(), {row: row / 100 for row in range(50)}
    for row, price in model.items():
        candidates.add(row, price)
    for number in range(1, 9_000):
        row = 50 + number * 7 % 400
        model[row] = float(number)
        candidates.add(row, model[row])
        assert candidates.lowest() == (0.0, 0)
        assert candidates.num_entries < 4 * (450 + SLACK)
    assert [candidates.pop() for _ in model] == sorted((price, row) for row, price in model.items())


def test_ghosts_forget_the_oldest_first() -> None:
    ghosts = Ghosts()
    for number in range(10):
        ghosts.add(name(number), 4)
    assert len(ghosts) == 4
    assert [ghosts.take(name(number)) for number in range(10)] == [False] * 6 + [True] * 4
    assert len(ghosts) == 0
    assert not ghosts.take(name(9)), "taken once"


def test_a_ghost_that_is_added_again_is_young_again() -> None:
    ghosts = Ghosts()
    for number in (1, 2, 3, 1, 4):
        ghosts.add(name(number), 3)
    assert [ghosts.take(name(number)) for number in (1, 2, 3, 4)] == [True, False, True, True]


def test_ghosts_follow_a_limit_that_falls() -> None:
    ghosts = Ghosts()
    for number in range(100):
        ghosts.add(name(number), 100)
    for number in range(100, 140):
        ghosts.add(name(number), 10)
    assert len(ghosts) == 10
    ghosts.add(name("last"), -5)
    assert len(ghosts) <= 10


def test_ghosts_that_come_back_leave_no_heap_of_dead_ones() -> None:
    ghosts = Ghosts()
    ghosts.add(name("stays"), 50)
    for number in range(1000):
        ghosts.add(name(number), 50)
        assert ghosts.take(name(number))
    assert len(ghosts._names._order) < 250


class Twice:
    """A future in which `again` is needed at 10 and at 100, `once` at 50, and nothing else ever."""

    def __init__(self) -> None:
        self._times = {name("again"): (10.0, 100.0), name("once"): (50.0,)}

    def next_use(self, prefix_hash: bytes, now: float) -> float:
        """Return the next of them."""
        return next((at for at in self._times.get(prefix_hash, ()) if at > now), math.inf)


def test_clairvoyance_looks_again_after_a_use() -> None:
    """A price that falls must not wait for somebody to offer the block again: one-sided gets do not."""
    facts = Facts()
    again, once = facts.add(name("again"), NO_ROW, 0.0), facts.add(name("once"), NO_ROW, 0.0)
    policy = ClairvoyantEviction(surroundings_of(facts, future=Twice()))
    policy.offer([again, once], 1.0)
    policy.used([again], Use(10.0, 0, 1, Urgency.QUEUED))
    victim = policy.choose(11.0)
    assert victim is not None
    assert (victim.row, victim.price, victim.runner_up) == (again, -100.0, -50.0)


def test_nobody_leaves_for_a_block_that_is_needed_no_sooner() -> None:
    admission = ClairvoyantAdmission(surroundings_of(Facts(), future=Twice()))

    def admits(letter: str, price: float) -> bool:
        newcomer = Newcomer(20.0, NO_ROW, 0, 1, 0, Urgency.QUEUED, (name(letter),))
        return admission.admits(newcomer, Victim(0, price))

    assert admits("once", -50.5)
    assert not admits("once", -50.0)
    assert not admits("again", -50.0)
    never = ClairvoyantEviction(surroundings_of(_one_block(), future=Twice())).price(0, 20.0)
    assert not admits("never", never)


def _one_block() -> Facts:
    facts = Facts()
    facts.add(name("never"), NO_ROW, 0.0)
    return facts
