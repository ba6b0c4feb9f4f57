"""Clients: what they do, in which order, and how they die.

A `Crowd` draws one operation after the other and starts it for a random client; what follows from it
(commits, reads, releases, retries: putting.py, acquiring.py) happens at its own random time, overlapping with
everything else. A client that dies stops in the middle of whatever it was doing.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.results import PinResult, Refusal
from kvtier.tiers.block import NamespaceIdentity

from .acquiring import Acquire
from .config import Config
from .daemon import Daemon
from .expected import ExpectedDraws
from .ladder import DRAM, HBM, MAPPED, NVME
from .oracle import Contents
from .putting import Put
from .readers import read_one_sided
from .requests import URGENCIES, Chain, Client
from .world import Violation, World

NEVER = float("inf")


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
        self.expected = ExpectedDraws(world)
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
        daemon.prefill.accepted = self.accepted
        self.clients = []
        self.pins = []
        for _ in range(self.config.num_clients):
            self.open_client()
        self.namespace_ids = []
        for identity, speed in zip(self.identities, self.config.prefill_speeds, strict=True):
            self.register(identity, self._opened, speed)

    def _opened(self, result: Any) -> None:
        """Note the id of the next namespace; 0, which is none's, when its tenant may have no other one."""
        if isinstance(result, Refusal) and result.reason != "TOO_MANY_NAMESPACES":
            raise Violation("namespaces", f"a namespace was refused: {result.reason}")
        self.namespace_ids.append(0 if isinstance(result, Refusal) else result.namespace_id)

    def register(self, identity: NamespaceIdentity, on_reply: Any, speed: Any = None) -> None:
        """Register a namespace."""
        self.daemon.step(ev.NamespaceRegistered(self.daemon.call(0, on_reply), identity, speed))

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

    def request_id(self) -> str:
        self._num_requests += 1
        return f"r{self._num_requests}"

    def session_id(self) -> str:
        world = self.world
        return f"s{world.rng.randrange(self.config.num_sessions)}" if world.random() < 0.6 else ""

    def deadline(self) -> float:
        return self.world.now + self.world.spread(0.2) if self.world.random() < 0.4 else NEVER

    def _measure(self, client: Client) -> None:
        """The mover says how fast an edge is."""
        bandwidth = self.world.rng.choice((1e3, 1e6, 1e9))
        self.daemon.step(ev.EdgeMeasured(NVME, DRAM, bandwidth, 1e-4))

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
        Put(self, client, Chain(*namespace, path[start:]), parent).start(one_step)

    def _acquire(self, client: Client) -> None:
        namespace = self._namespace(client)
        if namespace is not None:
            Acquire(self, client, Chain(*namespace, self.keys.draw(self.world.rng))).start()

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
        if isinstance(found, Refusal):
            assert namespace[0] not in self.daemon.planner.catalog.namespaces
            return
        for prefix_hash in path[: found.num_blocks]:
            if (namespace[1].digest, prefix_hash) not in self.accepted:
                raise Violation("lookup", "reports a block that nobody ever committed")
        if self.daemon.planner.fetches.is_open and found.num_blocks < len(path):
            self.daemon.step(ev.LookedUp(namespace[0], path))

    def _keep_alive(self, client: Client) -> None:
        self.daemon.step(ev.KeptAlive(None, client.number, client.leases[-3:], self.world.spread(0.2)))

    def _touch(self, client: Client) -> None:
        namespace = self._namespace(client)
        if namespace is not None:
            path = self.keys.draw(self.world.rng)
            session_id = self.session_id()
            if session_id:
                self.daemon.oracle.session(session_id, client.number)
            self.daemon.step(ev.Touched(client.number, namespace[0], path, session_id))

    def _pin(self, client: Client) -> None:
        namespace = self._namespace(client)
        if namespace is None:
            return
        call = self._call(client, self._pinned)
        floor = self.world.rng.choice(MAPPED.tiers)
        path, ttl_s = self.keys.draw(self.world.rng), self.world.spread(0.5)
        request = ev.PinRequested(call, client.number, self.request_id(), namespace[0], path, floor, ttl_s)
        self.daemon.step(request)

    def _pinned(self, result: Any) -> None:
        if isinstance(result, PinResult):
            self.pins.append(result.pin_id)

    def _unpin(self, client: Client) -> None:
        if self.pins:
            self.daemon.step(ev.UnpinRequested(self.world.rng.choice(self.pins)))

    def _prefetch(self, client: Client) -> None:
        namespace = self._namespace(client)
        if namespace is not None:
            call = self._call(client, lambda result: None)
            target = self.world.rng.choice(MAPPED.memory_tiers)
            path = self.keys.draw(self.world.rng)
            self.daemon.step(ev.PrefetchRequested(call, client.number, namespace[0], path, target))

    def _session(self, client: Client) -> None:
        session_id, urgency = self.session_id() or "s0", self.world.rng.choice(URGENCIES)
        back_at = NEVER
        if self.world.chance(self.config.hint_rate):
            back_at = self.world.now + self.world.spread(self.world.rng.choice((0.01, 0.3)))
        event = ev.SessionUpdated(client.number, session_id, urgency, back_at=back_at)
        self.daemon.follow_up(event)  # of the step before, which knew nothing of this
        self.daemon.oracle.session(session_id, client.number).urgency = urgency
        self.daemon.step(event)

    def _fork(self, client: Client) -> None:
        session_id, new_id = self.session_id() or "s0", self.session_id() or "s1"
        source = self.daemon.oracle.sessions.get(session_id)
        if source is not None:
            self.daemon.oracle.session(new_id, client.number).blocks.update(source.blocks)
        call = self._call(client, lambda result: None)
        self.daemon.step(ev.SessionForked(call, client.number, session_id, new_id))

    def _end(self, client: Client) -> None:
        session_id = self.session_id() or "s0"
        self.daemon.oracle.sessions.pop(session_id, None)
        call = self._call(client, lambda result: None)
        archive = self.world.random() < 0.5
        self.daemon.step(ev.SessionEnded(call, client.number, session_id, archive))

    def _evict(self, client: Client) -> None:
        tier = self.world.rng.choice(MAPPED.tiers)
        num_bytes = self.world.rng.choice((0, 1, 65536))
        of_all = 0 if num_bytes else self.world.rng.choice((0, 0, 1))  # or one namespace
        call = self._call(client, lambda result: None, NEVER)  # segments' readers and copies are waited for
        self.daemon.step(ev.EvictRequested(call, tier, num_bytes, of_all))

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
        self.daemon.step(ev.AcquireRequested(call, client.number, self.request_id(), namespace_id, path))

    def _jump(self, client: Client) -> None:
        """The clock jumps, or the process was stopped: everything is due at once."""
        self.world.counts["clock_jump"] += 1
        jump_s = self.world.spread(3.0)
        self.world.now += jump_s
        self.daemon.excuse(jump_s)

    def _tier_lost(self, client: Client) -> None:
        is_gpu = HBM in self.daemon.rooms and not self.config.hbm_is_shared
        if is_gpu and self.world.random() < 0.3:  # for good: the device fell off the bus
            self.world.counts["gpu_lost"] += 1
            self.daemon.was_offline = self.daemon.memories[HBM].is_lost = True
            self.daemon.step(ev.TierLost(HBM, True, "simulated"))
        elif NVME in self.daemon.rooms:
            self.world.counts["tier_lost"] += 1
            self.daemon.was_offline = True
            self.daemon.step(ev.TierLost(NVME, True, "simulated"))
            self.world.after(self.world.spread(0.3), self._tier_back, self.daemon)

    def _tier_back(self, daemon: Daemon) -> None:
        daemon.step(ev.TierLost(NVME, False, "simulated"))

    def _call(self, client: Client, on_reply: Any, due: float = 0.0) -> int:
        return self.daemon.call(client.number, on_reply, max(due, self.world.now))


def _must_be_refused(result: Any) -> None:
    if not isinstance(result, Refusal) or result.reason != "UNKNOWN_NAMESPACE":
        raise Violation("domains", f"a namespace of another domain was answered with {result}")
