"""Runs: many new blocks of one put at once, in columns.

A put of a prompt brings a run of blocks that nobody has seen, one the child of the other. One at a time
each costs a dozen calls and thirty scalar writes; together they cost thirty vector writes. The steps are
the same as in residency.py, and the simulator runs both (MIN_RUN is small).

Views on the columns live for one statement each: a column cannot grow while one is alive.
"""

from array import array
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ...tiers.block import FragmentLabel, Tier
from .catalog import NO_ROW, Catalog, Namespace
from .instructions import BlockChange, Notify, PublishRun
from .residency import STORED_IN, Residency
from .states import State

#: Below this the vector writes cost more than they save.
MIN_RUN = 6


def column(values: "array[Any]") -> npt.NDArray[Any]:
    """Return a writable view on a column. Do not keep it."""
    return np.frombuffer(values, values.typecode)


def num_new(namespace: Namespace, prefix_hashes: Sequence[bytes]) -> int:
    """Return how many blocks are unknown, up to the first known one."""
    shards = namespace.rows.shards
    seen = set()
    for prefix_hash in prefix_hashes:
        if prefix_hash in shards[prefix_hash[0]] or prefix_hash in seen:
            break
        seen.add(prefix_hash)
    return len(seen)


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
    num_groups = namespace.num_groups
    rows, firsts = catalog.take_rows(namespace, len(prefix_hashes))
    shards, names = namespace.rows.shards, catalog.prefix_hash
    for prefix_hash, row in zip(prefix_hashes, rows, strict=True):
        shards[prefix_hash[0]][prefix_hash] = row
        names[row] = prefix_hash
    r = np.array(rows, np.int32)
    f = (np.array(firsts, np.int32)[:, None] + np.arange(num_groups, dtype=np.int32)).ravel()
    position = catalog.position[parent] + 1 if parent != NO_ROW else 0
    _fill_rows(catalog, r, firsts, namespace, position, residency.now)
    catalog.link(rows[0], parent)
    if parent != NO_ROW:
        catalog.num_children_placed[Tier.DRAM][parent] += 1
    column(catalog.block_of)[f] = np.repeat(r, num_groups)
    column(catalog.checksum_low)[f] = 0
    column(catalog.checksum_high)[f] = 0
    column(catalog.place[Tier.DRAM])[f] = places
    column(catalog.state[Tier.DRAM])[f] = State.ARRIVING
    column(catalog.holds[Tier.DRAM])[f] = 1
    residency.arriving_bytes[Tier.DRAM] += len(rows) * namespace.block_bytes
    return rows, cast(list[int], f.tolist())


def _fill_rows(
    catalog: Catalog,
    r: npt.NDArray[np.int32],
    firsts: list[int],
    namespace: Namespace,
    position: int,
    now: float,
) -> None:
    """Fill the block columns of rows that follow one another in a chain."""
    num_groups = namespace.num_groups
    column(catalog.namespace_id)[r] = namespace.id
    column(catalog.position)[r] = np.arange(position, position + len(r))
    column(catalog.first_fragment)[r] = firsts
    column(catalog.last_used)[r] = now
    column(catalog.num_uses)[r] = 0
    column(catalog.urgency)[r] = catalog.NEW_URGENCY
    column(catalog.num_keepers)[r] = 1
    column(catalog.next_sibling)[r] = NO_ROW
    column(catalog.previous_sibling)[r] = NO_ROW
    column(catalog.parent)[r[1:]] = r[:-1]
    column(catalog.first_child)[r[:-1]] = r[1:]
    column(catalog.first_child)[r[-1:]] = NO_ROW
    column(catalog.num_placed[Tier.DRAM])[r] = num_groups
    column(catalog.num_holds[Tier.DRAM])[r] = num_groups
    column(catalog.num_children_placed[Tier.DRAM])[r[:-1]] = 1


def land_run(residency: Residency, fragments: Sequence[int], labels: list[FragmentLabel]) -> None:
    """The bytes of distinct fragments of a put arrived in dram, with the checksums in `labels`.

    The same step as Residency.land for each. Their blocks are kept by the put.
    """
    catalog = residency.catalog
    tier = Tier.DRAM
    f = np.array(fragments, np.int32)
    states = column(catalog.state[tier])
    assert (states[f] == State.ARRIVING).all()
    states[f] = State.RESIDENT
    del states
    halves = np.frombuffer(b"".join([label.checksum for label in labels]), ">u8").reshape(-1, 2)
    column(catalog.checksum_high)[f] = halves[:, 0]
    column(catalog.checksum_low)[f] = halves[:, 1]
    column(catalog.holds[tier])[f] -= 1
    r = column(catalog.block_of)[f]
    if catalog.namespace_of(int(r[0])).num_groups == 1:
        column(catalog.num_holds[tier])[r] -= 1
        column(catalog.num_resident[tier])[r] += 1
    else:  # a block occurs once per fragment
        np.subtract.at(column(catalog.num_holds[tier]), r, 1)
        np.add.at(column(catalog.num_resident[tier]), r, 1)
    num_bytes = sum([label.raw_length for label in labels])
    residency.arriving_bytes[tier] -= num_bytes
    residency.resident_bytes[tier] += num_bytes
    residency.num_resident[tier] += len(fragments)
    places = column(catalog.place[tier])[f].tolist()
    residency.out.append(PublishRun(tier, places, labels))
    _tell(residency, r)


def _tell(residency: Residency, r: npt.NDArray[np.int32]) -> None:
    """Tell routers and the story about the blocks that are complete now."""
    catalog = residency.catalog
    namespace = catalog.namespace_of(int(r[0]))
    if namespace.num_groups > 1:
        r = np.unique(r)
    complete = r[column(catalog.num_resident[Tier.DRAM])[r] == namespace.num_groups].tolist()
    names = [catalog.prefix_hash[row] for row in complete]
    if names:
        residency.add_notice(Notify(BlockChange.STORED, namespace.id, Tier.DRAM, names))
        residency.story.tell_many(residency.now, names, STORED_IN[Tier.DRAM])


def is_plain(residency: Residency, fragments: Sequence[int]) -> bool:
    """Whether `land_run` may land these: nothing of their blocks is in another tier."""
    catalog = residency.catalog
    r = column(catalog.block_of)[np.array(fragments, np.int32)]
    placed = catalog.num_placed
    return not (column(placed[Tier.HBM])[r].any() or column(placed[Tier.NVME])[r].any())


def refresh_run(residency: Residency, rows: Sequence[int]) -> None:
    """Note that these blocks were put just now."""
    column(residency.catalog.last_used)[np.array(rows, np.int32)] = residency.now


def touch_run(residency: Residency, rows: Sequence[int], urgency: int) -> None:
    """Note that a request used these blocks: the same as Residency.touch for each."""
    catalog = residency.catalog
    r = np.array(rows, np.int32)
    column(catalog.last_used)[r] = residency.now
    np.add.at(column(catalog.num_uses), r, 1)
    column(catalog.urgency)[r] = urgency


def unkeep_run(residency: Residency, rows: Sequence[int]) -> None:
    """Undo one `keep` of each row (a row may occur more than once)."""
    catalog = residency.catalog
    r = np.array(rows, np.int32)
    if len(set(rows)) == len(rows):
        column(catalog.num_keepers)[r] -= 1
    else:
        np.subtract.at(column(catalog.num_keepers), r, 1)
        r = np.unique(r)
    r = r[column(catalog.num_keepers)[r] == 0]
    children = catalog.num_children_placed
    has_children = (column(children[Tier.HBM])[r] > 0) | (column(children[Tier.DRAM])[r] > 0)
    placed = [column(counts)[r] > 0 for counts in catalog.num_placed]
    for row in r[~has_children & (placed[Tier.HBM] | placed[Tier.DRAM])].tolist():
        for tier in residency.evictions:
            residency.offer(row, tier)
    for row in r[~(placed[Tier.HBM] | placed[Tier.DRAM] | placed[Tier.NVME])].tolist():
        residency.forget_if_nowhere(row)
