"""Recovery: taking over a million records found at start, in columns, without Python per record.

The cold store hands over arrays; this turns them into rows of the catalog and books of the segment log. The
only step per block is the insertion into the table of prefix hashes, done by `dict(zip(...))` in C.

What arrives may have holes: a block with a missing fragment is a miss until it is put again; a block without
its parent is kept, unreachable, until the parent comes back or its segment is reclaimed."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....tiers.block import NO_SESSION
from ....tiers.cold.log import SegmentLog
from ..encodings import AS_IT_IS, Encoding
from .catalog import NO_ROW, Catalog, NamespaceEntry
from .columns import extend
from .core_state import CoreState

if TYPE_CHECKING:  # it reads files; what it found is plain data
    from ....tiers.cold.recovery import RecoveredStore

Records = dict[str, npt.NDArray[Any]]  # by name: columns of dtype RECORD, each (num_records,)
#: What records say of their block.
BLOCK_COLUMNS = ("prefix_hash", "parent_hash", "has_parent", "position")


def adopt(recovered: "RecoveredStore", namespaces: list[NamespaceEntry], core: CoreState) -> int:
    """Fill an empty catalog with what the cold store found. Returns the number of blocks.

    `namespaces` are those of `recovered.namespaces`, in the same order.
    """
    assert core.catalog.num_blocks == 0, "recovery comes before the first request"
    log = core.log
    assert log is not None
    for segment in recovered.segments:
        log.adopt(segment.number, segment.next_page, segment.num_live, segment.live_bytes)
    for number in recovered.unreadable:
        log.keep_out(number)
    for index, namespace in enumerate(namespaces):
        mine = _of(recovered.records, recovered.records["namespace_index"] == index)
        mine = _of(mine, _has_right_shape(mine, core, log, namespace))
        if len(mine["place"]):
            _adopt_namespace(mine, core, namespace)
    core.catalog.fit_columns()
    core.story.count("blocks_recovered", core.catalog.num_blocks)
    for reason, number in recovered.reasons.items():
        core.story.count(f"recovery_{reason}", number)
    return core.catalog.num_blocks


def _of(records: Records, which: npt.NDArray[np.bool_]) -> Records:
    """Return the chosen records, without copying them when these are all."""
    return records if which.all() else {name: column[which] for name, column in records.items()}


def _has_right_shape(
    records: Records, core: CoreState, log: SegmentLog, namespace: NamespaceEntry
) -> npt.NDArray[np.bool_]:
    """Return which records are fragments of this namespace's geometry; the others are given back."""
    groups = np.minimum(records["group"], namespace.num_groups - 1)
    sizes = np.array(namespace.fragment_bytes, np.uint64)[groups]
    is_right: npt.NDArray[np.bool_] = (records["group"] == groups) & (records["raw_length"] == sizes)
    is_right &= (records["codec"] == 0) | (_encodings(core.catalog, records) != AS_IT_IS)
    for index in np.flatnonzero(~is_right).tolist():
        log.release(int(records["place"][index]), int(records["stored_length"][index]))
    core.story.count("records_of_wrong_shape", int((~is_right).sum()))
    return is_right


def _adopt_namespace(records: Records, core: CoreState, namespace: NamespaceEntry) -> None:
    catalog = core.catalog
    num_groups = namespace.num_groups
    first_row, first_fragment = len(catalog.prefix_hash), len(catalog.block_of)
    row_of_record, first_record = _rows(records["prefix_hash"], num_groups)
    num_rows = len(first_record)
    firsts = records
    if num_rows < len(row_of_record):
        firsts = {name: records[name][first_record] for name in BLOCK_COLUMNS}
    names: list[bytes] = firsts["prefix_hash"].tolist()
    catalog.prefix_hash += names
    namespace.rows.add(names, range(first_row, first_row + num_rows))
    parents = _parents(firsts, namespace, first_row)
    for row in np.flatnonzero((parents == NO_ROW) & firsts["has_parent"]).tolist():
        catalog.lost_parent[first_row + row] = firsts["parent_hash"][row].tobytes()
    _extend_blocks(catalog, namespace, firsts["position"], first_fragment)
    _link(catalog, first_row, parents)
    _count_shared(catalog, first_row, parents)
    fragment_of_record = row_of_record * num_groups + records["group"]
    _extend_fragments(catalog, first_row, num_rows, num_groups, fragment_of_record, records)
    core.transitions.append_recovered(
        namespace.id,
        parents,
        first_fragment + fragment_of_record,
        records["place"],
        _encodings(catalog, records),
        int(records["stored_length"].sum()),
    )
    num_lost = int(np.sum((parents < 0) & (firsts["position"] > 0)))
    core.story.count("blocks_recovered_without_parent", num_lost)


def _rows(hashes: npt.NDArray[Any], num_groups: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Number the blocks in the order of their first records; return (number of each record, these records).

    No two records are of the same group of a block."""
    numbers = np.arange(len(hashes))
    if num_groups == 1:
        return numbers, numbers
    words = _words(hashes)
    order = np.argsort(words[:, 0])  # 64 bits tell hashes apart; a stable sort takes six times as long
    ordered = words[order, 0]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    alike = np.flatnonzero(~is_first)
    if (words[order[alike]] != words[order[alike - 1]]).any():
        # Clients choose the names: two of them that share 64 bits may be no accident, but are no duplicates.
        order = np.lexsort(tuple(words.T))
        is_first[1:] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
    numbers[order] = np.minimum.reduceat(order, np.flatnonzero(is_first))[np.cumsum(is_first) - 1]
    is_first = numbers == np.arange(len(numbers))
    return (np.cumsum(is_first) - 1)[numbers], np.flatnonzero(is_first)


def _words(hashes: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return hashes as rows of four words."""
    return np.ascontiguousarray(hashes).view(np.uint64).reshape(-1, 4)


def _parents(records: Records, namespace: NamespaceEntry, first_row: int) -> npt.NDArray[np.int32]:
    """Return the row of each block's parent, NO_ROW where there is none or it was not found.

    `records`: the first one of each block, which has its row. Most blocks were written behind their parent,
    so only the others are looked up. A parent is the block before: records of two times, named with care,
    must not make a circle.
    """
    parents = np.full(len(records["position"]), NO_ROW, np.int32)
    asks = records["has_parent"].copy()
    names, wanted = _words(records["prefix_hash"]), _words(records["parent_hash"])
    is_behind = asks[1:].copy()
    for word in range(names.shape[1]):
        is_behind &= wanted[1:, word] == names[:-1, word]
    behind = np.flatnonzero(is_behind)
    parents[behind + 1] = behind + first_row
    asks[behind + 1] = False
    if asks.any():
        parents[asks] = namespace.rows.find(records["parent_hash"][asks].tolist())
    positions = records["position"].astype(np.int64)
    parents[positions[np.maximum(parents - first_row, 0)] + 1 != positions] = NO_ROW
    return parents


def _extend_blocks(
    catalog: Catalog, namespace: NamespaceEntry, positions: npt.NDArray[Any], first_fragment: int
) -> None:
    num_rows = len(positions)
    catalog.num_blocks += num_rows
    extend(catalog.namespace_id, np.full(num_rows, namespace.id))
    extend(catalog.position, positions)
    extend(catalog.first_fragment, first_fragment + np.arange(num_rows) * namespace.num_groups)
    for column in (catalog.serial, catalog.num_uses, catalog.last_used):
        extend(column, np.zeros(num_rows, column.typecode))
    extend(catalog.urgency, np.full(num_rows, NO_SESSION))


def _link(catalog: Catalog, first_row: int, parents: npt.NDArray[np.int32]) -> None:
    """Fill the columns of the tree: siblings are the rows with the same parent, in row order."""
    num_rows = len(parents)
    rows = np.arange(first_row, first_row + num_rows, dtype=np.int32)
    first_child = np.full(num_rows, NO_ROW, np.int32)
    next_sibling, previous_sibling = first_child.copy(), first_child.copy()
    linked = np.flatnonzero(parents != NO_ROW)
    order = linked[np.argsort(parents[linked], kind="stable")]
    if len(order):
        same = parents[order[1:]] == parents[order[:-1]]
        next_sibling[order[:-1][same]] = rows[order[1:][same]]
        previous_sibling[order[1:][same]] = rows[order[:-1][same]]
        heads = order[np.concatenate(([True], ~same))]
        first_child[parents[heads] - first_row] = rows[heads]
    extend(catalog.parent, parents)
    extend(catalog.first_child, first_child)
    extend(catalog.next_sibling, next_sibling)
    extend(catalog.previous_sibling, previous_sibling)


def _count_shared(catalog: Catalog, first_row: int, parents: npt.NDArray[np.int32]) -> None:
    """Count a use of each block that several chains begin with: a second request was there before the start.

    Without any, the reclaim of its segment drops it, and all that continues it in whatever segment.
    """
    num_children = np.bincount(parents[parents != NO_ROW] - first_row, minlength=len(parents))
    is_shared = np.zeros(len(parents), dtype=bool)
    found = np.flatnonzero(num_children > 1)
    while len(found):  # from the forks to the beginnings
        is_shared[found] = True
        above = np.unique(parents[found])
        above = above[above != NO_ROW] - first_row
        found = above[~is_shared[above]]
    np.frombuffer(catalog.num_uses, np.uint64)[first_row:] += is_shared


def _extend_fragments(
    catalog: Catalog,
    first_row: int,
    num_rows: int,
    num_groups: int,
    fragment: npt.NDArray[np.int64],
    records: Records,
) -> None:
    """Append the fragments of the new rows; `fragment` counts from the first of them."""
    num_fragments = num_rows * num_groups
    extend(catalog.block_of, first_row + np.arange(num_fragments) // num_groups)
    halves = np.ascontiguousarray(records["checksum"]).view(">u8").reshape(-1, 2)
    for column, values in ((catalog.checksum_high, halves[:, 0]), (catalog.checksum_low, halves[:, 1])):
        filled = np.zeros(num_fragments, np.uint64)
        filled[fragment] = values
        extend(column, filled)
    first_fragment = len(catalog.block_of) - num_fragments
    catalog.spent.update((first_fragment + fragment[records["is_spent"]]).tolist())


def _encodings(catalog: Catalog, records: Records) -> npt.NDArray[np.uint16]:
    """Return the number of each record's encoding."""
    numbers = np.full(len(records["codec"]), AS_IT_IS, np.uint16)
    encoded = np.flatnonzero(records["codec"])
    # As one word each: rows of two fields are sorted fifty times as slowly, which was most of a start.
    forms = records["stored_length"][encoded] << np.uint64(16) | records["codec"][encoded]
    forms, which = np.unique(forms, return_inverse=True)
    number_of = catalog.encodings.number_of
    known = [number_of(Encoding(form & 0xFFFF, form >> 16)) for form in forms.tolist()]
    numbers[encoded] = np.array(known, np.uint16)[which]
    return numbers
