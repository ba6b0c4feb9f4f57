"""SenselessPrefetch: a prefetcher that is wrong about everything the contract lets it be wrong about.

It expects blocks at random: chains of living blocks, or parts of them that begin in the middle, or blocks
that are in memory already, for windows from nothing to minutes. Whatever it says, the planner must keep its
promises. Its dice are its own (an option, not the world's), so that the planner stays a function of events.
"""

from collections.abc import Sequence
from random import Random

from kvtier.policies.base import Expected, Prefetcher, SessionChange, Surroundings, Use


class SenselessPrefetch(Prefetcher):
    """Expects anybody, any time."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._facts = surroundings.facts
        self._rng = Random(surroundings.options["seed"])
        self._mean_pause_s = surroundings.options["mean_pause_s"]
        self._rows: dict[int, None] = {}
        self._next_at = 0.0
        self._num_left = 100  # a world must come to rest

    def used(self, rows: Sequence[int], use: Use) -> None:
        self._rows.update(dict.fromkeys(rows))

    def stored(self, rows: Sequence[int], use: Use) -> None:
        self._rows.update(dict.fromkeys(rows))

    def session_changed(self, change: SessionChange) -> None:
        self._next_at = min(self._next_at, change.back_at)

    def forgotten(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)

    def due(self, now: float, num_bytes: int) -> Sequence[Expected]:
        assert num_bytes > 0
        rng = self._rng
        self._num_left -= 1
        self._next_at = now + self._mean_pause_s * 2 * rng.random()
        expected = []
        for _ in range(rng.choice((0, 1, 1, 2))):
            if self._rows:
                chain, row = [], rng.choice(list(self._rows))
                while row >= 0:
                    chain.append(row)
                    row = self._facts.parent[row]
                chain.reverse()
                first = rng.randrange(len(chain)) if rng.random() < 0.3 else 0
                window_s = rng.choice((0.0, 0.001, 0.01, 0.1, 100.0))
                expected.append(Expected(chain[first:], now + window_s, "a whim", window_s < 0.05))
        return expected

    def next_at(self) -> float | None:
        return self._next_at if self._rows and self._num_left > 0 else None
