"""A prompt that is put in several calls is one request: a client's staging extent holds only so much."""

from collections.abc import Sequence

from kvtier.policies.base import Use
from kvtier.policies.urgency.forecast import Forecast
from kvtier.policies.urgency.lru_fallback import LruFallback
from kvtier.tiers.block import Urgency

from .tree import NO_ROW, Facts, name


class Heard:
    """A forecast that hears of one conversation whose blocks were all evicted between its turns."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.forecast = Forecast(self.facts)

    def put(self, now: float, names: Sequence[bytes], *ends: int) -> list[int]:
        """Store a chain, in calls that end there; return its rows."""
        rows: list[int] = []
        for first, end in zip((0, *ends), (*ends, len(names)), strict=True):
            parent = rows[-1] if rows else NO_ROW
            new = []
            for one in names[first:end]:
                new.append(parent := self.facts.add(one, parent, now))
            self.forecast.stored(new, Use(now, 1, len(new), Urgency.QUEUED))
            rows += new
            now += 0.01
        return rows

    def evict(self, rows: Sequence[int]) -> None:
        for row in reversed(rows):
            self.forecast.forgotten([row])
            self.facts.remove(row)

    def next_turn(self, *ends: int) -> tuple[int, int]:
        """Return what is known of the second turn: which it is, and how many of its blocks were known."""
        self.evict(self.put(0.0, [name(n) for n in range(40)]))
        self.put(60.0, [name(n) for n in range(50)], *ends)
        visit = self.forecast._visit
        assert visit is not None
        assert not self.forecast.check_integrity()
        return visit.turn, visit.num_known


def test_what_is_known_of_a_request_does_not_depend_on_how_many_calls_put_it() -> None:
    """Between a daemon and its replay, which puts everything at once, lay 2.4 points of hits."""
    whole = Heard().next_turn()
    assert whole == (1, 40), "it goes on where the first one ended"
    for ends in ((20,), (10, 30), (39,), (40,), (45,)):
        assert Heard().next_turn(*ends) == whole, f"put in pieces that end at {ends}"


def test_the_fallback_hears_of_every_piece_once() -> None:
    asked: list[int] = []

    class Counting(LruFallback):
        def asked(self, found: Sequence[bytes], missed: Sequence[bytes], num_blocks: int) -> None:
            asked.append(len(missed))
            super().asked(found, missed, num_blocks)

    heard = Heard()
    heard.forecast._fallback = Counting()
    heard.put(0.0, [name(n) for n in range(12)], 5, 9)
    assert asked == [5, 4, 3]
