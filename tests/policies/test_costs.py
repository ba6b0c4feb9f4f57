"""The cost model: formula, learning, advice."""

import math

import pytest

from kvtier.policies.costs import MIN_MEASUREMENTS, CostModel, PrefillModel
from kvtier.tiers.block import Geometry, Tier

LLAMA_8B = Geometry(32, 8, 128, 16, "float16")  # 2 MiB a block
TIERS = {"d": Tier.DRAM, "n": Tier.NVME, "h": Tier.HBM}


def model(speed: PrefillModel | None = None, bandwidth: float = 2e9, queued_bytes: int = 0) -> CostModel:
    costs = CostModel(1e9, 1e-3, queued_bytes=lambda tier: queued_bytes)
    costs.add_namespace(1, LLAMA_8B)
    if speed is not None:
        costs.state_speed(1, speed)
    costs.measured(Tier.NVME, bandwidth, 1e-3)
    return costs


def tiers(text: str) -> bytes:
    return bytes(TIERS[letter] for letter in text)


def brute_force(costs: CostModel, where: bytes, first: int) -> int:
    """Return the length that makes loading it and computing the rest quickest, the longest of several."""

    def total_s(length: int) -> float:
        num_cold = sum(tier > Tier.DRAM for tier in where[first:length])
        load_s = costs.load_s(1, num_cold, Tier.NVME) + (costs.wait_s(Tier.NVME) if num_cold else 0)
        return load_s + costs.recompute_s(1, length, len(where) - length)

    return min(range(first, len(where) + 1), key=lambda length: (round(total_s(length), 12), -length))


def test_the_guess_is_that_of_a_model_of_this_depth() -> None:
    """Llama-3-8B has 7.0e9 parameters beside its embeddings and a width of 4096."""
    costs = model()
    speed, source = costs.prefill_speed(1)
    assert source == "geometry"
    assert speed.tokens_per_s == pytest.approx(150e12 / (2 * 7.0e9), rel=0.1)
    assert speed.doubling_tokens == 6 * 4096


def test_the_quadratic_part() -> None:
    """Twice the speed's doubling context in one prompt costs twice what its tokens cost alone."""
    costs = model(PrefillModel(1000.0, 1600.0))
    num_blocks = 2 * 1600 // 16
    assert costs.recompute_s(1, 0, num_blocks) == pytest.approx(2 * 3200 / 1000)
    parts = sum(costs.recompute_s(1, position) for position in range(num_blocks))
    assert parts == pytest.approx(costs.recompute_s(1, 0, num_blocks)), "additive: no cost is counted twice"
    assert costs.recompute_s(1, 100) > costs.recompute_s(1, 0)


def test_measurements_replace_the_guess_and_then_only_nudge() -> None:
    costs = model()
    for _ in range(MIN_MEASUREMENTS):
        costs.prefilled(1, 0, 64, 64 * 16 / 500)
    speed, source = costs.prefill_speed(1)
    assert source == "measured"
    assert speed.tokens_per_s == pytest.approx(500, rel=0.05)
    costs.prefilled(1, 0, 64, 1e-9)  # no prefill is as quick as that
    assert costs.prefill_speed(1)[0].tokens_per_s < 1000
    for nonsense in (0.0, -1.0, math.inf, math.nan):
        costs.prefilled(1, 0, 64, nonsense)
    costs.prefilled(1, 0, 0, 1.0)
    assert costs.prefill_speed(1)[0].tokens_per_s < 1000


def test_a_stated_speed_is_followed_by_measurements_slowly() -> None:
    costs = model(PrefillModel(1000.0))
    costs.prefilled(1, 0, 1, 16 / 500)
    assert 800 < costs.prefill_speed(1)[0].tokens_per_s < 1000


@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 3e9, 1e10])
@pytest.mark.parametrize("speed", [PrefillModel(8_000.0, 2_000.0), PrefillModel(30_000.0, 500.0)])
def test_advice_is_what_trying_every_length_says(bandwidth: float, speed: PrefillModel) -> None:
    costs = model(speed, bandwidth, queued_bytes=5 << 20)
    for where in ("n" * 40, "ddnnnn", "nnnndd", "dndndn" * 5, "n", "d", "ddd" + "n" * 200):
        for first in (0, 1, len(where) // 2, len(where)):
            packed = tiers(where)
            advice = costs.advise(1, packed, first)
            assert advice.num_blocks == brute_force(costs, packed, first), (where, first)
            assert bool(advice.reason) == (advice.num_blocks < len(packed))


def test_late_blocks_may_be_worth_it_where_early_ones_are_not() -> None:
    """A token late in a long context costs many early ones; then all of the chain is loaded to get there."""
    costs = model(PrefillModel(30_000.0, 500.0), bandwidth=2 * (2 << 20) * 30_000 / 16)
    assert costs.load_s(1, 1, Tier.NVME) > costs.recompute_s(1, 0)
    assert costs.advise(1, tiers("nn")).num_blocks == 0
    assert costs.advise(1, tiers("n" * 400)).num_blocks == 400


def test_nothing_stored_needs_no_advice() -> None:
    assert model().advise(1, b"") == (0, 0.0, 0.0, True, "")


def test_a_bandwidth_nobody_measured_is_certain_of_nothing() -> None:
    costs = CostModel(1e9, 1e-3)
    costs.add_namespace(1, LLAMA_8B)
    costs.state_speed(1, PrefillModel(1e9))
    assert not costs.advise(1, tiers("n")).is_certain
    costs.measured(Tier.NVME, 0.0, 0.0)  # before its first sample an edge reports nothing
    assert not costs.advise(1, tiers("n")).is_certain
    costs.measured(Tier.NVME, 1e9, 0.0)
    assert costs.advise(1, tiers("n")).is_certain


def test_prices_stay_numbers_whatever_clients_measured() -> None:
    """A prefill of no time at all, often enough, was an infinite speed, and the next one no number."""
    costs = model()
    for seconds in [5e-324] * 3 + [1e-300] * 4000 + [1e308]:
        costs.prefilled(1, 0, 64, seconds)
        assert 0.0 < costs.recompute_s(1, 0, 64) < math.inf
    for _ in range(4000):
        costs.prefilled(1, 0, 64, 1e308)
        assert 0.0 < costs.recompute_s(1, 0, 64) < math.inf
