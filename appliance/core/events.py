"""Events in, instructions out: everything that crosses the wall of the pure core.

Events say what happened; instructions say what to do. Both are dumb values. The three shells (daemon,
simulator, replay) speak nothing else with the planner, which is why they all drive the same one.

A `call` is an opaque number chosen by the shell; the planner hands it back in `Reply`. A `copy` is a
number chosen by the planner; the shell hands it back in `CopyFinished`. Times are seconds on the
shell's monotonic clock; durations and deadlines say so in their names (`ttl_s`, `deadline_at`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple, TypeAlias

from ...policies.costs import PrefillSpeed
from ...tiers.base import CopyItem, CopyOutcome
from ...tiers.block import FragmentLabel, NamespaceIdentity, Tier, Urgency

STAGING = "staging"  # the source of a put's copy: the client's own extent, not a tier


# ------------------------------------------------------------------------------------------ events


class RetentionHint(NamedTuple):
    """How much some tokens of a chain are worth keeping. Tokens count from the start of the chain."""

    first_token: int
    end_token: int  # behind the last one; 0: to the end of the blocks the request names
    priority: int  # 0 to 100, lowest evicted first
    ttl_s: float = 0.0  # 0: until changed


@dataclass(slots=True)
class ClientOpened:
    """A client became known. `local` ones read shared memory in place, so what they hold is freed only by
    their word or their death; others hold pins that simply end."""

    client: int
    name: str
    local: bool
    domain: str
    ttl_s: float | None = None  # None: the connection itself says when it is gone


@dataclass(slots=True)
class ClientGone:
    """A client closed, died, or was silent for too long: everything it holds goes back."""

    client: int
    reason: str


@dataclass(slots=True)
class NamespaceRegistered:
    """Somebody wants to use a namespace. Answered with NamespaceResult."""

    call: int
    identity: NamespaceIdentity
    prefill: PrefillSpeed | None = None  # None: not stated


@dataclass(slots=True)
class AcquireRequested:
    """Look up and pin. Answered with AcquireResult, several times, the last marked `last`."""

    call: int
    client: int
    request_id: str
    namespace_id: int
    prefix_hashes: Sequence[bytes]
    session_id: str = ""
    urgency: Urgency | None = None  # None: the session's, or queued
    ttl_s: float = 0.0  # 0: the default
    deadline_at: float = float("inf")
    first_block: int = 0
    load_anyway: bool = False  # even from a tier that is slower than computing the blocks again
    retention: Sequence[RetentionHint] = ()
    on_device: bool = False  # whoever reads can read every memory tier, also one that is a GPU's


@dataclass(slots=True)
class AcquireAbandoned:
    """The caller of an acquire no longer listens (its RPC was cancelled); its lease ends."""

    call: int


@dataclass(slots=True)
class ReleaseRequested:
    """End leases. Answered with ReleaseResult when `call` is not None."""

    call: int | None
    client: int
    lease_ids: Sequence[int]


@dataclass(slots=True)
class KeptAlive:
    """A client is alive and wants these leases extended. Answered with KeepAliveResult."""

    call: int | None
    client: int
    lease_ids: Sequence[int]
    ttl_s: float = 0.0


@dataclass(slots=True)
class Touched:
    """A client read these blocks without asking."""

    client: int
    namespace_id: int
    prefix_hashes: Sequence[bytes]
    session_id: str = ""


@dataclass(slots=True)
class ReserveRequested:
    """First half of a put. Answered with ReserveResult."""

    call: int
    client: int
    request_id: str
    namespace_id: int
    parent_hash: bytes
    prefix_hashes: Sequence[bytes]
    session_id: str = ""
    deadline_at: float = float("inf")
    prefill_s: float = 0.0  # what computing these blocks took; 0: unknown
    retention: Sequence[RetentionHint] = ()


@dataclass(slots=True)
class CommitRequested:
    """Second half of a put, or both when `reserve` is given. Answered with PutResult.

    `spans` are (offset, length) in the client's staging extent, already checked to lie inside it: one
    per block that needs bytes, or with `reserve` one per block named.
    """

    call: int
    client: int
    request_id: str
    reservation_id: int
    spans: Sequence[tuple[int, int]]
    reserve: ReserveRequested | None = None


@dataclass(slots=True)
class AbortRequested:
    """Give a reservation back."""

    client: int
    reservation_id: int


@dataclass(slots=True)
class PinRequested:
    """Keep a stored prefix in `floor` or faster. Answered with PinResult."""

    call: int
    client: int
    request_id: str
    namespace_id: int
    prefix_hashes: Sequence[bytes]
    floor: Tier
    ttl_s: float


@dataclass(slots=True)
class UnpinRequested:
    """End a pin."""

    pin_id: int


@dataclass(slots=True)
class PrefetchRequested:
    """Promote a stored prefix before anyone asks. Answered with PrefetchResult at once."""

    call: int
    client: int
    namespace_id: int
    prefix_hashes: Sequence[bytes]
    target: Tier = Tier.DRAM
    deadline_at: float = float("inf")


@dataclass(slots=True)
class SessionUpdated:
    """Create or change a session."""

    client: int
    session_id: str
    urgency: Urgency
    deadline_at: float = float("inf")
    back_at: float = float("inf")  # when it expects to need its blocks again; inf: it did not say
    num_decoded_tokens: int = 0  # since its last request; 0: it did not say


@dataclass(slots=True)
class SessionForked:
    """A new session holds what another one holds. Answered with CountResult."""

    call: int
    client: int
    session_id: str
    new_session_id: str


@dataclass(slots=True)
class SessionEnded:
    """A session is over. Answered with CountResult (blocks a demotion was queued for)."""

    call: int
    client: int
    session_id: str
    archive: bool


@dataclass(slots=True)
class EvictRequested:
    """An administrator wants room. Answered with EvictResult."""

    call: int
    tier: Tier
    num_bytes: int  # 0: all that can go


@dataclass(slots=True)
class CopyFinished:
    """A copy batch ended; one outcome per item, in order."""

    copy: int
    outcomes: Sequence[CopyOutcome]


@dataclass(slots=True)
class SegmentFreed:
    """The cold store has durably forgotten a segment."""

    segment: int


@dataclass(slots=True)
class TierLost:
    """A tier stopped working (`offline`) or came back."""

    tier: Tier
    offline: bool
    reason: str


@dataclass(slots=True)
class EdgeMeasured:
    """The mover's latest measurement of one edge, for load estimates."""

    source: Tier
    target: Tier
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(slots=True)
class DrainStarted:
    """Accept nothing new; put what is dirty into the cold store."""

    call: int


@dataclass(slots=True)
class Tick:
    """Time passed: deadlines, watermarks."""


Event: TypeAlias = (
    ClientOpened
    | ClientGone
    | NamespaceRegistered
    | AcquireRequested
    | AcquireAbandoned
    | ReleaseRequested
    | KeptAlive
    | Touched
    | ReserveRequested
    | CommitRequested
    | AbortRequested
    | PinRequested
    | UnpinRequested
    | PrefetchRequested
    | SessionUpdated
    | SessionForked
    | SessionEnded
    | EvictRequested
    | CopyFinished
    | SegmentFreed
    | TierLost
    | EdgeMeasured
    | DrainStarted
    | Tick
)


# ----------------------------------------------------------------------------------------- results


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


# ------------------------------------------------------------------------------------ instructions


@dataclass(slots=True)
class Reply:
    """Answer a call. A stream has several replies; every other call exactly one."""

    call: int
    result: Result


@dataclass(slots=True)
class Copy:
    """Start a batch of copies of one edge. The places stay reserved and pinned until CopyFinished."""

    copy: int
    source: Tier | None  # None: the staging extent of `client`
    target: Tier
    items: list[CopyItem]
    urgency: Urgency
    deadline_at: float = float("inf")
    client: int = 0


@dataclass(slots=True)
class CancelCopy:
    """Nobody wants this copy any more. It may still complete; CopyFinished comes either way."""

    copy: int


@dataclass(slots=True)
class HastenCopy:
    """Somebody waits for this copy now: what is queued of it goes where it would be with this urgency."""

    copy: int
    urgency: Urgency
    deadline_at: float


@dataclass(slots=True)
class Publish:
    """Make a landed fragment readable by clients (memory tiers)."""

    tier: Tier
    place: int
    label: FragmentLabel


@dataclass(slots=True)
class PublishRun:
    """Publish many fragments of one put."""

    tier: Tier
    places: list[int]
    labels: list[FragmentLabel]


@dataclass(slots=True)
class Retract:
    """Make a fragment unreadable; its place may be reused by a later instruction."""

    tier: Tier
    place: int


@dataclass(slots=True)
class RetractRun:
    """Retract many fragments at once."""

    tier: Tier
    places: list[int]


@dataclass(slots=True)
class SealSegment:
    """All copies into a full segment have ended: write its footer, make it durable."""

    segment: int


@dataclass(slots=True)
class FreeSegment:
    """Nothing in this segment is wanted: forget it durably, then report SegmentFreed."""

    segment: int


@dataclass(slots=True)
class StoreNamespace:
    """Remember a namespace's identity in the cold store, before any of its records."""

    identity: NamespaceIdentity


class BlockChange(Enum):
    """What happened to blocks, for routers."""

    STORED = 1
    MOVED = 2
    REMOVED = 3


@dataclass(slots=True)
class Notify:
    """Tell whoever watches."""

    change: BlockChange
    namespace_id: int
    tier: Tier
    prefix_hashes: list[bytes] = field(default_factory=list)
    reason: str = ""


Instruction: TypeAlias = (
    Reply
    | Copy
    | CancelCopy
    | HastenCopy
    | Publish
    | PublishRun
    | Retract
    | RetractRun
    | SealSegment
    | FreeSegment
    | StoreNamespace
    | Notify
)
