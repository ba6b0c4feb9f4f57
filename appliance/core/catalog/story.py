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
    namespace_id: int  # of a block
    what: str
    why: str
    verdict: Verdict = NO_VERDICT


class Decision(NamedTuple):
    """One thing that was decided about one block or several together."""

    line: Line  # of the last of them
    num_blocks: int


_Value: TypeAlias = float | bytes | str
_Entry: TypeAlias = tuple[float, bytes | str, int, str, str, float, float, bytes]
_NUM_VALUES = 8  # of an entry


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
        self,
        at: float,
        subject: bytes | str,
        what: str,
        why: str = "",
        verdict: Verdict = NO_VERDICT,
        namespace_id: int = 0,
    ) -> None:
        """Remember that `what` happened to `subject`, and count it.

        Blocks of two namespaces may have one hash: `namespace_id` says which it was."""
        self._values.extend((at, subject, namespace_id, what, why, *verdict))
        self.counters[what] = self.counters.get(what, 0) + 1

    def tell_many(
        self,
        at: float,
        namespace_id: int,
        subjects: Sequence[bytes],
        what: str,
        why: str = "",
        verdict: Verdict = NO_VERDICT,
    ) -> None:
        """The same as `tell` for each of many blocks of a namespace."""
        price, next_price, next_block = verdict
        self.counters[what] = self.counters.get(what, 0) + len(subjects)
        subjects = subjects[-self._max_lines :]  # what would be forgotten at once is not written
        values: list[_Value] = [at, b"", namespace_id, what, why, price, next_price, next_block] * len(
            subjects
        )
        values[1::_NUM_VALUES] = subjects
        self._values.extend(values)

    def count(self, what: str, by: int = 1) -> None:
        """Count something that is not worth a line."""
        self.counters[what] = self.counters.get(what, 0) + by

    def of(self, subject: bytes | str, namespace_id: int = 0) -> list[Line]:
        """Return what is remembered about a block of a namespace, or about a session, oldest first."""
        key = subject, namespace_id
        return [_line(entry) for entry in self._entries() if entry[1:3] == key]

    def starting_with(self, prefix: bytes, namespace_id: int) -> set[bytes]:
        """Return the blocks of a namespace that are remembered under a hash that begins so."""
        return {
            subject
            for _, subject, number, *_ in self._entries()
            if number == namespace_id and isinstance(subject, bytes) and subject.startswith(prefix)
        }

    def decisions(
        self,
        words: frozenset[str],
        limit: int,
        max_lines: int = 20_000,
        about: Container[bytes | str] | None = None,
        namespace_id: int = 0,
    ) -> list[Decision]:
        """Return the last `limit` decisions with a `what` in `words`, newest first.
        Blocks that were evicted together are one decision. Looks at the last `max_lines` lines at most, and
        `about` some blocks of a namespace only when these are given."""
        found: list[Decision] = []
        kind: tuple[object, ...] = ()
        for entry in islice(self._newest_first(), max_lines):
            at, subject, number, what, why, _, _, next_block = entry
            if what not in words:
                continue
            if about is not None and (subject not in about or number != namespace_id):
                continue
            if (at, what, why, next_block) == kind:
                found[-1] = found[-1]._replace(num_blocks=found[-1].num_blocks + 1)
                continue
            if len(found) == limit:
                break
            kind = (at, what, why, next_block)
            found.append(Decision(_line(entry), 1))
        return found

    def _entries(self) -> Iterator[_Entry]:
        return cast(Iterator[_Entry], zip(*[iter(self._values)] * _NUM_VALUES, strict=True))

    def _newest_first(self) -> Iterator[_Entry]:
        for backwards in zip(*[reversed(self._values)] * _NUM_VALUES, strict=True):
            yield cast(_Entry, backwards[::-1])

    def words(self, subject: bytes | str, namespace_id: int = 0) -> list[str]:
        """Return the story as text, for error messages."""
        return [f"{line.at:.6f} {line.what} {line.why}".rstrip() for line in self.of(subject, namespace_id)]


def _line(entry: _Entry) -> Line:
    at, subject, namespace_id, what, why, price, next_price, next_block = entry
    verdict = Verdict(price, next_price, next_block)
    return Line(at, subject, namespace_id, what, _with_prices(why, verdict), verdict)


def _with_prices(why: str, verdict: Verdict) -> str:
    """Add what the victim and the runner-up would have cost. Formatted here, because few lines are read."""
    price, next_price, next_block = verdict
    if math.isnan(price):
        return why
    if math.isnan(next_price):
        return f"{why}; price {price:.4g}, no other candidate"
    name = f" ({next_block.hex()[:8]})" if next_block else ""
    return f"{why}; price {price:.4g}, the next one{name} {next_price:.4g}"
