"""What the scheduler asks its agent, and what comes back. Filled by one thread, read by another.

The agent's thread sets the fields of PendingLookup once each, `answer` last; the scheduler only reads them.
Assigning a reference is atomic in CPython, so there is no lock on the engine's critical path.
"""

import threading
from dataclasses import dataclass, field
from typing import Protocol

from ....v1.types import Tier, Urgency
from ...values.types import Retention
from .handover import HandoverSource


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """A prefix to look up from token `first_token` on, and to pin."""

    session: str
    hashes: tuple[bytes, ...]  # the request's own, one per hash block
    first_token: int = 0  # what is before it the engine has
    adapter_path: str = ""
    salt: str = ""
    deadline_s: float = 0.0  # what has not come up by then counts as not stored
    adapter_id: int = 0  # the engine's, of what it loaded from `adapter_path`
    retention: tuple[Retention, ...] = ()
    max_tokens: int = 1 << 62  # of a hit
    source: HandoverSource | None = None  # where the rest of it is being computed: it is waited for


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """Readable and pinned up to `num_tokens`; 0 with a `cause` (one of counters.NAMES) when there is none."""

    num_tokens: int = 0
    stored: tuple[int, ...] = ()  # blocks stored from the start, per group; empty: unknown
    tiers: tuple[Tier, ...] = ()  # where the blocks of the first group were found
    adapter: bytes = b""  # digest of the adapter at `adapter_path`
    cause: str = ""


@dataclass(eq=False, slots=True)
class PendingLookup:
    """A lookup under way. `answer` is set once."""

    question: LookupRequest
    asked_at: float
    is_pinned: bool = False  # the daemon has answered; blocks may still be on their way up
    arriving: LookupAnswer | None = None  # what `answer` will be, if all that is on its way up arrives
    answer: LookupAnswer | None = None
    is_lost: bool = False  # the pin ended before its release
    is_released: bool = field(default=False)  # by the scheduler: the answer is not wanted any more
    has_answer: threading.Event = field(default_factory=threading.Event)  # set after `answer`


@dataclass(frozen=True, slots=True)
class SessionUpdate:
    """New state of a session, for the appliance. Times in seconds from now."""

    urgency: Urgency
    deadline_s: float | None = None
    back_in_s: float | None = None  # when its next turn is expected
    num_decoded_tokens: int = 0  # of the answer that it got
    is_last: bool = False  # end it; what is reusable of its blocks is archived


class LookupAgent(Protocol):
    """What the scheduler's side needs of the agent. No method raises, and only `wait` blocks."""

    def allows(self) -> bool:
        """Whether to ask now; False while the appliance does not answer."""
        ...

    def ask(self, question: LookupRequest) -> PendingLookup:
        """Start a lookup that pins."""
        ...

    def wait(self, asked: PendingLookup, timeout_s: float) -> None:
        """Return when the answer is there, or after `timeout_s`."""
        ...

    def silent(self) -> None:
        """Note that an answer did not come in time."""
        ...

    def release(self, asked: PendingLookup) -> None:
        """End the pin, now or when it comes. Idempotent."""
        ...

    def tell(self, session: str, update: SessionUpdate) -> None:
        """Note the state of a session; the latest update counts."""
        ...

    def where(self, salt: str, adapter: bytes) -> tuple[int, bytes] | None:
        """Return the epoch of the daemon that was asked last, and the digest of the first namespace.

        None when that is not known."""
        ...
