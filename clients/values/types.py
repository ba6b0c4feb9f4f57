"""What calls take and return: reports, ranks, retention, speed. v1/types.py has tiers and outcomes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...v1 import kvcache_pb2, types_pb2
from ...v1.arguments import number, text, whole
from ...v1.types import STANDARD_LADDER, PutOutcome, Tier, TierInfo
from ..errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Version of the daemon, and the transport to it: `local` (shared memory) or `grpc`."""

    version: str
    epoch: int  # changes at every start of the daemon
    transport: str
    max_blocks_per_request: int
    #: Every tier the daemon can have, fastest first; calls take and return tiers of these names.
    ladder: tuple[TierInfo, ...] = STANDARD_LADDER


@dataclass(frozen=True, slots=True)
class Lookup:
    """How much of a chain is stored. No promise: only `acquire` promises."""

    num_blocks: int
    tiers: tuple[Tier, ...]  # one per stored block: the slowest its fragments must come from
    load_s: float  # estimated time until all of it is readable
    recompute_s: float = 0.0  # estimated prefill time of all of it
    num_worth_loading: int = 0  # blocks, from the start of the chain; computing the rest is quicker
    reason: str = ""  # why that is not all of it
    #: Blocks behind these that an object store is known to hold and that `acquire` fetches.
    num_fetchable: int = 0
    fetch_s: float = 0.0  # estimated time until those are readable
    #: How long it is worth to wait for a search of the object store that is under way; 0: there is none. The
    #: next lookup knows what it found.
    search_s: float = 0.0

    @property
    def num_available(self) -> int:
        """Blocks that an acquire brings: those stored here, and those it fetches."""
        return self.num_blocks + self.num_fetchable


@dataclass(frozen=True, slots=True)
class HostRank:
    """One host of a ranking. Blocks are counted from the first one of the prompt."""

    address: str  # as the fleet's members have it; empty: the daemon asked, which is no member
    name: str  # of the machine
    is_self: bool  # the daemon asked
    is_known: bool  # False: a candidate of which nothing is known, ranked as if it held nothing
    first_token_s: float  # expected: behind the queue, with blocks read, fetched and computed
    num_held: int  # blocks in its tiers
    num_in_memory: int  # of those held
    num_on_disk: int
    num_in_unknown_tier: int  # of an older host, which does not tell
    num_fetched: int  # blocks worth fetching from elsewhere
    num_computed: int
    load_s: float  # until the held ones are readable
    fetch_s: float  # until the fetched ones have arrived
    compute_s: float  # prefill of the rest
    queue_s: float  # of the candidate
    #: What the host said of its load, by the fields of HostLoad; what it did not tell is missing.
    load: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rank:
    """The hosts of a fleet for one prompt, the one that should get it first. A hint.

    That is the one with the earliest expected first token, unless others would lose more by it."""

    hosts: tuple[HostRank, ...]
    num_blocks: int  # of the prompt
    block_tokens: int
    recompute_s: float  # estimated prefill of the whole prompt
    is_guess: bool  # nothing measured or stated how fast prompts are computed: seconds are rough


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """How fast the runtime computes prompts of one model; what loading a block is weighed against."""

    tokens_per_s: float  # at the start of a context
    doubling_tokens: float = 0.0  # context at which a token takes twice as long; 0: let the daemon guess

    def __post_init__(self) -> None:
        number("tokens_per_s", self.tokens_per_s)
        number("doubling_tokens", self.doubling_tokens)

    def to_wire(self) -> types_pb2.PrefillSpeed:
        """Return the message."""
        return types_pb2.PrefillSpeed(tokens_per_s=self.tokens_per_s, doubling_tokens=self.doubling_tokens)


@dataclass(frozen=True, slots=True)
class Retention:
    """How much the tokens from `first_token` to `end_token` of a chain are worth keeping.

    Raises InvalidRequest when the priority is out of range or the range is empty.

    Tokens count from the start of the chain, whatever part of it a call names. A block belongs to the last
    range given that contains its first token.
    """

    priority: int  # 0 to 100, lowest evicted first; blocks without a hint have 50
    first_token: int = 0
    end_token: int | None = None  # None: to the end of the blocks named
    ttl_s: float | None = None  # None: until it is changed

    def __post_init__(self) -> None:
        whole("priority", self.priority, -1 << 63)
        whole("first_token", self.first_token, -1 << 63)
        if self.end_token is not None:
            whole("end_token", self.end_token, -1 << 63)
        if self.ttl_s is not None:
            number("ttl_s", self.ttl_s, 0.0)
        if not 0 <= self.priority <= 100:
            raise InvalidRequest(f"priority is 0 to 100, is {self.priority}", reason="BAD_REQUEST")
        if self.end_token is not None and not 0 <= self.first_token < self.end_token:
            raise InvalidRequest(
                f"tokens {self.first_token} to {self.end_token} are no range; end_token is behind the last",
                reason="BAD_REQUEST",
            )

    def to_wire(self) -> types_pb2.Retention:
        """Return the message."""
        return types_pb2.Retention(
            first_token=self.first_token,
            end_token=self.end_token or 0,
            priority=self.priority,
            ttl_ms=max(1, round(self.ttl_s * 1000)) if self.ttl_s is not None else 0,
        )


@dataclass(frozen=True, slots=True)
class ExpectedBlocks:
    """Blocks of a chain that another runtime computes now: an acquire or a get waits for them.

    It waits as long as computing them would take, a quarter longer once blocks come, and not at all for a
    host that is not of the fleet, or gone. Raises InvalidRequest for what is no number.
    """

    host: str = ""  # of the daemon they are put into: address as the fleet's members have it, or name
    epoch: int = 0  # of that daemon (`info.epoch`), which alone names it; with neither it is the one asked
    num_blocks: int = 0  # of the chain, from its start on; 0: all that are named
    wait_s: float | None = None  # at most; None: the call's deadline

    def __post_init__(self) -> None:
        text("host", self.host)
        whole("epoch", self.epoch)
        whole("num_blocks", self.num_blocks)
        if self.wait_s is not None:
            number("wait_s", self.wait_s, 0.0)

    def to_wire(self) -> kvcache_pb2.ExpectedBlocks:
        """Return the message."""
        return kvcache_pb2.ExpectedBlocks(
            host=self.host,
            epoch=self.epoch,
            num_blocks=self.num_blocks,
            wait_ms=max(1, round(self.wait_s * 1000)) if self.wait_s is not None else 0,
        )


@dataclass(frozen=True, slots=True)
class PutReport:
    """What became of a put, one outcome per block named."""

    outcomes: list[PutOutcome]

    @property
    def num_stored(self) -> int:
        """Number of blocks with bytes that were taken from this put."""
        return self.outcomes.count(PutOutcome.STORED)

    @property
    def num_deduplicated(self) -> int:
        """Blocks that were stored before."""
        return self.outcomes.count(PutOutcome.DEDUPLICATED)

    @property
    def num_refused(self) -> int:
        """Blocks that are not stored by this put. Never an error: the next get is a miss."""
        return len(self.outcomes) - self.num_stored - self.num_deduplicated

    @property
    def complete(self) -> bool:
        """Whether every block is stored now."""
        return self.num_refused == 0


@dataclass(frozen=True, slots=True)
class GetReport:
    """What a get brought. Block `i` of the chain, for `first_block <= i < num_blocks`, is in `data`."""

    num_blocks: int  # end of the readable prefix, counted from the start of the chain
    first_block: int
    data: Any  # `into` as it was passed; or a uint8 array cut to the bytes that came
    num_bytes: int
    num_one_sided: int  # blocks read from shared memory without any call

    @property
    def num_loaded(self) -> int:
        """Number of blocks that are in `data`."""
        return max(0, self.num_blocks - self.first_block)


@dataclass(frozen=True, slots=True)
class Prefetch:
    """What a prefetch started."""

    num_blocks: int  # stored prefix
    num_promoted: int  # blocks a promotion was queued for
