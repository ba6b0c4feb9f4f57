"""Urgency: kvtier's own policy. Price = chance of a use x cost of getting the block back / its bytes.

The chance is an index in uses per second, and comes from the forecast, which all tiers share. The cost is one
of two, by the option `objective`:

    tokens    (default) every token counts the same: hit ratio
    seconds   prefill time of the block at its position in the chain: late blocks are dearer (attention)

Prices fall while nothing happens and jump when something does, so candidates are not kept in an order: a
portion of them is priced when a victim is wanted (pool.py).

Admission (`urgency`) admits a block that is worth more than the victim: three quarters of chat blocks are
used once.
"""

import math
from collections.abc import Sequence

import numpy as np

from ..base import AdmissionPolicy, EvictionPolicy, Newcomer, SessionChange, Surroundings, Use, Victim
from ..options import BadPolicyOption
from .ages import F64
from .forecast import forecast_of
from .pool import I32, CandidatePool

NAME = "urgency"
OBJECTIVES = ("tokens", "seconds")


class ByteValues:
    """Tokens, or seconds of prefill, that a byte of a block saves."""

    def __init__(self, surroundings: Surroundings) -> None:
        options = {"objective": OBJECTIVES[0], **surroundings.options}
        if set(options) != {"objective"} or options["objective"] not in OBJECTIVES:
            raise BadPolicyOption(
                f"policy {NAME!r} has one option, objective: {' or '.join(OBJECTIVES)}; not {options}"
            )
        self._is_for_seconds = options["objective"] == "seconds"
        self._facts, self._costs = surroundings.facts, surroundings.costs
        self._tokens_per_byte: dict[int, float] = {}  # by namespace
        self._bytes: dict[int, int] = {}

    def of(self, row: int) -> float:
        """Return the tokens, or seconds of prefill, per byte of a block."""
        if self._is_for_seconds:
            return self.at(row, self._facts.position[row])
        known = self._tokens_per_byte.get(self._facts.namespace_id[row])
        return self.at(row, 0) if known is None else known

    def of_all(self, rows: I32) -> F64 | float:
        """Return the values (n,) float64 of `rows` (n,) int32; one number when it is the same for all."""
        if not self._is_for_seconds:
            namespace_ids = np.asarray(self._facts.namespace_id)[rows]
            if (namespace_ids == namespace_ids[0]).all():
                return self.of(int(rows[0]))
        return np.array([self.of(row) for row in rows.tolist()])

    def at(self, row: int, position: int) -> float:
        """Return the value per byte of a block at `position`, in the namespace of `row`."""
        namespace_id = self._facts.namespace_id[row]
        if namespace_id not in self._bytes:
            self._bytes[namespace_id] = self._facts.block_bytes(row)
            self._tokens_per_byte[namespace_id] = self._facts.block_tokens(row) / self._bytes[namespace_id]
        if self._is_for_seconds:
            return self._costs.recompute_s(namespace_id, position) / self._bytes[namespace_id]
        return self._tokens_per_byte[namespace_id]


class UrgencyEviction(EvictionPolicy):
    """Price: expected uses per second of keeping, times tokens (or seconds) per byte."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._facts = surroundings.facts
        self._values = ByteValues(surroundings)
        self._forecast = forecast_of(surroundings)
        self._victim = Victim(-1, math.nan)  # the last one
        self._pool = CandidatePool(self._prices, self._price_anew)
        #: The last price returned: a block too dear to leave with the one below becomes a candidate next.
        self._asked_row, self._asked_at, self._asked_price = -1, math.nan, math.nan

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Invalidate cached prices."""
        self._reprice()

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Invalidate cached prices."""
        self._reprice()

    def session_changed(self, change: SessionChange) -> None:
        """Invalidate cached prices."""
        self._reprice()

    def forgotten(self, rows: Sequence[int]) -> None:
        """Drop state of these rows: they may name other blocks from now on."""
        if self._asked_row in rows:
            self._asked_row = -1
        if self._victim.row in rows:
            self._victim = Victim(-1, math.nan)

    def offer(self, rows: Sequence[int], now: float) -> None:
        """Add candidates."""
        pool = self._pool
        is_ready = pool.is_ready(now)
        for row in rows:
            if is_ready and (row == self._asked_row or self._forecast.is_ready(row)):
                pool.add_priced(row, self.price(row, now))
            else:
                pool.add(row)

    def price(self, row: int, now: float) -> float:
        """Return what keeping the block is worth, per second and byte."""
        if row == self._asked_row and now == self._asked_at:
            return self._asked_price
        forecast = self._forecast
        if not forecast.is_ready(row):
            # The block below is evicted; so are the ready ones next, and then their parents are priced.
            parents = [self._facts.parent[ready] for ready in self._pool.ready_rows()]
            together = [row, *(parent for parent in parents if parent >= 0)]
            forecast.prepare(np.array(together, np.int32))
        price = forecast.price(row, now) * self._values.of(row)
        self._asked_row, self._asked_at, self._asked_price = row, now, price
        return price

    def num_no_dearer(self, rows: Sequence[int], price: float, now: float) -> int:
        """Return how many of these blocks, from the first one on, cost at most `price`.

        One price is read for all blocks with the same past: up their chain they are worth the same, or (in
        seconds) less and less. Blocks with the past of the victim count without: its price is of another
        instant, computed in a batch and rounded otherwise, which kept many of them."""
        number, victim = 0, self._victim
        if rows and price == victim.price and self._facts.parent[victim.row] == rows[0]:
            number = self._forecast.end_of_same_price((victim.row, *rows), 0) - 1
        while number < len(rows) and self.price(rows[number], now) <= price:
            number = self._forecast.end_of_same_price(rows, number)
        return number

    def choose(self, now: float) -> Victim | None:
        """Remove and return the cheapest of the candidates that are ready (pool.py)."""
        found = self._pool.pop(now)
        if found is None:
            return None
        (price, row), following = found
        self._victim = Victim(row, price, *(following or (math.nan, -1)))
        return self._victim

    def left(self, rows: Sequence[int]) -> None:
        """Drop candidates that left this tier."""
        self._pool.discard(rows)

    def __len__(self) -> int:
        return len(self._pool)

    def _reprice(self) -> None:
        self._pool.reprice()
        self._asked_row = -1

    def _price_anew(self, row: int, now: float) -> float | None:
        return self.price(row, now) if self._forecast.is_described_anew(row) else None

    def _prices(self, rows: I32, now: float) -> F64:
        return self._forecast.prices(rows, now) * self._values.of_all(rows)


class UrgencyAdmission(AdmissionPolicy):
    """Declines blocks that are worth less than their victim."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._values = ByteValues(surroundings)
        self._forecast = forecast_of(surroundings)

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        """Return whether the newcomer's price is at least the victim's; True where there is room."""
        if victim is None:
            return True
        like = newcomer.parent if newcomer.parent >= 0 else victim.row
        price = self._forecast.price_of_new(newcomer) * self._values.at(like, newcomer.position)
        if price >= victim.price:
            return True
        self._forecast.declined(newcomer)
        return False
