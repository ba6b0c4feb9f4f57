"""Types of blocks and fragments: those that clients share (v1/types.py), and fragment labels.

Imports neither protobuf nor numpy, so that the planner and the policies, which are pure, can use the same
types as the code that moves bytes.
"""

from dataclasses import dataclass
from typing import Final

from ..v1.types import (
    DTYPE_BYTES,
    HASH_BYTES,
    STANDARD_TIERS,
    Geometry,
    NamespaceIdentity,
    Tier,
    Urgency,
)

__all__ = [
    "DTYPE_BYTES",
    "HASH_BYTES",
    "NO_PLACE",
    "NO_SESSION",
    "STANDARD_TIERS",
    "FragmentLabel",
    "Geometry",
    "NamespaceIdentity",
    "Tier",
    "Urgency",
    "tenant_of",
]

NO_PLACE = -1  # a place is a non-negative number that only its tier interprets
#: Stands in place of an urgency for blocks that were last used without a session, or before the start.
NO_SESSION: Final = len(Urgency)


def tenant_of(domain: str) -> str:
    """Return the part of an isolation domain's name that names its tenant:
    of `tenant:acme/eu`, `tenant:acme`."""
    return domain.partition("/")[0]


@dataclass(slots=True, unsafe_hash=True)
class FragmentLabel:
    """Identity of a fragment: stored in every record and slot header, and compared by every read.

    Not changed after its checksum was set. Not `frozen`, because that triples the cost of making one, and
    one is made for every fragment that moves.
    """

    namespace_digest: bytes  # 32 bytes
    namespace_id: int  # short name, valid for one life of the daemon
    prefix_hash: bytes  # 32 bytes
    parent_hash: bytes  # 32 bytes; empty at the start of a chain
    position: int  # of the block in its chain, from 0
    group: int  # layer group
    raw_length: int  # bytes before encoding
    checksum: bytes = b""  # xxh3-128 of the raw payload, 16 bytes; empty until it was taken, at put
    codec_id: int = 0  # of its record in the cold store
    stored_length: int = 0  # bytes of that record's payload; 0: not encoded, raw_length
    is_spent: bool = False  # decoded from a lossy record: only exact codecs from then on
