"""Prices of a source in dollars: the day's bill, and how often a bundle is read until storing it has paid."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

#: Days for which a bundle is stored at most: three epochs of one day.
KEPT_DAYS: Final = 3
MONTH_DAYS: Final = 30
GB: Final = 1e9
#: Of a fetch: a search, the head of the bundle, its payloads.
REQUESTS_PER_FETCH: Final = 3
PUT_OPERATIONS: Final = ("put", "copy", "list")  # stores charge a listing as a put
GET_OPERATIONS: Final = ("get", "head")


@dataclass(frozen=True, slots=True)
class SourcePrices:
    """Dollars; 0: not counted."""

    gb_month: float = 0.0
    thousand_puts: float = 0.0
    thousand_gets: float = 0.0
    gb_egress: float = 0.0
    gpu_hour: float = 0.0  # of what computes the prefill of one namespace

    def storage(self, num_bytes: int) -> float:
        """Return the price of storing bytes for KEPT_DAYS."""
        return num_bytes / GB * self.gb_month * KEPT_DAYS / MONTH_DAYS


def reads_to_earn(prices: SourcePrices, num_bytes: int, recompute_s: float) -> float:
    """Return how often a bundle has to be read until that has saved what storing it costs.

    `recompute_s`: prefill of its blocks. Infinity: a read costs more than it saves. 0 without a price of
    prefill: nothing is compared.
    """
    if not prices.gpu_hour:
        return 0.0
    read = REQUESTS_PER_FETCH * prices.thousand_gets / 1000 + num_bytes / GB * prices.gb_egress
    saved = recompute_s * prices.gpu_hour / 3600 - read
    stored = prices.storage(num_bytes) + prices.thousand_puts / 1000
    return stored / saved if saved > 0 else float("inf")


def day_bill(prices: SourcePrices, usage: Mapping[str, int]) -> dict[str, float]:
    """Return dollars by reason for the requests and bytes of a day; only reasons that have a price.

    `usage`: number of requests by operation, `sent_bytes` and `received_bytes`. Storage counts what the day
    has sent, for as long as it is kept.
    """
    num_puts, num_gets = (
        sum(usage.get(operation, 0) for operation in kind) for kind in (PUT_OPERATIONS, GET_OPERATIONS)
    )
    bill = {
        "storage": (prices.gb_month, prices.storage(usage.get("sent_bytes", 0))),
        "puts": (prices.thousand_puts, num_puts / 1000 * prices.thousand_puts),
        "gets": (prices.thousand_gets, num_gets / 1000 * prices.thousand_gets),
        "egress": (prices.gb_egress, usage.get("received_bytes", 0) / GB * prices.gb_egress),
    }
    return {reason: dollars for reason, (price, dollars) in bill.items() if price}
