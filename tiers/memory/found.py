"""What is in an extent that another daemon filled: nothing in it is believed before it was compared.

A slot counts only if its header has the right check, makes sense by itself, and names the checksum that the
bytes have. A slot that was being written when its daemon died has an odd generation. Whether a fragment is
one of its namespace, the planner knows.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...v1.shm import MIN_SLOT_BYTES, PAGE_BYTES
from ..block import FragmentLabel
from ..payload import checksum
from .extent import SlotExtent

_NO_PARENT = bytes(32)


def plausible_slots(extent: SlotExtent) -> npt.NDArray[np.int64]:
    """Return the slots (n,) int64 with headers that make sense: filled, inside the extent, of one size."""
    headers = extent.headers.table()
    lengths, offsets = headers["raw_length"], headers["offset"]
    is_right = headers["generation"] % 2 == 0
    is_right &= (lengths > 0) & (lengths <= extent.extent_bytes) & (headers["length"] == lengths)
    is_right &= (offsets <= extent.extent_bytes) & (offsets + lengths <= extent.extent_bytes)
    slots = np.flatnonzero(is_right)
    sizes = np.maximum(-(-lengths[slots].astype(np.int64) // PAGE_BYTES) * PAGE_BYTES, MIN_SLOT_BYTES)
    is_usual = (sizes == sizes[:1]) & (offsets[slots] == slots * sizes[:1])
    usual: npt.NDArray[np.int64] = slots[is_usual]
    return usual


def verified_labels(
    extent: SlotExtent, digest_of: Callable[[int], bytes | None]
) -> list[tuple[int, FragmentLabel]]:
    """Return (slot, label) of every fragment in `extent` that is whole: header and checksum are right.

    `digest_of` returns the digest of a namespace by its number, None for unknown ones. Reads all bytes, at
    the speed of the checksum: call it in a thread.
    """
    found = []
    headers = extent.headers.table()
    for slot in filter(extent.headers.is_whole, plausible_slots(extent).tolist()):
        header = headers[slot]
        namespace_id, length, offset = (int(header[k]) for k in ("namespace_id", "raw_length", "offset"))
        digest, stored = digest_of(namespace_id), header["checksum"].tobytes()
        if digest is None or checksum(extent.data[offset : offset + length]) != stored:
            continue
        parent_hash, position = header["parent_hash"].tobytes(), int(header["position"])
        label = FragmentLabel(
            digest,
            namespace_id,
            header["prefix_hash"].tobytes(),
            b"" if parent_hash == _NO_PARENT and not position else parent_hash,
            position,
            int(header["group"]),
            length,
            stored,
        )
        found.append((slot, label))
    return found
