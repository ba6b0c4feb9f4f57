"""What fetches remember of acquires that they hold back."""

from dataclasses import dataclass

from ..copying.source_speed import SourceSpeed
from ..events import AcquireRequested
from .leases import ClientEntry


@dataclass(slots=True)
class ParkedAcquire:
    """An acquire that waits for a search, at most until `search_until`; for fetches until `until`."""

    event: AcquireRequested
    search_until: float
    until: float
    search: int


@dataclass(slots=True)
class UnbegunFetches:
    """The rest of what an acquire fetches.

    Fetches of `size` blocks, from block `start` to `end`; the first `num_here` blocks of the chain are here.
    """

    event: AcquireRequested
    client: ClientEntry
    start: int
    end: int
    size: int
    num_here: int
    until: float
    speed: SourceSpeed
