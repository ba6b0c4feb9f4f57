"""The contracts of the policies: what they see and what they decide.

A policy sees blocks as row numbers and reads their attributes from `BlockFacts`, columns owned by the
catalog. It never sees bytes, places or clocks. The planner tells it when a block becomes a candidate;
the policy answers which candidate to give up first; the planner checks the rules (nobody reads it, no
child is left behind, no session decodes on it) and carries it out.
"""

from collections.abc import Sequence
from typing import Protocol


class BlockFacts(Protocol):
    """What is known about every block, one column per fact, indexed by row."""

    @property
    def last_used(self) -> Sequence[float]:
        """When the block was last used, in seconds."""
        ...

    @property
    def num_uses(self) -> Sequence[int]:
        """How often it was used since it was stored."""
        ...

    @property
    def position(self) -> Sequence[int]:
        """Its place in its chain, from 0."""
        ...

    @property
    def urgency(self) -> Sequence[int]:
        """Urgency of the session that used it last."""
        ...


class EvictionPolicy(Protocol):
    """Which block of one tier to give up first. One instance per tier."""

    def offer(self, block: int) -> None:
        """`block` may be given up from now on. Offering it again is allowed and refreshes its price."""
        ...

    def choose(self) -> int | None:
        """Remove and return the candidate to give up first; None when there is none.

        The answer may be out of date (the block may be in use again); the caller checks, and offers it
        again when it becomes a candidate.
        """
        ...

    def __len__(self) -> int:
        """Number of candidates, out-of-date ones included."""
        ...
