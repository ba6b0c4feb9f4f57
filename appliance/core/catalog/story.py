"""The story: what happened to every block and session, with the reasons, as far back as memory allows.

One bounded ring for all subjects. A list per block was rejected: a million blocks would keep a million
lists alive for a question that people ask about a handful. Answering scans the ring, which takes
milliseconds and never happens on the way of a request.
"""

import math
from collections import deque
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias, cast


class Verdict(NamedTuple):
    """Why this block is evicted: its price, and the block that was next, at which price."""

    price: float = math.nan  # NaN: not priced
    next_price: float = math.nan  # NaN: no other candidate
    next_block: bytes = b""  # prefix hash


NO_VERDICT = Verdict()


class Line(NamedTuple):
    """One thing that happened."""

    at: float  # seconds on the shell's clock
    subject: bytes | str  # prefix hash of a block, or id of a session
    what: str
    why: str
    verdict: Verdict = NO_VERDICT


class Decision(NamedTuple):
    """One thing that was decided about one block or several together."""

    line: Line  # of the last of them
    num_blocks: int


_Value: TypeAlias = float | bytes | str
_Entry: TypeAlias = tuple[float, bytes | str, str, str, float, float, bytes]
_NUM_VALUES = 7  # of an entry


class Story:
    """A bounded log of decisions, and counters of the same words."""

    def __init__(self, max_lines: int) -> None:
        self._max_lines = max_lines
        # The values of entries, one behind the other. Were they tuples, Python's collector would look at a
        # whole ring of them at once, for 5 ms: it counts those that are new less those that are gone.
        self._values: deque[_Value] = deque(maxlen=_NUM_VALUES * max_lines)
        #: How often each `what` happened since the start.
        self.counters: dict[str, int] = {}

    def tell(
        self, at: float, subject: bytes | str, what: str, why: str = "", verdict: Verdict = NO_VERDICT
    ) -> None:
        """Remember that `what` happened to `subject`, and count it."""
        self._values.extend((at, subject, what, why, *verdict))
        self.counters[what] = self.counters.get(what, 0) + 1

    def tell_many(
        self,
        at: float,
        subjects: Sequence[bytes],
        what: str,
        why: str = "",
        verdict: Verdict = NO_VERDICT,
    ) -> None:
        """The same as `tell` for each of many blocks."""
        price, next_price, next_block = verdict
        self.counters[what] = self.counters.get(what, 0) + len(subjects)
        subjects = subjects[-self._max_lines :]  # what would be forgotten at once is not written
        values: list[_Value] = [at, b"", what, why, price, next_price, next_block] * len(subjects)
        values[1::_NUM_VALUES] = subjects
        self._values.extend(values)

    def count(self, what: str, by: int = 1) -> None:
        """Count something that is not worth a line."""
        self.counters[what] = self.counters.get(what, 0) + by

    def of(self, subject: bytes | str) -> list[Line]:
        """Return what is remembered about a block or session, oldest first."""
        return [_line(entry) for entry in self._entries() if entry[1] == subject]

    def starting_with(self, prefix: bytes) -> set[bytes]:
        """Return the blocks that are remembered under a hash that begins so."""
        return {s for _, s, *_ in self._entries() if isinstance(s, bytes) and s.startswith(prefix)}

    def decisions(
        self,
        words: frozenset[str],
        limit: int,
        max_lines: int = 20_000,
        about: Container[bytes | str] | None = None,
    ) -> list[Decision]:
        """Return the last `limit` decisions with a `what` in `words`, newest first.
        Blocks that were evicted together are one decision. Looks at the last `max_lines` lines at most, and
        `about` some subjects only when that is given."""
        found: list[Decision] = []
        kind: tuple[object, ...] = ()
        for entry in islice(self._newest_first(), max_lines):
            if entry[2] not in words or (about is not None and entry[1] not in about):
                continue
            if (entry[0], entry[2], entry[3], entry[6]) == kind:
                found[-1] = found[-1]._replace(num_blocks=found[-1].num_blocks + 1)
                continue
            if len(found) == limit:
                break
            kind = (entry[0], entry[2], entry[3], entry[6])
            found.append(Decision(_line(entry), 1))
        return found

    def _entries(self) -> Iterator[_Entry]:
        return cast(Iterator[_Entry], zip(*[iter(self._values)] * _NUM_VALUES, strict=True))

    def _newest_first(self) -> Iterator[_Entry]:
        for backwards in zip(*[reversed(self._values)] * _NUM_VALUES, strict=True):
            yield cast(_Entry, backwards[::-1])

    def words(self, subject: bytes | str) -> list[str]:
        """Return the story as text, for error messages."""
        return [f"{line.at:.6f} {line.what} {line.why}".rstrip() for line in self.of(subject)]


def _line(entry: _Entry) -> Line:
    at, subject, what, why, price, next_price, next_block = entry
    verdict = Verdict(price, next_price, next_block)
    return Line(at, subject, what, _with_prices(why, verdict), verdict)


def _with_prices(why: str, verdict: Verdict) -> str:
    """Add what the victim and the runner-up would have cost. Formatted here, because few lines are read."""
    price, next_price, next_block = verdict
    if math.isnan(price):
        return why
    if math.isnan(next_price):
        return f"{why}; price {price:.4g}, no other candidate"
    name = f" ({next_block.hex()[:8]})" if next_block else ""
    return f"{why}; price {price:.4g}, the next one{name} {next_price:.4g}"
