"""Telemetry: which blocks were asked for, where they were, and what that saved, in total and by session.

Told of every step of the appliance (the event, what the planner answered), so that no service has to remember
to report and the core does not know of it. An asked block counts where it was when it was asked for:

    asked = found in each tier of the ladder + missed + declined

`declined` blocks are stored, and were not given: computing them is quicker, or the client holds its share.
Blocks read one-sidedly are asked and found in host memory; the client reports them later, with its next
message.
A runtime may acquire with one client and read with others (vLLM: scheduler and workers): such reads were
asked for already, and are told by where they end: where an acquire of another client ended lately.

Bounded: the MAX_SESSIONS most recently active sessions have totals of their own, the total has all. The names
of the chain a session used last are kept for as many sessions as MAX_NAMES allow: `kvtier why session` asks
for blocks that the catalog has forgotten.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...tiers.block import HASH_BYTES
from ...tiers.ladder import Ladder
from ..core.events import AcquireRequested, CommitRequested, Event, ReserveRequested, Touched
from ..core.instructions import Reply
from ..core.planner import Planner
from ..core.results import AcquireResult, PutOutcome, PutResult

MAX_SESSIONS = 4096
MAX_OPEN_PUTS = 4096
MAX_NAMES = 65_536
MAX_ACQUIRED = 1024
ALL = ""  # the session of requests that name none


@dataclass(slots=True)
class UsageTotals:
    """What was asked, found and put. Counts are blocks."""

    ladder: Ladder
    num_asked: int = 0
    found: list[int] = field(init=False)  # by Tier
    num_missed: int = 0
    num_declined: int = 0
    num_stored: int = 0
    read_bytes: int = 0  # of found blocks
    loaded_bytes: int = 0  # of those: that had to be brought up first
    stored_bytes: int = 0
    saved_s: float = 0.0  # of prefill, less the loading, as the cost model has it

    def __post_init__(self) -> None:
        self.found = [0] * len(self.ladder.tiers)

    @property
    def num_found(self) -> int:
        """Found in any tier."""
        return sum(self.found)

    @property
    def hit_ratio(self) -> float | None:
        """Share of the asked blocks that were found; None before anything was asked."""
        return self.num_found / self.num_asked if self.num_asked else None

    def ask(self, tiers: bytes, num_asked: int, num_stored: int, block_bytes: int, saved_s: float) -> None:
        """Count one request: `tiers` of what was given, `num_stored` of the asked blocks are stored."""
        self.num_asked += num_asked
        put_tier, log_tier = self.ladder.put_tier, self.ladder.log_tier
        num_first = tiers.count(put_tier)
        self.found[put_tier] += num_first
        if num_first < len(tiers):
            for tier in self.ladder.tiers:
                if tier != put_tier:
                    self.found[tier] += tiers.count(tier)
            self.loaded_bytes += tiers.count(log_tier) * block_bytes
        self.num_missed += num_asked - max(num_stored, len(tiers))
        self.num_declined += max(0, num_stored - len(tiers))
        self.read_bytes += len(tiers) * block_bytes
        self.saved_s += saved_s

    def put(self, num_stored: int, block_bytes: int) -> None:
        """Count the new blocks of one put."""
        self.num_stored += num_stored
        self.stored_bytes += num_stored * block_bytes


@dataclass(slots=True)
class SessionChain:
    """The blocks a session used last: a chain it asked for, and what it put behind that."""

    namespace_id: int
    packed: bytes  # their names, one behind the other: bytes objects of their own take 80 bytes each

    @property
    def num_names(self) -> int:
        """How many there are, those twice in it counted twice."""
        return len(self.packed) // HASH_BYTES


class Telemetry:
    """Hears of every step. Owned by the event loop."""

    def __init__(self, planner: Planner) -> None:
        self._ladder = ladder = planner.core.ladder
        self.total = UsageTotals(ladder)
        self._planner = planner
        #: Memories that clients read in place beside the put tier. None: what was read one-sidedly was there.
        self._slower = [
            tier for tier in ladder.host_tiers if tier > ladder.put_tier and tier in planner.rooms
        ]
        self._sessions: OrderedDict[str, UsageTotals] = OrderedDict()
        self._puts: dict[int, tuple[str, int]] = {}  # call -> session, bytes of a block
        self._handlers: dict[type, Callable[[Any, Sequence[Any]], None]] = {
            AcquireRequested: self._asked,
            Touched: self._touched,
            CommitRequested: self._committed,
        }
        self._reservations: OrderedDict[int, tuple[str, int]] = OrderedDict()
        self._chains: OrderedDict[str, SessionChain] = OrderedDict()
        self._num_names = 0
        #: Client and number of blocks of the last acquires, by namespace and name of their last block.
        self._acquired: OrderedDict[tuple[int, bytes], tuple[int, int]] = OrderedDict()

    def stepped(self, event: Event, instructions: Sequence[Any], now: float) -> None:
        """The planner took in `event` and answered with `instructions`."""
        handle = self._handlers.get(type(event))
        if handle is not None:
            handle(event, instructions)
        elif type(event) is ReserveRequested:
            self._reserved(event, instructions)
        if self._puts:
            self._look_for_puts(instructions)

    def of(self, session_id: str) -> UsageTotals:
        """Return the totals of a session; empty ones when it asked for nothing lately."""
        return self._sessions.get(session_id) or UsageTotals(self._ladder)

    def chain_of(self, session_id: str) -> tuple[int, list[bytes]]:
        """Return namespace and names of the chain a session used last; no names when that is not known."""
        chain = self._chains.get(session_id)
        if chain is None:
            return 0, []
        packed = chain.packed
        names = (packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES))
        return chain.namespace_id, list(dict.fromkeys(names))

    def check_integrity(self) -> list[str]:
        """Audit: every asked block is found, missed or declined, in total and by session."""
        totals = {"total": self.total, **self._sessions}
        return [
            f"telemetry of {'a session' if name != 'total' else name}: {b.num_asked} blocks asked, "
            f"{b.num_found} found, {b.num_missed} missed, {b.num_declined} declined"
            for name, b in totals.items()
            if b.num_asked != b.num_found + b.num_missed + b.num_declined
        ]

    # ------------------------------------------------------------------------------------ internals

    def _totals(self, session_id: str) -> tuple[UsageTotals, ...]:
        if session_id == ALL:
            return (self.total,)
        totals = self._sessions.get(session_id)
        if totals is None:
            totals = self._sessions[session_id] = UsageTotals(self._ladder)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        else:
            self._sessions.move_to_end(session_id)
        return self.total, totals

    def _block_bytes(self, namespace_id: int) -> int:
        namespace = self._planner.catalog.namespaces.get(namespace_id)
        return namespace.block_bytes if namespace is not None else 0

    def _asked(self, event: AcquireRequested, instructions: Sequence[Any]) -> None:
        """The first answer to an acquire comes in the same step. What another host asks is no runtime's."""
        if event.is_local:
            return
        for instruction in instructions:
            if type(instruction) is Reply and instruction.call == event.call:
                result, first = instruction.result, event.first_block
                break
        else:
            return
        if type(result) is not AcquireResult:
            return  # refused
        self._uses(event.session_id, event.namespace_id, event.prefix_hashes, goes_on=False)
        num_asked, given = len(event.prefix_hashes) - first, result.tiers[first:]
        num_stored = max(0, result.num_stored - first)
        saved_s = max(0.0, result.recompute_s - result.load_s) if given else 0.0
        if given:
            last = event.prefix_hashes[first + len(given) - 1]
            self._acquired[event.namespace_id, last] = event.client, len(given)
            if len(self._acquired) > MAX_ACQUIRED:
                self._acquired.popitem(last=False)
        block_bytes = self._block_bytes(event.namespace_id)
        for totals in self._totals(event.session_id):
            totals.ask(given, num_asked, num_stored, block_bytes, saved_s)

    def _touched(self, event: Touched, _: Sequence[Any]) -> None:
        """Read one-sidedly: found, in host memory.

        Several chains may be in one report; the price takes them for one.
        """
        num, namespace_id = len(event.prefix_hashes), event.namespace_id
        catalog, costs = self._planner.catalog, self._planner.costs
        if namespace_id not in catalog.namespaces or not num:
            return
        chain = self._chains.get(event.session_id)
        is_known = chain is not None and chain.packed.startswith(event.prefix_hashes[0])  # and longer
        if not is_known:
            self._uses(event.session_id, namespace_id, event.prefix_hashes, goes_on=False)
        num -= self._num_asked_before(event)
        row = catalog.find(namespace_id, event.prefix_hashes[0])
        position = catalog.position[row] if row >= 0 else 0
        saved_s = costs.recompute_s(namespace_id, position, num)
        tiers = self._tiers_read(namespace_id, event.prefix_hashes[-num:] if num else ())
        for totals in self._totals(event.session_id):
            totals.ask(tiers, num, num, self._block_bytes(namespace_id), saved_s)

    def _tiers_read(self, namespace_id: int, names: Sequence[bytes]) -> bytes:
        """Return the memory tier of each block that was read in place a moment ago: where it is now, or the
        put tier where that is no memory."""
        put_tier, slower = self._ladder.put_tier, self._slower
        if not slower:
            return bytes([put_tier]) * len(names)
        catalog = self._planner.catalog
        rows = [catalog.find(namespace_id, name) for name in names]
        tiers = [catalog.tier_of(row) if row >= 0 else None for row in rows]
        return bytes(tier if tier is not None and tier in slower else put_tier for tier in tiers)

    def _num_asked_before(self, event: Touched) -> int:
        """Return how many of these reads another client's acquire has asked for."""
        acquired, namespace_id = self._acquired, event.namespace_id
        num_asked, first = 0, 0
        for end, name in enumerate(event.prefix_hashes, 1) if acquired else ():
            client, num_given = acquired.get((namespace_id, name), (event.client, 0))
            if client != event.client:
                num_asked += min(num_given, end - first)
                first = end
        return num_asked

    def _reserved(self, event: ReserveRequested, instructions: Sequence[Any]) -> None:
        """A put in two steps names its session in the first and its blocks' fate in the second."""
        self._puts_behind(event)
        for instruction in instructions:
            reservation = getattr(getattr(instruction, "result", None), "reservation_id", 0)
            if reservation:
                source = event.session_id, self._block_bytes(event.namespace_id)
                self._reservations[reservation] = source
                if len(self._reservations) > MAX_OPEN_PUTS:
                    self._reservations.popitem(last=False)

    def _committed(self, event: CommitRequested, _: Sequence[Any]) -> None:
        source = self._reservations.pop(event.reservation_id, None)
        if event.reserve is not None:
            self._puts_behind(event.reserve)
            source = event.reserve.session_id, self._block_bytes(event.reserve.namespace_id)
        if source is not None and len(self._puts) < MAX_OPEN_PUTS:
            self._puts[event.call] = source

    def _puts_behind(self, event: ReserveRequested) -> None:
        chain = self._chains.get(event.session_id)
        parent = event.parent_hash
        goes_on = chain is not None and bool(parent) and chain.packed.endswith(parent)
        self._uses(event.session_id, event.namespace_id, event.prefix_hashes, goes_on)

    def _uses(self, session_id: str, namespace_id: int, names: Sequence[bytes], goes_on: bool) -> None:
        """Note the chain a session uses now, or that it `goes_on` with these blocks."""
        if session_id == ALL or not names:
            return
        before = self._chains.pop(session_id, None)
        kept = before.packed if before is not None and goes_on else b""
        chain = self._chains[session_id] = SessionChain(namespace_id, kept + b"".join(names))
        self._num_names += chain.num_names - (before.num_names if before is not None else 0)
        while self._num_names > MAX_NAMES:
            self._num_names -= self._chains.popitem(last=False)[1].num_names

    def _look_for_puts(self, instructions: Sequence[Any]) -> None:
        for instruction in instructions:
            if type(instruction) is Reply and instruction.call in self._puts:
                session_id, block_bytes = self._puts.pop(instruction.call)
                if isinstance(instruction.result, PutResult):
                    num_stored = instruction.result.outcomes.count(PutOutcome.STORED)
                    for totals in self._totals(session_id):
                        totals.put(num_stored, block_bytes)
