"""Layout of the residence table: where the blocks of one isolation domain are, for lookups without a call.

The daemon writes it into a sealed memfd, which clients map read-only (MapExtents of RESIDENCE_EXTENT). A
header page, then entries of 16 bytes, open addressing: tag, then value. A block is found within MAX_PROBES
steps of `tag & mask`, or it is not here.

    tag      first 8 bytes of the prefix hash, mixed with the namespace; EMPTY or TOMBSTONE: no block
    value    the next 8 bytes, mixed too, but for the lowest: the block's tier, by its number on the wire

Value and tag are stored in this order, and an entry's tag is taken away before another block gets it: a
reader that finds a tag beside a value of another block goes on. So 120 bits of a name are compared, and two
blocks with names that agree in them, which only a client of the same domain can bring about, count as one.

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
    first, second = struct.unpack_from("<QQ", prefix_hash)
    tag = first ^ (namespace_id * _NAMESPACE_MIX & _MASK64)
    check = (second ^ (namespace_id * _GROUP_MIX & _MASK64)) & _CHECK_MASK
    return Keys(tag if tag > TOMBSTONE_TAG else tag + 2, check)


def file_bytes(log2_entries: int) -> int:
    """Return the size of a table's memfd."""
    return HEADER_BYTES + (ENTRY_BYTES << log2_entries)
