"""Assigns blocks to stretches: when they are stored, used again, or asked for and not kept.

The forecast says which visit they belong to (forecast.py); this part moves rows and ghosts between stretches,
and counts the uses that the appraiser learns from.
"""

from collections.abc import Iterable, Sequence

from ..base import BlockFacts
from .appraiser import Appraiser
from .stretches import UNKNOWN, Stretches
from .visits import NEW, NO_PAST, PRIVATE, TAIL, Past, Visit


class StretchAssigner:
    """Moves blocks into the stretches of a visit, new ones where their pasts differ."""

    def __init__(self, facts: BlockFacts, stretches: Stretches, appraiser: Appraiser) -> None:
        self._facts = facts
        self._stretches = stretches
        self._appraiser = appraiser

    def past_of(self, stretch: int, now: float) -> Past:
        """Return the past of a stretch's blocks that are used at `now`, in seconds."""
        stretches = self._stretches
        if stretch == UNKNOWN:
            return Past(0, 1, -1.0, 0.0)
        age_s = now - stretches.used_at[stretch]
        num_forks = stretches.num_forks[stretch]
        visit = stretches.visit[stretch]
        if visit is not None and not visit.turn and stretches.kind[stretch] >= PRIVATE:
            num_forks += 1  # the visit it had was a fork itself
        known_s = stretches.known_s[stretch] + age_s
        return Past(num_forks, stretches.num_uses[stretch] + 1, age_s, known_s)

    def use_again(self, visit: Visit, rows: Sequence[int], runs: Iterable[tuple[int, int, int]]) -> None:
        """Move blocks that a visit used again from their stretches to new ones of the visit.

        `runs`: (first, last + 1, stretch) of the parts of `rows` with one past each.
        """
        stretches = self._stretches
        last = UNKNOWN
        for first, end, before in runs:
            past = self.past_of(before, visit.used_at)
            if before:
                self._appraiser.count_use(before, visit.used_at, end - first)
            if not last or visit.kind_of(past) != stretches.kind[last]:
                last = self._open(visit, visit.kind_of(past), past)
            stretches.put(rows[first:end], last)

    def store(self, visit: Visit, rows: Sequence[int], names: Sequence[bytes]) -> None:
        """Put stored blocks of these names into stretches of a visit: new ones, and ghosts that are back."""
        stretches = self._stretches
        is_whole = self._facts.position[rows[-1]] + 1 >= visit.num_blocks
        fresh: list[int] = []
        returned: dict[int, list[int]] = {}
        for row, name, ghost in zip(rows, names, stretches.ghosts.get_all(names), strict=True):
            if ghost and stretches.visit[ghost] is not visit:
                returned.setdefault(ghost, []).append(row)
            else:
                if ghost:
                    stretches.remove_ghost(name)
                fresh.append(row)
        back = [row for rows_back in returned.values() for row in rows_back]
        ranges, first = [], 0
        for ghost, rows_back in returned.items():
            ranges.append((first, first + len(rows_back), ghost))
            first += len(rows_back)
        for row in back:
            name = self._facts.prefix_hash[row]
            stretches.num_ghosts[stretches.ghosts.pop(name)] -= 1
        self.use_again(visit, back, ranges)
        for ghost in returned:
            stretches.close_if_empty(ghost)
        tail = fresh[-1:] if is_whole and fresh and fresh[-1] == rows[-1] else []
        self._put_new(visit, fresh[:-1] if tail else fresh, NEW)
        self._put_new(visit, tail, TAIL)

    def restart_age(self, visit: Visit, now: float) -> None:
        """Restart the age of a visit's blocks: it is still adding some (its answer is decoded)."""
        visit.used_at = now
        stretches = self._stretches
        for stretch in visit.stretches:
            stretches.used_at[stretch] = now
            stretches.bin[stretch] = 0
            stretches.renew(stretch)
            self._appraiser.watch(stretch)

    def remember(self, visit: Visit, names: Sequence[bytes]) -> None:
        """Make ghosts of blocks that were asked for and not kept, `names` in chain order."""
        stretches = self._stretches
        for first, end, ghost in stretches.ghost_runs(names):
            if ghost and stretches.visit[ghost] is visit:
                continue
            if ghost:
                past = self.past_of(ghost, visit.used_at)
                self._appraiser.count_use(ghost, visit.used_at, end - first)
                stretch = self._open(visit, visit.kind_of(past), past)
            else:
                stretch = self._stretch_of(visit, NEW)
            stretches.add_ghosts(names[first:end], stretch)

    def _open(self, visit: Visit, kind: int, past: Past = NO_PAST) -> int:
        """Return a new stretch of a visit, with an age that begins at its last use."""
        stretches = self._stretches
        stretch = stretches.open(
            visit, visit.used_at, kind, past.num_forks, past.num_uses, past.age_s, past.known_s
        )
        visit.stretches.append(stretch)
        self._appraiser.watch(stretch)
        return stretch

    def _put_new(self, visit: Visit, rows: Sequence[int], kind: int) -> None:
        if rows:
            self._stretches.put(rows, self._stretch_of(visit, kind))

    def _stretch_of(self, visit: Visit, kind: int) -> int:
        """Return the stretch of a visit's new blocks, made if need be."""
        for stretch in visit.stretches:
            if self._stretches.kind[stretch] == kind:
                return stretch
        return self._open(visit, kind)
