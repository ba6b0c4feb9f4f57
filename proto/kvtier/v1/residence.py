"""Layout of the residence table: where the blocks of one isolation domain are, for lookups without a call.

The daemon writes it into a sealed memfd, which clients map read-only (MapExtents of RESIDENCE_EXTENT). A
header page, then entries of 16 bytes, open addressing: tag, then value. A block is found within MAX_PROBES
steps of `tag & mask`, or it is not here.

    tag      all words of the prefix hash, mixed with the namespace; EMPTY or TOMBSTONE: no block
    value    words 1 and 3, mixed too, but for the lowest byte: the block's tier, by its number on the wire

Value and tag are stored in this order, and an entry's tag is taken away before another block gets it: a
reader that finds a tag beside a value of another block goes on. So 120 bits made of all 32 bytes of a name
are compared, and two blocks of which these agree, which only a client of the same domain can bring about,
count as one. Names need not be hashes: some count their blocks in the last bytes.

`state` says what it means that a block is not here; a reader loads it after it has searched. Prices are
copied out between two equal, even loads of their `version`.
"""

import struct
from typing import NamedTuple

from .shm import _GROUP_MIX, _MASK64, _NAMESPACE_MIX, PAGE_BYTES, TOMBSTONE_TAG

RESIDENCE_EXTENT = 0xFFFF_FFFF  # by this number MapExtents gives the table; no extent has it
MAGIC = b"kvtwhere"
VERSION = 1
MAX_PROBES = 128
ENTRY_BYTES = 16
HEADER_BYTES = PAGE_BYTES
_CHECK_MASK = _MASK64 ^ 0xFF

#: magic, version, log2 of the number of entries, epoch of the daemon, number of the slowest tier, unused
HEAD = struct.Struct("<8sIIQII")
STATE_OFFSET, EDGE_OFFSET, SPEEDS_OFFSET = 32, 40, 128
#: version; bandwidth in bytes/s, seconds until the first byte
EDGE = struct.Struct("<Qdd")
#: version; namespace, source of the speed; tokens/s, doubling tokens. A namespace of 0 ends the list.
SPEED = struct.Struct("<QIIdd")
NUM_SPEEDS = (HEADER_BYTES - SPEEDS_OFFSET) // SPEED.size
SOURCES = ("geometry", "measured", "stated")

ASK = 0  # it may be somewhere all the same: ask
NOWHERE = 1  # it is nowhere
RETIRED = 2  # nothing is entered here any more: map the table anew


class Keys(NamedTuple):
    """What an entry of a block says of its name."""

    tag: int
    check: int


def keys_of(prefix_hash: bytes, namespace_id: int) -> Keys:
    """Return tag and value, without a tier, of a block."""
    first, second, third, fourth = struct.unpack("<QQQQ", prefix_hash)
    check = second ^ ((_rotated(fourth) * _NAMESPACE_MIX ^ namespace_id * _GROUP_MIX) & _MASK64)
    tag = first ^ ((_rotated(third) * _GROUP_MIX ^ namespace_id * _NAMESPACE_MIX) & _MASK64)
    tag ^= (_rotated(check) * _NAMESPACE_MIX & _MASK64) >> 32
    return Keys(tag if tag > TOMBSTONE_TAG else tag + 2, check & _CHECK_MASK)


def _rotated(word: int) -> int:
    return (word << 29 | word >> 35) & _MASK64


def file_bytes(log2_entries: int) -> int:
    """Return the size of a table's memfd."""
    return HEADER_BYTES + (ENTRY_BYTES << log2_entries)
