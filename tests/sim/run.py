"""One seed from the first client to quiescence."""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.catalog.states import State
from kvtier.appliance.core.requests import put_job
from kvtier.tiers.cold.log import SegmentLog
from kvtier.v1.shm import extent_of, slot_of
from tests.records import rows_of

from .acquiring import Acquire
from .changes import Changes
from .clients import Crowd
from .cold import VirtualColdStore
from .config import Config, draw
from .daemon import Daemon
from .erasing import Erasing
from .forks import fork
from .keeping import Keeping
from .ladder import NVME
from .last_put import check_room
from .namespaces import Namespaces
from .oracle import Contents
from .requests import Chain, Client
from .source import VirtualSource
from .tenants import Tenants
from .wear import wear
from .world import Violation, World
from .writing import Writes, draw_writes

#: No honest seed needs more; a livelock does.
MAX_EVENTS = 200_000


@dataclass(slots=True)
class Outcome:
    """How one seed ended. `check` is empty when nothing was violated."""

    seed: int
    verify: bool
    check: str = ""
    message: str = ""
    num_events: int = 0
    virtual_s: float = 0.0
    fingerprint: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    trace_back: str = ""


class Run:
    """A world with a daemon, a medium and a crowd."""

    def __init__(
        self,
        seed: int,
        verify: bool,
        num_operations: int = 0,
        trace: list[str] | None = None,
        audit_every: int = 0,
    ) -> None:
        self.world = World(seed, trace)
        self.config: Config = draw(self.world.rng, verify, num_operations)
        self.config.audit_every = audit_every or self.config.audit_every
        wear(seed, self.config, is_short=num_operations > 0)
        fork(seed, self.config)
        self.config.options = draw_writes(Random(f"writes of {seed}"), self.config.options)
        self.writes = Writes(self.world)
        self.tenants = Tenants(seed, self.config)
        self.namespaces = Namespaces(seed, self.config)
        self.contents = Contents()
        self.source = VirtualSource(self.world, self.config)
        self.cold = VirtualColdStore(self.world, self.contents, self.config.num_segments, self.config.rates)
        self.daemon = self._daemon()
        self.crowd = Crowd(self.world, self.config, self.contents, self.daemon)
        self.changes = Changes(self.world, self.config)
        self.erasing = Erasing(self.world, self.config, self.contents, self.cold)
        if self.source.is_on:
            self.erasing.num_left = 0  # the settings refuse both
        self.keeping = Keeping(self.world, self.contents)
        self.num_left = self.config.num_operations

    def execute(self) -> None:
        """Run to quiescence, then read everything that is left. Raises Violation."""
        world = self.world
        self.crowd.open(self.daemon)
        world.after(0, self._next)
        self.settle()
        self.daemon.check_answered()
        self._close()
        self.settle()
        self.daemon.check_quiet()
        for rate in self.config.rates:
            self.config.rates[rate] = 0.0
        self._read_everything()
        check_room(self)
        self.daemon.check_quiet()

    def _daemon(self) -> Daemon:
        return Daemon(self.world, self.config, self.cold, self.contents, self.writes, self.source)

    def _next(self) -> None:
        """One more operation, and the time of the next one."""
        if self.erasing.is_due(self.num_left):
            self.erasing.apply(self.daemon)
        if self.changes.is_due(self.num_left):
            self.changes.apply(self.daemon)
        if self.num_left == 0:
            return
        self.num_left -= 1
        self.namespaces.apply(self.crowd)
        weights, world = self.config.weights, self.world
        total = sum(weights.values())
        draw_ = world.random() * total
        if draw_ < weights["crash"]:
            self._crash(power=world.random() < 0.5)
        elif draw_ < weights["crash"] + weights["drain"]:
            self._drain()
        else:
            self.crowd.act()
        self.tenants.check(self.daemon.planner, counts_extents=not self.keeping.is_on)
        world.after(world.spread(self.config.step_s), self._next)

    def settle(self) -> None:
        """Let everything come to rest. A cold store that is too small for what must stay in it is tried for
        ever, though rarely; after a minute that is stopped, because it is no news."""
        world = self.world
        rests_at = world.now + 60 + self.num_left * 3 * self.config.step_s
        while world.advance():
            if world.now > rests_at:
                self.daemon.planner.reclaim._not_before = float("inf")
            if world.num_events > MAX_EVENTS:
                raise Violation("liveness", f"more than {MAX_EVENTS} events: something goes in circles")

    def _close(self) -> None:
        """Everybody goes home."""
        for client in list(self.crowd.clients):
            if self.crowd.expect(client):
                self.crowd.die(client)
        for pin in self.crowd.pins:
            self.daemon.step(ev.UnpinRequested(pin))
        self.daemon.step(ev.Tick())

    def _read_everything(self) -> None:
        """Everything that is still stored must be right, and can be had."""
        for index, identity in enumerate(self.crowd.identities):
            client = self.crowd.open_client()
            self.daemon.step(ev.ClientGone(client.number, "renamed"))
            client = Client(client.number + 1_000_000, identity.domain, True)
            self.daemon.local.add(client.number)
            self.crowd.clients.append(client)
            self.daemon.step(ev.ClientOpened(client.number, "reader", True, identity.domain))
            self.namespaces.renew(self.crowd)
            for path in self.crowd.keys.paths:
                namespace_id = self.crowd.namespace_ids[index]
                acquire = Acquire(self.crowd, client, Chain(namespace_id, identity, path))
                acquire.deadline_at, acquire.ttl_s, acquire.session_id = float("inf"), 0.0, ""
                acquire.expected = None
                acquire.send()
                self.settle()
                acquire.release()
                self.settle()
            self.crowd.die(client)
            self.settle()
        self.daemon.check_quiet()

    # ------------------------------------------------------------------------------------ restarts

    def _crash(self, power: bool) -> None:
        """The daemon dies and starts again on what the medium kept."""
        world = self.world
        world.counts["power_cut" if power else "crash"] += 1
        world.note("!crash", power)
        self.daemon.kill()
        certain = self._certain_survivors(power)  # after the writes that this ends, which may go astray
        erased = self.erasing.crashed()
        kept = self.keeping.keep(self.daemon, erased) if self.keeping.is_on and not power else None
        for client in self.crowd.clients:
            client.is_alive = False
        if power:
            self.cold.power_cut(kept=world.random())
        written = self.daemon.planner.write_budget.state()
        self.daemon = self._daemon()
        if kept is not None:
            self.keeping.hand_over(kept, self.daemon)
        if written is not None:  # kept beside the store, and the clock goes on
            self.daemon.planner.write_budget.restore(written, written["as_of"])
        if self.config.num_segments:
            self._adopt(certain)
        self.crowd.open(self.daemon)
        if kept is not None:
            self.keeping.adopt(kept, self.daemon)

    def _adopt(self, certain: dict[int, tuple[bytes, bytes, int]]) -> None:
        recovered = self.cold.recover()
        self.daemon.planner.adopt(recovered, self.world.now)
        self.world.note("!recovered", recovered.num_records, len(recovered.segments))
        places = set()
        for record in rows_of(recovered):
            place = int(record["place"])
            digest = recovered.namespaces[int(record["namespace_index"])].digest
            key = (digest, bytes(record["prefix_hash"]), int(record["group"]))
            places.add(key)
            found = self.cold.segments[extent_of(place)]
            token = next(r.token for r in found.entries if r.page == slot_of(place))
            where = (extent_of(place), slot_of(place), found.epoch)
            if where not in self.cold.damaged:
                self.contents.must_be(token, key, "recovered")
        for place, key in certain.items():
            where = (extent_of(place), slot_of(place), self.cold.segments[extent_of(place)].epoch)
            if key not in places and where not in self.cold.damaged:
                raise Violation("durability", f"record {place:#x} was safe and is not there after the crash")
        problems = self.daemon.planner.check_integrity()
        if problems:
            raise Violation("check_integrity", f"after recovery: {problems[:3]}")

    def _certain_survivors(self, power: bool) -> dict[int, tuple[bytes, bytes, int]]:
        """Return the readable records (place -> key) that no crash of this kind may take."""
        planner = self.daemon.planner
        catalog = planner.catalog
        certain = {}
        for namespace in catalog.namespaces.values():
            for row in namespace.rows.values():
                for group, fragment in enumerate(catalog.fragments(row)):
                    if catalog.state[NVME][fragment] != State.RESIDENT:
                        continue
                    place = catalog.place[NVME][fragment]
                    segment = self.cold.segments[extent_of(place)]
                    if extent_of(place) >= self.config.num_segments:
                        continue  # its segment was leaving: the next owner does not open it
                    if (extent_of(place), slot_of(place), segment.epoch) in self.cold.damaged:
                        continue
                    if not self.cold.has_key(place):
                        continue  # its tenant was erased, and the planner had not come to it
                    if segment.has_footer or (not power and segment.epoch):
                        key = (namespace.identity.digest, catalog.prefix_hash[row], group)
                        certain[place] = key
        return certain

    def _drain(self) -> None:
        """The daemon is asked to end; it flushes what is dirty, seals, and starts again."""
        world, daemon = self.world, self.daemon
        world.counts["drain"] += 1
        daemon.step(ev.DrainStarted(daemon.call(0, lambda result: None, world.now)))
        world.after(0.05 + world.spread(0.2), self._drained, daemon)

    def _drained(self, daemon: Daemon) -> None:
        if not daemon.is_alive:
            return
        log = daemon.rooms.get(NVME)
        if isinstance(log, SegmentLog):
            for instruction in daemon.planner.close_cold_store():
                daemon._execute[type(instruction)](instruction)
        self.world.after(1.0, self._restart, daemon)

    def _restart(self, daemon: Daemon) -> None:
        if daemon.is_alive:
            self._crash(power=False)


@contextmanager
def _min_run(num_blocks: int) -> Iterator[None]:
    """Let the core take its way in columns for puts of `num_blocks` already."""
    saved = vars(put_job)["MIN_RUN"]
    vars(put_job)["MIN_RUN"] = num_blocks
    try:
        yield
    finally:
        vars(put_job)["MIN_RUN"] = saved


def run_seed(
    seed: int,
    verify: bool,
    num_operations: int = 0,
    trace: list[str] | None = None,
    audit_every: int = 0,
) -> Outcome:
    """Run one seed; never raises for what the system under test does. 0 operations: as many as it draws."""
    outcome = Outcome(seed, verify)
    run = Run(seed, verify, num_operations, trace, audit_every)
    try:
        with _min_run(run.config.min_run), run.source.installed():
            run.execute()
    except Violation as violation:
        outcome.check, outcome.message = violation.check, str(violation)
        outcome.trace_back = traceback.format_exc()
    except Exception as error:  # the planner stopped itself: an assertion, a forbidden transition
        outcome.check = f"planner raised {type(error).__name__}"
        outcome.message = str(error)[:500]
        outcome.trace_back = traceback.format_exc()
    outcome.num_events = run.world.num_events
    outcome.virtual_s = run.world.now
    outcome.fingerprint = run.world.fingerprint
    outcome.counts = run.world.counts
    return outcome
