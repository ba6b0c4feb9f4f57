"""Damage: what a verification found damaged is condemned, as a record is that could not be read.

What memory has of a block that lost its record is written down again (dirty.py); a block that no tier has
whole any more is a miss from this event on.
"""

import numpy as np

from ....tiers.block import Tier
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..catalog.runs import column
from ..catalog.states import State
from ..events import FragmentsDamaged
from ..results import DamagedBlock, DamageResult
from .request_registry import RequestRegistry


class Damage:
    """Carries out FragmentsDamaged."""

    def __init__(self, core: CoreState, requests: RequestRegistry, residency: Residency) -> None:
        self._core = core
        self._requests = requests
        self._residency = residency

    def places_in(self, tier: Tier, number: int) -> list[int]:
        """Return the places of readable fragments in a segment or extent. Changes nothing."""
        catalog = self._core.catalog
        found = np.flatnonzero(column(catalog.place[tier]) >> 32 == number).tolist()
        is_readable = catalog.state[tier]
        return [catalog.place[tier][one] for one in found if is_readable[one] == State.RESIDENT]

    def condemn(self, event: FragmentsDamaged) -> None:
        """Condemn the fragments at these places; answer with their blocks and where else they are."""
        catalog, tier = self._core.catalog, event.tier
        rows = []
        for fragment in np.flatnonzero(np.isin(column(catalog.place[tier]), list(event.found))).tolist():
            if catalog.state[tier][fragment] == State.RESIDENT:
                place, row = catalog.place[tier][fragment], catalog.block_of[fragment]
                rows.append((place, catalog.namespace_id[row], catalog.prefix_hash[row]))
                self._residency.condemn(fragment, tier, event.found[place].value)
        blocks = [DamagedBlock(*one, self._readable_from(*one[1:])) for one in rows]
        self._requests.reply(event.call, DamageResult(blocks))

    def _readable_from(self, namespace_id: int, prefix_hash: bytes) -> str:
        catalog = self._core.catalog
        row = catalog.find(namespace_id, prefix_hash)
        tier = catalog.tier_of(row) if row != NO_ROW else None
        return tier.label if tier is not None else ""
