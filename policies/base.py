"""The contracts of the policies: what they see and what they decide.

    what the appliance sees   used · stored · session_changed · forgotten        Observer
    who leaves a tier         offer · price · choose · left                      EvictionPolicy
    who enters a tier         admits                                             AdmissionPolicy
    who comes up unasked      due · next_at                                      Prefetcher

A policy sees blocks as row numbers and reads their attributes from `BlockFacts`, columns owned by the
catalog. It never sees bytes, places or clocks: every call says what time it is. The planner tells what
happened once per request, not once per block, so that a policy may work on runs of blocks; it checks the
rules (nobody reads it, no child is left behind, no session decodes on it) and carries decisions out.

One algorithm per file, methods in the order above, registered by name in registry.py. Rejected: giving
policies the planner's events. They would have to know leases, copies and retries, and a user's own policy
would break whenever those change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..tiers.block import Tier

#: Priority of a block that nobody said anything about; 0 to 100, lowest evicted first.
DEFAULT_PRIORITY = 50


class BlockFacts(Protocol):
    """What is known about every block, one column per fact, indexed by row.

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
        """Its place in its chain, from 0."""
        ...

    @property
    def last_used(self) -> Sequence[float]:
        """When the block was last used or stored, in seconds."""
        ...

    @property
    def num_uses(self) -> Sequence[int]:
        """How often it was used since it was stored."""
        ...

    @property
    def urgency(self) -> Sequence[int]:
        """Urgency of the session that used it last; `NO_SESSION` (6) when the last use came without a
        session, or was before the daemon's start."""
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
    """What it takes to get a block back; the same numbers answer "load or recompute?"."""

    def recompute_s(self, namespace_id: int, position: int, num_blocks: int = 1) -> float:
        """Return the seconds of prefill of blocks whose first stands at `position` in its chain."""
        ...

    def load_s(self, namespace_id: int, num_blocks: int, tier: Tier) -> float:
        """Return the seconds until blocks that are in `tier` are readable from the fastest one."""
        ...


class Future(Protocol):
    """What will happen. Exists in replay only, for the bounds that no real policy reaches."""

    def next_use(self, prefix_hash: bytes, now: float) -> float:
        """Return when a block is asked for next after `now`; inf: never again."""
        ...


@dataclass(slots=True)
class Surroundings:
    """What a policy is built with. One per tier and policy kind; `shared` is one per planner."""

    facts: BlockFacts
    costs: Costs
    tier: Tier
    capacity_bytes: int
    options: dict[str, Any] = field(default_factory=dict)  # the administrator's, for this policy
    #: Learners that several policies of one planner share, by name. Whoever needs one first makes it; those
    #: that are Observers hear what the appliance sees before the policies do.
    shared: dict[str, Any] = field(default_factory=dict)
    future: Future | None = None


class Use(NamedTuple):
    """One request's use of a chain, or one put's addition to it."""

    now: float  # seconds
    session: int  # number of the session; 0: the request named none
    num_asked: int  # blocks of the chain the request named, stored or not
    urgency: int
    deadline_at: float = float("inf")


class SessionChange(NamedTuple):
    """A session changed its urgency, or said when it will be back, or how much was decoded for it."""

    now: float
    session: int
    urgency: int
    back_at: float = float("inf")  # when it expects to need its blocks again; inf: it did not say
    num_decoded_tokens: int = 0  # since its last request; 0: it did not say


class Newcomer(NamedTuple):
    """Blocks about to enter a tier: new ones of a put, or one that is spilled from a faster tier."""

    now: float
    parent: int  # row of the last block before it that has one; negative: it starts a chain
    position: int  # of the first one
    num_blocks: int
    session: int
    urgency: int
    prefix_hashes: Sequence[bytes] = ()  # of a put, in chain order: these blocks have no rows yet
    row: int = -1  # its row when it is stored already (a spill)
    priority: int = DEFAULT_PRIORITY  # the highest that somebody gave one of these blocks

    def after(self, num_blocks: int) -> "Newcomer":
        """Return what is left when its first blocks have a place; `parent` stays, they have no rows yet, and
        so does `priority`."""
        return self._replace(
            position=self.position + num_blocks,
            num_blocks=self.num_blocks - num_blocks,
            prefix_hashes=self.prefix_hashes[num_blocks:],
        )


class Victim(NamedTuple):
    """Who should leave, and why: its price, and the price and row of the one that would have been next."""

    row: int
    price: float
    runner_up: float = float("nan")  # NaN: none was at hand
    runner_up_row: int = -1


@runtime_checkable
class Observer(Protocol):
    """Whoever learns from what the appliance sees. Subclasses override what they need."""

    def used(self, rows: Sequence[int], use: Use) -> None:
        """A request used these stored blocks, in chain order from the start of the chain."""
        return

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """These new blocks of one chain are readable now, in chain order; the first continues its parent.

        A long prompt comes in several calls, and so does what is decoded after it, block by block.
        """
        return

    def session_changed(self, change: SessionChange) -> None:
        """A session said something about itself."""
        return

    def forgotten(self, rows: Sequence[int]) -> None:
        """These blocks are in no tier any more; their rows may name other blocks after this call."""
        return


class EvictionPolicy(Observer, Protocol):
    """Which block of one tier to give up first. One instance per tier."""

    def offer(self, rows: Sequence[int], now: float) -> None:
        """These may be given up from now on. Offering again is allowed and refreshes their price."""
        ...

    def price(self, row: int, now: float) -> float:
        """Return what giving up this block costs, in the policy's own unit; small leaves first."""
        ...

    def num_no_dearer(self, rows: Sequence[int], price: float, now: float) -> int:
        """Return how many of these blocks, from the first one on, cost at most `price`.

        The planner asks for the blocks above a victim, deepest first: those that cost no more leave in the
        same step. Whoever has one price for many blocks says so here in one go.
        """
        for number, row in enumerate(rows):
            if not self.price(row, now) <= price:  # a price that is no number keeps its block
                return number
        return len(rows)

    def choose(self, now: float) -> Victim | None:
        """Remove and return the candidate to give up first; None when there is none.

        The answer may be out of date (the block may be in use again); the caller checks, and offers it
        again when it becomes a candidate.
        """
        ...

    def left(self, rows: Sequence[int]) -> None:
        """These blocks left this tier (chosen or not)."""
        return

    def __len__(self) -> int:
        """Number of candidates, out-of-date ones included."""
        ...


class AdmissionPolicy(Protocol):
    """Whether blocks are worth a place in one tier. One instance per tier."""

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        """Say whether the newcomer may take the place of `victim` (None: the tier below is asked to take
        what is spilled). The answer holds for as many blocks as the victim's run makes room for."""
        ...


class Expected(NamedTuple):
    """Blocks that somebody is expected to need soon."""

    rows: Sequence[int]  # in chain order, parents first; those that are in a memory tier need not be named
    until: float  # when the expectation ends: unused by then, it was wrong
    reason: str  # for the story, in words
    is_announced: bool = False  # its session said so; otherwise it was learned from others


class Prefetcher(Observer, Protocol):
    """Who should come up before anyone asks."""

    def due(self, now: float, num_bytes: int) -> Sequence[Expected]:
        """Return what to promote now, best first, of about `num_bytes` in total, each once.

        What does not fit may be returned by a later call. The planner asks only when it could begin.
        """
        ...

    def next_at(self) -> float | None:
        """Return when `due` has something to say; None: not before something happens."""
        ...
