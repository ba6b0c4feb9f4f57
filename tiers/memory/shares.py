"""Limits of what a group of isolation domains may take of a memory tier together.

Counted in extents, because an extent is bound to one domain for its whole life: what a domain took it never
gives back to others, so a limit on bytes in use would come too late.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Share:
    """Extents that some domains may have together, and have. Shared by their entries in a SlotPool."""

    max_extents: int
    num_extents: int = 0

    @property
    def is_used_up(self) -> bool:
        """Whether no further extent may be bound."""
        return self.num_extents >= self.max_extents
