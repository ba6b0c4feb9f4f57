"""Layout of the shared memory that daemon and clients both read: warm extents and the index.

This is a wire contract like the .proto files, which is why it lives beside them: the daemon writes these
bytes, clients only map them read-only (the memfds are sealed).

Warm extent, `extent_bytes` of data, then one header per possible slot:

    |<------------ extent_bytes (multiple of 2 MiB) ---------->|<-- headers -->|
    | slot 0 | slot 1 | ...                                    | h0 | h1 | ... |

An extent is cut into equal slots of `slot_bytes` (multiple of 4 KiB, at least MIN_SLOT_BYTES). Headers
stand behind the data so that a slot of a power-of-two size wastes nothing and data stays aligned for
direct I/O and huge pages.

Generation protocol (a sequence lock per slot). The daemon makes `generation` odd before it touches a
slot and even, larger than ever used in this extent, when the bytes are complete. A reader without a
lease copies, then checks that generation and identity are what they were before the copy; anything else is a
miss. Generations never repeat, so a recycled slot cannot look like its former self. On x86 stores are not
reordered with stores, nor loads with loads. On other machines both sides need native code, which stores with
release and loads with acquire: `is_ordered` says that the daemon has it; clients without it use leases.

Index: an open-addressing hash table of (tag, place) for all fragments of one isolation domain that are
readable in memory. It is a hint: what makes a read right is the slot header. An entry is found within
MAX_PROBES steps of `tag & mask`, or it does not exist.
"""

import numpy as np
import numpy.typing as npt

from .types import HASH_BYTES as HASH_BYTES

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
MIN_SLOT_BYTES = 16 << 10
CHECKSUM_BYTES = 16

SLOT_HEADER = np.dtype(
    [
        ("generation", "<u8"),  # odd while the slot changes or is empty
        ("namespace_id", "<u4"),
        ("group", "<u4"),  # layer group
        ("offset", "<u8"),  # of the fragment in the extent
        ("length", "<u8"),  # stored bytes
        ("raw_length", "<u8"),  # the same: memory keeps what was put
        ("check", "<u4"),  # crc32 of what follows the generation, this field taken as zero
        ("position", "<u4"),  # of the block in its chain, from 0; IS_SPENT is the highest bit
        ("prefix_hash", "V32"),
        ("checksum", "V16"),  # xxh3-128 of the raw payload, taken once, at put
        ("parent_hash", "V32"),  # of the block before; zero at the start of a chain
    ]
)
assert SLOT_HEADER.itemsize == 128
IS_SPENT = 1 << 31  # decoded from a lossy record: for the next daemon; clients do not look at it

INDEX_HEADER_BYTES = PAGE_BYTES
INDEX_HEADER = np.dtype(
    [
        ("magic", "V8"),
        ("version", "<u4"),
        ("log2_entries", "<u4"),
        ("epoch", "<u8"),
        ("is_ordered", "<u4"),  # 1: words are stored so that readers on any machine see them in order
    ]
)
INDEX_MAGIC = b"kvtindex"
INDEX_VERSION = 1
INDEX_ENTRY = np.dtype([("tag", "<u8"), ("place", "<u8")])
EMPTY_TAG = 0
TOMBSTONE_TAG = 1
MAX_PROBES = 32

_NAMESPACE_MIX = 0x9E3779B97F4A7C15
_GROUP_MIX = 0xC2B2AE3D27D4EB4F
_MASK64 = (1 << 64) - 1


def place_of(extent: int, slot: int) -> int:
    """Return the number that names slot `slot` of extent `extent`."""
    return extent << 32 | slot


def extent_of(place: int) -> int:
    """Return the extent of `place`."""
    return place >> 32


def slot_of(place: int) -> int:
    """Return the slot of `place` in its extent."""
    return place & 0xFFFF_FFFF


def slot_bytes_for(length: int) -> int:
    """Return the slot size that holds `length` bytes."""
    return max(MIN_SLOT_BYTES, -(-length // PAGE_BYTES) * PAGE_BYTES)


def extent_file_bytes(extent_bytes: int) -> int:
    """Return the size of an extent's memfd: data and headers, in whole huge pages."""
    assert extent_bytes % HUGE_PAGE_BYTES == 0
    headers = extent_bytes // MIN_SLOT_BYTES * SLOT_HEADER.itemsize
    return extent_bytes + -(-headers // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def index_file_bytes(log2_entries: int) -> int:
    """Return the size of an index's memfd."""
    return INDEX_HEADER_BYTES + (INDEX_ENTRY.itemsize << log2_entries)


def tag_of(prefix_hash: bytes, namespace_id: int, group: int) -> int:
    """Return the 64-bit tag under which a fragment is indexed; never EMPTY_TAG or TOMBSTONE_TAG."""
    tag = int.from_bytes(prefix_hash[:8], "little")
    tag ^= (namespace_id * _NAMESPACE_MIX + group * _GROUP_MIX) & _MASK64
    return tag if tag > TOMBSTONE_TAG else tag + 2


def tags_of(prefix_hashes: bytes, namespace_id: int, num_groups: int) -> npt.NDArray[np.uint64]:
    """Return the tags of all fragments of packed `prefix_hashes`, shape (num_blocks, num_groups)."""
    first_words = np.frombuffer(prefix_hashes, "<u8")[:: HASH_BYTES // 8]
    groups = np.arange(num_groups, dtype=np.uint64) * np.uint64(_GROUP_MIX)
    groups += np.uint64(namespace_id * _NAMESPACE_MIX & _MASK64)
    tags: npt.NDArray[np.uint64] = first_words[:, None] ^ groups[None, :]
    tags[tags <= TOMBSTONE_TAG] += np.uint64(2)
    return tags
