"""Reads what another daemon left in an extent: nothing in it is believed before it was compared.

A slot counts only if its header has the right check, makes sense by itself, and names the checksum that the
bytes have. A slot that was being written when its daemon died has an odd generation. Whether a fragment is
one of its namespace, the planner knows.
"""

import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...v1.shm import IS_SPENT, MIN_SLOT_BYTES, PAGE_BYTES, SLOT_HEADER
from ..block import FragmentLabel
from ..payload import checksum
from .extent import SlotExtent
from .headers import BODY, BODY_OFFSET

_NO_PARENT = bytes(32)


def plausible_slots(extent: SlotExtent) -> npt.NDArray[np.int64]:
    """Return the slots (n,) int64 with headers that make sense: filled, inside the extent, of one size."""
    headers = extent.headers.table()
    slots = np.flatnonzero(headers["generation"] % 2 == 0)
    lengths, offsets = headers["raw_length"][slots], headers["offset"][slots]
    is_right = (lengths > 0) & (lengths <= extent.extent_bytes) & (headers["length"][slots] == lengths)
    is_right &= (offsets <= extent.extent_bytes) & (offsets + lengths <= extent.extent_bytes)
    slots, lengths, offsets = slots[is_right], lengths[is_right], offsets[is_right]
    sizes = np.maximum(-(-lengths.astype(np.int64) // PAGE_BYTES) * PAGE_BYTES, MIN_SLOT_BYTES)
    is_usual = (sizes == sizes[:1]) & (offsets == slots * sizes[:1])
    usual: npt.NDArray[np.int64] = slots[is_usual]
    return usual


def labelled_slots(
    extent: SlotExtent, digest_of: Callable[[int], bytes | None]
) -> list[tuple[int, FragmentLabel]]:
    """Return (slot, label) of every slot in `extent` with a right header. Its bytes are not read.

    `digest_of` returns the digest of a namespace by its number, None for unknown ones.
    """
    slots = plausible_slots(extent)
    rows = extent.headers.table()[slots]
    checks = rows["check"].tolist()
    rows["check"] = 0  # as it was when the check was taken
    raw, row_bytes = memoryview(rows.tobytes()), SLOT_HEADER.itemsize
    found = []
    for number, slot in enumerate(slots.tolist()):
        body = raw[number * row_bytes + BODY_OFFSET : (number + 1) * row_bytes]
        if zlib.crc32(body) != checks[number]:
            continue
        namespace_id, group, _, _, length, _, position, prefix_hash, stored, parent_hash = BODY.unpack(body)
        is_spent, position = position >= IS_SPENT, position % IS_SPENT
        digest = digest_of(namespace_id)
        if digest is None:
            continue
        if parent_hash == _NO_PARENT and not position:
            parent_hash = b""
        label = FragmentLabel(digest, namespace_id, prefix_hash, parent_hash, position, group, length, stored)
        label.is_spent = is_spent
        found.append((slot, label))
    return found


def has_right_bytes(extent: SlotExtent, slot: int, label: FragmentLabel) -> bool:
    """Whether the bytes of a slot that `labelled_slots` returned have the checksum in its label."""
    offset = int(extent.headers.table()[slot]["offset"])
    return checksum(extent.data[offset : offset + label.raw_length]) == label.checksum
