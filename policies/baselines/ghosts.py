"""Ghosts: the names of blocks that left a tier a short while ago.

A ghost that comes back was evicted too early, which is what S3-FIFO and ARC learn from. Ghosts are kept by
prefix hash: the row of a block that left may name another block by the time the first one comes back.

An OrderedDict does all this in three lines, and stops for 35 ms whenever a million entries are hashed anew.
So the names are spread over many small dicts, and their order is in deques, which never move: names in one,
numbers in another, because a tuple of both is an object more for the garbage collector to look at, which
stopped for 6 ms. `Ghosts` is a set of names, `Names` keeps a number with each.
"""

from collections import deque
from collections.abc import Iterable, Sequence

NUM_SHARDS = 256
SLACK = 64


class Names:
    """A number (not 0) per name, oldest name first. Names are hashes: their first byte chooses the shard.

    Names that come together are forgotten together: what is kept of their order is the order of the groups.
    """

    def __init__(self) -> None:
        self._numbers: list[dict[bytes, int]] = [{} for _ in range(NUM_SHARDS)]
        #: Names as they were set, and the size and number of each group. An entry is dead when its shard has
        #: another number.
        self._order: deque[bytes] = deque()
        self._group_sizes: deque[int] = deque()
        self._group_numbers: deque[int] = deque()
        self._num_names = 0

    def get(self, name: bytes) -> int:
        """Return the number of a name; 0 when it is not here."""
        return self._numbers[name[0]].get(name, 0)

    def get_all(self, names: Iterable[bytes]) -> list[int]:
        """Return the numbers of names, 0 for each that is not here."""
        shards = self._numbers
        return [shards[name[0]].get(name, 0) for name in names]

    def set(self, names: Sequence[bytes], number: int) -> list[int]:
        """Set the number of names, and make them the youngest. Returns the numbers that some of them had."""
        shards, numbers_before = self._numbers, []
        for name in names:
            shard = shards[name[0]]
            if name in shard:
                numbers_before.append(shard[name])
            shard[name] = number
        self._num_names += len(names) - len(numbers_before)
        self._order.extend(names)
        self._group_sizes.append(len(names))
        self._group_numbers.append(number)
        return numbers_before

    def pop(self, name: bytes) -> int:
        """Remove a name; return its number, or 0."""
        number = self._numbers[name[0]].pop(name, 0)
        self._num_names -= number != 0
        return number

    def pop_oldest(self, max_names: int) -> tuple[int, int]:
        """Remove the oldest group if there are more than `max_names`; never the youngest group.

        The dead are counted with the living twice over. Returns its number and how many of its names were
        still living. The number is 0 when nothing was removed.
        """
        order, shards = self._order, self._numbers
        is_crowded = self._num_names > max_names or len(order) > 2 * max_names + SLACK
        if not is_crowded or len(self._group_sizes) == 1:
            return 0, 0
        number, num_living = self._group_numbers.popleft(), 0
        for _ in range(self._group_sizes.popleft()):
            name = order.popleft()
            shard = shards[name[0]]
            found = shard.pop(name, 0)
            if found == number:
                num_living += 1
            elif found:
                shard[name] = found  # it was set again since
        self._num_names -= num_living
        return number, num_living

    def numbers(self) -> list[int]:
        """Return the numbers of all names."""
        return [number for shard in self._numbers for number in shard.values()]

    def __contains__(self, name: bytes) -> bool:
        return name in self._numbers[name[0]]

    def __len__(self) -> int:
        return self._num_names


class Ghosts:
    """A bounded set of prefix hashes, oldest first. About 250 bytes each."""

    def __init__(self) -> None:
        self._names = Names()
        self._num_added = 0

    def add(self, prefix_hash: bytes, max_ghosts: int) -> None:
        """Add the name of a block that left; drop a few of the oldest beyond `max_ghosts`, never this one.

        The limit follows the tier, so it may fall: several per addition catch up without a pause. The dead
        count with the living twice over: where most ghosts come back, the others are forgotten a bit early.
        """
        self._num_added += 1
        self._names.set([prefix_hash], self._num_added)
        for _ in range(4):
            self._names.pop_oldest(max_ghosts)

    def take(self, prefix_hash: bytes) -> bool:
        """Remove the name of a block that is back; return whether it was a ghost."""
        return self._names.pop(prefix_hash) != 0

    def __len__(self) -> int:
        return len(self._names)
