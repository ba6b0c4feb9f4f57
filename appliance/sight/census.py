"""Census: the bytes of a tier by the urgency of whoever used them last.

Counted when somebody asks, in vectors over the catalog's columns, instead of kept: a change of urgency
touches thousands of rows, and books for that would cost every request for a picture that is looked at
now and then.
A million blocks take some 10 ms here (`python -m bench.sight`), so what was counted is used again for FRESH_S
or fifty times as long as counting took.
"""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from ...tiers.block import Tier, Urgency
from ..core.catalog import Catalog, Namespace
from ..core.runs import column
from ..core.states import State

FRESH_S = 0.5
MAX_SHARE = 0.02  # of the time, spent on counting

Count = dict[Tier, dict[Urgency, int]]


class Census:
    """Counts at most as often as it is worth."""

    def __init__(self, catalog: Catalog, tiers: Iterable[Tier], clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._tiers = list(tiers)
        self._clock = clock
        self._count: Count = {}
        self._good_until = float("-inf")

    def take(self) -> Count:
        """Return bytes by tier and urgency, as they were a moment ago."""
        began_at = self._clock()
        if began_at >= self._good_until:
            self._count = {tier: bytes_by_urgency(self._catalog, tier) for tier in self._tiers}
            ended_at = self._clock()
            self._good_until = ended_at + max(FRESH_S, (ended_at - began_at) / MAX_SHARE)
        return self._count


def bytes_by_urgency(catalog: Catalog, tier: Tier) -> dict[Urgency, int]:
    """Return the readable bytes of a tier by urgency. They sum to its used bytes, exactly."""
    resident = column(catalog.num_resident[tier])
    rows = np.flatnonzero(resident)
    counts = resident[rows]
    urgencies = column(catalog.urgency)[rows]
    namespace_ids = column(catalog.namespace_id)[rows]
    totals = np.zeros(len(Urgency), np.int64)
    for namespace in catalog.namespaces.values():
        mine = namespace_ids == namespace.id
        if mine.any():
            sizes = _bytes_of(catalog, tier, namespace, rows[mine], counts[mine])
            np.add.at(totals, urgencies[mine], sizes)
    return {urgency: int(totals[urgency]) for urgency in Urgency}


def _bytes_of(
    catalog: Catalog,
    tier: Tier,
    namespace: Namespace,
    rows: "npt.NDArray[np.intp]",
    counts: "npt.NDArray[np.uint16]",
) -> "npt.NDArray[np.int64]":
    """Return the readable bytes of each of these rows."""
    sizes = np.full(len(rows), namespace.block_bytes, np.int64)
    partial = counts != namespace.num_groups
    if partial.any():
        firsts = column(catalog.first_fragment)[rows[partial]]
        fragments = firsts[:, None] + np.arange(namespace.num_groups, dtype=np.int32)
        is_resident = column(catalog.state[tier])[fragments] == State.RESIDENT
        sizes[partial] = is_resident @ np.array(namespace.fragment_bytes, np.int64)
    return sizes
