"""Census: the bytes of a tier by the urgency of the session that used them last.

Counted on demand, in vectors over the catalog's columns, instead of kept: a change of urgency
touches thousands of rows, and counters for that would cost every request for a picture that is looked at
now and then.
A million blocks take some 20 ms of a core, and requests wait meanwhile.
So what was counted is used again for FRESH_S, or two hundred times as long as counting took.
"""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from ...tiers.block import Tier, Urgency
from ..core.catalog.catalog import Catalog
from ..core.catalog.runs import column
from ..core.catalog.states import State
from ..core.encodings import AS_IT_IS

FRESH_S = 0.5
MAX_SHARE = 0.005  # of the time, spent on counting

#: Names of the classes, by their number in the catalog's column. `none`: no session since the daemon's start.
CLASSES = (*[urgency.name.lower() for urgency in Urgency], "none")

Count = dict[Tier, dict[str, int]]


class Census:
    """Counts at most as often as it is worth."""

    def __init__(self, catalog: Catalog, tiers: Iterable[Tier], clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._tiers = list(tiers)
        self._clock = clock
        self._count: Count = {}
        self._only_in_memory = (0, 0)
        self._good_until = float("-inf")

    def take(self) -> Count:
        """Return bytes by tier and class of CLASSES, as they were a moment ago."""
        began_at = self._clock()
        if began_at >= self._good_until:
            self._count = {tier: bytes_by_urgency(self._catalog, tier) for tier in self._tiers}
            self._only_in_memory = only_in_memory(self._catalog)
            ended_at = self._clock()
            self._good_until = ended_at + max(FRESH_S, (ended_at - began_at) / MAX_SHARE)
        return self._count

    def only_in_memory(self) -> tuple[int, int]:
        """Return (blocks, bytes) that the cold store has not, as they were a moment ago."""
        self.take()
        return self._only_in_memory


def only_in_memory(catalog: Catalog) -> tuple[int, int]:
    """Return (blocks, bytes of payload) of which memory has something, and the cold store not all."""
    numbers, num_groups, block_bytes = namespace_sizes(catalog)
    ladder = catalog.ladder
    memories = [column(catalog.num_resident[tier]) for tier in ladder.memory_tiers]
    rows = np.flatnonzero(np.logical_or.reduce(memories))
    which = np.searchsorted(numbers, column(catalog.namespace_id)[rows])
    which = which[column(catalog.num_resident[ladder.log_tier])[rows] < num_groups[which]]
    return len(which), int(block_bytes[which].sum())


def namespace_sizes(
    catalog: Catalog,
) -> "tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], npt.NDArray[np.int64]]":
    """Return ids (sorted), fragments and bytes of a block of all namespaces, (n,) each."""
    numbers = sorted(catalog.namespaces)
    sizes = [(catalog.namespaces[n].num_groups, catalog.namespaces[n].block_bytes) for n in numbers]
    num_groups, block_bytes = np.array(sizes, np.int64).reshape(-1, 2).T
    return np.array(numbers, np.uint32), num_groups, block_bytes


def bytes_by_urgency(catalog: Catalog, tier: Tier) -> dict[str, int]:
    """Return the readable bytes of a tier by class, a key for each of CLASSES.

    They sum to its used bytes, exactly.

    Blocks that are complete are counted by (namespace, class) and multiplied; of the others, and where
    fragments are encoded, each fragment is looked at.
    """
    numbers, num_groups, block_bytes = namespace_sizes(catalog)
    resident = column(catalog.num_resident[tier])
    rows = np.flatnonzero(resident)
    ids, urgencies = column(catalog.namespace_id)[rows], column(catalog.urgency)[rows]
    is_plain = tier != catalog.ladder.log_tier or len(catalog.encodings) == 1
    which = np.searchsorted(numbers, ids)
    is_complete = (resident[rows] == num_groups.astype(resident.dtype)[which]) & is_plain
    kinds = which[is_complete] * len(CLASSES) + urgencies[is_complete]
    counts = np.bincount(kinds, minlength=len(num_groups) * len(CLASSES)).reshape(-1, len(CLASSES))
    totals = block_bytes @ counts
    if len(kinds) < len(rows):
        others = ~is_complete
        _add_fragments(catalog, tier, rows[others], urgencies[others], ids[others], totals)
    return dict(zip(CLASSES, totals.tolist(), strict=True))


def _add_fragments(
    catalog: Catalog,
    tier: Tier,
    rows: "npt.NDArray[np.intp]",
    urgencies: "npt.NDArray[np.uint8]",
    ids: "npt.NDArray[np.uint32]",
    totals: "npt.NDArray[np.int64]",
) -> None:
    """Add the readable bytes of blocks to `totals`, by class, fragment by fragment."""
    encodings = catalog.encodings
    stored = np.array([encodings.stored_bytes(number, 0) for number in range(len(encodings))], np.int64)
    for number in np.unique(ids).tolist():
        namespace, mine = catalog.namespaces[number], ids == number
        firsts = column(catalog.first_fragment)[rows[mine]]
        fragments = firsts[:, None] + np.arange(namespace.num_groups, dtype=np.int32)
        is_resident = column(catalog.state[tier])[fragments] == State.RESIDENT
        sizes = np.array(namespace.fragment_bytes, np.int64)[None, :]
        if tier == catalog.ladder.log_tier:
            numbers = column(catalog.encoding)[fragments]
            sizes = np.where(numbers == AS_IT_IS, sizes, stored[numbers])
        num_bytes = (is_resident * sizes).sum(1)
        totals += np.bincount(urgencies[mine], num_bytes, len(totals)).astype(np.int64)
