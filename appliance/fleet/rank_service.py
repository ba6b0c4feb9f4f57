"""RankService: answers which host of the fleet a prompt should go to, from what this daemon knows of each.

What others hold is in their inventories, how busy they are in what they tell; what this host holds, and how
fast its disk, other hosts and prefill are, is the planner's. The order is made in core/fleet.

A ranking looks at every host and takes many turns of the event loop, so a tenant has one at a time; further
ones wait, up to MAX_WAITING. Each in a task of its own was rejected: all of them went on in every turn of the
loop, and what one tenant asked for held up all others for a second.
"""

import asyncio
import math
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from ...tiers.block import NamespaceIdentity, tenant_of
from ...v1 import kvcache_pb2 as pb
from ...v1.bundles import blocks_per_bundle
from ..core.fleet.fleet_rank import FleetRank, KnownHost, disk_load_s, is_full, rank_fleet
from ..core.fleet.promises import Promises
from ..core.requests.lookups import LookupResult
from ..core.results import Refusal
from ..errors import error, from_refusal
from ..security import request_checks as checks
from ..security.callers import Caller
from ..server.cache_service import CacheService
from .finding import ChainPart, Held
from .fleet import Fleet
from .fleet_host import FleetHost
from .index import IndexedHosts
from .tickets import PeerService

MAX_CANDIDATES: Final = 1024
HOSTS_PER_TURN: Final = 4  # looked up between two turns of the event loop
MAX_WAITING: Final = 64  # of one tenant, with the one that is under way; each holds the names of a chain
RETRY_S: Final = 0.1


@dataclass(slots=True)
class _Rankings:
    """The rankings of one tenant: one goes on at a time."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    num: int = 0


class _Row(NamedTuple):
    """One host: what is ranked of it, and what is told of it beside its rank."""

    known: KnownHost
    shown: pb.RankedHost


class RankService:
    """Handler of Rank, for both transports. Owned by the event loop."""

    def __init__(self, cache: CacheService, peers: PeerService, fleet: Fleet | None) -> None:
        self._cache = cache
        self._peers = peers
        self._fleet = fleet
        self._promises = Promises()
        self._lanes: dict[str, _Rankings] = {}  # by tenant; those that have any

    def rank(self, caller: Caller, request: pb.RankRequest) -> "asyncio.Future[pb.RankResponse]":
        """Return the hosts for a chain, the one that should get it first.

        A caller that names queues sends the prompt there, which the next rankings count on. Raises
        ApplianceError."""
        names = self._cache.chain(request.prefix_hashes)
        principal = caller.principal
        is_admin = principal.is_admin and caller.client is None
        identity = self._cache.identity_of(caller, request.namespace_id, is_admin=is_admin)
        queues = _queues(request.candidates)
        tenant = principal.lane
        lane = self._lanes.setdefault(tenant, _Rankings())
        if lane.num >= MAX_WAITING:
            raise error("TOO_MANY_IN_FLIGHT", f"{lane.num} rankings of the tenant wait; ask later", RETRY_S)
        lane.num += 1
        ranked = asyncio.ensure_future(
            self._in_turn(lane, partial(self._rank, request.namespace_id, identity, names, queues))
        )
        ranked.add_done_callback(lambda _: self._end(tenant, lane))
        return ranked

    async def _in_turn(
        self, lane: _Rankings, rank: Callable[[], Awaitable[pb.RankResponse]]
    ) -> pb.RankResponse:
        async with lane.turn:
            return await rank()

    def _end(self, tenant: str, lane: _Rankings) -> None:
        lane.num -= 1
        if not lane.num:
            del self._lanes[tenant]

    async def _rank(
        self,
        namespace_id: int,
        identity: NamespaceIdentity,
        names: Sequence[bytes],
        queues: Mapping[str, float],
    ) -> pb.RankResponse:
        planner, rows = self._cache.planner, list[_Row]()
        held = await self._held_in_index(identity, names)
        for number, host in enumerate(self._fleet.hosts.live() if self._fleet is not None else ()):
            if number % HOSTS_PER_TURN == HOSTS_PER_TURN - 1:
                await asyncio.sleep(0)
            rows.append(self._row(host, identity, names, held))
        found = planner.lookup(namespace_id, names)
        if isinstance(found, Refusal):  # it was forgotten while others had their turn
            raise from_refusal(found)
        rows.append(self._own_row(namespace_id, found))
        costs, block_bytes = planner.core.costs, identity.geometry.block_bytes
        num_elsewhere = max(row.known.num_held for row in rows if row.known.is_askable)
        chosen, now = _chosen(rows, queues), self._cache.appliance.clock()
        hosts = [row.known._replace(host=key, queue_s=queues.get(key, 0.0)) for key, row in chosen.items()]
        ranked = rank_fleet(
            [self._with_promised(host, identity, names, now) for host in hosts],
            names,
            max(num_elsewhere, found.num_blocks + found.num_fetchable),
            lambda count: planner.fetches.host_fetch_s(count * block_bytes),
            lambda first, count: costs.recompute_s(namespace_id, first, count),
        )
        if queues:
            best = ranked[0]
            tenant, sent_to = tenant_of(identity.domain), best.known.host
            self._promises.add(tenant, identity.digest, names, sent_to, best.first_token_s, now)
        return pb.RankResponse(
            hosts=[_told(one, chosen[one.known.host].shown) for one in ranked],
            num_blocks=len(names),
            block_tokens=identity.geometry.block_tokens,
            recompute_s=costs.recompute_s(namespace_id, 0, len(names)),
            is_guess=costs.prefill_speed(namespace_id)[1] == "geometry",
        )

    def _with_promised(
        self, host: KnownHost, identity: NamespaceIdentity, names: Sequence[bytes], now: float
    ) -> KnownHost:
        """Return a host with what it will have when its turn comes behind what was sent there."""
        tenant, rest = tenant_of(identity.domain), names[host.num_held :]
        num_promised = self._promises.prefix(tenant, identity.digest, rest, host.host, now)
        if not num_promised or host.num_worth_loading < host.num_held:
            return host
        num_held = host.num_held + num_promised
        return host._replace(num_held=num_held, num_worth_loading=num_held)

    async def _held_in_index(self, identity: NamespaceIdentity, names: Sequence[bytes]) -> Held:
        """Return what an index says of a chain; nothing where hosts tell what they hold themselves."""
        if self._fleet is None or not isinstance(self._fleet.hosts, IndexedHosts):
            return {}
        found: asyncio.Future[Held] = asyncio.get_running_loop().create_future()
        size = blocks_per_bundle(identity.geometry)
        part = ChainPart(identity.digest, names, 0, size, tenant_of(identity.domain))
        self._fleet.hosts.find(part, lambda held: None if found.done() else found.set_result(held))
        return await found

    def _own_row(self, namespace_id: int, found: LookupResult) -> _Row:
        """Return what is known of this host, which holds what a lookup found."""
        core, load = self._cache.planner.core, self._peers.load()
        num_on_disk, worth = found.tiers.count(core.ladder.log_tier), found.num_worth_loading
        load_s = found.load_s
        if worth < found.num_blocks:
            load_s = core.costs.advise(namespace_id, found.tiers[:worth], now=core.now).load_s
        own = (one for one in self._fleet.hosts.all() if one.is_self) if self._fleet else ()
        shown = pb.RankedHost(
            address=next((one.address for one in own), ""),
            name=socket.gethostname(),
            is_self=True,
            is_known=True,
            num_held=found.num_blocks,
            num_in_memory=found.num_blocks - num_on_disk,
            num_on_disk=num_on_disk,
            load=load,
        )
        return _row_of(shown, worth, load_s)

    def _row(self, host: FleetHost, identity: NamespaceIdentity, names: Sequence[bytes], held: Held) -> _Row:
        """Return what is known of another host, which holds what it says."""
        core, load, digest = self._cache.planner.core, host.load, identity.digest
        num_held = held.get(host) or host.inventory.prefix(digest, names)
        num_on_disk = host.inventory.num_on_disk(digest, names[:num_held]) if host.tells_tiers else 0
        load_s = disk_load_s(
            num_on_disk,
            identity.geometry.block_bytes,
            load.disk_wait_s,
            load.disk_bytes_per_s,
            core.costs.bandwidth_of(core.ladder.log_tier),
        )
        in_known_tier = num_held if host.tells_tiers else 0
        shown = pb.RankedHost(
            address=host.address,
            name=host.name,
            is_known=True,
            num_held=num_held,
            num_in_memory=in_known_tier - num_on_disk,
            num_on_disk=num_on_disk,
            num_in_unknown_tier=num_held - in_known_tier,
            load=load,
        )
        return _row_of(shown, num_held, load_s, host.may_fetch(self._cache.appliance.clock()))


def _queues(candidates: Sequence[pb.RankCandidate]) -> dict[str, float]:
    """Return the seconds of prefill that wait at each candidate. Raises CallerError."""
    if len(candidates) > MAX_CANDIDATES:
        raise error("BAD_REQUEST", f"{len(candidates)} candidates, limit {MAX_CANDIDATES}; name fewer")
    for one in candidates:
        if not checks.text("host", one.host):
            raise error("BAD_REQUEST", "a candidate has no host; give its address")
        if not 0.0 <= one.queue_s < math.inf:
            raise error("BAD_REQUEST", f"queue_s of {one.host!r} must be seconds, is {one.queue_s}")
    return {one.host: one.queue_s for one in candidates}


def _chosen(rows: Iterable[_Row], queues: Mapping[str, float]) -> dict[str, _Row]:
    """Return the rows of the candidates by what the caller calls them; all by address, where it names none.

    A machine's name that several hosts have stands for none of them."""
    by_address = {row.shown.address or row.shown.name: row for row in rows}
    if not queues:
        return by_address
    names = Counter(row.shown.name for row in by_address.values())
    by_name = {row.shown.name: row for row in by_address.values() if names[row.shown.name] == 1}
    return {
        key: by_address.get(key) or by_name.get(key) or _Row(KnownHost(key), pb.RankedHost(address=key))
        for key in queues
    }


def _row_of(shown: pb.RankedHost, num_worth_loading: int, load_s: float, is_askable: bool = True) -> _Row:
    """Return the row of a host: what is told of it, and what that means for its rank."""
    load = shown.load
    known = KnownHost(
        "",
        shown.num_held,
        num_worth_loading,
        load_s,
        is_askable=is_askable,
        is_draining=load.is_draining,
        is_full=load.HasField("free_share") and is_full(load.free_share),
        busy=(load.num_tickets, load.queued_bytes),
    )
    return _Row(known, shown)


def _told(rank: FleetRank, shown: pb.RankedHost) -> pb.RankedHost:
    """Return the message of a ranked host."""
    told = pb.RankedHost()
    told.CopyFrom(shown)  # two candidates may name one host
    told.first_token_s, told.queue_s = rank.first_token_s, rank.known.queue_s
    told.num_fetched, told.num_computed = rank.num_fetched, rank.num_computed
    told.load_s, told.fetch_s, told.compute_s = rank.known.load_s, rank.fetch_s, rank.compute_s
    return told
