"""Events: what the shell tells the planner.

Events in (this module), instructions out (instructions.py), results of calls in them (results.py). All
are plain values. The shells (daemon, simulator, replay) exchange nothing else with the planner.

A `call` is an opaque number chosen by the shell; the planner hands it back in `Reply`. A `copy` is a
number chosen by the planner; the shell hands it back in `CopyFinished`. Times are seconds on the
shell's monotonic clock; durations and deadlines say so in their names (`ttl_s`, `deadline_at`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ...policies.costs import PrefillModel
from ...policies.registry import PolicyChoice
from ...tiers.base import Cause, CopyOutcome
from ...tiers.block import FragmentLabel, NamespaceIdentity, Tier, Urgency
from .encodings import Compression
from .options import PlannerOptions


class RetentionHint(NamedTuple):
    """How much some tokens of a chain are worth keeping. Tokens count from the start of the chain."""

    first_token: int
    end_token: int  # behind the last one; 0: to the end of the blocks the request names
    priority: int  # 0 to 100, lowest evicted first
    ttl_s: float = 0.0  # 0: until changed


@dataclass(slots=True)
class ClientOpened:
    """A client became known.
    `local` ones read shared memory in place, so what they hold is freed only when they release it or are
    gone; others hold pins that simply end."""

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
    """A client registers a namespace. Answered with NamespaceResult."""

    call: int
    identity: NamespaceIdentity
    prefill: PrefillModel | None = None  # None: not stated


@dataclass(slots=True)
class ExtentFound:
    """An earlier daemon left these fragments, (slot, label), in an extent that the room holds.

    Their headers are right; their bytes are verified later.
    """

    tier: Tier
    extent: int
    fragments: Sequence[tuple[int, FragmentLabel]]
    is_viewed: bool = False  # a client of that daemon may still have views of it


@dataclass(slots=True)
class FoundVerified:
    """The bytes of fragments of an `ExtentFound` were compared with their checksums: (place, label)."""

    tier: Tier
    fragments: Sequence[tuple[int, FragmentLabel]]
    are_right: Sequence[bool]


@dataclass(slots=True)
class ViewsEnded:
    """No client views these found extents, (tier, number), any more."""

    extents: frozenset[tuple[Tier, int]]


class ExpectedPart(NamedTuple):
    """Blocks of a chain that are being computed elsewhere, and are put into this daemon or another host's."""

    num_blocks: int  # from the start of the chain on, those that are stored among them
    until: float  # waited for no longer
    source: str = ""  # address of the host they are put into; empty: this one


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
    on_device: bool = False  # the reader can read every memory tier, also one that is a GPU's
    is_local: bool = False  # nothing is fetched for it: another host asks
    expected: ExpectedPart | None = None


@dataclass(slots=True)
class AcquireAbandoned:
    """The caller of an acquire no longer listens (its RPC was cancelled); its lease ends."""

    call: int


@dataclass(slots=True)
class ReleaseRequested:
    """End leases. Answered with CountResult (unknown ones) when `call` is not None."""

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
class LookedUp:
    """A lookup found less than it was asked for: find out what the source has of it. Never answered."""

    namespace_id: int
    prefix_hashes: Sequence[bytes]  # from the start of the chain


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
    """Promote a stored prefix ahead of its use. Answered with PrefetchResult at once."""

    call: int
    client: int
    namespace_id: int  # 0: in all namespaces of the client's domain
    prefix_hashes: Sequence[bytes]
    target: Tier | None = None  # None: where puts land
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
    num_decoded_tokens: int = 0  # since its last request; 0: it did not say


@dataclass(slots=True)
class EvictRequested:
    """An administrator wants room. Answered with EvictResult."""

    call: int
    tier: Tier
    num_bytes: int  # 0: all that can go
    namespace_id: int = 0  # only blocks of this namespace, and then all of them; 0: of any


@dataclass(slots=True)
class TenantErased:
    """A tenant's key is gone: nothing of what it stored may be found any more.
    Answered with CountResult (blocks forgotten) when that is so."""

    call: int
    tenant: str  # first part of its isolation domains


@dataclass(slots=True)
class CopyFinished:
    """A copy batch ended; one outcome per item, in order."""

    copy: int
    outcomes: Sequence[CopyOutcome]


@dataclass(slots=True)
class SourceChanged:
    """The source of bundles can be asked (`is_open`), or cannot: until it is open nothing is asked of it."""

    is_open: bool
    takes_exports: bool = True  # with `is_open`: there is a store among what can be asked
    has_hosts: bool = False  # there are other hosts among it, which have single blocks


@dataclass(slots=True)
class SourceSearched:
    """A search ended. What it found is a hint: bundles before the last one found may be missing."""

    search: int
    num_found: int  # bundles of the chain, from the first one asked for
    num_possible: int  # the one behind so many is not there, if there is one; -1: that is not known
    is_stored: bool = True  # false: other hosts have them, which a store may not
    num_blocks: int = 0  # that a host has, from the first one of the first bundle: perhaps no whole bundles
    is_answered: bool = True  # false: the source was not asked, or failed


@dataclass(slots=True)
class BlocksTold:
    """Another host says how many of the blocks of an AwaitBlocks it can read: a hint."""

    await_number: int
    num_blocks: int  # from the first one on
    is_over: bool = False  # nothing more is told


@dataclass(slots=True)
class ExportFinished:
    """An export ended. `is_stored`: the source holds the bundle now, perhaps since another host stored it."""

    export: int
    is_stored: bool
    num_bytes: int = 0  # sent
    read_s: float = 0.0  # of a trial: seconds in which the source brought the bundle; 0: not known
    has_key: bool = True  # False: the tenant's cannot be used here, which a new try does not change


@dataclass(slots=True)
class FragmentsDamaged:
    """What lies at these places is not what was put there: a verification found it, with a cause for each.
    Answered with DamageResult."""

    call: int
    tier: Tier
    found: Mapping[int, Cause]  # by place


@dataclass(slots=True)
class SegmentFreed:
    """The cold store has durably forgotten a segment."""

    segment: int


@dataclass(slots=True)
class TierLost:
    """A tier stopped working (`offline`), in all or, with `is_read_on`, for writes alone, or came back."""

    tier: Tier
    offline: bool
    reason: str
    is_read_on: bool = False  # the cold store, where the disk takes no metadata


@dataclass(slots=True)
class EdgeMeasured:
    """The mover's latest measurement of one edge, for load estimates."""

    source: Tier
    target: Tier
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(slots=True)
class ColdEdgeOpened:
    """The way from the cold store straight onto the device is the quicker one, for these codecs.
    0 stands for what is stored as it is. Without this event everything stops in host memory."""

    codecs: frozenset[int]


@dataclass(slots=True)
class PolicyChanged:
    """An administrator chose anew. What can be wrong with it was asked before (`Changes.objections`)."""

    options: PlannerOptions
    policies: PolicyChoice
    #: New sizes, in extents or segments; tiers that are not named stay as they are. The files of new segments
    #: are there already.
    num_units: Mapping[Tier, int]


@dataclass(slots=True)
class CompressionChosen:
    """How fragments enter the cold store from now on. What is there stays as it is."""

    compression: Compression


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
    | ExtentFound
    | FoundVerified
    | ViewsEnded
    | AcquireRequested
    | AcquireAbandoned
    | ReleaseRequested
    | KeptAlive
    | Touched
    | LookedUp
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
    | TenantErased
    | CopyFinished
    | SourceChanged
    | SourceSearched
    | BlocksTold
    | ExportFinished
    | FragmentsDamaged
    | SegmentFreed
    | TierLost
    | EdgeMeasured
    | ColdEdgeOpened
    | PolicyChanged
    | CompressionChosen
    | DrainStarted
    | Tick
)
