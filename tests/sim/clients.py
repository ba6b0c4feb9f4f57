"""Clients: what they do, in which order, and how they die.

A `Crowd` draws one operation after the other and starts it for a random client; what follows from it
(commits, reads, releases, retries) happens at its own random time, overlapping with everything else. A
client that dies stops in the middle of whatever it was doing.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.catalog import NO_ROW
from kvtier.tiers.block import NamespaceIdentity, Tier, Urgency

from .config import Config
from .daemon import Daemon
from .mover import Staging
from .oracle import Contents
from .readers import read_one_sided, read_under_lease
from .world import Violation, World

URGENCIES = (Urgency.DECODING, Urgency.PREFILL, Urgency.QUEUED, Urgency.WAITING, Urgency.IDLE)
NEVER = float("inf")


class Client:
    """One client of one life of the daemon."""

    def __init__(self, number: int, domain: str, is_local: bool) -> None:
        self.number = number
        self.domain = domain
        self.is_local = is_local
        self.is_alive = True
        self.staging = Staging()
        self.next_offset = 0
        self.leases: list[int] = []


class Keys:
    """A forest of prefix hashes, the same for all namespaces: only the namespace tells them apart."""

    def __init__(self, rng: Random, num_keys: int) -> None:
        self.paths: list[list[bytes]] = []
        for _ in range(num_keys):
            parent: list[bytes] = []
            if self.paths and rng.random() < 0.8:
                parent = self.paths[int(rng.random() * len(self.paths))]
            self.paths.append([*parent[:10], rng.randbytes(32)])

    def draw(self, rng: Random) -> list[bytes]:
        """Draw a chain; some are drawn much more often than others."""
        return self.paths[int(rng.random() ** 1.5 * len(self.paths))]


class Crowd:
    """All clients of a world, across the lives of its daemon."""

    def __init__(self, world: World, config: Config, contents: Contents, daemon: Daemon) -> None:
        self.world = world
        self.config = config
        self.contents = contents
        self.daemon = daemon
        self.keys = Keys(world.rng, config.num_keys)
        self.identities = [
            NamespaceIdentity(bytes([index]) * 16, geometry, domain=f"domain-{domain}")
            for index, (geometry, domain) in enumerate(
                zip(config.geometries, config.domain_of_namespace, strict=True)
            )
        ]
        self.namespace_ids: list[int] = []
        self.clients: list[Client] = []
        self.pins: list[int] = []
        self.accepted: set[tuple[bytes, bytes]] = set()  # (namespace digest, prefix hash) ever committed
        self._num_clients = 0
        self._num_requests = 0
        self._operations = [name for name, weight in config.weights.items() if weight]
        self._weights = [config.weights[name] for name in self._operations]

    # ------------------------------------------------------------------------------ coming, going

    def open(self, daemon: Daemon) -> None:
        """Everybody connects to a daemon that has just started."""
        self.daemon = daemon
        self.clients = []
        self.pins = []
        for _ in range(self.config.num_clients):
            self.open_client()
        self.namespace_ids = []
        for identity, speed in zip(self.identities, self.config.prefill_speeds, strict=True):
            call = daemon.call(0, lambda result: self.namespace_ids.append(result.namespace_id))  # type: ignore[union-attr]
            daemon.step(ev.NamespaceRegistered(call, identity, speed))

    def open_client(self) -> Client:
        """One more client connects."""
        world, config, daemon = self.world, self.config, self.daemon
        self._num_clients += 1
        is_local = not world.chance(config.remote_fraction)
        domain = f"domain-{world.rng.randrange(config.num_domains)}"
        client = Client(self._num_clients, domain, is_local)
        ttl_s = None if is_local else config.silent_ttl_s
        daemon.stagings[client.number] = client.staging
        if is_local:
            daemon.local.add(client.number)
        self.clients.append(client)
        daemon.step(ev.ClientOpened(client.number, f"client-{client.number}", is_local, domain, ttl_s))
        return client

    def die(self, client: Client) -> None:
        """A client is gone, whatever it was doing."""
        client.is_alive = False
        client.staging.is_open = False
        self.clients.remove(client)
        self.daemon.client_gone(client.number, "died")

    def expect(self, client: Client) -> bool:
        """Whether the client still lives and the daemon still counts it; a silent one finds out here."""
        if client.is_alive and self.daemon.is_alive and not self.daemon.knows(client.number):
            client.is_alive = False
            client.staging.is_open = False
            if client in self.clients:
                self.clients.remove(client)
            self.daemon.stagings.pop(client.number, None)
        return client.is_alive and self.daemon.is_alive

    # --------------------------------------------------------------------------------- operations

    def act(self) -> None:
        """Start one operation of one client."""
        world = self.world
        if not self.clients:
            self.open_client()
        client = world.rng.choice(self.clients)
        if not self.expect(client):
            return
        name = world.rng.choices(self._operations, self._weights)[0]
        operation = getattr(self, f"_{name}", None)
        if operation is not None:
            operation(client)

    def _namespace(self, client: Client) -> tuple[int, NamespaceIdentity] | None:
        mine = [n for n, identity in enumerate(self.identities) if identity.domain == client.domain]
        if not mine:
            return None
        index = self.world.rng.choice(mine)
        return self.namespace_ids[index], self.identities[index]

    def _request_id(self) -> str:
        self._num_requests += 1
        return f"r{self._num_requests}"

    def _session_id(self) -> str:
        world = self.world
        return f"s{world.rng.randrange(self.config.num_sessions)}" if world.random() < 0.6 else ""

    def _deadline(self) -> float:
        return self.world.now + self.world.spread(0.2) if self.world.random() < 0.4 else NEVER

    def _measure(self, client: Client) -> None:
        """The mover says how fast an edge is."""
        bandwidth = self.world.rng.choice((1e3, 1e6, 1e9))
        self.daemon.step(ev.EdgeMeasured(Tier.NVME, Tier.DRAM, bandwidth, 1e-4))

    def retention(self, namespace_id: int, hashes: Sequence[bytes]) -> list[ev.RetentionHint]:
        """Draw hints for a request about these blocks, and let the oracle know."""
        rng = self.world.rng
        hints: list[ev.RetentionHint] = []
        while self.world.chance(self.config.hint_rate) and len(hints) < 3:
            first = rng.randrange(6) * 16
            end = rng.choice((0, first + 1, first + 16, first + 100))
            ttl_s = rng.choice((0.0, 0.001, 0.1, 10.0))
            hints.append(ev.RetentionHint(first, end, rng.randrange(101), ttl_s))
        self.daemon.oracle.hinted(namespace_id, hashes, [hint.priority for hint in hints])
        return hints

    def _put(self, client: Client) -> None:
        self._begin_put(client, one_step=True)

    def _reserve(self, client: Client) -> None:
        self._begin_put(client, one_step=False)

    def _begin_put(self, client: Client, *, one_step: bool) -> None:
        namespace = self._namespace(client)
        if namespace is None:
            return
        path = self.keys.draw(self.world.rng)
        start = 0 if self.world.random() < 0.7 else self.world.rng.randrange(len(path))
        parent = path[start - 1] if start else b""
        Put(self, client, *namespace, parent, path[start:]).start(one_step)

    def _acquire(self, client: Client) -> None:
        namespace = self._namespace(client)
        if namespace is not None:
            Acquire(self, client, *namespace, self.keys.draw(self.world.rng)).start()

    def _one_sided(self, client: Client) -> None:
        namespace = self._namespace(client)
        if namespace is not None and client.is_local:
            read_one_sided(self, client, *namespace, self.keys.draw(self.world.rng))

    def _lookup(self, client: Client) -> None:
        namespace = self._namespace(client)
        if namespace is None:
            return
        path = self.keys.draw(self.world.rng)
        found = self.daemon.planner.lookup(namespace[0], path)
        assert not isinstance(found, ev.Refusal)
        for prefix_hash in path[: found.num_blocks]:
            if (namespace[1].digest, prefix_hash) not in self.accepted:
                raise Violation("lookup", "reports a block that nobody ever committed")

    def _keep_alive(self, client: Client) -> None:
        self.daemon.step(ev.KeptAlive(None, client.number, client.leases[-3:], self.world.spread(0.2)))

    def _touch(self, client: Client) -> None:
        namespace = self._namespace(client)
        if namespace is not None:
            path = self.keys.draw(self.world.rng)
            session_id = self._session_id()
            if session_id:
                self.daemon.oracle.session(session_id, client.number)
            self.daemon.step(ev.Touched(client.number, namespace[0], path, session_id))

    def _pin(self, client: Client) -> None:
        namespace = self._namespace(client)
        if namespace is None:
            return
        call = self._call(client, self._pinned)
        floor = self.world.rng.choice((Tier.HBM, Tier.DRAM, Tier.NVME))
        path, ttl_s = self.keys.draw(self.world.rng), self.world.spread(0.5)
        request = ev.PinRequested(call, client.number, self._request_id(), namespace[0], path, floor, ttl_s)
        self.daemon.step(request)

    def _pinned(self, result: Any) -> None:
        if isinstance(result, ev.PinResult):
            self.pins.append(result.pin_id)

    def _unpin(self, client: Client) -> None:
        if self.pins:
            self.daemon.step(ev.UnpinRequested(self.world.rng.choice(self.pins)))

    def _prefetch(self, client: Client) -> None:
        namespace = self._namespace(client)
        if namespace is not None:
            call = self._call(client, lambda result: None)
            target = self.world.rng.choice((Tier.HBM, Tier.DRAM))
            path = self.keys.draw(self.world.rng)
            self.daemon.step(ev.PrefetchRequested(call, client.number, namespace[0], path, target))

    def _session(self, client: Client) -> None:
        session_id, urgency = self._session_id() or "s0", self.world.rng.choice(URGENCIES)
        self.daemon.oracle.session(session_id, client.number).urgency = urgency
        back_at = NEVER
        if self.world.chance(self.config.hint_rate):
            back_at = self.world.now + self.world.spread(self.world.rng.choice((0.01, 0.3)))
        self.daemon.step(ev.SessionUpdated(client.number, session_id, urgency, back_at=back_at))

    def _fork(self, client: Client) -> None:
        session_id, new_id = self._session_id() or "s0", self._session_id() or "s1"
        source = self.daemon.oracle.sessions.get(session_id)
        if source is not None:
            self.daemon.oracle.session(new_id, client.number).blocks.update(source.blocks)
        call = self._call(client, lambda result: None)
        self.daemon.step(ev.SessionForked(call, client.number, session_id, new_id))

    def _end(self, client: Client) -> None:
        session_id = self._session_id() or "s0"
        self.daemon.oracle.sessions.pop(session_id, None)
        call = self._call(client, lambda result: None)
        archive = self.world.random() < 0.5
        self.daemon.step(ev.SessionEnded(call, client.number, session_id, archive))

    def _evict(self, client: Client) -> None:
        tier = self.world.rng.choice((Tier.HBM, Tier.DRAM, Tier.NVME))
        num_bytes = self.world.rng.choice((0, 1, 65536))
        call = self._call(client, lambda result: None)
        self.daemon.step(ev.EvictRequested(call, tier, num_bytes))

    def _die(self, client: Client) -> None:
        self.world.counts["client_death"] += 1
        self.die(client)
        if self.world.random() < 0.8:
            self.open_client()

    def _trespass(self, client: Client) -> None:
        """Ask for a namespace of another domain, by its right number."""
        others = [n for n, identity in enumerate(self.identities) if identity.domain != client.domain]
        if not others:
            return
        namespace_id = self.namespace_ids[self.world.rng.choice(others)]
        call = self._call(client, _must_be_refused)
        path = self.keys.draw(self.world.rng)
        self.daemon.step(ev.AcquireRequested(call, client.number, self._request_id(), namespace_id, path))

    def _jump(self, client: Client) -> None:
        """The clock jumps, or the process was stopped: everything is due at once."""
        self.world.counts["clock_jump"] += 1
        jump_s = self.world.spread(3.0)
        self.world.now += jump_s
        self.daemon.excuse(jump_s)

    def _tier_lost(self, client: Client) -> None:
        is_gpu = Tier.HBM in self.daemon.rooms and not self.config.hbm_is_shared
        if is_gpu and self.world.random() < 0.3:  # for good: the device fell off the bus
            self.world.counts["gpu_lost"] += 1
            self.daemon.was_offline = self.daemon.memories[Tier.HBM].is_lost = True
            self.daemon.step(ev.TierLost(Tier.HBM, True, "simulated"))
        elif Tier.NVME in self.daemon.rooms:
            self.world.counts["tier_lost"] += 1
            self.daemon.was_offline = True
            self.daemon.step(ev.TierLost(Tier.NVME, True, "simulated"))
            self.world.after(self.world.spread(0.3), self._tier_back, self.daemon)

    def _tier_back(self, daemon: Daemon) -> None:
        daemon.step(ev.TierLost(Tier.NVME, False, "simulated"))

    def _call(self, client: Client, on_reply: Any, due: float = 0.0) -> int:
        return self.daemon.call(client.number, on_reply, max(due, self.world.now))


def _must_be_refused(result: Any) -> None:
    if not isinstance(result, ev.Refusal) or result.reason != "UNKNOWN_NAMESPACE":
        raise Violation("domains", f"a namespace of another domain was answered with {result}")


class Put:
    """One put from its first request to its last answer."""

    def __init__(
        self,
        crowd: Crowd,
        client: Client,
        namespace_id: int,
        identity: NamespaceIdentity,
        parent_hash: bytes,
        hashes: Sequence[bytes],
    ) -> None:
        self.crowd = crowd
        self.world = crowd.world
        self.daemon = crowd.daemon
        self.client = client
        self.namespace_id = namespace_id
        self.identity = identity
        self.parent_hash = parent_hash
        self.hashes = hashes
        self.session_id = crowd._session_id()
        self.deadline_at = crowd._deadline()
        self.retention = crowd.retention(namespace_id, hashes)
        self.prefill_s = crowd.world.spread(0.01) if crowd.world.chance(crowd.config.hint_rate) else 0.0
        self.request_id = crowd._request_id()
        self.commit_id = crowd._request_id()
        self.reservation_id = 0
        self.tokens: dict[int, int] = {}  # by offset in the staging extent
        self.is_over = False
        self.was_refused = False
        self.due = 0.0

    def start(self, one_step: bool) -> None:
        """Send the first request."""
        wait_s = self.crowd.config.options.put_wait_s
        self.due = min(self.deadline_at, self.world.now + wait_s)
        if one_step:
            spans = [self._fill(prefix_hash) for prefix_hash in self.hashes]
            self._send(self._commit_whole, spans)
            self._change_staging()
        else:
            self._send(self._reserve_event)

    def _send(self, send: Any, *arguments: Any) -> None:
        """Send a request, and again with the same id now or later, as a client does that lost the answer."""
        send(*arguments)
        rates, world = self.crowd.config.rates, self.world
        if world.chance(rates["retry"]):
            world.after(world.spread(0.005), self._again, False, send, *arguments)
        if world.chance(rates["late_retry"]) and self.crowd.config.options.max_remembered_requests > 100:
            world.after(world.spread(2.0), self._again, True, send, *arguments)

    def _again(self, is_late: bool, send: Any, *arguments: Any) -> None:
        if self.crowd.expect(self.client) and not self.was_refused and (is_late or not self.is_over):
            self.world.counts["retry"] += 1
            send(*arguments)

    def _fill(self, prefix_hash: bytes) -> tuple[int, int]:
        """Write a block into the staging extent; return its span."""
        client, geometry = self.client, self.identity.geometry
        offset = start = client.next_offset
        for group in range(geometry.num_groups):
            token = self.crowd.contents.new((self.identity.digest, prefix_hash, group))
            self.crowd.contents.commit(token)
            client.staging.tokens[offset] = self.tokens[offset] = token
            offset += geometry.fragment_bytes(group)
        client.next_offset = offset
        self.crowd.accepted.add((self.identity.digest, prefix_hash))
        return start, geometry.block_bytes

    def _change_staging(self) -> None:
        """A faulty client writes other content for the same keys while the daemon copies."""
        if self.world.chance(self.crowd.config.rates["staging_changed"]):
            self.world.counts["staging_changed"] += 1
            self.world.after(self.world.spread(0.001), self._rewrite)

    def _rewrite(self) -> None:
        if self.is_over:
            return
        contents = self.crowd.contents
        for offset, token in self.tokens.items():
            changed = contents.new(contents.key_of(token))
            contents.commit(changed)
            self.client.staging.tokens[offset] = changed

    def _reserve_event(self, call: int = 0) -> ev.ReserveRequested:
        make = not call
        call = call or self.daemon.call(self.client.number, self._reserved, max(self.due, self.world.now))
        request = ev.ReserveRequested(
            call,
            self.client.number,
            self.request_id,
            self.namespace_id,
            self.parent_hash,
            self.hashes,
            self.session_id,
            self.deadline_at,
            self.prefill_s,
            self.retention,
        )
        if make:
            self.daemon.step(request)
        return request

    def _reserved(self, result: Any) -> None:
        if isinstance(result, ev.Refusal) or self.reservation_id or self.is_over:
            return
        outcomes = result.outcomes
        if result.reservation_id == 0:
            return self._finish(outcomes)
        self.reservation_id = result.reservation_id
        fate = self.world.random()
        if fate < 0.7:
            self.world.after(self.world.spread(0.01), self._commit_rest, outcomes)
        elif fate < 0.85:
            self.world.after(self.world.spread(0.01), self._abort)
        return None

    def _commit_rest(self, outcomes: bytes) -> None:
        if not self.crowd.expect(self.client) or self.is_over:
            return
        needed = [h for h, o in zip(self.hashes, outcomes, strict=True) if o == ev.PutOutcome.NEEDED]
        self._send(self._commit_event, [self._fill(prefix_hash) for prefix_hash in needed])
        self._change_staging()

    def _commit_event(self, spans: list[tuple[int, int]]) -> None:
        call = self.daemon.call(self.client.number, self._stored, self.world.now)
        self.daemon.step(
            ev.CommitRequested(call, self.client.number, self.commit_id, self.reservation_id, spans)
        )

    def _commit_whole(self, spans: list[tuple[int, int]]) -> None:
        call = self.daemon.call(self.client.number, self._stored, max(self.due, self.world.now))
        request = self._reserve_event(call)
        self.daemon.step(ev.CommitRequested(call, self.client.number, self.request_id, 0, spans, request))

    def _abort(self) -> None:
        if self.crowd.expect(self.client):
            self.is_over = True
            self.daemon.step(ev.AbortRequested(self.client.number, self.reservation_id))

    def _stored(self, result: Any) -> None:
        if isinstance(result, ev.Refusal):
            self.was_refused = True  # a refusal is not remembered: the same id would begin anew
            if not self.is_over:
                self._reuse_staging()
        elif not self.is_over:
            self._finish(result.outcomes)

    def _finish(self, outcomes: bytes) -> None:
        """The answer is there: what it says must be true now, and the staging extent is free again."""
        if len(outcomes) != len(self.hashes):
            raise Violation("put outcomes", f"{len(outcomes)} outcomes for {len(self.hashes)} blocks")
        catalog = self.daemon.planner.catalog
        for prefix_hash, outcome in zip(self.hashes, outcomes, strict=True):
            if outcome not in (ev.PutOutcome.STORED, ev.PutOutcome.DEDUPLICATED):
                if outcome == 0:
                    raise Violation("put outcomes", "a block has no outcome")
                continue
            row = catalog.find(self.namespace_id, prefix_hash)
            is_there = row != NO_ROW and catalog.tier_of(row) is not None
            is_excused = (self.namespace_id, prefix_hash) in self.daemon.removed_now
            is_excused |= self.daemon.oracle.is_lossy
            if not is_there and outcome == ev.PutOutcome.STORED and not is_excused:
                raise Violation("put outcomes", f"{prefix_hash.hex()[:8]} is STORED and not readable")
            if is_there and self.session_id and self.daemon.knows(self.client.number):
                model = self.daemon.oracle.session(self.session_id, self.client.number)
                model.blocks[self.namespace_id, prefix_hash] = None
        self.world.counts["put_answered"] += 1
        self._reuse_staging()

    def _reuse_staging(self) -> None:
        """Something else stands there from now on: a copy that is still to come reads that."""
        self.is_over = True
        for offset in self.tokens:
            self.client.staging.tokens[offset] = self.crowd.contents.garbage()


class Acquire:
    """One acquire, the reads under its lease, and its release."""

    def __init__(
        self,
        crowd: Crowd,
        client: Client,
        namespace_id: int,
        identity: NamespaceIdentity,
        hashes: Sequence[bytes],
    ) -> None:
        self.crowd = crowd
        self.world = crowd.world
        self.daemon = crowd.daemon
        self.client = client
        self.namespace_id = namespace_id
        self.identity = identity
        self.hashes = hashes
        self.request_id = crowd._request_id()
        self.session_id = crowd._session_id()
        self.urgency = self.world.rng.choice(URGENCIES)
        self.deadline_at = crowd._deadline()
        self.ttl_s = self.world.rng.choice((0.0, 0.0, 0.01, 1.0))
        self.first_block = self.world.rng.randrange(len(hashes)) if self.world.random() < 0.2 else 0
        self.load_anyway = self.world.random() < 0.5
        self.on_device = self.world.random() < 0.5
        self.retention = crowd.retention(namespace_id, hashes)
        self.calls: list[int] = []
        self.lease_id = 0
        self.is_released = False
        self.num_reads = 0  # under way
        self.seen: set[tuple[int, int]] = set()

    def start(self) -> None:
        """Send it, perhaps several times; perhaps stop listening."""
        world, rates = self.world, self.crowd.config.rates
        self.send()
        if world.chance(rates["retry"]):
            world.after(world.spread(0.005), self._again, False)
        if world.chance(rates["late_retry"]):
            world.after(world.spread(2.0), self._again, True)
        if world.random() < 0.05:
            world.after(world.spread(0.01), self._abandon)

    def send(self) -> None:
        """Send the request once."""
        due = max(self.deadline_at, self.world.now)
        call = self.daemon.call(self.client.number, self._answered, due)
        self.calls.append(call)
        if self.session_id and not self.lease_id:
            self._open_session()
        self.daemon.step(
            ev.AcquireRequested(
                call,
                self.client.number,
                self.request_id,
                self.namespace_id,
                self.hashes,
                self.session_id,
                self.urgency,
                self.ttl_s,
                self.deadline_at,
                self.first_block,
                self.load_anyway,
                self.retention,
                self.on_device,
            )
        )

    def _open_session(self) -> None:
        # A retry that finds its first try (it was no miss) does not touch the session, nor comes here.
        if len(self.hashes) <= self.crowd.config.options.max_blocks_per_request:
            model = self.daemon.oracle.session(self.session_id, self.client.number)
            # Decoding is promised only once an answer says so; anything else counts at once.
            model.urgency = Urgency.IDLE if self.urgency is Urgency.DECODING else self.urgency

    def _again(self, is_late: bool) -> None:
        if not self.crowd.expect(self.client) or not (is_late or not self.is_released):
            return
        if is_late and self.crowd.config.options.max_remembered_requests < 100:
            return  # forgotten: it would be another request
        self.world.counts["retry"] += 1
        self.send()

    def _abandon(self) -> None:
        """The caller gives up; nobody reads what was reported."""
        if not self.crowd.expect(self.client) or self.is_released or self.num_reads:
            return
        self.is_released = True
        for call in self.calls:
            self.daemon.forget_call(call)
        if self.lease_id:
            self.daemon.end_lease(self.lease_id)
        for call in self.calls:
            self.daemon.step(ev.AcquireAbandoned(call))
        if self.lease_id:
            self.daemon.step(ev.ReleaseRequested(None, self.client.number, [self.lease_id]))

    def _answered(self, result: Any) -> None:
        if isinstance(result, ev.Refusal) or self.is_released:
            return
        if result.lease_id and not self.lease_id:
            self.lease_id = result.lease_id
            self.client.leases.append(result.lease_id)
        for ready in result.ready:
            if (ready.block, ready.group) in self.seen:
                continue
            self.seen.add((ready.block, ready.group))
            if ready.block >= len(self.hashes) or ready.block < self.first_block:
                raise Violation("replies", f"block {ready.block} was not asked for")
            key = (self.identity.digest, self.hashes[ready.block], ready.group)
            self.daemon.memories[ready.tier]  # a tier that has an address
            if ready.tier is Tier.HBM and not (self.on_device or self.crowd.config.hbm_is_shared):
                raise Violation("replies", f"block {ready.block} was offered in hbm, which is a GPU's")
            if self.world.random() < 0.7:
                read_under_lease(self, ready, key)
        if result.last:
            self._complete(result)
            if not self.world.chance(self.crowd.config.rates["never_released"]):
                self.world.after(self.world.spread(0.05), self._release)

    def _complete(self, result: Any) -> None:
        """The last answer promises: every group of every block from first_block to num_blocks is readable."""
        groups = self.identity.geometry.num_groups
        promised = {(b, g) for b in range(self.first_block, result.num_blocks) for g in range(groups)}
        missing = promised - self.seen
        if missing and result.lease_id:
            raise Violation("replies", f"promised {result.num_blocks} blocks, {sorted(missing)[:3]} missing")

    def _release(self) -> None:
        if not self.crowd.expect(self.client) or self.is_released:
            return
        if self.num_reads:
            self.world.after(0.01, self._release)
            return
        self.is_released = True
        self.daemon.end_lease(self.lease_id)
        self.daemon.step(ev.ReleaseRequested(None, self.client.number, [self.lease_id]))
        if self.world.chance(self.crowd.config.rates["released_twice"]):
            self.daemon.step(ev.ReleaseRequested(None, self.client.number, [self.lease_id, self.lease_id]))
