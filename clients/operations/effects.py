"""What an operation asks of its shell: the seam between the sans-IO client and sockets.

Every operation of the client (lookup, put, get, ...) is written once, as a generator that yields effects and
is sent their results. Client performs them with blocking sockets, AsyncClient with asyncio; both are thin.
Writing each operation twice was rejected (twins drift), and so was running one on top of the other
(an event loop in a thread costs more than the call).

    Attach()                    -> Attachment      make sure there is a connection
    Send(call, request, ...)    -> ticket          start a call, do not wait
    Receive(ticket)             -> Answer          wait for its next message
    Post(call, request)         -> None            send, no answer
    Forget(ticket)              -> None            stop listening to a stream
    Work(function, num_bytes)   -> what it returns move bytes; AsyncClient uses a thread when many
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ...v1.conversions import STANDARD_WIRE, WireTiers
from ...v1.shm import HASH_BYTES
from ..memory.extents import ExtentTable, Memory
from ..memory.one_sided import OneSidedReader
from ..memory.residence import ResidenceReader
from ..memory.staging import StagingArea
from ..memory.view_lock import ViewLock
from ..options import Limits
from ..values.types import ServerInfo
from .stream_codecs import StreamCodecs

T = TypeVar("T")
TOUCH_PERIOD_S = 1.0  # blocks that are read one-sidedly only must not look unused for longer


class Attach(NamedTuple):
    """Return the current connection's Attachment; where there is none, make one, or return None."""

    connect: bool = True


class Send(NamedTuple):
    """Start a call named as in kvcache.proto. For `Put` the request is an iterable of messages."""

    call: str
    request: Any
    timeout_s: float


class Receive(NamedTuple):
    """Wait for the next message of a call."""

    ticket: int


class Post(NamedTuple):
    """Send a request that has no answer. A hint may be dropped where sending it would have to wait."""

    call: str
    request: Any
    is_hint: bool = False


class Forget(NamedTuple):
    """Stop listening to a streaming call."""

    ticket: int


class Work(NamedTuple):
    """Run a function that moves `num_bytes` and releases the GIL meanwhile."""

    function: Callable[[], Any]
    num_bytes: int


Effect: TypeAlias = Attach | Send | Receive | Post | Forget | Work
Operation: TypeAlias = Generator[Effect, Any, T]


class Answer(NamedTuple):
    """One message of the daemon, and the memory that came with it."""

    message: Any
    memory: Sequence[Memory] = ()


@dataclass(slots=True)
class Touches:
    """Blocks read one-sidedly and not reported yet, per (namespace id, session). Mutated by every get."""

    chains: dict[tuple[int, str], dict[bytes, None]] = field(default_factory=dict)  # ordered sets
    num_blocks: int = 0
    due_at: float = 0.0

    def add(self, namespace_id: int, session: str, packed: bytes) -> None:
        """Remember that the blocks named in `packed` were read. The same chain again counts once."""
        chains = self.chains.setdefault((namespace_id, session), {})
        if packed not in chains:
            if not self.num_blocks:
                self.due_at = time.monotonic() + TOUCH_PERIOD_S
            chains[packed] = None
            self.num_blocks += len(packed) // HASH_BYTES

    def are_due(self, limits: Limits) -> bool:
        """Whether it is time to report."""
        return self.num_blocks >= limits.max_pending_touches or time.monotonic() >= self.due_at

    def take(self) -> list[tuple[int, str, bytes]]:
        """Return (namespace id, session, packed hashes) of everything remembered, and forget it."""
        chains, self.chains, self.num_blocks = self.chains, {}, 0
        return [(*key, b"".join(parts)) for key, parts in chains.items()]


@dataclass(eq=False, slots=True)
class Attachment:
    """One connection's life: everything that is void when it ends. Replaced as a whole, never repaired."""

    info: ServerInfo
    client_id: int
    local: bool  # extents can be read and staging written
    extents: ExtentTable
    staging: StagingArea | None = None
    reader: OneSidedReader | None = None  # None: no shared index, or this machine's memory order is too weak
    view_lock: ViewLock | None = None  # held while a lease has views into extents
    namespace_ids: dict[bytes, int] = field(default_factory=dict)  # by serialized identity
    touches: Touches = field(default_factory=Touches)
    #: (ticket, staging offset) of commits of puts that were cancelled: the daemon may still read there.
    unsettled: deque[tuple[int, int]] = field(default_factory=deque)
    #: How fragments travel where there is no shared memory; see stream_codecs.py.
    streams: StreamCodecs = field(default_factory=StreamCodecs)
    tiers: WireTiers = STANDARD_WIRE  # of this daemon, by the numbers of its messages
    #: Where blocks are; None: not asked for yet, or there is none.
    residence: ResidenceReader | None = None
    has_residence: bool = True  # as far as is known
    is_lost: Callable[[], bool] = lambda: False  # whether the daemon is seen to have ended the connection
