"""Allocation against trying everything."""

import itertools
import random

import pytest

from kvtier.appliance.calibrate.allocation import CoderChoice, allocate, hull, total_loss


def random_choices(rng: random.Random, num_units: int) -> dict[str, list[CoderChoice[str]]]:
    """Units of very different sensitivity; losses about a quarter for each bit, with noise."""
    found = {}
    for unit in range(num_units):
        scale = 10 ** rng.uniform(-5, -1)
        found[f"u{unit}"] = [
            CoderChoice(f"{bits} bits", bits + 0.5, scale * 4.0**-bits * rng.uniform(0.6, 1.6))
            for bits in (2, 3, 4, 5)
        ]
    return found


def everything(choices: dict[str, list[CoderChoice[str]]]) -> list[tuple[float, float]]:
    """Return (mean bits, loss) of every way to choose."""
    return [
        (sum(one.bits for one in picked) / len(picked), sum(one.loss for one in picked))
        for picked in itertools.product(*choices.values())
    ]


def mean_bits(allocated: dict[str, CoderChoice[str]]) -> float:
    """Return the bits a value, over all units."""
    return sum(choice.bits for choice in allocated.values()) / len(allocated)


@pytest.mark.parametrize("seed", range(20))
def test_greedy_is_at_most_a_step_from_the_best(seed: int) -> None:
    choices = random_choices(random.Random(seed), 5)
    ways = everything(choices)
    for loss in (1e-2, 1e-3, 1e-4, 1e-5):
        allocated = allocate(choices, loss=loss)
        possible = [bits for bits, lost in ways if lost <= loss]
        if possible:
            assert total_loss(allocated) <= loss
            assert mean_bits(allocated) <= min(possible) + 3 / len(choices)
    for bits in (2.5, 3.0, 3.7, 4.4, 5.5):
        allocated = allocate(choices, bits=bits)
        assert mean_bits(allocated) <= bits + 1e-9
        a_step_less = max(min(one.bits for one in choices["u0"]), bits - 3 / len(choices))
        assert total_loss(allocated) <= min(lost for size, lost in ways if size <= a_step_less + 1e-9) + 1e-12


def test_sensitive_units_get_the_bits() -> None:
    even = [CoderChoice(bits, bits, 4.0**-bits) for bits in (2, 3, 4)]
    harsh = [CoderChoice(bits, bits, 1000 * 4.0**-bits) for bits in (2, 3, 4)]
    allocated = allocate({"a": even, "b": harsh, "c": even}, bits=8 / 3)
    assert {unit: choice.coding for unit, choice in allocated.items()} == {"a": 2, "b": 4, "c": 2}


def test_what_a_mixture_beats_is_not_chosen() -> None:
    choices = [
        CoderChoice("2", 2, 1.0),
        CoderChoice("odd", 3, 0.9),
        CoderChoice("4", 4, 0.1),
        CoderChoice("worse", 4.5, 0.2),
    ]
    assert [one.coding for one in hull(choices)] == ["2", "4"]


def test_budgets_out_of_reach_give_the_nearest_there_is() -> None:
    choices = {"a": [CoderChoice(2, 2, 0.5), CoderChoice(4, 4, 0.1)]}
    assert allocate(choices, loss=0.01)["a"].coding == 4
    assert allocate(choices, bits=1.0)["a"].coding == 2
    assert allocate(choices, loss=9.0)["a"].coding == 2
