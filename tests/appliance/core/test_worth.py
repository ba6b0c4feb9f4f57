"""Prices of a source: the bill of a day, and when storing a bundle pays."""

import pytest

from kvtier.appliance.core.worth import KEPT_DAYS, SourcePrices, day_bill, reads_to_earn
from kvtier.appliance.transfer.object_edge import EPOCH_DAYS
from kvtier.sources.objects.lifecycle import rule_days

S3 = SourcePrices(gb_month=0.023, thousand_puts=0.005, thousand_gets=0.0004, gpu_hour=2.5)


def test_what_is_sent_is_billed_for_as_long_as_it_is_kept() -> None:
    assert rule_days(EPOCH_DAYS) == KEPT_DAYS


@pytest.mark.parametrize(
    ("num_bytes", "recompute_s", "num_reads"),
    [(32 << 20, 256 / 12_000, 5.9), (80 << 20, 256 / 1600, 1.8), (17 << 20, 256 / 1500, 0.4)],
    ids=["8B", "70B", "MLA"],
)
def test_models_earn_a_rented_store_as_research_has_it(
    num_bytes: int, recompute_s: float, num_reads: float
) -> None:
    assert reads_to_earn(S3, num_bytes, recompute_s) == pytest.approx(num_reads, abs=0.25)


def test_a_read_that_costs_more_than_it_saves_never_earns() -> None:
    far = SourcePrices(gb_egress=0.09, gpu_hour=2.5)
    assert reads_to_earn(far, 32 << 20, 256 / 12_000) == float("inf")


def test_nothing_is_compared_without_a_price_of_prefill() -> None:
    assert reads_to_earn(SourcePrices(gb_month=1.0), 32 << 20, 0.001) == 0


def test_a_store_that_is_owned_earns_at_once() -> None:
    assert reads_to_earn(SourcePrices(gpu_hour=2.5), 32 << 20, 0.02) == 0


def test_a_bill_has_the_reasons_that_have_a_price() -> None:
    usage = {"put": 2000, "list": 500, "copy": 500, "get": 10_000, "head": 5000, "delete": 9}
    usage |= {"sent_bytes": 10**12, "received_bytes": 10**10}
    bill = day_bill(SourcePrices(0.023, 0.005, 0.0004, 0.09), usage)
    assert bill == pytest.approx({"storage": 2.3, "puts": 0.015, "gets": 0.006, "egress": 0.9})
    assert day_bill(SourcePrices(gb_egress=0.09), usage).keys() == {"egress"}
    assert day_bill(SourcePrices(gpu_hour=2.5), usage) == {}
