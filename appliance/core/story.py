"""The story: what happened to every block and session, with the reasons, as far back as memory allows.

One bounded ring for all subjects. A list per block was rejected: a million blocks would keep a million
lists alive for a question that people ask about a handful. Answering scans the ring, which takes
milliseconds and never happens on the way of a request.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Line(NamedTuple):
    """One thing that happened."""

    at: float  # seconds on the shell's clock
    subject: bytes | str  # prefix hash of a block, or id of a session
    what: str
    why: str


class Story:
    """A bounded log of decisions, and counters of the same words."""

    def __init__(self, max_lines: int) -> None:
        # Plain tuples of plain values: the garbage collector does not look into those. The last two are
        # the price of who left and of who would have been next; NaN when nobody was priced.
        self._lines: deque[tuple[float, bytes | str, str, str, float, float]] = deque(maxlen=max_lines)
        #: How often each `what` happened since the start.
        self.counters: dict[str, int] = {}

    def tell(
        self,
        at: float,
        subject: bytes | str,
        what: str,
        why: str = "",
        price: float = math.nan,
        next_price: float = math.nan,
    ) -> None:
        """Remember that `what` happened to `subject`, and count it."""
        self._lines.append((at, subject, what, why, price, next_price))
        self.counters[what] = self.counters.get(what, 0) + 1

    def tell_many(
        self,
        at: float,
        subjects: Sequence[bytes],
        what: str,
        why: str = "",
        price: float = math.nan,
        next_price: float = math.nan,
    ) -> None:
        """The same as `tell` for each of many blocks."""
        self._lines.extend([(at, subject, what, why, price, next_price) for subject in subjects])
        self.counters[what] = self.counters.get(what, 0) + len(subjects)

    def count(self, what: str, by: int = 1) -> None:
        """Count something that is not worth a line."""
        self.counters[what] = self.counters.get(what, 0) + by

    def of(self, subject: bytes | str) -> list[Line]:
        """Return what is remembered about a block or session, oldest first."""
        return [
            Line(at, name, what, _with_prices(why, price, next_price))
            for at, name, what, why, price, next_price in self._lines
            if name == subject
        ]

    def words(self, subject: bytes | str) -> list[str]:
        """Return the story as text, for error messages."""
        return [f"{line.at:.6f} {line.what} {line.why}".rstrip() for line in self.of(subject)]


def _with_prices(why: str, price: float, next_price: float) -> str:
    """Add what the victim and the runner-up would have cost. Formatted here, because few lines are read."""
    if math.isnan(price):
        return why
    runner_up = "nobody else could go" if math.isnan(next_price) else f"the next one {next_price:.4g}"
    return f"{why}; price {price:.4g}, {runner_up}"
