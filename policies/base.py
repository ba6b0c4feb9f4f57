"""The contracts of the policies: what they see and what they decide.

    events       used · stored · session_changed · forgotten        Observer
    eviction     offer · price · choose · left                      EvictionPolicy
    admission    admits                                             AdmissionPolicy
    prefetch     due · next_at                                      Prefetcher

A policy sees blocks as row numbers and reads their attributes from `BlockFacts`, columns owned by the
catalog. It never sees bytes, places or clocks: every call says what time it is. The planner reports events
once per request, not once per block, so that a policy may work on runs of blocks; it checks the rules (a
victim has no reader, no child in its tier and no decoding session) and carries decisions out.

One algorithm per file, methods in the order above, registered by name in registry.py. Rejected: giving
policies the planner's events. They would have to know leases, copies and retries, and a user's own policy
would break whenever those change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..tiers.block import Tier
from ..tiers.ladder import STANDARD, Ladder

#: Priority of a block without a stated one; 0 to 100, lowest evicted first.
DEFAULT_PRIORITY = 50


class BlockFacts(Protocol):
    """Facts about every block, one column per fact, indexed by row.

    Columns grow: keep no view on them. Rows are used again after `Observer.forgotten`.
    """

    @property
    def prefix_hash(self) -> Sequence[bytes]:
        """Name of the block, 32 bytes; the only fact that outlives the row."""
        ...

    @property
    def namespace_id(self) -> Sequence[int]:
        """Namespace of the block: the same layout and size for all blocks in it."""
        ...

    @property
    def parent(self) -> Sequence[int]:
        """Row of the block before it in its chain; negative at the start."""
        ...

    @property
    def first_child(self) -> Sequence[int]:
        """Row of the block that continued it last; negative when there is none."""
        ...

    @property
    def next_sibling(self) -> Sequence[int]:
        """Row of another block with the same parent; negative at the end of the list."""
        ...

    @property
    def position(self) -> Sequence[int]:
        """Position of the block in its chain, from 0."""
        ...

    @property
    def last_used(self) -> Sequence[float]:
        """Time of the last use, or of the put, in seconds."""
        ...

    @property
    def num_uses(self) -> Sequence[int]:
        """Number of uses since the block was stored."""
        ...

    @property
    def urgency(self) -> Sequence[int]:
        """Urgency of the session that used it last.

        `NO_SESSION` (6) when the last use came without a session, or was before the daemon's start.
        """
        ...

    def block_bytes(self, row: int) -> int:
        """Return the raw bytes of the block, all layers."""
        ...

    def block_tokens(self, row: int) -> int:
        """Return the tokens in the block."""
        ...

    def tier_of(self, row: int) -> Tier | None:
        """Return the slowest tier that reading the whole block involves; None when it is in none."""
        ...

    @property
    def has_retention(self) -> bool:
        """Whether any block has another priority than DEFAULT_PRIORITY."""
        ...

    def retention(self, row: int, now: float) -> int:
        """Return the priority of a block: what a client said about its tokens, or a prefetch about it.

        Honoured for every policy by retained.py; a policy may read it, and need not.
        """
        ...


class Costs(Protocol):
    """Seconds to load a block and to recompute it."""

    def recompute_s(self, namespace_id: int, position: int, num_blocks: int = 1) -> float:
        """Return the seconds of prefill of `num_blocks` blocks, the first at `position` in its chain."""
        ...

    def load_s(self, namespace_id: int, num_blocks: int, tier: Tier) -> float:
        """Return the seconds until blocks that are in `tier` are readable from the fastest one."""
        ...


class Future(Protocol):
    """Requests to come. Exists in replay only, for bounds that no online policy reaches."""

    def next_use(self, prefix_hash: bytes, now: float) -> float:
        """Return when a block is asked for next after `now`; inf: never again."""
        ...


@dataclass(slots=True)
class Surroundings:
    """Arguments of a policy's constructor. One per tier and policy kind; `shared` is one per planner."""

    facts: BlockFacts
    costs: Costs
    tier: Tier
    capacity_bytes: int
    options: dict[str, Any] = field(default_factory=dict)  # the administrator's, for this policy
    #: Learners that several policies of one planner share, by name. The first policy that needs one makes it;
    #: those that are Observers get every event before the policies do.
    shared: dict[str, Any] = field(default_factory=dict)
    future: Future | None = None
    ladder: Ladder = STANDARD


class Use(NamedTuple):
    """One request's use of a chain, or one put's addition to it."""

    now: float  # seconds
    session: int  # number of the session; 0: the request named none
    num_asked: int  # blocks of the chain the request named, stored or not
    urgency: int
    deadline_at: float = float("inf")


class SessionChange(NamedTuple):
    """A session's new urgency, announced return and number of decoded tokens."""

    now: float
    session: int
    urgency: int
    back_at: float = float("inf")  # when it announced to need its blocks again; inf: not stated
    num_decoded_tokens: int = 0  # since its last request; 0: not stated


class Newcomer(NamedTuple):
    """Blocks to be admitted to a tier: new ones of a put, or one that is spilled from a faster tier."""

    now: float
    parent: int  # row of the last block before it that has one; negative: it starts a chain
    position: int  # of the first one
    num_blocks: int
    session: int
    urgency: int
    prefix_hashes: Sequence[bytes] = ()  # of a put, in chain order: these blocks have no rows yet
    row: int = -1  # its row when it is stored already (a spill)
    priority: int = DEFAULT_PRIORITY  # the highest that was stated for one of these blocks

    def after(self, num_blocks: int) -> "Newcomer":
        """Return the rest of the blocks when the first `num_blocks` have a place.

        `parent` stays, because they have no rows yet, and so does `priority`.
        """
        return self._replace(
            position=self.position + num_blocks,
            num_blocks=self.num_blocks - num_blocks,
            prefix_hashes=self.prefix_hashes[num_blocks:],
        )


class Victim(NamedTuple):
    """The block to evict, its price, and the price and row of the next candidate."""

    row: int
    price: float
    runner_up: float = float("nan")  # price of the next candidate; NaN: not known
    runner_up_row: int = -1


@runtime_checkable
class Observer(Protocol):
    """Receives the events of the planner. Subclasses override the ones they need."""

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Handle a request's use of these stored blocks, in chain order from the start of the chain."""
        return

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Handle new blocks of one chain, readable now, in chain order; the first continues its parent.

        A long prompt comes in several calls, and so does what is decoded after it, block by block.
        """
        return

    def session_changed(self, change: SessionChange) -> None:
        """Handle a session's change."""
        return

    def forgotten(self, rows: Sequence[int]) -> None:
        """Drop state of blocks that are in no tier any more.

        Their rows may name other blocks after this call.
        """
        return


class EvictionPolicy(Observer, Protocol):
    """Chooses the block of one tier to evict next. One instance per tier."""

    def offer(self, rows: Sequence[int], now: float) -> None:
        """Add candidates for eviction. Offering one again is allowed and refreshes its price."""
        ...

    def price(self, row: int, now: float) -> float:
        """Return what evicting this block costs, in the policy's own unit; the lowest is evicted first."""
        ...

    def num_no_dearer(self, rows: Sequence[int], price: float, now: float) -> int:
        """Return how many of these blocks, from the first one on, cost at most `price`.

        The planner asks for the blocks above a victim, deepest first: those that cost no more are evicted in
        the same step. Override it where many blocks have one price.
        """
        for number, row in enumerate(rows):
            if not self.price(row, now) <= price:  # a price that is no number keeps its block
                return number
        return len(rows)

    def choose(self, now: float) -> Victim | None:
        """Remove and return the candidate to evict next; None when there is none.

        The answer may be out of date (the block may be in use again); the caller checks, and offers it
        again when it becomes a candidate.
        """
        ...

    def left(self, rows: Sequence[int]) -> None:
        """Drop candidates that left this tier, chosen or not."""
        return

    def __len__(self) -> int:
        """Number of candidates, out-of-date ones included."""
        ...


class AdmissionPolicy(Protocol):
    """Decides whether blocks are admitted to one tier. One instance per tier."""

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        """Return whether the newcomer may take the place of `victim`.

        None: it is a spill into the tier below, which has room. The answer holds for as many blocks as the
        victim's run makes room for.
        """
        ...


class Expected(NamedTuple):
    """Blocks that are likely to be used soon, to be prefetched."""

    rows: Sequence[int]  # in chain order, parents first; those that are in a memory tier need not be named
    until: float  # when the expectation ends: unused by then, it was wrong
    reason: str  # for `kvtier why`, in words
    is_announced: bool = False  # its session said so; otherwise it was learned from others


class Prefetcher(Observer, Protocol):
    """Chooses blocks to promote before they are requested."""

    def due(self, now: float, num_bytes: int) -> Sequence[Expected]:
        """Return what to promote now, best first, of about `num_bytes` in total, each once.

        What does not fit may be returned by a later call. The planner asks only when it could begin.
        """
        ...

    def next_at(self) -> float | None:
        """Return when to call `due` next, in seconds; None: not before the next event."""
        ...
