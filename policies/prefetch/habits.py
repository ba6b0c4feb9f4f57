"""Habits: what prefetchers learn about returns, one per appliance and kept over a restart.

A life table (returns.py) per kind of silence and last gap, each leaning on the table of all gaps of its kind,
and how far off announcements are. Conversations themselves are not kept: after a restart it is not known
since when each is silent, and a guess would prefetch blocks for conversations that are over.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..base import Surroundings
from .returns import MAX_AT_RISK, NUM_BINS, KeptPromises, ReturnTimes

NAME = "habits"
FORMAT = 1
#: In place of a last gap: the table of all of its kind of silence.
ANY_GAP = -2
#: Kinds of silence and gaps there can be, so that a damaged file makes no tables without end.
KEYS = range(-2, 64)


class Habits:
    """Life tables by kind of silence and last gap, and errors of announcements.

    Implements learned.Learner.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[int, int], ReturnTimes] = {}
        self.promises = KeptPromises()

    def table_of(self, silence: int, last_gap: int) -> ReturnTimes:
        """Return the life table of conversations like this one: same kind of silence, similar last gap.

        `last_gap` is the bin of the gap before this silence; -1 when there was none.
        """
        key = (silence, last_gap // 2)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = ReturnTimes(self._broad_of(silence))
        return table

    def _broad_of(self, silence: int) -> ReturnTimes:
        return self._tables.setdefault((silence, ANY_GAP), ReturnTimes())

    def dump(self) -> dict[str, Any]:
        """Return everything learned, in JSON's types, to be loaded after a restart."""
        tables = [[*key, *table.counts()] for key, table in self._tables.items()]
        return {"format": FORMAT, "tables": tables, "promises": self.promises.counts()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Replace what was learned by a `dump`. Raises ValueError, and changes nothing, if it is damaged."""
        if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
            raise ValueError("what was learned is of another version of the prefetcher; start without it")
        learned = Habits()
        rows = saved.get("tables")
        if not isinstance(rows, list):
            raise ValueError("what was learned holds no tables; start without it")
        for row in rows:
            if not isinstance(row, list) or len(row) != 4 or not all(key in KEYS for key in row[:2]):
                raise ValueError("what was learned holds a table of an impossible kind; start without it")
            silence, gap = int(row[0]), int(row[1])
            table = learned._broad_of(silence) if gap == ANY_GAP else learned.table_of(silence, 2 * gap)
            table.take(_numbers(row[2], NUM_BINS, MAX_AT_RISK), _numbers(row[3], NUM_BINS, MAX_AT_RISK))
        promises = _numbers(saved.get("promises"), len(self.promises.counts()), math.inf)
        if not any(promises):
            raise ValueError("what was learned holds no announced returns; start without it")
        learned.promises.take(promises)
        self._tables, self.promises = learned._tables, learned.promises


def habits_of(surroundings: Surroundings) -> Habits:
    """Return the habits that all prefetchers of one planner share."""
    habits: Habits = surroundings.shared.setdefault(NAME, Habits())
    return habits


def _numbers(values: object, count: int, highest: float) -> Sequence[float]:
    """Return numbers of a file. Raises ValueError where they are none, or impossible."""
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"what was learned should hold {count} numbers here; start without it")
    if not all(isinstance(one, int | float) and 0 <= one <= highest and one < math.inf for one in values):
        raise ValueError("what was learned holds impossible numbers; start without it")
    return [float(one) for one in values]
