"""Budgets as people write them."""

import math

import pytest

from kvtier.appliance.calibrate.budget import Budget, parse_budget


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("ppl +0.5%", Budget("ppl", 0.005)),
        ("ppl 1 %", Budget("ppl", 0.01)),
        ("  kl 2e-3 ", Budget("kl", 0.002)),
        ("ratio 4.5", Budget("ratio", 4.5)),
        ("ratio 7x", Budget("ratio", 7.0)),
    ],
)
def test_budgets_are_read(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget
    assert parse_budget(str(budget)) == budget


@pytest.mark.parametrize(
    "text",
    [
        *("", "0.5%", "ppl", "ppl 0.5", "ppl -1%", "ppl +0%", "ppl +200%"),
        *("kl 5%", "kl +0.1", "ratio 1", "ratio 17", "ratio 4%", "bits 3"),
    ],
)
def test_what_is_no_budget_is_told_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"write 'ppl \+0\.5%'"):
        parse_budget(text)


def test_a_budget_is_kept_by_what_it_names_only() -> None:
    assert parse_budget("ppl +0.5%").is_kept(0.005, kl=1.0)
    assert not parse_budget("ppl +0.5%").is_kept(0.0051, kl=0.0)
    assert parse_budget("kl 0.002").is_kept(9.0, kl=0.002)
    assert not parse_budget("kl 0.002").is_kept(-1.0, kl=0.0021)
    assert parse_budget("ppl +0.5%").loss == pytest.approx(math.log(1.005))
