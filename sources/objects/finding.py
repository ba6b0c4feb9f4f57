"""Finds how much of a chain is in a store, by name and without a directory. Pure: the caller probes.

Names of bundles follow from the chain, so bundle `n` can be asked for without those before it. Asking for
bundles 1, 2, 4, 8 … takes log2 of their number, rounded up, and one probe at most. What is found is a hint:
bundles before one that is there may be gone, which the get of them tells.
"""

from collections import OrderedDict
from collections.abc import Generator
from typing import Final, NamedTuple

REMEMBERED_S: Final = 60.0
MAX_REMEMBERED: Final = 65_536


class ChainExtent(NamedTuple):
    """How many bundles of a chain are there, as far as probes tell."""

    num_found: int  # the bundle before this one is there
    num_possible: int  # the one behind these is not, or is behind the end of the chain
    num_probes: int


def gallop(num_bundles: int) -> Generator[int, bool, ChainExtent]:
    """Yield the index of each bundle to probe, and take whether it is there; return the extent.
    The last bundle is among them when all that were probed before it were there."""
    found, num_probes = 0, 0
    step = 1
    while found < num_bundles:
        asked = min(step, num_bundles)
        num_probes += 1
        if not (yield asked - 1):
            return ChainExtent(found, asked - 1, num_probes)
        found, step = asked, step * 2
    return ChainExtent(found, num_bundles, num_probes)


class MissingNames:
    """Names that were not there a short while ago: asking again would cost a request and a round trip."""

    def __init__(self, remembered_s: float = REMEMBERED_S, capacity: int = MAX_REMEMBERED) -> None:
        self._remembered_s = remembered_s
        self._capacity = capacity
        self._until: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, name: str, now: float) -> None:
        """Remember that `name` is not there at `now`. The oldest one is forgotten beyond the capacity."""
        self._until.pop(name, None)
        self._until[name] = now + self._remembered_s
        while len(self._until) > self._capacity or next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)

    def has(self, name: str, now: float) -> bool:
        """Whether `name` was missing a short while before `now`."""
        return self._until.get(name, now) > now
