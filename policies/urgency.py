"""Urgency: kvtier's own policy. Price = chance of a use x what it costs to get the block back / its bytes.

The chance is an index in uses per second, and comes from the forecast, which all tiers share. The cost is one
of two, by the option `objective`:

    tokens    (default) every token counts the same: hit ratio
    seconds   prefill time of the block at its position in the chain: late blocks are dearer (attention)

Prices fall while nothing happens and jump when something does, so the lazy heap of priced.py is not enough: a
candidate is looked at again when its price changes next, a bounded number per call. In between its price is
at most one step of age (a factor of 2**0.25) old.

Admission (`urgency`) lets a block in when it is worth more than the victim that would leave for it: three
quarters of chat blocks are used once.
"""

import math
from collections.abc import Sequence

from .base import AdmissionPolicy, Newcomer, Surroundings, Use, Victim
from .candidates import Candidates
from .forecast import forecast_of
from .options import BadPolicyOption
from .priced import MAX_REFRESHES, PricedEviction

NAME = "urgency"
OBJECTIVES = ("tokens", "seconds")
#: Candidates whose price is brought up to date per `choose`.
MAX_UPDATES = 64


class Values:
    """What it is worth to have a block, per byte, in the unit of the objective."""

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
        """Return tokens, or seconds of prefill, per byte."""
        return self.at(row, self._facts.position[row])

    def at(self, row: int, position: int) -> float:
        """Return the same for a block of this row's namespace at a position."""
        namespace_id = self._facts.namespace_id[row]
        if namespace_id not in self._bytes:
            self._bytes[namespace_id] = self._facts.block_bytes(row)
            self._tokens_per_byte[namespace_id] = self._facts.block_tokens(row) / self._bytes[namespace_id]
        if self._is_for_seconds:
            return self._costs.recompute_s(namespace_id, position) / self._bytes[namespace_id]
        return self._tokens_per_byte[namespace_id]


class UrgencyEviction(PricedEviction):
    """Price: expected uses per second of keeping, times tokens (or seconds) per byte."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self._values = Values(surroundings)
        self._forecast = forecast_of(surroundings)
        self._due = Candidates()  # the same rows, by the time at which their price changes

    def forgotten(self, rows: Sequence[int]) -> None:
        """Rows may name other blocks from now on."""
        self.left(rows)

    def used(self, rows: Sequence[int], use: Use) -> None:
        """The last block may be a leaf; its price is another one now."""
        if rows[-1] in self._candidates:
            self.offer(rows[-1:], use.now)

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """As above."""
        self.used(rows, use)

    def offer(self, rows: Sequence[int], now: float) -> None:
        """Add candidates, or bring their prices up to date."""
        for row in rows:
            self._candidates.add(row, self.price(row, now))
            self._due.add(row, self._forecast.next_change_at(row, now))

    def price(self, row: int, now: float) -> float:
        """Return what keeping the block is worth per second and byte."""
        return self._forecast.price(row, now) * self._values.of(row)

    def choose(self, now: float) -> Victim | None:
        """Remove and return the candidate with the lowest price."""
        self._update(now)
        candidates = self._candidates
        for _ in range(MAX_REFRESHES):
            entry = candidates.pop()
            if entry is None:
                return None
            price, row = entry
            current = self.price(row, now)
            if current <= price:
                break
            self.offer((row,), now)  # it was used meanwhile, or its session was heard of
        else:
            entry = candidates.pop()
            assert entry is not None, "the last one that was looked at went back"
            price, row = entry
        self._due.discard(row)
        following = candidates.lowest()
        return Victim(row, price, *(following or (math.nan, -1)))

    def left(self, rows: Sequence[int]) -> None:
        """These blocks left this tier."""
        for row in rows:
            self._candidates.discard(row)
            self._due.discard(row)

    def _update(self, now: float) -> None:
        """Look again at candidates whose price changed since they were offered."""
        for _ in range(MAX_UPDATES):
            first = self._due.lowest()
            if first is None or first[0] > now:
                return
            self.offer(first[1:], now)


class UrgencyAdmission(AdmissionPolicy):
    """Declines what is worth less than its victim."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._values = Values(surroundings)
        self._forecast = forecast_of(surroundings)

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        """Compare prices; whoever finds free room comes in."""
        if victim is None:
            return True
        like = newcomer.parent if newcomer.parent >= 0 else victim.row
        price = self._forecast.price_of_new(newcomer) * self._values.at(like, newcomer.position)
        if price >= victim.price:
            return True
        self._forecast.declined(newcomer)
        return False
