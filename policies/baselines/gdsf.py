"""GreedyDual-Size-Frequency: uses times cost per byte, on a rising floor.

Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP Labs
1998: priority = floor at the last use + uses x cost / size. The floor rises to the price of whatever left
last, so what was popular once has to be used again to stay. With equal costs this is LFU with dynamic
ageing.

Cost is the prefill time of the block at its position (attention makes later blocks dearer), or its tokens
where the hit ratio is the aim. Counts and costs belong to the block, so nothing changes on a prefix tree
but the candidates: a parent is used at least as often as its children, though its prefill is cheaper; it
leaves in the same step when that makes it worth no more than the victim.
"""

from array import array
from collections.abc import Sequence

from ..base import Surroundings, Use, Victim
from ..options import BadPolicyOption
from .arrivals import GROWTH
from .priced import PricedEviction

OBJECTIVES = ("seconds", "tokens")


class GdsfEviction(PricedEviction):
    """Price: seconds of prefill (or tokens) per byte, times uses, above the floor."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        options = {"objective": "seconds", **surroundings.options}
        if set(options) != {"objective"} or options["objective"] not in OBJECTIVES:
            raise BadPolicyOption(
                f"policy 'gdsf' has one option, objective: {' or '.join(OBJECTIVES)}; not {options}"
            )
        self._costs = surroundings.costs
        self._is_for_seconds = options["objective"] == "seconds"
        self._floor = 0.0
        self._floor_at_use = array("d")  # by row
        self._victim: Victim | None = None  # the last one chosen; the planner may have kept it

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Raise used blocks to the present floor."""
        self._lift(rows)

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Start new blocks at the present floor."""
        self._lift(rows)

    def price(self, row: int, now: float) -> float:
        """Return the price: floor at the last use, plus uses times cost per byte."""
        facts = self._facts
        floor = self._floor_at_use[row] if row < len(self._floor_at_use) else 0.0
        if self._is_for_seconds:
            cost = self._costs.recompute_s(facts.namespace_id[row], facts.position[row])
        else:
            cost = facts.block_tokens(row)
        return floor + (facts.num_uses[row] + 1) * cost / facts.block_bytes(row)

    def choose(self, now: float) -> Victim | None:
        """Remove and return the candidate with the lowest price."""
        self._victim = super().choose(now)
        return self._victim

    def left(self, rows: Sequence[int]) -> None:
        """Drop blocks that left this tier.

        Raises the floor to the price of the chosen one, if it is among them.
        """
        if self._victim is not None and self._victim.row in rows:
            self._floor = max(self._floor, self._victim.price)
        super().left(rows)

    def _lift(self, rows: Sequence[int]) -> None:
        floors = self._floor_at_use
        for row in rows:
            if row >= len(floors):
                floors.extend([0.0] * (row + GROWTH - len(floors)))
            floors[row] = self._floor
