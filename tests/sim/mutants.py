"""Mutants: the defects of others, planted one at a time, and the check that sees each.

Every entry breaks the planner or the shell the way a real system was broken (research: field defects of
KV-cache stores), for as long as its context lasts. A simulator that lets one live proves nothing about the
rest, so a test demands every kill. The planner's own audit is off while mutants are hunted:
what counts is what the oracle sees from outside.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvtier.appliance.core.capacity import reclaim
from kvtier.appliance.core.catalog import catalog, residency
from kvtier.appliance.core.catalog.states import State
from kvtier.appliance.core.copying import copies
from kvtier.appliance.core.instructions import Publish, Retract
from kvtier.appliance.core.requests import acquire_job, leases, request_registry, waiting
from kvtier.appliance.core.requests import sessions as sessions_module
from kvtier.tiers.base import CopyOutcome
from kvtier.tiers.block import Tier, Urgency
from kvtier.tiers.cold.log import SegmentLog
from kvtier.tiers.memory.slots import SlotPool
from kvtier.v1.shm import extent_of, place_of

from . import (
    cold,
    daemon,
    memory,
    mutants_budget,
    mutants_keeping,
    mutants_prefetch,
    mutants_puts,
    mutants_resizing,
    mutants_rules,
    mutants_tenants,
    mutants_writing,
)
from . import (
    mutants_run_eviction as run_mutants,
)
from .ladder import NVME
from .run import run_seed

Patch = tuple[Any, str, Any]
NO_AUDIT = 1 << 30


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted defect. `patches` are made anew for each use."""

    name: str
    what: str
    patches: Callable[[], list[Patch]]


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Break the code for the duration of the context."""
    saved = []
    try:
        for owner, name, replacement in mutant.patches():
            assert name in vars(owner), f"{owner.__name__}.{name} is gone; the mutant {mutant.name} is stale"
            saved.append((owner, name, vars(owner)[name]))
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in reversed(saved):
            setattr(owner, name, original)


def _late_hold() -> list[Patch]:
    start, finish = copies.Copies.start, copies.Copies.finish

    def start_without(self: Any, source: Any, target: Any, moves: Any, *rest: Any, **named: Any) -> None:
        start(self, source, target, moves, *rest, **named)
        if source is not None:
            for move in moves:
                self._residency.drop(move.fragment, source)

    def finish_with(self: Any, copy: int, outcomes: Any) -> None:
        batch = self._batches[copy]
        if batch.source is not None:
            for fragment in batch.fragments:
                self._core.transitions.hold(fragment, batch.source)
        finish(self, copy, outcomes)

    return [(copies.Copies, "start", start_without), (copies.Copies, "finish", finish_with)]


def _publish_early() -> list[Patch]:
    arrive = residency.Residency.arrive

    def early(self: Any, fragment: int, tier: Tier, place: int, encoding: int = 0) -> None:
        arrive(self, fragment, tier, place, encoding)
        if tier is not NVME:
            self.core.outbox.emit(Publish(tier, [place], [self.core.catalog.label_of(fragment)]))

    return [(residency.Residency, "arrive", early)]


def _failure_counts_as_success() -> list[Patch]:
    finish = copies.Copies.finish

    def optimistic(self: Any, copy: int, outcomes: Any) -> None:
        finish(self, copy, [CopyOutcome(None, o.checksum or b"\1" * 16) for o in outcomes])

    return [(copies.Copies, "finish", optimistic)]


def _decoding_is_a_hint() -> list[Patch]:
    update = sessions_module.Sessions.update

    def weak(urgency: Urgency) -> Urgency:
        return Urgency.PREFILL if urgency is Urgency.DECODING else urgency

    def update_weakly(self: Any, session: Any, urgency: Urgency, *rest: Any, **named: Any) -> None:
        update(self, session, weak(urgency), *rest, **named)

    return [(sessions_module.Sessions, "update", update_weakly)]


def _release_twice() -> list[Patch]:
    release = leases.LeaseTable.release

    def twice(self: Any, lease_id: int) -> bool:
        lease = self._leases.get(lease_id)
        held = list(lease.held) if lease is not None else []
        answer = release(self, lease_id)
        for fragment, tier in held:
            if self._core.catalog.holds[tier][fragment]:
                self._residency.drop(fragment, tier)
        return answer

    return [(leases.LeaseTable, "release", twice)]


def _forced_expiry() -> list[Patch]:
    expire = leases.LeaseTable.expire

    def force(self: Any, now: float) -> None:
        is_local = [(client, client.local) for client in self.clients.values()]
        for client, _ in is_local:
            client.local = False
        expire(self, now)
        for client, local in is_local:
            client.local = local

    return [(leases.LeaseTable, "expire", force)]


def _condemned_is_free() -> list[Patch]:
    def at_once(self: Any, fragment: int, tier: Tier, reason: str, verb: str = "") -> None:
        catalog = self.core.catalog
        row = catalog.block_of[fragment]
        if catalog.state[tier][fragment] == State.RESIDENT:
            catalog.num_holds[tier][row] -= catalog.holds[tier][fragment]
            catalog.holds[tier][fragment] = 0
            self._evict(row, fragment, tier)

    return [(residency.Residency, "condemn", at_once)]


def _no_retract() -> list[Patch]:
    step = daemon.Daemon.step

    def forgetful(self: Any, event: Any) -> None:
        self._execute[Retract] = lambda instruction: None
        step(self, event)

    return [(daemon.Daemon, "step", forgetful)]


def _slot_reused_without_new_generation() -> list[Patch]:
    publish = memory.VirtualMemory.publish

    def same_generation(self: Any, place: int, label: Any) -> None:
        publish(self, place, label)
        self.slot(place).generation = 2

    return [(memory.VirtualMemory, "publish", same_generation)]


def _recovery_believes_torn_records() -> list[Patch]:
    return [(cold.VirtualColdStore, "is_whole", lambda self, record: True)]


def _segment_freed_under_reader() -> list[Patch]:
    finish, begin = reclaim.Reclaim._finish_when_quiet, reclaim.Reclaim._begin

    def blind(original: Any) -> Any:
        def without_readers(self: Any, *arguments: Any) -> Any:
            reads, self._copies.num_reads_of_segment = self._copies.num_reads_of_segment, {}
            try:
                return original(self, *arguments)
            finally:
                reads.update(self._copies.num_reads_of_segment)
                self._copies.num_reads_of_segment = reads

        return without_readers

    return [
        (reclaim.Reclaim, "_finish_when_quiet", blind(finish)),
        (reclaim.Reclaim, "_begin", blind(begin)),
        (reclaim.Reclaim, "_decide", _decide_ignoring_holds()),
    ]


def _decide_ignoring_holds() -> Any:
    decide = reclaim.Reclaim._decide

    def ignoring(self: Any, row: int) -> bool:
        column = self._core.catalog.num_holds[NVME]
        held, column[row] = column[row], 0
        answer = decide(self, row)
        column[row] += held
        return bool(answer)

    return ignoring


def _forward_moves_first() -> list[Patch]:
    start, move = copies.Copies.start, residency.Residency.move

    def eager(self: Any, source: Any, target: Any, moves: Any, *rest: Any, **named: Any) -> None:
        start(self, source, target, moves, *rest, **named)
        if source is NVME and target is NVME:
            for one in moves:
                self._core.catalog.place[NVME][one.fragment] = one.target

    def late(self: Any, fragment: int, tier: Tier, place: int) -> None:
        if tier is not NVME:
            move(self, fragment, tier, place)
            return
        self.core.catalog.place[NVME][fragment] = place
        self.core.transitions.in_segment[extent_of(place)].append(fragment)
        self._settle(NVME, place)

    return [(copies.Copies, "start", eager), (residency.Residency, "move", late)]


def _spill_reads_the_next_slot() -> list[Patch]:
    start = copies.Copies.start

    def shifted(self: Any, source: Any, target: Any, moves: Any, *rest: Any, **named: Any) -> None:
        if source is not None and target is NVME and source is not NVME and len(moves) > 1:
            places = [move.source for move in moves]
            moves = [m._replace(source=p) for m, p in zip(moves, places[1:] + places[:1], strict=True)]
        start(self, source, target, moves, *rest, **named)

    return [(copies.Copies, "start", shifted)]


def _retry_is_new() -> list[Patch]:
    return [(request_registry.RequestRegistry, "earlier", lambda self, client, request_id: None)]


def _namespaces_share_keys() -> list[Patch]:
    add = catalog.Catalog.add_namespace

    def shared(self: Any, identity: Any, domain: int, number: int) -> Any:
        namespace = add(self, identity, domain, number)
        for other in self.namespaces.values():
            if other.fragment_bytes == namespace.fragment_bytes and other.domain == domain:
                namespace.rows = other.rows
                break
        return namespace

    return [(catalog.Catalog, "add_namespace", shared)]


def _domains_share_extents() -> list[Patch]:
    reserve = SlotPool.reserve
    return [(SlotPool, "reserve", lambda self, domain, num_bytes: reserve(self, 0, num_bytes))]


def _failed_load_is_ready() -> list[Patch]:
    arrived = acquire_job.AcquireJob._arrived

    def ready(self: Any, tier: Tier, fragment: int, cause: Any) -> None:
        arrived(self, tier, fragment, None)

    return [(acquire_job.AcquireJob, "_arrived", ready)]


def _append_over_records() -> list[Patch]:
    settle = SegmentLog.settle

    def rewind(self: Any, place: int) -> None:
        segment = self.segments[extent_of(place)]
        pages = place - place_of(extent_of(place), 0)
        if segment.state.value == "open" and segment.num_landing == 1:
            segment.next_page = min(segment.next_page, pages + 1)
        settle(self, place)

    return [(SegmentLog, "settle", rewind)]


def _lost_listener() -> list[Patch]:
    return [(copies.Copies, "listen", lambda self, fragment, tier, listener: None)]


def _unbounded_waiting() -> list[Patch]:
    return [(waiting.Waiting, "is_full", lambda self, tenant: False)]


def _sealed_records_forgotten() -> list[Patch]:
    seal = cold.VirtualColdStore.seal

    def partly(self: Any, number: int) -> None:
        seal(self, number)
        segment = self.segments[number]
        if segment.has_footer and len(segment.entries) > 1:
            segment.entries = segment.entries[:-1]

    return [(cold.VirtualColdStore, "seal", partly)]


def _reported_fragments_let_go() -> list[Patch]:
    shorten = acquire_job.AcquireJob._shorten

    def all_of_them(self: Any, num_blocks: int) -> None:
        shorten(self, num_blocks)
        behind = [self._core.catalog.block_of[f] for f, _ in self.lease.held]
        keep = set(self._rows[: self._limit])
        extra = [pair for pair, row in zip(self.lease.held, behind, strict=True) if row not in keep]
        self.lease.held = [pair for pair in self.lease.held if pair not in extra]
        self._leases.let_go(self.lease, extra)

    return [(acquire_job.AcquireJob, "_shorten", all_of_them)]


def _old_checksum_kept() -> list[Patch]:
    labels_of = catalog.Catalog.labels_of
    seen: dict[tuple[bytes, bytes, int], bytes] = {}

    def remember(label: Any) -> Any:
        key = (label.namespace_digest, label.prefix_hash, label.group)
        if label.checksum:
            seen.setdefault(key, label.checksum)
        return label if label.checksum else replace(label, checksum=seen.get(key, b""))

    def stale(self: Any, fragments: Any) -> Any:
        return [remember(label) for label in labels_of(self, fragments)]

    return [(catalog.Catalog, "labels_of", stale)]


MUTANTS = [
    Mutant("late hold", "a copy holds its source only when it ends, not when it is queued", _late_hold),
    Mutant("publish early", "a slot is published when it is reserved", _publish_early),
    Mutant("failure is success", "a failed copy counts as landed", _failure_counts_as_success),
    *(Mutant(*planted) for planted in mutants_rules.PLANTED),
    Mutant("decoding is a hint", "a decoding session keeps nothing", _decoding_is_a_hint),
    Mutant("release twice", "the end of a lease gives its holds back twice", _release_twice),
    Mutant("forced expiry", "an expired lease of a local client frees its slots", _forced_expiry),
    Mutant("condemned is free", "what failed verification is freed under its readers", _condemned_is_free),
    Mutant("no retract", "a slot stays published when its block leaves", _no_retract),
    Mutant(
        "same generation", "a recycled slot looks like its former self", _slot_reused_without_new_generation
    ),
    Mutant("torn recovery", "recovery believes unsealed records unseen", _recovery_believes_torn_records),
    Mutant("free under reader", "a segment is freed while it is read", _segment_freed_under_reader),
    Mutant("forward first", "a record moves before its copy has landed", _forward_moves_first),
    Mutant("wrong slot", "a spill reads its neighbour's slot", _spill_reads_the_next_slot),
    *(Mutant(*planted) for planted in mutants_puts.PLANTED),
    Mutant("retry is new", "a retry is executed as another request", _retry_is_new),
    Mutant(
        "namespaces share keys",
        "two namespaces of one shape find each other's blocks",
        _namespaces_share_keys,
    ),
    Mutant("quota ignored", "a tenant takes more memory than it may", mutants_tenants.quota_ignored),
    Mutant("pins of others", "a tenant's clients pin its quota each", mutants_tenants.pins_not_counted),
    *(Mutant(*planted) for planted in mutants_tenants.ERASING),
    Mutant("domains share extents", "two isolation domains share an extent", _domains_share_extents),
    Mutant("failed load is ready", "a load that failed is reported as readable", _failed_load_is_ready),
    Mutant("append over", "the log appends over its last record", _append_over_records),
    Mutant("lost wake-up", "nobody hears that a fragment arrived", _lost_listener),
    Mutant("unbounded queue", "any number of requests may wait", _unbounded_waiting),
    Mutant("short footer", "a footer forgets the last record", _sealed_records_forgotten),
    Mutant("reported let go", "fragments reported to a client are let go again", _reported_fragments_let_go),
    Mutant(
        "run through holds",
        "a run takes blocks along that are in use",
        run_mutants.run_through_holds,
    ),
    Mutant("run past branches", "a run leaves another child behind", run_mutants.run_past_branches),
    Mutant("old checksum", "new bytes are published under the checksum of former ones", _old_checksum_kept),
    Mutant("ahead of demand", "prefetches begin whoever waits", mutants_prefetch.ahead_of_demand),
    Mutant(
        "cancelled is over", "a cancelled copy's slots are free at once", mutants_prefetch.cancelled_is_over
    ),
    Mutant(
        "inherited priority",
        "a priority outlives its block",
        mutants_prefetch.priority_outlives_its_block,
    ),
    Mutant("awaited for ever", "what left dram is awaited there", mutants_prefetch.awaited_for_ever),
    *(Mutant(*planted) for planted in mutants_resizing.PLANTED),
    *(Mutant(*planted) for planted in mutants_keeping.PLANTED),
    *(Mutant(*planted) for planted in mutants_budget.PLANTED),
    *(Mutant(*planted) for planted in mutants_writing.PLANTED),
]


@dataclass(slots=True)
class Kill:
    """How a mutant fared in one mode."""

    num_seeds: int
    num_killed: int
    first_seed: int  # -1: it lives
    checks: str  # what saw it, most often first


#: What a patch raises that no longer fits the code it breaks: called with other arguments, or asking for a
#: name that is gone. That is no kill.
STALE = ("TypeError", "AttributeError", "NameError")


def hunt(mutant: Mutant, verify: bool, seeds: range, *, stop_at_first: bool) -> Kill:
    """Run seeds with the mutant planted and say what saw it."""
    checks: Counter[str] = Counter()
    first = -1
    num_seeds = 0
    with planted(mutant):
        for seed in seeds:
            num_seeds += 1
            outcome = run_seed(seed, verify, audit_every=NO_AUDIT)
            if outcome.check:
                assert not outcome.check.endswith(STALE), (
                    f"the mutant {mutant.name} is stale\n{outcome.trace_back}"
                )
                checks[outcome.check] += 1
                first = seed if first < 0 else first
                if stop_at_first:
                    break
    names = ", ".join(f"{name} {count}" for name, count in checks.most_common(3))
    return Kill(num_seeds, checks.total(), first, names)
