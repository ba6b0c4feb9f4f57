"""Life tables of returns, and announcements that are kept or not."""

import json
import math
from random import Random
from typing import Any

import pytest

from kvtier.appliance.core.catalog.catalog import Catalog
from kvtier.policies.costs import CostModel
from kvtier.policies.learned import pack, unpack
from kvtier.policies.prefetch.habits import NAME, Habits
from kvtier.policies.prefetch.returns import EDGES_S, NUM_BINS, KeptPromises, ReturnTimes, bin_of
from kvtier.policies.registry import PolicyChoice, build
from kvtier.tiers.block import Tier


def learn(table: ReturnTimes, gap_s: float) -> None:
    """One conversation is silent for so long; inf: for ever."""
    last = bin_of(gap_s) if gap_s < math.inf else NUM_BINS
    for number in range(last):
        table.outlived(number)
    table.returned(last)


def test_bins_cover_every_age_once() -> None:
    assert [bin_of(edge) for edge in EDGES_S] == list(range(NUM_BINS + 1))
    assert [bin_of(edge * 0.999) for edge in EDGES_S] == list(range(-1, NUM_BINS))
    assert (bin_of(0.0), bin_of(1e9)) == (-1, NUM_BINS)


def test_the_chance_of_a_window_is_how_often_it_held_a_return() -> None:
    """Against counting: lognormal gaps, a third never comes back."""
    rng = Random(7)
    gaps = [rng.lognormvariate(math.log(100), 0.7) if rng.random() < 2 / 3 else math.inf for _ in range(4000)]
    table = ReturnTimes()
    for gap_s in gaps[:1500]:
        learn(table, gap_s)
    for number in range(8, 16):
        outlook = table.outlook(number, 0.4, 600.0)
        if outlook is None:
            continue
        reached = [gap_s for gap_s in gaps[1500:] if gap_s >= EDGES_S[number]]
        really = sum(gap_s < outlook.until_s for gap_s in reached) / len(reached)
        assert outlook.chance == pytest.approx(really, abs=0.08), number
        spent = [min(gap_s, outlook.until_s) - EDGES_S[number] for gap_s in reached]
        assert outlook.occupied_s == pytest.approx(sum(spent) / len(spent), rel=0.15), number


def test_those_who_never_return_are_not_expected() -> None:
    table = ReturnTimes()
    for _ in range(100):
        learn(table, math.inf)
    assert all(table.outlook(number, 0.5, 1e9) is None for number in range(NUM_BINS))


def test_waiting_is_better_while_returns_are_still_far_off() -> None:
    table = ReturnTimes()
    for _ in range(200):
        learn(table, 100.0)
    assert table.outlook(0, 0.7, 200.0) is None
    assert table.outlook(bin_of(40.0), 0.7, 200.0) is None
    outlook = table.outlook(bin_of(100.0), 0.7, 200.0)
    assert outlook is not None
    assert outlook.chance > 0.9


def test_a_new_class_believes_what_the_broad_one_knows() -> None:
    broad = ReturnTimes()
    for _ in range(100):
        learn(broad, 10.0)
    narrow = ReturnTimes(broad)
    number = bin_of(10.0)
    assert narrow.hazard(number) == pytest.approx(broad.hazard(number))
    for _ in range(100):
        learn(narrow, 1000.0)
    assert narrow.hazard(number) < 0.1
    assert broad.hazard(number) == pytest.approx(0.5, abs=0.05), (
        "what the narrow class saw, the broad one saw"
    )


def test_habits_change() -> None:
    table = ReturnTimes()
    for _ in range(10_000):
        learn(table, 10.0)
    for _ in range(6_000):
        learn(table, 1000.0)
    assert table.hazard(bin_of(10.0)) < 0.2


def test_announcements_are_believed_until_they_are_broken() -> None:
    promises = KeptPromises()
    assert promises.ratio_at(0.5) == 1.0
    assert 0.5 < promises.ratio_at(0.1) < 1.0 < promises.ratio_at(0.9) < 2.0
    for _ in range(200):
        promises.kept(10.0, 40.0)
    assert promises.ratio_at(0.5) == pytest.approx(4.0, rel=0.2)
    for nonsense in ((0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (1.0, 1e9), (1e9, 1.0)):
        promises.kept(*nonsense)
    assert promises.ratio_at(0.5) == pytest.approx(4.0, rel=0.2)


def learned_habits() -> Habits:
    habits = Habits()
    for gap, silence, number in ((-1, 3, 4), (5, 3, 6), (5, 4, 9), (5, 3, 6)):
        table = habits.table_of(silence, gap)
        for outlived in range(number):
            table.outlived(outlived)
        table.returned(number)
    habits.promises.kept(30.0, 60.0)
    return habits


def test_habits_outlive_a_restart() -> None:
    habits, again = learned_habits(), Habits()
    again.load(json.loads(json.dumps(habits.dump())))
    assert again.dump() == habits.dump()
    for silence, gap in ((3, -1), (3, 5), (4, 5), (4, 20)):  # the last one leans on all of its kind
        for number in range(NUM_BINS):
            assert again.table_of(silence, gap).hazard(number) == habits.table_of(silence, gap).hazard(number)
    assert again.promises.ratio_at(0.9) == habits.promises.ratio_at(0.9)


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 0},
        {"tables": None},
        {"tables": [[3, 1, [0.0] * NUM_BINS]]},
        {"tables": [[3, 10**9, [0.0] * NUM_BINS, [0.0] * NUM_BINS]]},
        {"tables": [[3, 1, [1.0] * NUM_BINS, [2.0] * NUM_BINS]]},
        {"tables": [[3, 1, [float("nan")] * NUM_BINS, [0.0] * NUM_BINS]]},
        {"promises": []},
        {"promises": [0.0] * 33},
    ],
)
def test_habits_take_nothing_of_what_makes_no_sense(damage: dict[str, object]) -> None:
    habits = learned_habits()
    before = habits.dump()
    with pytest.raises(ValueError, match="start without"):
        habits.load({**before, **damage})
    assert habits.dump() == before


def test_prefetchers_of_one_planner_share_their_habits() -> None:
    """So that they are kept with everything else that was learned."""
    shared: dict[str, Any] = {}
    choice = PolicyChoice(prefetch="turns")
    built = build(choice, Catalog(), CostModel(3e9, 1e-4), {Tier.DRAM: 1 << 30}, None, shared)
    assert pack(built.shared)
    assert unpack(pack({NAME: learned_habits()}), built.shared) == {}
    assert built.shared[NAME].dump() == learned_habits().dump()
