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

from ...tiers.block import FragmentLabel, Tier
from .catalog import NO_ROW, Namespace
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
    prefix_hashes: Sequence[bytes],
    parent: int,
    places: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Create the rows of a run of new blocks under `parent`, ARRIVING in dram at `places`, kept.

    `places` holds one place per fragment, block by block in group order. Returns (rows, fragments).
    """
    catalog = residency.catalog
    rows, firsts = catalog.take_rows(namespace, len(prefix_hashes))
    _fill_rows(residency, rows, firsts, namespace, prefix_hashes, parent)
    catalog.link(rows[0], parent)
    if parent != NO_ROW:
        catalog.num_children_placed[Tier.DRAM][parent] += 1
    num_groups = namespace.num_groups
    if num_groups == 1:
        fragments, owners = firsts, rows
    else:
        fragments = [fragment for first in firsts for fragment in range(first, first + num_groups)]
        owners = [row for row in rows for _ in range(num_groups)]
    _fill_fragments(residency, fragments, owners, places)
    residency.arriving_bytes[Tier.DRAM] += len(rows) * namespace.block_bytes
    return rows, fragments


def _fill_rows(
    residency: Residency,
    rows: Sequence[int],
    firsts: Sequence[int],
    namespace: Namespace,
    prefix_hashes: Sequence[bytes],
    parent: int,
) -> None:
    """Fill the block columns of rows that follow one another in a chain. The first is to be linked."""
    catalog, now, urgency = residency.catalog, residency.now, int(residency.catalog.NEW_URGENCY)
    shards, names, number = namespace.rows.shards, catalog.prefix_hash, namespace.id
    namespace_ids, positions, first_fragments = catalog.namespace_id, catalog.position, catalog.first_fragment
    last_used, num_uses, urgencies = catalog.last_used, catalog.num_uses, catalog.urgency
    keepers, parents, first_child = catalog.num_keepers, catalog.parent, catalog.first_child
    following, preceding = catalog.next_sibling, catalog.previous_sibling
    num_placed, num_holds = catalog.num_placed[Tier.DRAM], catalog.num_holds[Tier.DRAM]
    children, num_groups = catalog.num_children_placed[Tier.DRAM], namespace.num_groups
    position = positions[parent] + 1 if parent != NO_ROW else 0
    before = NO_ROW
    for prefix_hash, row, first in zip(prefix_hashes, rows, firsts, strict=True):
        shards[prefix_hash[0]][prefix_hash] = row
        names[row] = prefix_hash
        namespace_ids[row] = number
        positions[row] = position
        first_fragments[row] = first
        last_used[row] = now
        num_uses[row] = 0
        urgencies[row] = urgency
        keepers[row] = 1
        following[row] = preceding[row] = NO_ROW
        num_placed[row] = num_holds[row] = num_groups
        if before >= 0:
            parents[row] = before
            first_child[before] = row
            children[before] = 1
        before = row
        position += 1
    first_child[before] = NO_ROW


def _fill_fragments(
    residency: Residency, fragments: Sequence[int], owners: Sequence[int], places: Sequence[int]
) -> None:
    """Fill the fragment columns of new blocks."""
    catalog = residency.catalog
    block_of, lows, highs = catalog.block_of, catalog.checksum_low, catalog.checksum_high
    place_of, states = catalog.place[Tier.DRAM], catalog.state[Tier.DRAM]
    holds, arriving = catalog.holds[Tier.DRAM], int(State.ARRIVING)
    for fragment, row, place in zip(fragments, owners, places, strict=True):
        block_of[fragment] = row
        lows[fragment] = highs[fragment] = 0
        place_of[fragment] = place
        states[fragment] = arriving
        holds[fragment] = 1


def land_run(residency: Residency, fragments: Sequence[int], labels: list[FragmentLabel]) -> None:
    """The bytes of distinct fragments of a put arrived in dram, with the checksums in `labels`.

    The same step as Residency.land for each. Their blocks are kept by the put, and of one namespace.
    """
    catalog, tier = residency.catalog, Tier.DRAM
    states, holds, place_of = catalog.state[tier], catalog.holds[tier], catalog.place[tier]
    lows, highs, block_of = catalog.checksum_low, catalog.checksum_high, catalog.block_of
    num_holds, num_resident, names = catalog.num_holds[tier], catalog.num_resident[tier], catalog.prefix_hash
    namespace = catalog.namespace_of(block_of[fragments[0]])
    num_groups, arriving, resident = namespace.num_groups, int(State.ARRIVING), int(State.RESIDENT)
    halves = struct.unpack(f">{2 * len(labels)}Q", b"".join([label.checksum for label in labels]))
    complete, places = [], []
    for fragment, high, low in zip(fragments, halves[::2], halves[1::2], strict=True):
        assert states[fragment] == arriving
        states[fragment] = resident
        highs[fragment], lows[fragment] = high, low
        holds[fragment] -= 1
        places.append(place_of[fragment])
        row = block_of[fragment]
        num_holds[row] -= 1
        num_resident[row] = count = num_resident[row] + 1
        if count == num_groups:
            complete.append(names[row])
    num_bytes = sum([label.raw_length for label in labels])
    residency.arriving_bytes[tier] -= num_bytes
    residency.resident_bytes[tier] += num_bytes
    residency.num_resident[tier] += len(fragments)
    residency.out.append(PublishRun(tier, places, labels))
    if complete:
        residency.add_notice(Notify(BlockChange.STORED, namespace.id, tier, complete))
        residency.story.tell_many(residency.now, complete, STORED_IN[tier])


def is_plain(residency: Residency, fragments: Sequence[int]) -> bool:
    """Whether `land_run` may land these: nothing of their blocks is in another tier."""
    catalog = residency.catalog
    block_of, in_hbm, in_nvme = catalog.block_of, catalog.num_placed[Tier.HBM], catalog.num_placed[Tier.NVME]
    for fragment in fragments:
        row = block_of[fragment]
        if in_hbm[row] or in_nvme[row]:
            return False
    return True


def refresh_run(residency: Residency, rows: Sequence[int]) -> None:
    """Note that these blocks were put just now."""
    last_used, now = residency.catalog.last_used, residency.now
    for row in rows:
        last_used[row] = now


def touch_run(residency: Residency, rows: Sequence[int], urgency: int) -> None:
    """Note that a request used these blocks."""
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
    below_hbm, below_dram, _ = catalog.num_children_placed
    free, nowhere = [], []
    for row in rows:
        assert keepers[row] > 0
        keepers[row] = count = keepers[row] - 1
        if count:
            continue
        if in_hbm[row] or in_dram[row]:
            if not (below_hbm[row] or below_dram[row]):
                free.append(row)
        elif not in_nvme[row]:
            nowhere.append(row)
    for row in free:
        for tier in residency.evictions:
            residency.offer(row, tier)
    for row in nowhere:
        residency.forget_if_nowhere(row)
