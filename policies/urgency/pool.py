"""Candidates with prices that change with time: priced in portions, not kept in order.

The price of every candidate falls with its age, so an order of a million candidates is wrong a moment later,
and keeping it right costs forty price changes for every block that leaves. A pool keeps no order. When a
victim is wanted it prices a portion of the candidates at once (numpy), together with the cheapest ones that
it found before, and the cheapest of these are ready to leave at this instant. The portions go round: a
cheap candidate is found within one round and carried along from then on. A pool of up to PORTION candidates
is priced as a whole, so there the victim is the cheapest of all.

A request changes the prices of a few. So candidates that are ready in a large pool stay so for FRESH_S, and
each is priced by itself before it leaves: with a thousand candidates and more, a request would pay for a
portion each time, to evict three of them.

Sources: LHD (NSDI 2018) and Redis sample 32 and 5 candidates; Redis carries the best ones along. Rejected: a
heap by price and one by the time of the next price change (policies/candidates.py), which is exact to a
step of age and cost more than everything else in a full tier.
"""

from array import array
from bisect import insort
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

I32: TypeAlias = npt.NDArray[np.int32]
Entry: TypeAlias = tuple[float, int]

#: Candidates priced at a time; about 0.1 ms.
PORTION = 1024
#: Of those, how many may leave before others are looked at: what a few requests of a busy service evict.
NUM_READY = 128
#: Prices are good for this long where nothing happens: room is made in many small steps, a copy's end each.
FRESH_S = 0.05
GROWTH = 1024


class CandidatePool:
    """A set of rows, of which `pop` removes a cheap one.

    All else costs a fraction of a microsecond per row.
    """

    def __init__(
        self,
        price_all: Callable[[I32, float], npt.NDArray[np.float64]],
        price_anew: Callable[[int, float], float | None] | None = None,
    ) -> None:
        """`price_all(rows, now)` returns the prices of many rows at once, `price_anew(row, now)` that of one
        if its description changed since it was priced, else None. Without it no candidate stays ready at an
        event."""
        self._price_all = price_all
        self._price_anew = price_anew
        self._rows = array("i")
        self._places = array("i")  # by row: 1 + its index in `_rows`; 0: no candidate
        self._cursor = 0
        self._ready: list[Entry] = []  # cheapest first; candidates that left may still be in it
        self._ready_at = float("nan")  # prices are of this instant; NaN: out of date
        self._is_doubtful = False  # an event since then changed some of them

    def add(self, row: int) -> None:
        """Make a row a candidate."""
        places = self._places
        if row >= len(places):
            places.extend([0] * (row + GROWTH - len(places)))
        if not places[row]:
            self._rows.append(row)
            places[row] = len(self._rows)

    def add_priced(self, row: int, price: float) -> None:
        """Make a row a candidate, a ready one if it is as cheap as those."""
        self.add(row)
        if price <= self._ready[-1][0]:
            insort(self._ready, (price, row))

    def discard(self, rows: Iterable[int]) -> None:
        """Remove candidates; nothing happens to rows that are none."""
        places = self._places
        num_places = len(places)
        for row in rows:
            if row < num_places and places[row]:
                self._remove(row)

    def is_ready(self, now: float) -> bool:
        """Whether any candidate is ready to leave."""
        return now - self._ready_at <= FRESH_S and bool(self._ready)

    def ready_rows(self) -> list[int]:
        """Return the rows that are ready to leave, cheapest first; some may have left."""
        return [row for _, row in self._ready]

    def reprice(self) -> None:
        """Mark prices as outdated, after an event.

        A pool of one portion is priced anew at the next `pop`. In a larger one the ready candidates are a
        sample anyway, and few of them changed: each is priced by itself before it leaves.
        """
        if len(self._rows) > PORTION and self._price_anew is not None:
            self._is_doubtful = True
        else:
            self._ready_at = float("nan")

    def pop(self, now: float) -> tuple[Entry, Entry | None] | None:
        """Remove and return (price, row) of the cheapest candidate, and the next one, which stays.

        None: there is none. None for the next one: no other is ready, and pricing a portion would cost more
        than it is worth when no other victim is wanted.
        """
        entry = self._cheapest(now) if now - self._ready_at <= FRESH_S else None  # false for NaN
        while entry is None:
            if not self._rows:
                return None
            self._look(now)
            entry = self._first_ready()
        del self._ready[0]
        self._remove(entry[1])
        return entry, self._first_ready()

    def __contains__(self, row: int) -> bool:
        return row < len(self._places) and self._places[row] > 0

    def __len__(self) -> int:
        return len(self._rows)

    def _remove(self, row: int) -> None:
        """Remove a candidate; the last one takes its place."""
        place, last = self._places[row], self._rows.pop()
        if last != row:
            self._rows[place - 1] = last
            self._places[last] = place
        self._places[row] = 0

    def _cheapest(self, now: float) -> Entry | None:
        """Return the cheapest ready candidate, by its new price where it has one."""
        entry = self._first_ready()
        while self._is_doubtful and entry is not None and self._price_anew is not None:
            row = entry[1]
            price = self._price_anew(row, now)
            if price is None:
                return entry
            del self._ready[0]
            insort(self._ready, (price, row))
            entry = self._first_ready()
            if entry is not None and entry[1] == row:
                return entry
        return entry

    def _first_ready(self) -> Entry | None:
        """Return the cheapest ready candidate that is still here."""
        ready, places = self._ready, self._places
        while ready:
            if places[ready[0][1]]:
                return ready[0]
            del ready[0]  # it left meanwhile
        return None

    def _look(self, now: float) -> None:
        """Price the next portion, and those that were cheap before; the cheapest are ready."""
        rows = self._portion()
        prices = self._price_all(rows, now)
        if len(rows) > NUM_READY:
            cheapest = np.argpartition(prices, NUM_READY)[:NUM_READY]
            rows, prices = rows[cheapest], prices[cheapest]
        self._ready = sorted(zip(prices.tolist(), rows.tolist(), strict=True))
        self._ready_at = now
        self._is_doubtful = False

    def _portion(self) -> I32:
        """Return the rows (n,) int32 of the next portion, and those that were ready and are not among
        them."""
        places, num_rows = self._places, len(self._rows)
        if num_rows <= PORTION:
            return np.array(self._rows, np.int32)
        start = self._cursor if self._cursor < num_rows else 0
        end = self._cursor = start + PORTION
        carried = [row for _, row in self._ready if places[row] and not start < places[row] <= end]
        return np.concatenate((np.frombuffer(self._rows, np.int32)[start:end], np.array(carried, np.int32)))
