"""Counts that a daemon of years reaches: what a thousand requests a second begin with is used 2**31 times in
a month."""

from kvtier.appliance.core.catalog.catalog import Catalog
from kvtier.policies.base import Use
from kvtier.policies.urgency.forecast import Forecast
from kvtier.tiers.block import Urgency

from .tree import NO_ROW, Facts, name


def test_a_block_may_be_used_for_years() -> None:
    catalog = Catalog()
    catalog.num_uses.append(2**32 - 1)
    catalog.num_uses[0] += 1
    assert catalog.num_uses[0] == 2**32


def test_the_forecast_may_hear_of_a_block_for_years() -> None:
    facts = Facts()
    forecast = Forecast(facts)
    row = facts.add(name("system prompt"), NO_ROW, 0.0)
    forecast.stored([row], Use(0.0, 0, 1, Urgency.PREFILL))
    stretch = forecast._stretches.of_row[row]
    forecast._stretches.num_uses[stretch] = forecast._stretches.num_forks[stretch] = 2**31 - 1
    for number in range(1, 4):
        forecast.used([row], Use(float(number), 0, 1, Urgency.PREFILL))
    assert forecast.price(row, 3.0) > 0
    assert forecast.check_integrity() == []
