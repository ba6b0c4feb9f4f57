"""The tiers as `Appliance` drives them."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..tiers.base import Engine
from ..tiers.block import Tier
from ..tiers.cold.engine import ColdStore
from ..tiers.ladder import STANDARD, Ladder
from .transfer.lanes import Edge, Route


@dataclass(frozen=True, slots=True)
class TierBackends:
    """Engines, routes of copies, and the cold store, of which the shell also does the housekeeping.

    `max_in_flight` bounds the batches of copies per edge; `store` is None without nvme.
    """

    engines: Mapping[Tier, Engine]
    routes: Mapping[Edge, Route]
    max_in_flight: Mapping[Edge, int]
    store: ColdStore | None
    ladder: Ladder = STANDARD
