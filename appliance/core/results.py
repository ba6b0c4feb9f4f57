"""Results: what the planner answers to a call, wrapped in a `Reply` (instructions.py).

Plain values, one class per answer; the services turn them into messages. A `Refusal` is an operating error
and may answer any call."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ...tiers.block import STANDARD_TIERS, Tier
from ...v1.types import PutOutcome as PutOutcome


@dataclass(slots=True)
class Refusal:
    """An operating error: what is wrong, as in the error table of docs/api.md."""

    reason: str  # a name of kvtier.appliance.errors
    message: str  # says the fix
    retry_after_s: float = 0.0


@dataclass(slots=True)
class NamespaceResult:
    """A registered namespace: its short name, and the raw bytes of its fragments by layer group."""

    namespace_id: int
    digest: bytes
    fragment_bytes: list[int]


class ReadyFragment(NamedTuple):
    """One fragment a lease may read: block is an index into the request, place is of `tier`."""

    block: int
    group: int
    tier: Tier
    place: int
    length: int


class ReadyFragments:
    """Fragments a lease may read, in columns of equal length. Iterating gives ReadyFragment.
    A long prompt has ten thousand, and an object for each would cost more than copying it does. `known`: the
    ladder's tiers."""

    def __init__(self, known: Sequence[Tier] = STANDARD_TIERS) -> None:
        self._known = known
        self.blocks = array("q")
        self.groups = array("q")
        self.tiers = array("q")
        self.places = array("q")
        self.lengths = array("q")

    def add(self, block: int, group: int, tier: Tier, place: int, length: int) -> None:
        """Append one fragment."""
        self.blocks.append(block)
        self.groups.append(group)
        self.tiers.append(tier)
        self.places.append(place)
        self.lengths.append(length)

    def add_block(self, block: int, tier: Tier, places: Sequence[int], lengths: Sequence[int]) -> None:
        """Append all fragments of a block, in group order. The two columns are arrays of "q"."""
        count = len(places)
        self.blocks.extend(array("q", [block]) * count)
        self.groups.extend(array("q", range(count)))
        self.tiers.extend(array("q", [tier]) * count)
        self.places.extend(places)
        self.lengths.extend(lengths)

    def extend(self, other: "ReadyFragments") -> None:
        """Append those of `other`."""
        self.blocks.extend(other.blocks)
        self.groups.extend(other.groups)
        self.tiers.extend(other.tiers)
        self.places.extend(other.places)
        self.lengths.extend(other.lengths)

    def copy(self) -> "ReadyFragments":
        """Return the same fragments, to which nothing is added later."""
        found = ReadyFragments(self._known)
        found.extend(self)
        return found

    def before(self, num_blocks: int) -> "ReadyFragments":
        """Return those of the first `num_blocks` blocks."""
        found = ReadyFragments(self._known)
        for one in self:
            if one.block < num_blocks:
                found.add(one.block, one.group, one.tier, one.place, one.length)
        return found

    def bytes_before(self, num_blocks: int) -> int:
        """Return the bytes of those of the first `num_blocks` blocks."""
        if not self.blocks or max(self.blocks) < num_blocks:
            return sum(self.lengths)
        return sum(one.length for one in self if one.block < num_blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[ReadyFragment]:
        for block, group, tier, place, length in zip(
            self.blocks, self.groups, self.tiers, self.places, self.lengths, strict=True
        ):
            yield ReadyFragment(block, group, self._known[tier], place, length)


@dataclass(slots=True)
class AcquireResult:
    """One answer to an acquire: what became readable under its lease, of `num_blocks` blocks in all."""

    lease_id: int
    num_blocks: int
    ready: ReadyFragments
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
class KeepAliveResult:
    """The leases that could not be extended."""

    expired: list[int]


@dataclass(slots=True)
class ReserveResult:
    """A reservation, 0 when no block needs bytes. outcomes: a PutOutcome per block."""

    reservation_id: int
    outcomes: bytes


@dataclass(slots=True)
class PutResult:
    """The end of a put. outcomes: a PutOutcome per block."""

    outcomes: bytes


@dataclass(slots=True)
class PinResult:
    """A pin, and how many blocks it keeps."""

    pin_id: int
    num_blocks: int


@dataclass(slots=True)
class PrefetchResult:
    """How many blocks were found, and how many of them begin to come up."""

    num_blocks: int
    num_promoted: int


@dataclass(slots=True)
class CountResult:
    """How many blocks, or unknown leases, a call was about."""

    count: int


@dataclass(slots=True)
class EvictResult:
    """What an eviction by hand achieved."""

    num_blocks: int
    num_bytes: int
    num_readable: int  # of the blocks: still readable, from other tiers
    num_kept: dict[str, int]  # blocks that stayed though their room was wanted, by reason


@dataclass(slots=True)
class DamagedBlock:
    """A block of which a fragment was damaged. `readable_from`: the tier it can still be read from."""

    place: int
    namespace_id: int
    prefix_hash: bytes
    readable_from: str  # empty: the block is lost


@dataclass(slots=True)
class DamageResult:
    """The blocks that damaged places belonged to. Places of none are not in it."""

    blocks: list[DamagedBlock]


Result: TypeAlias = (
    Refusal
    | NamespaceResult
    | AcquireResult
    | KeepAliveResult
    | ReserveResult
    | PutResult
    | PinResult
    | PrefetchResult
    | CountResult
    | EvictResult
    | DamageResult
)
