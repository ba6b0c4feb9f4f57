"""Urgency on workloads nobody made it for: it may not find much less than LRU, whatever it learned.

The traces are small, so that this takes seconds: what a policy pays for learning is a larger share here than
in a day of serving. `python -m tests.policies.test_robustness` prints the table of all baselines.
"""

import argparse
from collections.abc import Sequence
from random import Random
from statistics import fmean

import numpy as np
import pytest

from kvtier.appliance.replay.setups import ModelShape, single_tier
from kvtier.appliance.replay.sweep import run_setup
from kvtier.appliance.replay.traces import Trace
from kvtier.policies.baselines.ghosts import Names
from kvtier.policies.urgency.ages import EDGES_S, F64, MIN_GAP_S, NUM_BINS, Clock
from kvtier.policies.urgency.forecast import Forecast
from kvtier.policies.urgency.lru_fallback import MARGIN, SLACK, LruFallback
from kvtier.policies.urgency.pool import I32, NUM_READY, PORTION, CandidatePool

from .tree import name
from .workloads import WORKLOADS, make

SHAPE = ModelShape(1, 1, 64, "float16")
BASELINES = ("lru", "fifo", "lfu", "s3fifo", "arc")
#: Percent of the tokens that a short trace may lose to LRU: the margin, and what learning costs.
TOLERANCE = 1.5


def hit_percent(trace: Trace, policy: str, capacity: str) -> float:
    """Return the tokens found, by the production planner."""
    outcome = run_setup(trace, single_tier(policy, capacity, trace, SHAPE))
    assert outcome.problems == []
    return 100 * outcome.token_hit_ratio


@pytest.mark.parametrize(
    ("workload", "capacity", "time_scale", "won_points"),
    [
        ("recent", "10%", 1.0, 0.0),  # where LRU is best, nothing much is lost
        ("chats", "5%", 0.0, 0.0),  # no times at all
        ("zipf", "5%", 1.0, 5.0),  # where it is not, much is won
        ("loop", "5%", 0.0, 2.0),
        ("twice", "5%", 10.0, 4.0),
    ],
)
def test_never_much_below_lru(workload: str, capacity: str, time_scale: float, won_points: float) -> None:
    trace = make(workload, 1000, seed=7, time_scale=time_scale)
    lru = hit_percent(trace, "lru", capacity)
    urgency = hit_percent(trace, "urgency", capacity)
    assert urgency > lru + won_points - (TOLERANCE if not won_points else 0.0)


def test_what_was_learned_elsewhere_may_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast that believes firmly that only what is old returns: the fallback finds out."""
    as_made = Forecast.__init__

    def misled(self: Forecast, *args: object) -> None:
        as_made(self, *args)  # type: ignore[arg-type]
        hazards = self._appraiser._hazards
        hazards._at_risk[:] = 15_000.0
        hazards._used[:] = np.where(EDGES_S[:NUM_BINS] > 180.0, 14_000.0, 1.0)
        hazards._is_current = False

    trace = make("recent", 1000, seed=7)
    lru = hit_percent(trace, "lru", "10%")
    monkeypatch.setattr(Forecast, "__init__", misled)
    with_fallback = hit_percent(trace, "urgency", "10%")
    monkeypatch.setattr(LruFallback, "asked", lambda *args: None)
    without = hit_percent(trace, "urgency", "10%")
    assert with_fallback > lru - 3.0
    assert without < with_fallback - 3.0


# --------------------------------------------------------------------------------------------- the fallback


def names_of(*numbers: int) -> list[bytes]:
    """Return names."""
    return [name("asked", number) for number in numbers]


def test_a_forecast_that_finds_nothing_is_left_when_its_budget_is_spent_and_tried_again() -> None:
    fallback = LruFallback()
    num_asked = 0
    while fallback.follows_forecast:
        fallback.asked([], names_of(num_asked % 5), 5)
        num_asked += 1
        assert num_asked <= 5 + SLACK + MARGIN * num_asked + 1
    assert num_asked > SLACK
    while not fallback.follows_forecast:  # as LRU it finds what LRU finds, and the loss is a smaller share
        fallback.asked(names_of(num_asked % 5), [], 5)
        num_asked += 1
        assert num_asked < 40_000
    for _ in range(20):
        fallback.asked([], names_of(*range(5)), 5)
    assert not fallback.follows_forecast


def test_a_forecast_that_was_left_is_tried_again_when_its_loss_is_half_the_margin() -> None:
    """Nearer than the margin it would be sent away by the next few names: tried and left all the time."""
    fallback, num_blocks, num_names = LruFallback(), 2000, 100
    num_asked = 0
    while fallback.follows_forecast:
        fallback.asked([], names_of(num_asked % num_names), num_blocks)
        num_asked += 1
    num_lost = num_asked - num_names  # the first time around LRU does not find them either
    while not fallback.follows_forecast:
        fallback.asked(names_of(num_asked % num_names), [], num_blocks)
        num_asked += 1
        assert num_asked < 10_000
    assert num_asked == pytest.approx(num_lost / (MARGIN / 2), abs=2)


def test_who_finds_more_than_lru_is_never_left() -> None:
    fallback, rng = LruFallback(), Random(3)
    for number in range(5000):
        is_found = rng.random() < 0.5
        asked = names_of(number)
        fallback.asked(asked if is_found else [], [] if is_found else asked, 50)
        assert fallback.follows_forecast


def test_a_large_store_is_judged_by_a_sample() -> None:
    fallback = LruFallback()
    num_blocks = 6000
    for number in range(75 * num_blocks // 50):
        fallback.asked([], [name(number, part) for part in range(50)], num_blocks)
        fallback._num_asked *= 1.2  # as if more had been asked for
    assert fallback._below < 256
    assert len(fallback._lru) <= num_blocks * fallback._below // 256
    assert all(each[1] < fallback._below for each in fallback._lru)


# -------------------------------------------------------------------------------------- clock, pool, names


def test_the_clock_tells_requests_of_one_instant_apart_never_runs_backwards_and_is_right_again() -> None:
    clock = Clock()
    times = [clock.begin_request(5.0) for _ in range(4)]
    assert times[0] == 5.0
    assert np.diff(times) == pytest.approx([MIN_GAP_S] * 3)
    assert clock.at(5.0) == times[-1]
    assert clock.begin_request(50.0) == clock.at(50.0) == 50.0


def test_a_pool_of_one_portion_gives_the_cheapest_first() -> None:
    rng = Random(1)
    prices = np.array([rng.random() for _ in range(PORTION)])
    pool = CandidatePool(lambda rows, now: prices[rows])
    for row in range(0, PORTION, 2):
        pool.add(row)
    assert pool.pop(0.0) is not None
    for row in range(1, PORTION, 2):  # the others come while some are ready
        pool.add_priced(row, prices[row])
    left = sorted(row for row in range(PORTION) if row in pool)
    order = []
    while (found := pool.pop(0.0)) is not None:
        order.append(found[0][1])
    assert order == sorted(left, key=lambda row: prices[row])
    assert len(pool) == 0


def test_a_large_pool_meets_the_cheapest_within_one_round() -> None:
    num_rows = 20 * PORTION
    prices = np.arange(num_rows, dtype=np.float64)[::-1].copy()  # the last row is the cheapest
    pool = CandidatePool(lambda rows, now: prices[rows])
    for row in range(num_rows):
        pool.add(row)
    num_left = num_looks = 0
    now = 0.0
    while num_rows - 1 in pool:
        now += 1.0
        for _ in range(NUM_READY // 2):
            assert pool.pop(now) is not None
            num_left += 1
        num_looks += 1
        assert num_looks <= 22
    for _ in range(40):  # those that were cheap and not taken are carried along
        now += 1.0
        found = pool.pop(now)
        assert found is not None
    assert len(pool) == num_rows - num_left - 40


def test_a_large_pool_carries_the_cheap_ones_along_though_it_looks_elsewhere() -> None:
    prices = np.arange(8 * PORTION, dtype=np.float64)  # all that are cheap are in the first portion
    pool = CandidatePool(lambda rows, now: prices[rows])
    for row in range(len(prices)):
        pool.add(row)
    for step in range(7):
        found = pool.pop(float(step))
        assert found is not None
        (price, _), following = found
        assert price == step
        assert following is not None
        assert following[0] == step + 1


def test_a_pool_that_gave_all_who_were_ready_looks_again_when_asked_and_not_before() -> None:
    num_looks = 0

    def price_all(rows: I32, now: float) -> F64:
        nonlocal num_looks
        num_looks += 1
        return rows.astype(np.float64)

    pool = CandidatePool(price_all)
    for row in range(NUM_READY + 1):
        pool.add(row)
    followers = [found[1] for found in (pool.pop(0.0) for _ in range(NUM_READY)) if found is not None]
    assert [each is None for each in followers] == [False] * (NUM_READY - 1) + [True]
    assert num_looks == 1
    assert pool.pop(0.0) == ((float(NUM_READY), NUM_READY), None)
    assert num_looks == 2
    assert pool.pop(0.0) is None


def test_names_forget_the_oldest_and_the_dead_are_bounded() -> None:
    names = Names()
    for number in range(1, 101):
        assert names.set([name(number)], number) == []
    assert names.set([name(1)], 500) == [1]  # young again
    assert names.pop_oldest(99) == (1, 0)
    assert names.pop_oldest(99) == (2, 1)
    assert names.pop_oldest(99) == (0, 0)
    assert names.get(name(1)) == 500
    for number in range(1000, 3000):
        names.set([name(7)], number)
        while names.pop_oldest(99)[0]:
            pass
        assert len(names._order) <= 2 * 99 + 64
    assert names.pop(name(7)) == 2999
    assert name(7) not in names


def test_names_that_came_together_are_forgotten_together() -> None:
    names = Names()
    names.set([name(number) for number in range(5)], 1)
    assert names.pop_oldest(1) == (0, 0)  # the youngest
    assert names.set([name(3), name(9), name(9)], 2) == [1, 2]
    assert len(names) == 6
    assert names.pop(name(4)) == 1
    assert names.pop_oldest(4) == (1, 3)
    assert sorted(names.numbers()) == [2, 2]
    assert len(names) == 2


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--capacities", nargs="*", default=["2%", "5%", "15%"])
    parser.add_argument("--requests", type=int, default=2500)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1], help="figures are means over these")
    parser.add_argument("--time-scale", type=float, default=1.0)
    args = parser.parse_args(argv)
    for workload in args.workloads:
        traces = [make(workload, args.requests, seed, args.time_scale) for seed in args.seeds]
        for capacity in args.capacities:
            found = {
                policy: fmean(hit_percent(trace, policy, capacity) for trace in traces)
                for policy in (*BASELINES, "urgency")
            }
            urgency = found.pop("urgency")
            best = max(found, key=lambda policy: found[policy])
            columns = f"lru {found['lru']:6.2f}  best {best:8s} {found[best]:6.2f}  urgency {urgency:6.2f}"
            print(f"{workload:9s} {capacity:4s} {columns}  {urgency - found[best]:+6.2f}", flush=True)


if __name__ == "__main__":
    main()
