"""Retention hints: what clients said about how long tokens are worth keeping, by row.

A hint is a priority of 0 to 100 for a range of tokens, with a TTL after which the block is like any other.
Stored sparsely (`Catalog.retained`), because few blocks have one, and forgotten with the block. Policies see
`BlockFacts.retention(row, now)`; since a price changes when a TTL passes, the block is offered anew then.
"""

import heapq
from collections.abc import Sequence
from itertools import accumulate

from ....policies.base import DEFAULT_PRIORITY
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..events import RetentionHint

SLACK = 1024  # ends that are not worth a new heap


def hint_for(hints: Sequence[RetentionHint], token: int) -> RetentionHint | None:
    """Return the last hint with a token in its range."""
    for hint in reversed(hints):
        if hint.first_token <= token and (token < hint.end_token or not hint.end_token):
            return hint
    return None


def highest_priorities(
    hints: Sequence[RetentionHint], position: int, count: int, block_tokens: int
) -> list[int]:
    """Return the highest priority that hints give each block or one behind it.
    The blocks are `count` blocks of a chain from `position` on."""
    tokens = range(position * block_tokens, (position + count) * block_tokens, block_tokens)
    found = [hint_for(hints, token) for token in reversed(tokens)]
    priorities = [DEFAULT_PRIORITY if hint is None else hint.priority for hint in found]
    return list(accumulate(priorities, max))[::-1]


class RetentionHints:
    """Applies hints and ends them."""

    def __init__(self, core: CoreState, residency: Residency) -> None:
        self._core = core
        self._residency = residency
        self._ends: list[tuple[float, int]] = []  # (end of a TTL, handle); at most one entry counts per block

    def apply(self, rows: Sequence[int], hints: Sequence[RetentionHint]) -> None:
        """Give blocks the priority of the last hint with their first token in its range."""
        if not hints or not rows:
            return
        catalog, now = self._core.catalog, self._core.now
        block_tokens = catalog.block_tokens(rows[0])
        for row in rows:
            hint = hint_for(hints, catalog.position[row] * block_tokens)
            if hint is not None:
                self._set(row, hint.priority, now + hint.ttl_s if hint.ttl_s else float("inf"))
        self._core.story.count("blocks_with_retention", len(rows))

    def expire(self, now: float) -> None:
        """End hints past their TTL."""
        catalog = self._core.catalog
        while self._ends and self._ends[0][0] <= now:
            row = catalog.row_of(heapq.heappop(self._ends)[1])
            if row != NO_ROW and catalog.retained.get(row, (0, float("inf")))[1] <= now:
                del catalog.retained[row]
                self._offer(row)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        return self._ends[0][0] if self._ends else None

    def check_integrity(self) -> list[str]:
        """Audit: priorities are of living blocks, in range, and end when their TTL does."""
        catalog = self._core.catalog
        ends = set(self._ends)
        problems = []
        for row, (priority, until) in catalog.retained.items():
            if not catalog.prefix_hash[row]:
                problems.append(f"row {row}: has a priority and is no block")
            elif not 0 <= priority <= 100 or priority == DEFAULT_PRIORITY:
                problems.append(f"row {row}: priority {priority} is kept")
            elif until != float("inf") and (until, catalog.handle(row)) not in ends:
                problems.append(f"row {row}: the end of its priority was forgotten")
        return problems

    def _set(self, row: int, priority: int, until: float) -> None:
        catalog = self._core.catalog
        known = catalog.retained.get(row)
        if priority == DEFAULT_PRIORITY:
            catalog.retained.pop(row, None)
        else:
            catalog.retained[row] = (priority, until)
            if until != float("inf") and (known is None or known[1] != until):
                heapq.heappush(self._ends, (until, catalog.handle(row)))
                self._tidy()
        if known is None or known[0] != priority:
            self._offer(row)

    def _tidy(self) -> None:
        """Drop the ends that do not count any more when they outnumber those that do."""
        retained, handle = self._core.catalog.retained, self._core.catalog.handle
        if len(self._ends) > 2 * len(retained) + SLACK:
            self._ends = [
                (until, handle(row)) for row, (_, until) in retained.items() if until != float("inf")
            ]
            heapq.heapify(self._ends)

    def _offer(self, row: int) -> None:
        for tier in self._core.ladder.memory_tiers:
            if tier in self._core.rooms:
                self._residency.offer(row, tier)
