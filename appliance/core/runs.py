"""Runs: many blocks of one chain at once, in one pass over the columns.

A put of a prompt brings a run of blocks that nobody has seen, one the child of the other. One at a time each
costs a dozen calls; together they cost one loop with the columns in local variables, some 20 ns a value.
The steps are the same as in residency.py, and the simulator runs both.

Rejected: numpy writes (`column[rows] = value`) here. One costs 1.5 microseconds whatever its length, a prompt
brings fifteen blocks, and a put took a hundred of them: plain loops are quicker below about a hundred blocks,
and no step has more than 64. `column` is for those who look at a whole table at once.
"""

import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...tiers.block import NO_SESSION, Tier
from .catalog import NO_ROW, Catalog, Namespace
from .fresh import FreshRun
from .instructions import BlockChange, Notify, PublishRun
from .residency import STORED_IN, Residency
from .states import State

#: Blocks from which on a put takes this way. The other one is the specification; seeds choose.
MIN_RUN = 2


def column(values: "array[Any]") -> npt.NDArray[Any]:
    """Return a writable view on a column. Do not keep it: a column cannot grow while one is alive."""
    return np.frombuffer(values, values.typecode)


def num_new(namespace: Namespace, prefix_hashes: Sequence[bytes]) -> int:
    """Return how many blocks are unknown, up to the first known one."""
    shards = namespace.rows.shards
    if len(set(prefix_hashes)) < len(prefix_hashes):  # a client's mistake
        prefix_hashes = _up_to_a_repetition(prefix_hashes)
    for number, prefix_hash in enumerate(prefix_hashes):
        if prefix_hash in shards[prefix_hash[0]]:
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
    residency: Residency,
    namespace: Namespace,
    first_block: int,
    prefix_hashes: Sequence[bytes],
    parent: int,
    places: list[int],
) -> FreshRun:
    """Create the rows of a run of new blocks under `parent`, ARRIVING in dram at `places`, kept.

    `places` holds one place per fragment, block by block in group order.
    """
    catalog = residency.catalog
    rows = catalog.take_rows(namespace, len(prefix_hashes))
    parent_hash, position = b"", 0
    if parent != NO_ROW:
        parent_hash, position = catalog.prefix_hash[parent], catalog.position[parent] + 1
        catalog.num_children_placed[Tier.DRAM][parent] += 1
    fragments = catalog.fragments_of(rows, namespace.num_groups)
    run = FreshRun(namespace, first_block, prefix_hashes, parent_hash, position, rows, fragments, places)
    _fill_rows(residency, run)
    _fill_fragments(catalog, run)
    catalog.link(rows[0], parent)
    residency.arriving_bytes[Tier.DRAM] += len(rows) * namespace.block_bytes
    return run


def _fill_rows(residency: Residency, run: FreshRun) -> None:
    """Fill the block columns of free rows that follow one another in a chain. The first is to be linked."""
    catalog, now = residency.catalog, residency.now
    shards, names, number = run.namespace.rows.shards, catalog.prefix_hash, run.namespace.id
    namespace_ids, positions = catalog.namespace_id, catalog.position
    last_used, num_uses, urgencies = catalog.last_used, catalog.num_uses, catalog.urgency
    keepers, parents, first_child = catalog.num_keepers, catalog.parent, catalog.first_child
    num_placed, num_holds = catalog.num_placed[Tier.DRAM], catalog.num_holds[Tier.DRAM]
    children, num_groups = catalog.num_children_placed[Tier.DRAM], run.namespace.num_groups
    position, before = run.position, NO_ROW
    for prefix_hash, row in zip(run.names, run.rows, strict=True):
        shards[prefix_hash[0]][prefix_hash] = row
        names[row] = prefix_hash
        namespace_ids[row] = number
        positions[row] = position
        last_used[row] = now
        num_uses[row] = 0
        urgencies[row] = NO_SESSION
        keepers[row] = 1
        num_placed[row] = num_holds[row] = num_groups
        if before >= 0:
            parents[row] = before
            first_child[before] = row
            children[before] = 1
        before = row
        position += 1


def _fill_fragments(catalog: Catalog, run: FreshRun) -> None:
    """Fill the fragment columns of new blocks. Checksums come with the bytes."""
    place_of, states = catalog.place[Tier.DRAM], catalog.state[Tier.DRAM]
    holds, arriving = catalog.holds[Tier.DRAM], int(State.ARRIVING)
    for fragment, place in zip(run.fragments, run.places, strict=True):
        place_of[fragment] = place
        states[fragment] = arriving
        holds[fragment] = 1


def land_run(residency: Residency, run: FreshRun, checksums: Sequence[bytes]) -> None:
    """All bytes of a run arrived in dram, with these checksums. The same step as Residency.land for each.

    Nobody but the put touched the blocks so far: it has one hold on each fragment, and keeps each block.
    """
    catalog, tier = residency.catalog, Tier.DRAM
    states, holds = catalog.state[tier], catalog.holds[tier]
    lows, highs = catalog.checksum_low, catalog.checksum_high
    arriving, resident = int(State.ARRIVING), int(State.RESIDENT)
    halves = struct.unpack(f">{2 * len(checksums)}Q", b"".join(checksums))
    for fragment, high, low in zip(run.fragments, halves[::2], halves[1::2], strict=True):
        assert states[fragment] == arriving
        states[fragment] = resident
        highs[fragment], lows[fragment] = high, low
        holds[fragment] = 0
    num_holds, num_resident = catalog.num_holds[tier], catalog.num_resident[tier]
    num_groups = run.namespace.num_groups
    for row in run.rows:
        num_holds[row] = 0
        num_resident[row] = num_groups
    num_bytes = len(run.rows) * run.namespace.block_bytes
    residency.arriving_bytes[tier] -= num_bytes
    residency.resident_bytes[tier] += num_bytes
    residency.num_resident[tier] += len(run.fragments)
    residency.out.append(PublishRun(tier, run.places, run.labels(checksums)))
    residency.add_notice(Notify(BlockChange.STORED, run.namespace.id, tier, list(run.names)))
    residency.story.tell_many(residency.now, run.names, STORED_IN[tier])


def refresh_run(residency: Residency, rows: Sequence[int]) -> None:
    """Note that these blocks were put just now."""
    last_used, now = residency.catalog.last_used, residency.now
    for row in rows:
        last_used[row] = now


def touch_run(residency: Residency, rows: Sequence[int], urgency: int) -> None:
    """Note that a request used these blocks. `urgency`: of its session, or NO_SESSION."""
    catalog, now = residency.catalog, residency.now
    last_used, num_uses, urgencies = catalog.last_used, catalog.num_uses, catalog.urgency
    for row in rows:
        last_used[row] = now
        num_uses[row] += 1
        urgencies[row] = urgency


def unkeep_run(residency: Residency, rows: Sequence[int]) -> None:
    """Undo one `keep` of each row (a row may occur more than once)."""
    catalog = residency.catalog
    keepers, (in_hbm, in_dram, in_nvme) = catalog.num_keepers, catalog.num_placed
    below_dram = catalog.num_children_placed[Tier.DRAM]
    free, nowhere = [], []
    for row in rows:
        assert keepers[row] > 0
        keepers[row] = count = keepers[row] - 1
        if count or (below_dram[row] and not in_hbm[row]):  # who has a child there stays there
            continue
        if in_dram[row] or in_hbm[row]:
            free.append(row)
        elif not in_nvme[row]:
            nowhere.append(row)
    for row in free:
        for tier in residency.evictions:
            residency.offer(row, tier)
    for row in nowhere:
        residency.forget_if_nowhere(row)
