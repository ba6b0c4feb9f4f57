"""Fleet replay: one trace over several hosts, each with the planner of a daemon, behind one router.

Each host computes one prompt at a time, in the order of arrival: prompts sent to a busy host wait, which the
replay of one host leaves out. A prompt's blocks are looked up when its turn comes, as engines do, so it finds
what those before it have computed; looked up on arrival, sessions of agents on 8 busy hosts found half. Hosts
fetch from each other over one link in each direction per host. A search sees what other hosts hold at that
moment; a real inventory is up to 50 ms late.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from ...tiers.base import Cause, CopyOutcome
from ...v1.bundles import blocks_per_bundle
from ..core import events as ev
from ..core.fleet.fleet_rank import is_full
from ..core.fleet.ranking import HostOffer, rank_hosts
from ..core.instructions import FetchBundle, SearchBundles
from .future import TraceFuture
from .outcomes import percentiles
from .setups import Setup
from .shell import cpu_seconds
from .timed import BUSY_TICK_S, SETTLE_S, TimedShell
from .traces import Trace
from .virtual import LANDED, EdgeSpeed, VirtualClock

#: Requests of one host that load blocks at a time while it computes nothing.
MAX_READING: Final = 8
#: Of a put: what was just computed is in the runtime's own cache, too, so the next prompt finds it.
AT_ONCE: Final = EdgeSpeed(1e15, 0.0)
ROUTES: Final = ("round-robin", "sticky", "least-loaded", "rank")


class FleetSetup(NamedTuple):
    """Hosts of one kind, and how prompts are spread over them."""

    num_hosts: int
    route: str  # one of ROUTES
    network: EdgeSpeed | None = None  # between hosts, each direction of each host; None: they do not fetch


@dataclass(slots=True)
class FleetOutcome:
    """What one route did with one trace. Bytes are raw payload; seconds are virtual but for `cpu_s`."""

    route: str
    num_hosts: int
    has_store: bool
    num_tokens: int  # asked for
    own_hit_ratio: float  # share of tokens that the host had
    fetched_ratio: float  # share of tokens that came from another host
    stored_ratio: float  # from the store that they share
    computed_ratio: float
    ttft_s: dict[str, float]  # by percentile, and the mean
    imbalance: float  # prefill seconds of the busiest host over the mean
    network_bytes: int
    cpu_s: float
    problems: list[str] = field(default_factory=list)


class _HostShell(TimedShell):
    """One host of the fleet."""

    def __init__(
        self,
        fleet: "FleetReplay",
        speeds: Mapping[str, EdgeSpeed] | None,
        future: TraceFuture,
    ) -> None:
        speeds = {f"staging>{fleet.setup.ladder.put_tier.label}": AT_ONCE, **(speeds or {})}
        super().__init__(fleet.trace, fleet.setup, None, speeds, clock=fleet.clock, future=future)
        self._fleet = fleet
        self._free_at = 0.0  # of its compute
        self._queue: deque[int] = deque()  # requests that wait, the oldest first
        self._begun: list[int] = []  # requests that read or compute
        self._expected_s: dict[int, float] = {}  # of prefill, by request that is not read yet
        self._coming: Counter[bytes] = Counter()  # names of blocks of all these requests
        self.sent_at = self.received_at = 0.0  # when its links are free
        if self._store is not None:
            self.execute |= {FetchBundle: self._fetch_from_store}
            if fleet.hosts:
                assert fleet.hosts[0]._store is not None
                self._store.share(fleet.hosts[0]._store)
        if fleet.fleet_setup.network is not None:
            self.execute |= {SearchBundles: self._search, FetchBundle: self._fetch_from_host}
            self.state_prefill()
            has_store = self._store is not None
            self.step(ev.SourceChanged(True, takes_exports=has_store, has_hosts=True), 0.0)

    def queue_s(self) -> float:
        """Return seconds of prefill that wait or run."""
        return max(0.0, self._free_at - self.clock.now) + sum(self._expected_s.values())

    @property
    def is_full(self) -> bool:
        """Return whether new blocks push others out."""
        ladder = self.setup.ladder
        tier = ladder.log_tier if ladder.log_tier in self.planner.rooms else ladder.put_tier
        room = self.planner.rooms[tier].statistics()
        return is_full(room.free_bytes / max(1, room.capacity_bytes))

    def tiers_of(self, namespace: int, names: Sequence[bytes], num_less: int = 0) -> bytes | bytearray:
        """Return the tiers of what it holds of a chain; of `num_less` blocks or fewer it may be nothing."""
        entry = self.planner.catalog.namespaces[self.namespace_ids[namespace]]
        if num_less >= len(names) or names[num_less] not in entry.rows:
            return b""
        return self.planner.lookups.stored(entry, names)

    def num_expected(self, chain: Sequence[bytes], num_held: int) -> int:
        """Return how many blocks of a chain it will have when its turn comes behind all that wait."""
        coming, end = self._coming, len(chain)
        return next((number for number in range(num_held, end) if not coming[chain[number]]), end)

    @property
    def is_busy(self) -> bool:
        """Return whether requests wait, read or compute."""
        return bool(self._queue or self._begun or self._waiting)

    def send(self, request: int, prefill_s: float) -> None:
        """Queue a request; `prefill_s` of prefill are expected of it."""
        self._coming.update(self.chain_of(request))
        self._queue.append(request)
        self._expected_s[request] = prefill_s
        self._begin()

    def _begin(self) -> None:
        """Begin the next requests if the compute is idle: only then are their blocks looked up."""
        while self._queue and self.clock.now >= self._free_at and len(self._begun) < MAX_READING:
            request = self._queue[0]
            if self._is_being_computed(request):
                return
            self._queue.popleft()
            self._begun.append(request)
            self.serve(request)

    def _is_being_computed(self, request: int) -> bool:
        """Return whether the first block that a request lacks comes of one that was begun before it."""
        chain = self.chain_of(request)[: int(self.trace.num_asked[request])]
        there = len(self.tiers_of(int(self.trace.namespace[request]), chain))
        return there < len(chain) and any(chain[there] in self.chain_of(other) for other in self._begun)

    def computed_at(self, begin_at: float, prefill_s: float) -> float:
        """Return when a prefill ends behind those that wait."""
        if prefill_s:
            self._free_at = max(begin_at, self._free_at) + prefill_s
            return self._free_at
        return begin_at

    def _read(self, request: int, tiers: bytes, lease_id: int) -> None:
        super()._read(request, tiers, lease_id)
        del self._expected_s[request]
        self.clock.at(self._free_at + BUSY_TICK_S, partial(self._computed, request))  # it is put by then

    def _computed(self, request: int) -> None:
        self._begun.remove(request)
        self._coming.subtract(self.chain_of(request))
        self._begin()

    def _search(self, search: SearchBundles) -> None:
        names, num_blocks = list(search.blocks), 0
        namespace = self._fleet.namespace_of[search.identity.digest]
        for host in self._fleet.hosts:
            if host is not self:
                num_blocks = max(num_blocks, len(host.tiers_of(namespace, names, num_blocks)))
        num_found = (search.num_here + num_blocks) // blocks_per_bundle(search.identity.geometry)
        if self._store is not None and self._store.num_bundles(search) > num_found:
            return self._store.search(search)
        if num_blocks:
            num_blocks += search.num_here
            answer = ev.SourceSearched(search.search, num_found, -1, is_stored=False, num_blocks=num_blocks)
        else:
            answer = ev.SourceSearched(search.search, 0, -1)
        self.clock.at(self.clock.now, partial(self._step, answer))

    def _fetch_from_host(self, fetch: FetchBundle) -> None:
        """Receive blocks from the host with the earliest free link; a batch lands when its bytes have."""
        network = self._fleet.fleet_setup.network
        assert network is not None
        first = min(item.source for _, items in fetch.batches for item in items)
        names = list(fetch.bundle.names[first:])
        namespace = self._fleet.namespace_of[fetch.bundle.identity.digest]
        size, others = len(names), [host for host in self._fleet.hosts if host is not self]
        holders = [host for host in others if len(host.tiers_of(namespace, names, size - 1)) == size]
        holder = min(holders, key=lambda host: host.sent_at, default=None)
        if holder is None and self._store is not None:
            return self._fetch_from_store(fetch)
        for copy, items in fetch.batches:
            landed_at, outcome = self.clock.now, CopyOutcome(Cause.SOURCE_GONE)
            if holder is not None:
                num_bytes = sum(item.label.raw_length for item in items)
                begin_at = max(self.clock.now, holder.sent_at, self.received_at)
                carried_at = begin_at + num_bytes / network.bandwidth_bytes_per_s
                landed_at, outcome = carried_at + network.latency_s, LANDED
                if landed_at > fetch.deadline_at:
                    landed_at, outcome = fetch.deadline_at, CopyOutcome(Cause.CANCELLED)
                else:
                    holder.sent_at = self.received_at = carried_at
                    self._fleet.network_bytes += num_bytes
                    self._fleet.fetched_tokens += self._fleet.tokens_of_bytes(namespace, num_bytes)
            finished = ev.CopyFinished(copy, [outcome] * len(items))
            self.clock.at(landed_at, partial(self._step, finished))

    def _fetch_from_store(self, fetch: FetchBundle) -> None:
        assert self._store is not None
        before = self._store.usage["received_bytes"]
        self._fetch(fetch)
        num_bytes = self._store.usage["received_bytes"] - before
        namespace = self._fleet.namespace_of[fetch.bundle.identity.digest]
        self._fleet.stored_tokens += self._fleet.tokens_of_bytes(namespace, num_bytes)


class FleetReplay:
    """Replays one trace over `fleet_setup.num_hosts` hosts, each with all of `setup`.

    Raises ValueError for a route that does not exist, a setup that is not timed.
    """

    def __init__(
        self,
        trace: Trace,
        setup: Setup,
        fleet_setup: FleetSetup,
        speeds: Mapping[str, EdgeSpeed] | None = None,
    ) -> None:
        if fleet_setup.route not in ROUTES:
            raise ValueError(f"no route {fleet_setup.route!r}; known: {', '.join(ROUTES)}")
        if fleet_setup.num_hosts < 1:
            raise ValueError("a fleet has at least one host")
        if not setup.is_timed:
            raise ValueError("a fleet is replayed with --tiers")
        self.trace, self.setup, self.fleet_setup = trace, setup, fleet_setup
        self.clock = VirtualClock()
        self.network_bytes = 0
        self.fetched_tokens = self.stored_tokens = 0.0
        self.namespace_of: dict[bytes, int] = {}  # number in the trace, by digest
        future = TraceFuture(trace)
        self.hosts: list[_HostShell] = []
        for _ in range(fleet_setup.num_hosts):
            self.hosts.append(_HostShell(self, speeds, future))
        first = self.hosts[0]
        for number, namespace_id in enumerate(first.namespace_ids):
            digest = first.planner.catalog.namespaces[namespace_id].identity.digest
            self.namespace_of[digest] = number
        self._session_hosts: dict[object, int] = {}  # by session, or by the last block of a prompt
        self._has_sessions = len(set(trace.sessions)) < trace.num_requests
        self._num_full = np.minimum(trace.num_tokens // trace.block_tokens_of_requests(), trace.num_asked)
        self._num_routed = 0
        self._pick = {
            "round-robin": self._round_robin,
            "sticky": self._sticky,
            "least-loaded": self._least_loaded,
            "rank": self._rank,
        }[fleet_setup.route]

    def run(self) -> FleetOutcome:
        """Replay the whole trace. Returns the outcome, every host audited."""
        cpu_s = cpu_seconds(self._serve)
        return self._outcome(cpu_s)

    def _serve(self) -> None:
        self._arrive_from(0)
        end_at = self.trace.duration_s + SETTLE_S
        while (when := self.clock.next_at()) is not None:
            if when > end_at and not any(host.is_busy for host in self.hosts):
                break
            self.clock.run_next()

    def tokens_of_bytes(self, namespace: int, num_bytes: int) -> float:
        """Return how many tokens so many bytes of KV are."""
        tokens = self.trace.namespaces[namespace].block_tokens
        return num_bytes * tokens / self.hosts[0].block_bytes[namespace]

    def _arrive_from(self, request: int) -> None:
        if request < self.trace.num_requests:
            self.clock.at(float(self.trace.at[request]), lambda: self._arrive(request))

    def _arrive(self, request: int) -> None:
        self._arrive_from(request + 1)
        chain = self.hosts[0].chain_of(request)[: int(self.trace.num_asked[request])]
        number = self._pick(request, chain)
        self._num_routed += 1
        host, namespace = self.hosts[number], int(self.trace.namespace[request])
        if not chain:
            return host.serve(request)
        there = host.num_expected(chain, len(host.tiers_of(namespace, chain)))
        host.send(request, self._compute_s(namespace, there, len(chain) - there))

    def _compute_s(self, namespace: int, first: int, count: int) -> float:
        host = self.hosts[0]
        return host.planner.costs.recompute_s(host.namespace_ids[namespace], first, count)

    # ------------------------------------------------------------------------------------- routes

    def _round_robin(self, request: int, chain: list[bytes]) -> int:
        return self._num_routed % len(self.hosts)

    def _sticky(self, request: int, chain: list[bytes]) -> int:
        """Return the host of a session; a new one goes to the next host in turn.

        In a trace without sessions: the host of the prompt that this one continues. Its last full block is
        in the chain, and is not the first one, which many share.
        """
        keys: Sequence[object] = [self.trace.sessions[request]] if self._has_sessions else chain[:0:-1]
        number = next((self._session_hosts[key] for key in keys if key in self._session_hosts), None)
        if number is None:
            number = self._round_robin(request, chain)
        if self._has_sessions:
            self._session_hosts[keys[0]] = number
        elif (num_full := int(self._num_full[request])) > 1:
            self._session_hosts[chain[num_full - 1]] = number
        return number

    def _least_loaded(self, request: int, chain: list[bytes]) -> int:
        num_hosts = len(self.hosts)
        order = [(self._num_routed + step) % num_hosts for step in range(num_hosts)]
        return min(order, key=lambda number: self.hosts[number].queue_s())

    def _rank(self, request: int, chain: list[bytes]) -> int:
        if not chain:
            return self._least_loaded(request, chain)
        num_hosts, namespace = len(self.hosts), int(self.trace.namespace[request])
        order = [(self._num_routed + step) % num_hosts for step in range(num_hosts)]
        found = {number: self.hosts[number].tiers_of(namespace, chain) for number in order}
        network, block_bytes = self.fleet_setup.network, self.hosts[0].block_bytes[namespace]
        most = max(map(len, found.values())) if network is not None else 0
        offers = []
        for number in order:
            host, there = self.hosts[number], len(found[number])
            fetch_s = 0.0
            if network is not None and most > there:
                num_bytes = (most - there) * block_bytes
                wait_s = max(0.0, host.received_at - self.clock.now)
                fetch_s = wait_s + network.latency_s + num_bytes / network.bandwidth_bytes_per_s
            num_held = host.num_expected(chain, there)
            load_s = host.planner.costs.advise(host.namespace_ids[namespace], found[number]).load_s
            most_here, queue_s = max(most, num_held), host.queue_s()
            offers.append(HostOffer(str(number), num_held, load_s, most_here, fetch_s, queue_s, host.is_full))
        ranked = rank_hosts(offers, len(chain), partial(self._compute_s, namespace))
        return int(ranked[0].host)

    # ------------------------------------------------------------------------------------ outcome

    def _outcome(self, cpu_s: float) -> FleetOutcome:
        trace, hosts = self.trace, self.hosts
        num_tokens = int(trace.num_tokens.sum())
        num_hits = np.stack([host.num_hits for host in hosts]).max(axis=0)  # a request has one host
        hit_tokens = float(trace.tokens_of(num_hits).sum())
        fetched = min(self.fetched_tokens, hit_tokens)
        stored = min(self.stored_tokens, hit_tokens - fetched)
        ttft_s = np.concatenate([host._ttft_s[~np.isnan(host._ttft_s)] for host in hosts])
        prefill_s = [host._prefill_s for host in hosts]
        mean_s = sum(prefill_s) / len(hosts)
        total = num_tokens or 1
        return FleetOutcome(
            route=self.fleet_setup.route,
            num_hosts=len(hosts),
            has_store=self.setup.store is not None,
            num_tokens=num_tokens,
            own_hit_ratio=(hit_tokens - fetched - stored) / total,
            fetched_ratio=fetched / total,
            stored_ratio=stored / total,
            computed_ratio=1 - hit_tokens / total,
            ttft_s=percentiles(ttft_s),
            imbalance=max(prefill_s) / mean_s if mean_s else 1.0,
            network_bytes=self.network_bytes,
            cpu_s=cpu_s,
            problems=[problem for host in hosts for problem in host.planner.check_integrity()],
        )
