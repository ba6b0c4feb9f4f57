"""Count-min sketch that ages: about how often a name was seen, in a few bytes per name.

Cormode and Muthukrishnan 2005, with the ageing of TinyLFU (Einziger, Friedman and Manes, ACM ToS 2017):
counters stop at 15, and all are halved after ten additions per counter of a row, so that the past fades.
The doorkeeper of the paper is left out: it saves memory that names of 32 bytes do not let us notice.

It never counts too little, and too much only when a name meets others in all four rows. Prefix hashes come
from clients, so all their bytes are folded in before they are trusted to be random; `hash()` is not used,
because it differs from process to process and a replay must not.
"""

NUM_ROWS = 4
MAX_COUNT = 15
FIRST_WIDTH = 1024
ADDITIONS_PER_COUNTER = 10
#: A prime below 2**128: the remainder of a multiple has bits for all rows, and all bytes of a name in each.
PRIME = (1 << 127) - 1
SPREAD = 0x5851F42D4C957F2D14057B7EF767814F
HALVED = bytes(value // 2 for value in range(256))


class FrequencySketch:
    """Four rows of counters, one byte each. Widths are powers of two."""

    def __init__(self) -> None:
        self._rows = [bytearray(FIRST_WIDTH) for _ in range(NUM_ROWS)]
        self._mask = FIRST_WIDTH - 1
        self._num_additions = 0

    def add(self, name: bytes) -> None:
        """Count a name once more."""
        places = self._places(name)
        counts = [row[place] for row, place in zip(self._rows, places, strict=True)]
        lowest = min(counts)
        if lowest < MAX_COUNT:
            for row, place, count in zip(self._rows, places, counts, strict=True):
                if count == lowest:  # "conservative update": the others are too high already
                    row[place] += 1
        self._num_additions += 1
        self._age()

    def count(self, name: bytes) -> int:
        """Return how often a name was seen lately; too high at times, never too low."""
        first, second, third, fourth = self._rows
        i, j, k, m = self._places(name)
        return min(first[i], second[j], third[k], fourth[m])

    def fit(self, num_names: int) -> None:
        """Have at least one counter per name in each row. A doubled sketch keeps all its counts."""
        while self._mask + 1 < num_names:
            self._rows = [row + row for row in self._rows]
            self._mask = 2 * self._mask + 1

    def _places(self, name: bytes) -> tuple[int, int, int, int]:
        bits = int.from_bytes(name, "little") * SPREAD % PRIME
        mask = self._mask
        return bits & mask, bits >> 31 & mask, bits >> 62 & mask, bits >> 93 & mask

    def _age(self) -> None:
        """Halve all counts, one row at an addition, when it is time: a million counters take a while."""
        row = self._num_additions - ADDITIONS_PER_COUNTER * (self._mask + 1)
        if row >= 0:
            self._rows[row] = self._rows[row].translate(HALVED)
            if row == NUM_ROWS - 1:
                self._num_additions //= 2
