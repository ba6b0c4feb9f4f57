"""What the daemon's rooms call things: the types that clients share (v1/types.py), and fragment labels.

Imports neither protobuf nor numpy, so that the planner and the policies, which are pure, can use the same
types as the code that moves bytes.
"""

from dataclasses import dataclass
from typing import Final

from ..v1.types import DTYPE_BYTES, HASH_BYTES, Geometry, NamespaceIdentity, Tier, Urgency

__all__ = [
    "DTYPE_BYTES",
    "HASH_BYTES",
    "NO_PLACE",
    "NO_SESSION",
    "FragmentLabel",
    "Geometry",
    "NamespaceIdentity",
    "Tier",
    "Urgency",
    "tenant_of",
]

NO_PLACE = -1  # a place is a non-negative number whose meaning belongs to its tier
#: Stands in place of an urgency for blocks that were last used without a session, or before the start.
NO_SESSION: Final = len(Urgency)


def tenant_of(domain: str) -> str:
    """Return the part of an isolation domain's name that names its tenant: of `tenant:acme/eu`,
    `tenant:acme`."""
    return domain.partition("/")[0]


@dataclass(slots=True, unsafe_hash=True)
class FragmentLabel:
    """Who a fragment is: what every record and slot header says, and what every read compares.

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
    codec_id: int = 0  # of its record in the cold store, and
    stored_length: int = 0  # the bytes that takes there; 0: as it is, raw_length
    is_spent: bool = False  # the payload was decoded from a lossy record: it loses nothing more
