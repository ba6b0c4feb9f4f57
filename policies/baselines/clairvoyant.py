"""Belady's rule, for replay: evicts the leaf with the farthest next use. A bound, not a policy.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966. It
asks `Surroundings.future`, which only a replay has. On a prefix tree a parent's next use is never later
than its children's, so the farthest block is always a leaf.

With the admission of the same name it also declines a block that is needed again later than the one that
would have to go for it (bypass). No demand-filled cache of equal blocks does much better; without bypass it
is the best that a store can do that keeps whatever it is given.
"""

from collections.abc import Sequence

from ..base import AdmissionPolicy, Future, Newcomer, Surroundings, Use, Victim
from ..options import read_numbers
from .priced import PricedEviction

#: Price of a block that is never used again, and of nothing else: a time after all others, in seconds.
NEVER = 1e11


class ReplayOnly(ValueError):
    """The clairvoyant policy was configured outside of replay, where the future is not known."""


def _future_of(surroundings: Surroundings) -> Future:
    read_numbers("clairvoyant", surroundings.options, {})
    if surroundings.future is None:
        raise ReplayOnly("policy 'clairvoyant' works in `kvtier replay` only: it needs the whole trace")
    return surroundings.future


class ClairvoyantEviction(PricedEviction):
    """Price: minus the time of the next use, in seconds."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self._future = _future_of(surroundings)

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Offer used candidates again: their next use is another one, and their price fell."""
        self.offer([row for row in rows if row in self._candidates], use.now)

    def price(self, row: int, now: float) -> float:
        """Return minus the time of the next use; -NEVER when there is none."""
        return -min(self._future.next_use(self._facts.prefix_hash[row], now), NEVER)


class ClairvoyantAdmission(AdmissionPolicy):
    """Declines blocks that are used later than their victim, or never."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._future = _future_of(surroundings)

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        """Return whether the newcomer's first block, the one used soonest, is used before the victim."""
        next_use = min(self._future.next_use(newcomer.prefix_hashes[0], newcomer.now), NEVER)
        return -next_use > (-NEVER if victim is None else victim.price)
