"""The contract of a tier: a room that accounts for places and an engine that moves bytes.

The two halves are separate objects on purpose. The *room* is pure bookkeeping (which places are free); the
planner owns it, so that placement is a deterministic decision and the simulator runs the very same
code. The *engine* touches memory, files or a GPU and knows nothing of policy; the mover drives it. A
tier with both in one object was rejected: either the planner would do I/O or the simulator would need
a second allocator.

Life of a place:

    reserve -> write -> (visible) -> read ... -> retract -> release

`reserve` and `release` are the room's, `write`, `publish_run`, `read`, `retract` the engine's.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import repeat
from typing import NamedTuple, Protocol, TypeAlias

from .block import FragmentLabel, Tier

Buffer: TypeAlias = memoryview  # one-dimensional, contiguous, of bytes


class Cause(Enum):
    """Why a copy did not land. Every one of them is a miss, counted under this name."""

    IO_ERROR = "io_error"
    SHORT_TRANSFER = "short_transfer"
    WRONG_IDENTITY = "wrong_identity"  # the record there is another one
    WRONG_CHECKSUM = "wrong_checksum"  # the record there is this one, its bytes are not
    NO_SPACE = "no_space"
    DOES_NOT_FIT = "does_not_fit"  # encoded it is longer than its place: to be stored as it is
    NOT_AUTHENTIC = "not_authentic"  # it was changed since it was encrypted
    NO_KEY = "no_key"  # of a tenant that was erased, or of another key file
    CANCELLED = "cancelled"
    SOURCE_GONE = "source_gone"  # the staging extent or device went away with its client
    TIER_OFFLINE = "tier_offline"
    UNREADABLE = "unreadable"  # what its codec needs is missing: readable again when that is back


DISK_CAUSES = (Cause.IO_ERROR, Cause.SHORT_TRANSFER, Cause.NO_SPACE)  # those of failing system calls


class CopyError(Exception):
    """A copy of one fragment failed; `cause` says why. Never carries payload bytes in its message."""

    def __init__(self, cause: Cause, detail: str = "") -> None:
        super().__init__(f"{cause.value}: {detail}" if detail else cause.value)
        self.cause = cause


class ColdStoreError(Exception):
    """A cold store or its keys cannot be opened. The message says why and names the fix."""


class Encryption(NamedTuple):
    """Key and envelope of an encrypted payload, from its record's header:
    copied along where the payload is copied as stored."""

    key: int  # id, never 0
    envelope: bytes


class CopyOutcome(NamedTuple):
    """Result of one copy: the payload's checksum, or a cause."""

    cause: Cause | None
    checksum: bytes = b""  # xxh3-128 of the raw payload, when the copy took or verified it
    encryption: Encryption | None = None  # of what was read as it stands


def landed(checksums: Sequence[bytes]) -> list[CopyOutcome]:
    """Return the outcomes of successful copies, by their checksums.
    Made in C, because a batch has hundreds."""
    rows = zip(repeat(None), checksums, repeat(None), strict=False)
    return list(map(partial(tuple.__new__, CopyOutcome), rows))


@dataclass(slots=True)
class RoomStatistics:
    """Bytes of a room by use. The planner keeps `free + reserved + used + condemned == capacity`.
    A room itself knows free and taken."""

    capacity_bytes: int
    free_bytes: int
    taken_bytes: int
    wasted_bytes: int = 0  # taken, but not by payload: rounding, headers, holes


class Room(Protocol):
    """Allocates the places of a tier. Pure, deterministic, no I/O."""

    def reserve(self, domain: int, num_bytes: int) -> int | None:
        """Take a place for a fragment of `num_bytes` of isolation domain `domain`.
        None when there is none. Amortised O(1)."""
        ...

    def release(self, place: int, num_bytes: int) -> None:
        """Free `place`, reserved for `num_bytes`.
        The caller promises that it is neither read nor written any more."""
        ...

    def settle(self, place: int) -> None:
        """Mark the copy into `place` as ended, successful or not."""
        ...

    def can_hold(self, num_bytes: int) -> bool:
        """Whether a fragment of this size can ever be placed here."""
        ...

    def statistics(self) -> RoomStatistics:
        """Return the present numbers."""
        ...

    def check_integrity(self) -> list[str]:
        """Return inconsistencies in words; empty when there are none."""
        ...


class MemoryRoom(Room, Protocol):
    """The room of a tier that takes puts: many places at once."""

    def reserve_many(self, domain: int, sizes: Sequence[int], count: int) -> list[int]:
        """Take up to `count` times places of all `sizes`.
        Return as many as fit, in order, in whole multiples of `sizes`."""
        ...

    def release_many(self, places: Sequence[int], sizes: Sequence[int]) -> None:
        """Free many places: place `i` was reserved for `sizes[i % len(sizes)]` bytes."""
        ...

    def adopt(self, number: int, domain: int, sizes: Mapping[int, int], is_closed: bool = False) -> None:
        """Bind extent `number`, which was held, to `domain`, its slots taken for `sizes`: slot -> bytes.

        If it `is_closed`, slots that are or become free are not used before `open_again`.
        """
        ...

    def open_again(self, number: int) -> None:
        """Use a closed extent like any other."""
        ...


@dataclass(slots=True)
class EngineStatistics:
    """Counters of an engine since it was opened."""

    backend: str
    num_reads: int = 0
    num_writes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    failures: dict[Cause, int] = field(default_factory=dict)


class Engine(Protocol):
    """Moves bytes in and out of the places of one tier. Thread-safe; long calls release the GIL."""

    tier: Tier

    def write(self, place: int, label: FragmentLabel, payload: Buffer) -> bytes:
        """Store `payload` (len == label.raw_length) at `place`; return its xxh3-128 checksum.

        The checksum is taken from *the stored copy* when `label.checksum` is empty, because a client
        can change its staging extent during the copy; otherwise `label.checksum` is carried unchanged.
        The fragment is not readable before `publish_run`. Raises CopyError.
        """
        ...

    def read(self, place: int, label: FragmentLabel, into: Buffer) -> None:
        """Fill `into` with the payload at `place`.
        Compares identity first, and the checksum where this tier could have lost it. On any doubt raises
        CopyError; `into` is then undefined."""
        ...

    def publish_run(self, places: Sequence[int], labels: Sequence[FragmentLabel]) -> None:
        """Make fragments of one domain readable under their labels. Cheap; called on the event loop."""
        ...

    def retract(self, place: int) -> None:
        """Make `place` unreadable. Cheap; called on the event loop before the place is reused."""
        ...

    def statistics(self) -> EngineStatistics:
        """Return counters."""
        ...

    def check_integrity(self) -> list[str]:
        """Return inconsistencies of the engine's own state, in words; empty when there are none."""
        ...

    def close(self) -> None:
        """Release memory, files and threads. Idempotent."""
        ...


class MemoryEngine(Engine, Protocol):
    """Engine of a tier with places in this process's address space: copies from and to it need no bounce."""

    def view(self, place: int, length: int) -> Buffer:
        """Return the `length` bytes at `place`, writable, without copying. Valid until `close`."""
        ...


class Damaged(NamedTuple):
    """A place with other bytes than were stored there."""

    place: int
    life: int  # of the place: another number, another fragment
    cause: Cause


class Verified(NamedTuple):
    """What one step of a verification read."""

    num_fragments: int
    num_bytes: int
    damaged: Sequence[Damaged] = ()
    #: Words: what cannot be read although no fragment is damaged by that.
    problem: str = ""
    #: If what says which fragments there are is damaged (it is in `damaged`): the places that are whole.
    whole: Sequence[int] | None = None


class Verifier(Protocol):
    """Compares everything in an engine with its checksums, beside other work."""

    def units(self) -> list[int]:
        """Return the numbers of the extents or segments that hold something."""
        ...

    def verify_unit(self, number: int) -> Iterator[Verified]:
        """Read a unit in steps of a millisecond or so; yields what each found.

        For a thread. Never raises for what it finds, and ends early when the unit is given up.
        """
        ...

    def is_alive(self, damaged: Damaged) -> bool:
        """Whether the place still holds what was found damaged. Called on the event loop."""
        ...


class CopyItem(NamedTuple):
    """One fragment to copy. Places belong to the source and target tier of the batch."""

    source: int  # place, or offset in the staging extent
    target: int
    label: FragmentLabel


class Copier(Protocol):
    """Executes batches of copies of one edge asynchronously. Completion is an event, never a wait.

    Host memory and NVMe copy in worker threads; a GPU enqueues on a stream and completes by CUDA
    event. Within one batch, outcomes are in the order of the items.
    """

    def start(self, items: Sequence[CopyItem]) -> "Future[list[CopyOutcome]]":
        """Begin copying `items`; the future completes when every item has ended, well or not."""
        ...
