"""Results: what the planner answers to a call, wrapped in a `Reply` (instructions.py) by whoever answers.

Dumb values, one class per answer; the services turn them into messages. A `Refusal` is an operating error and
may answer any call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from ...tiers.block import Tier


class PutOutcome(IntEnum):
    """What became of one block of a put. Numbers are those of the wire."""

    NEEDED = 1
    STORED = 2
    DEDUPLICATED = 3
    IN_PROGRESS = 4
    NO_ROOM = 5
    PARENT_MISSING = 6
    FAILED = 7
    DECLINED = 8  # not worth the room of anything that is stored


@dataclass(slots=True)
class Refusal:
    """An operating error: what is wrong, as in the error table of docs/api.md."""

    reason: str  # a name of kvtier.appliance.errors
    message: str  # says the fix
    retry_after_s: float = 0.0


@dataclass(slots=True)
class NamespaceResult:
    namespace_id: int
    digest: bytes
    fragment_bytes: list[int]


@dataclass(slots=True)
class ReadyFragment:
    """One fragment a lease may read: block is an index into the request, place is of `tier`."""

    block: int
    group: int
    tier: Tier
    place: int
    length: int


@dataclass(slots=True)
class AcquireResult:
    lease_id: int
    num_blocks: int
    ready: list[ReadyFragment]
    last: bool
    ttl_s: float
    # First answer only:
    tiers: bytes = b""  # one Tier (of this module) per block
    num_stored: int = 0  # of the chain, in whatever tier
    reason: str = ""  # why not all of that is loaded
    load_s: float = 0.0
    recompute_s: float = 0.0
    arriving: Sequence[tuple[Tier, int]] = ()  # extents, numbered in their tier, that the rest will be in


@dataclass(slots=True)
class ReleaseResult:
    num_unknown: int


@dataclass(slots=True)
class KeepAliveResult:
    expired: list[int]


@dataclass(slots=True)
class ReserveResult:
    reservation_id: int
    outcomes: bytes


@dataclass(slots=True)
class PutResult:
    outcomes: bytes


@dataclass(slots=True)
class PinResult:
    pin_id: int
    num_blocks: int


@dataclass(slots=True)
class PrefetchResult:
    num_blocks: int
    num_promoted: int


@dataclass(slots=True)
class CountResult:
    count: int


@dataclass(slots=True)
class EvictResult:
    num_blocks: int
    num_bytes: int
    num_readable: int  # of the blocks: still readable, from other tiers
    num_kept: dict[str, int]  # blocks that stayed though their room was wanted, by reason


Result: TypeAlias = (
    Refusal
    | NamespaceResult
    | AcquireResult
    | ReleaseResult
    | KeepAliveResult
    | ReserveResult
    | PutResult
    | PinResult
    | PrefetchResult
    | CountResult
    | EvictResult
)
