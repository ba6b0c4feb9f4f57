"""Instructions: what the planner wants done, in order, by whichever shell drives it.

Dumb values. A shell executes those it can do something about: replay has no bytes and leaves `Publish` and
`Retract` alone, the daemon and the simulator execute all of them. The number of a `Copy` is the planner's;
the shell hands it back in `CopyFinished` (events.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from ...tiers.base import CopyItem
from ...tiers.block import FragmentLabel, NamespaceIdentity, Tier, Urgency
from .results import Result

STAGING = "staging"  # the source of a put's copy: the client's own extent, not a tier


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
    items: Sequence[CopyItem]
    urgency: Urgency
    deadline_at: float = float("inf")
    client: int = 0
    in_one: bool = False  # one thread makes all of it, also when others are idle


@dataclass(slots=True)
class CancelCopy:
    """This copy is not wanted any more. It may still complete; CopyFinished comes either way."""

    copy: int


@dataclass(slots=True)
class HastenCopy:
    """A request waits for this copy now: what is queued of it goes where it would be with this urgency."""

    copy: int
    urgency: Urgency
    deadline_at: float


@dataclass(slots=True)
class SearchBundles:
    """Ask the source which bundles of a chain it holds. Answered with one SourceSearched, always."""

    search: int
    identity: NamespaceIdentity
    names: Sequence[bytes]  # of the chain's bundles, in order, from the first one that is missing here
    blocks: Sequence[bytes] = ()  # of the chain, from the first one that is missing here
    num_here: int = 0  # blocks of the first bundle that stand before these


@dataclass(slots=True)
class BundleBlocks:
    """The blocks of one bundle: consecutive ones of a chain."""

    identity: NamespaceIdentity
    parent_hash: bytes  # of the first one; empty at the start of a chain
    position: int  # of the first one in its chain
    names: Sequence[bytes]  # prefix hash of each block; the last one is the bundle's
    #: Of what waits for it, where it is fetched; it is the same bundle whatever that is.
    urgency: Urgency = field(default=Urgency.QUEUED, compare=False)


@dataclass(slots=True)
class AwaitBlocks:
    """Let another host tell how many of these blocks it has, as they come to be there.

    BlocksTold follow, the last one `is_over`: at once when the host cannot be asked, soon after it is gone,
    and soon after `until` at the latest. None has to follow a StopAwaiting.
    """

    number: int
    identity: NamespaceIdentity
    names: Sequence[bytes]  # consecutive blocks of a chain
    source: str  # address of the host
    until: float


@dataclass(slots=True)
class StopAwaiting:
    """What an AwaitBlocks tells is not wanted any more."""

    number: int


@dataclass(slots=True)
class FetchBundle:
    """Read blocks of a bundle from the source into reserved places, one batch a layer group.

    Each of `batches`, (copy, items), ends in exactly one CopyFinished, in any order, as soon as its bytes are
    verified, and all of them soon after `deadline_at`. `CopyItem.source` is the block's number in the bundle;
    items are in that order, because a store reads on in it. A copy that lands has the checksum of its bytes
    in the outcome.
    """

    bundle: BundleBlocks
    target: Tier
    batches: Sequence[tuple[int, Sequence[CopyItem]]]
    deadline_at: float


@dataclass(slots=True)
class ExportBundle:
    """Store a bundle in the source. The places are held until the one ExportFinished.

    `fragments`: (tier, place, label), group-major: all blocks of the first layer group, then of the next.
    """

    export: int
    bundle: BundleBlocks
    fragments: Sequence[tuple[Tier, int, FragmentLabel]]
    is_trial: bool = False  # once stored it is read, to tell how fast the source is


@dataclass(slots=True)
class Publish:
    """Make fragments that arrived readable by clients (memory tiers). places, labels: one of each."""

    tier: Tier
    places: Sequence[int]
    labels: Sequence[FragmentLabel]


@dataclass(slots=True)
class Retract:
    """Make fragments unreadable; their places may be reused by a later instruction."""

    tier: Tier
    places: Sequence[int]


@dataclass(slots=True)
class SealSegment:
    """All copies into a full segment have ended: write its footer, make it durable."""

    segment: int


@dataclass(slots=True)
class FreeSegment:
    """Nothing in this segment is wanted: forget it durably, then report SegmentFreed."""

    segment: int


@dataclass(slots=True)
class GiveBack:
    """A tier became smaller: an extent or segment that nothing will use again can go back to the host."""

    tier: Tier
    number: int


@dataclass(slots=True)
class StoreNamespace:
    """Remember a namespace's identity in the cold store, before any of its records."""

    identity: NamespaceIdentity


@dataclass(slots=True)
class ForgetNamespace:
    """The cold store need not remember a namespace any more: it has no records of it that count."""

    identity: NamespaceIdentity


class BlockChange(Enum):
    """What happened to blocks, for routers."""

    STORED = 1
    MOVED = 2
    REMOVED = 3


@dataclass(slots=True)
class Notify:
    """Tell watchers of block events."""

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
    | SearchBundles
    | AwaitBlocks
    | StopAwaiting
    | FetchBundle
    | ExportBundle
    | Publish
    | Retract
    | SealSegment
    | FreeSegment
    | GiveBack
    | StoreNamespace
    | ForgetNamespace
    | Notify
)
