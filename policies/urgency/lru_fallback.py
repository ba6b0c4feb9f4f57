"""Fallback to LRU: the forecast is followed as long as it finds about as much as LRU would.

What was learned can be wrong: habits change, or were noise. So a sample of the names that are asked for also
goes through an LRU with the same share of the room, which holds names and no bytes. The forecast has a
budget: it may have found less than LRU by MARGIN of all names asked for. When that is spent, blocks are
priced by age alone, which is LRU, until twice as much was asked for; the forecast goes on learning
meanwhile, and is then tried again. What it won before counts, but not for ever: sums halve.

Sources: a sample of names stands for all of them (Waldspurger et al., "SHARDS", FAST'15; miniature
simulations, ATC'17); two policies that compete on samples (Qureshi et al., "Set Dueling", ISCA 2007).
Rejected: judging window by window (a forecast that loses every other window and wins more in between was
abandoned: 12 points on one workload); a budget ten times smaller (the first minutes of a chat service were
enough to spend it, and three points went with it); a shadow for the forecast as well (it would need the tree
to price inner blocks as the tier does); weights by regret on ghosts (LeCaR, HotStorage'18): its draws tear
chains apart.
"""

from collections import OrderedDict
from collections.abc import Sequence

#: Names in the sample's room are this many at most, about; with fewer blocks, every name is in the sample.
MAX_SAMPLE = 2048
MARGIN = 0.01  # of the names asked for
#: Names that do not count as lost: a few chains found or not by chance.
SLACK = 32
#: Sums halve when the names asked for are this many times those in the sample's room.
MEMORY = 64
NUM_SHARES = 256


class LruFallback:
    """Says whether to follow the forecast. A few microseconds per request."""

    def __init__(self) -> None:
        self.follows_forecast = True
        self._lru: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._below = NUM_SHARES  # a name is in the sample if its second byte is below
        self._num_asked = 0.0
        self._num_lost = 0.0  # found by LRU and not by the tier; negative: the other way round

    def asked(self, found: Sequence[bytes], missed: Sequence[bytes], num_blocks: int) -> None:
        """Count the names that a request asked for, in chain order; `num_blocks` are stored by now."""
        below, lru = self._below, self._lru
        if below < NUM_SHARES:
            found = [name for name in found if name[1] < below]
            missed = [name for name in missed if name[1] < below]
        num_found_by_lru = 0
        for names in (missed, found):
            for name in reversed(names):  # the tail of a chain goes first
                if name in lru:
                    num_found_by_lru += 1
                    lru.move_to_end(name)
                else:
                    lru[name] = None
        capacity = max(1, num_blocks * below // NUM_SHARES)
        while len(lru) > capacity:
            lru.popitem(last=False)
        self._num_asked += len(found) + len(missed)
        if self.follows_forecast:
            self._num_lost += num_found_by_lru - len(found)
            self.follows_forecast = self._num_lost <= MARGIN * self._num_asked + SLACK
        else:
            self.follows_forecast = self._num_lost <= MARGIN / 2 * self._num_asked
        if self._num_asked > MEMORY * capacity:
            self._num_asked /= 2
            self._num_lost /= 2
            if capacity > MAX_SAMPLE and below > 1:
                self._thin_out()

    def _thin_out(self) -> None:
        """Halve the sample."""
        self._below //= 2
        for name in [name for name in self._lru if name[1] >= self._below]:
            del self._lru[name]
