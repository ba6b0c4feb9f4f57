"""Runs: many blocks of one chain at once, in one pass over the columns.

A put of a prompt brings a run of new blocks, one the child of the other. One at a time each
costs a dozen calls; together they cost one loop with the columns in local variables, some 20 ns a value.
The steps are the same as in residency.py, and the simulator runs both.

Rejected: numpy writes (`column[rows] = value`) here. One costs 1.5 microseconds whatever its length, a prompt
brings fifteen blocks, and a put took a hundred of them: plain loops are quicker below about a hundred blocks,
and no step has more than 64. `column` is for code that reads a whole table at once.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..instructions import BlockChange, Publish
from .catalog import NO_ROW, NamespaceEntry
from .core_state import CoreState
from .fresh import FreshRun
from .residency import Residency

#: New blocks from which on a put takes this way: also one takes a sixth less time than by single steps, which
#: are the specification, and what a block takes of which something is stored. Seeds of the simulator choose.
MIN_RUN = 1


def column(values: "array[Any]") -> npt.NDArray[Any]:
    """Return a view on a column, to be read. Do not keep it: a column cannot grow while one is alive."""
    view = np.frombuffer(values, values.typecode)
    view.flags.writeable = False
    return view


def num_new(namespace: NamespaceEntry, prefix_hashes: Sequence[bytes]) -> int:
    """Return how many blocks are unknown, up to the first known one."""
    if len(set(prefix_hashes)) < len(prefix_hashes):  # a client's mistake
        prefix_hashes = _up_to_a_repetition(prefix_hashes)
    for number, row in enumerate(namespace.rows.find(prefix_hashes)):
        if row >= 0:
            return number
    return len(prefix_hashes)


def _up_to_a_repetition(prefix_hashes: Sequence[bytes]) -> Sequence[bytes]:
    seen: set[bytes] = set()
    for number, prefix_hash in enumerate(prefix_hashes):
        if prefix_hash in seen:
            return prefix_hashes[:number]
        seen.add(prefix_hash)
    return prefix_hashes


def admit_run(
    core: CoreState,
    namespace: NamespaceEntry,
    first_block: int,
    prefix_hashes: Sequence[bytes],
    parent: int,
    places: list[int],
) -> FreshRun:
    """Create the rows of a run of new blocks under `parent`, ARRIVING in the put tier at `places`, kept.

    `places` holds one place per fragment, block by block in group order.
    """
    catalog = core.catalog
    rows = catalog.add_run(namespace, prefix_hashes, parent, core.now)
    parent_hash = catalog.prefix_hash[parent] if parent != NO_ROW else b""
    fragments = catalog.fragments_of(rows, namespace.num_groups)
    core.transitions.reserve_run(rows, fragments, places)
    position = catalog.position[rows[0]]
    return FreshRun(namespace, first_block, prefix_hashes, parent_hash, position, rows, fragments, places)


def land_run(core: CoreState, run: FreshRun, checksums: Sequence[bytes]) -> None:
    """All bytes of a run arrived in the put tier, with these checksums: `Residency.land` for each fragment.

    Nothing but the put touched the blocks so far: it has one hold on each fragment, and keeps each block.
    """
    tier = core.ladder.put_tier
    core.transitions.land_run(run.rows, run.fragments, checksums)
    core.outbox.emit(Publish(tier, run.places, run.labels(checksums)))
    core.outbox.notify(BlockChange.STORED, run.namespace.id, tier, list(run.names))
    core.story.tell_many(core.now, run.namespace.id, run.names, core.stored_in[tier])


def refresh_run(core: CoreState, rows: Sequence[int]) -> None:
    """Note that these blocks were put just now."""
    last_used, now = core.catalog.last_used, core.now
    for row in rows:
        last_used[row] = now


def touch_run(core: CoreState, rows: Sequence[int], urgency: int) -> None:
    """Note that a request used these blocks. `urgency`: of its session, or NO_SESSION."""
    catalog, now = core.catalog, core.now
    last_used, num_uses, urgencies = catalog.last_used, catalog.num_uses, catalog.urgency
    for row in rows:
        last_used[row] = now
        num_uses[row] += 1
        urgencies[row] = urgency


def unkeep_run(residency: Residency, rows: Sequence[int]) -> None:
    """Undo one `keep` of each row (a row may occur more than once)."""
    free, nowhere = residency.core.transitions.unkeep_run(rows)
    for row in free:
        for tier in residency.core.policies.evictions:
            residency.offer(row, tier)
    for row in nowhere:
        residency.forget_if_nowhere(row)
