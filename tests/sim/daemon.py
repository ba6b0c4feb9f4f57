"""One life of the daemon: the production planner, its rooms, and a shell that executes what it says.

`step` does what Appliance.step does: one event in, its instructions executed in order. Every reply is checked
as it leaves: exactly once, and naming only slots that hold what they should at that instant.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import (
    AwaitBlocks,
    CancelCopy,
    Copy,
    ExportBundle,
    FetchBundle,
    ForgetNamespace,
    FreeSegment,
    GiveBack,
    HastenCopy,
    Instruction,
    Notify,
    Publish,
    Reply,
    Retract,
    SealSegment,
    SearchBundles,
    StopAwaiting,
    StoreNamespace,
)
from kvtier.appliance.core.planner import Planner
from kvtier.appliance.core.results import AcquireResult, PutResult, Refusal, ReserveResult, Result
from kvtier.tiers.base import Room
from kvtier.tiers.block import Tier
from kvtier.tiers.cold.log import SegmentLog
from kvtier.tiers.memory.slots import SlotPool
from kvtier.v1.shm import extent_of

from .cold import VirtualColdStore
from .config import FOOTER_BYTES, SLOT_BYTES, Config
from .expected import OtherPrefill
from .ladder import CXL, DRAM, HBM, MAPPED, NVME, ON_DEVICE
from .memory import VirtualMemory
from .mover import Mover, Staging
from .oracle import Contents, Oracle, is_removal
from .source import SourceShell, VirtualSource
from .world import Violation, World
from .writing import Writes

#: How much later than its deadline a request may be answered: the longest honest memory copy and a tick.
SLACK_S = 2.0
#: A shell does not tick more often than this, however soon the planner wants it.
TICK_S = 0.001


@dataclass(slots=True)
class Call:
    """A request that waits for its answer."""

    client: int
    on_reply: Callable[[Result], None]
    due: float  # when it must have been answered, slack included


class FlakyPool(SlotPool):
    """A room that sometimes has no place although it has."""

    fails: Callable[[], bool] = staticmethod(lambda: False)

    def reserve(self, domain: int, num_bytes: int) -> int | None:
        return None if self.fails() else super().reserve(domain, num_bytes)


class FlakyLog(SegmentLog):
    """The same for the cold store."""

    fails: Callable[[], bool] = staticmethod(lambda: False)

    def reserve(self, domain: int, num_bytes: int, *, forward: bool = False) -> int | None:
        return None if self.fails() else super().reserve(domain, num_bytes, forward=forward)


class Daemon:
    """Planner, virtual tiers and mover of one life. Dies with `kill`; the cold store outlives it."""

    def __init__(
        self,
        world: World,
        config: Config,
        cold: VirtualColdStore,
        contents: Contents,
        writes: Writes,
        source: VirtualSource,
    ) -> None:
        self.world = world
        self.config = config
        self.cold = cold
        self.contents = contents
        self.writes = writes
        self.is_alive = True
        self.was_offline = False
        self.rooms = _rooms(config, self._no_place)
        ladder = MAPPED if config.hbm_is_shared else ON_DEVICE
        self.planner = Planner(
            config.options,
            self.rooms,
            policies=config.policies,
            ladder=ladder,
        )
        if config.compression is not None:
            self.planner.handle(ev.CompressionChosen(config.compression), world.now)
        self.memories = {
            tier: VirtualMemory(tier, room, contents)
            for tier, room in self.rooms.items()
            if isinstance(room, SlotPool)
        }
        self.oracle = Oracle(world, self)
        self.mover = Mover(self)
        self.source = SourceShell(self, source)
        self.prefill = OtherPrefill(self, source, contents)
        self.stagings: dict[int, Staging] = {}  # of living clients
        self.local: set[int] = set()
        self._domains: dict[int, str] = {}  # of clients, gone ones too
        #: Blocks of memory that was taken over, by namespace, that the step under way verified.
        self.found_now: set[tuple[int, bytes]] = set()
        self.unfound: set[int] = set()  # what an earlier life left in memory that was not looked at yet
        #: What local clients were told they may read: lease -> (tier, place).
        self.leased: dict[int, dict[tuple[Tier, int], None]] = {}
        #: Blocks that left a tier in this very step, perhaps after a reply that still counted on them.
        self.removed_now: set[tuple[int, bytes]] = set()
        self._calls: dict[int, Call] = {}
        self._next_call = 0
        self._tick_at = float("inf")
        self._house_busy_until = 0.0
        if not config.hbm_is_shared:  # the daemon's, once it has measured
            self.planner.handle(ev.ColdEdgeOpened(config.straight_codecs), world.now)
        self._execute: dict[type, Callable[..., None]] = {
            Reply: self._reply,
            Copy: self.mover.start,
            CancelCopy: self.mover.cancel,
            HastenCopy: self.mover.hasten,
            SearchBundles: self.source.search,
            FetchBundle: self.source.fetch,
            AwaitBlocks: self.prefill.begin,
            StopAwaiting: self.prefill.stop,
            ExportBundle: self.source.export,
            Publish: self._publish,
            Retract: self._retract,
            SealSegment: lambda i: self._run_store_task(self.cold.seal, i.segment),
            FreeSegment: lambda i: self._run_store_task(self._free, i.segment),
            GiveBack: self._give_back,
            StoreNamespace: self._store_namespace,
            ForgetNamespace: self._forget_namespace,
            Notify: self._notify,
        }

    def _publish(self, run: Publish) -> None:
        for place, label in zip(run.places, run.labels, strict=True):
            self.memories[run.tier].publish(place, label)

    def _retract(self, run: Retract) -> None:
        for place in run.places:
            self.memories[run.tier].retract(place)

    # ------------------------------------------------------------------------------------ calls

    def call(self, client: int, on_reply: Callable[[Result], None], due: float = float("inf")) -> int:
        """Return the number of a new call; `on_reply` hears every answer at once."""
        self._next_call += 1
        self._calls[self._next_call] = Call(client, on_reply, due + SLACK_S)
        return self._next_call

    def forget_call(self, call: int) -> None:
        """The caller no longer listens."""
        self._calls.pop(call, None)

    def step(self, event: ev.Event, check: Callable[[], None] | None = None) -> None:
        """Give one event to the planner and do what it says; `check` is made before anything follows."""
        if not self.is_alive:
            return
        world = self.world
        world.note(type(event).__name__, *_detail(event))
        if isinstance(event, ev.ClientOpened):
            self._domains[event.client] = event.domain
        if check is None and (world.seed % 2 or not isinstance(event, ev.CopyFinished | ev.CommitRequested)):
            self._carry_out(event, self.planner.handle(event, world.now))
        else:  # as the daemon does: others hear of what landed after its answers are out
            # What was left of the step before comes first: it knew nothing of what was found just now.
            if isinstance(event, ev.FoundVerified):
                self.found_now = {(label.namespace_id, label.prefix_hash) for _, label in event.fragments}
            self._carry_out(event, self.planner.answer(event, world.now))
            self.found_now = set()
            if check is not None:
                check()
            if check is None and world.seed % 4:
                world.after(TICK_S, self.follow_up, event)  # or later puts are answered first
            else:
                self._carry_out(event, self.planner.follow_up())
        self.oracle.after_step()

    def follow_up(self, event: ev.Event) -> None:
        """Do what is left of the step before, if anything is."""
        if self.is_alive:
            self._carry_out(event, self.planner.follow_up())

    def _carry_out(self, event: ev.Event, instructions: list[Instruction]) -> None:
        world = self.world
        if isinstance(event, ev.Tick | ev.ClientGone):
            self.oracle.clients_gone()
        self.removed_now = {
            (i.namespace_id, prefix_hash)
            for i in instructions
            if isinstance(i, Notify) and is_removal(i)
            for prefix_hash in i.prefix_hashes
        }
        self.oracle.before_copies(event, instructions)
        self.writes.after(self, event)
        self.writes.before_copies(self, instructions)
        for instruction in instructions:
            self._execute[type(instruction)](instruction)
        deadline = self.planner.next_deadline()
        if deadline is not None and max(deadline, world.now + TICK_S) < self._tick_at:
            self._tick_at = max(deadline, world.now + TICK_S)
            world.after(self._tick_at - world.now, self._tick, self._tick_at)

    def kill(self) -> None:
        """The process dies, now."""
        self.is_alive = False
        self.mover.die()

    def excuse(self, seconds: float) -> None:
        """The whole process stood still: what it owes is due that much later."""
        for call in self._calls.values():
            call.due += seconds

    def check_late(self) -> None:
        """Every request has been answered by its deadline (I-19)."""
        if self._tick_at <= self.world.now:
            return  # the clock jumped over a tick, which comes first now
        for number, call in self._calls.items():
            if call.due < self.world.now:
                late_s = self.world.now - call.due + SLACK_S
                raise Violation("liveness", f"call {number} is {late_s:.3f} s late")

    def check_answered(self) -> None:
        """Nothing is under way any more: nobody may still wait for an answer."""
        if self._calls:
            raise Violation("liveness", f"calls {sorted(self._calls)[:5]} were never answered")

    def check_quiet(self) -> None:
        """Nothing is under way and everybody is gone: nothing may be held."""
        self.check_answered()
        for memory in self.memories.values():
            memory.check_quiet()
            # Two segments can both be out of reach of spills; the settings ask for three.
            can_spill = self.config.num_segments != 2 and self.planner.reclaim._not_before < float("inf")
            if memory.room.leaving and can_spill and not self.config.rates["no_place"]:
                raise Violation("resizing", f"{memory.tier.label}: {memory.room.leaving} never left")
        self.oracle.check_quiescence()
        self.writes.check_quiet(self)
        self.source.check_quiet()

    def copies_in_flight(self) -> list[Copy]:
        """Return the copies the planner waits for."""
        return self.mover.in_flight()

    # ---------------------------------------------------------------------------- life of clients

    def client_gone(self, client: int, reason: str) -> None:
        """A client died: its copies that have not begun end first, its readers are gone."""
        self.stagings.pop(client, None)
        for lease_id in self.planner.leases.clients[client].leases if self.knows(client) else ():
            self.end_lease(lease_id)
        for number in [n for n, call in self._calls.items() if call.client == client]:
            del self._calls[number]
        self.step(ev.ClientGone(client, reason))

    def knows(self, client: int) -> bool:
        """Whether the planner still counts this client among the living."""
        return client in self.planner.leases.clients

    def end_lease(self, lease_id: int) -> None:
        """Its holder reads no more."""
        for tier, place in self.leased.pop(lease_id, ()):
            self.memories[tier].slot(place).num_leases -= 1

    # --------------------------------------------------------------------------------- instructions

    def _reply(self, reply: Reply) -> None:
        result = reply.result
        self.world.note(">Reply", reply.call, *_result_detail(result))
        call = self._calls.get(reply.call)
        if call is None:
            if reply.call <= 0 or reply.call > self._next_call:
                raise Violation("replies", f"an answer to call {reply.call}, which nobody made")
            return
        if not isinstance(result, AcquireResult) or result.last:
            del self._calls[reply.call]
        if isinstance(result, AcquireResult):
            self._check_ready(call.client, result)
        call.on_reply(result)

    def _check_ready(self, client: int, result: AcquireResult) -> None:
        # A step answers first and hears of a client that is gone then.
        is_leased = client in self.local and client in self.planner.leases.clients
        leased = self.leased.setdefault(result.lease_id, {}) if is_leased and result.ready else {}
        for ready in result.ready:
            memory = self.memories[ready.tier]
            slot = memory.slot(ready.place)
            if slot.label is None:
                raise Violation("visible means valid", f"a reply names slot {ready.place:#x}, not published")
            domain = memory.room.domain_of_extent(extent_of(ready.place))
            if domain != self.planner.domain_number(self._domains[client]):
                raise Violation("domains", f"client {client} was given a slot of domain {domain}")
            if is_leased and (ready.tier, ready.place) not in leased:
                leased[ready.tier, ready.place] = None
                slot.num_leases += 1

    def _notify(self, notice: Notify) -> None:
        hashes = [prefix_hash.hex()[:8] for prefix_hash in notice.prefix_hashes]
        self.world.note(">Notify", notice.change.name, notice.tier.label, notice.reason, *hashes)
        if is_removal(notice):
            self.oracle.removed(notice)
        else:
            self.oracle.stored(notice)

    def _store_namespace(self, instruction: StoreNamespace) -> None:
        # Copies into the store begin later than this, as the real mover holds them back.
        self.cold.store_namespace(instruction.identity)

    def _forget_namespace(self, instruction: ForgetNamespace) -> None:
        self.cold.forget_namespace(instruction.identity)

    def _run_store_task(self, do: Callable[[int], None], segment: int) -> None:
        """One thread does everything to segments, in order."""
        delay_s = self.world.spread(self.config.nvme_copy_s)
        self._house_busy_until = max(self._house_busy_until, self.world.now) + delay_s
        self.world.after(self._house_busy_until - self.world.now, self._do_house, do, segment)

    def _do_house(self, do: Callable[[int], None], segment: int) -> None:
        if self.is_alive:
            do(segment)

    def _free(self, segment: int) -> None:
        self.cold.free(segment)
        self.step(ev.SegmentFreed(segment))

    def _give_back(self, instruction: GiveBack) -> None:
        self.world.counts[f"given_back_{instruction.tier.label}"] += 1
        if instruction.tier is NVME:
            self.cold.give_back(instruction.number)
        else:
            self.memories[instruction.tier].give_back(instruction.number)

    def _tick(self, at: float) -> None:
        if self.is_alive and at == self._tick_at:
            self._tick_at = float("inf")
            self.step(ev.Tick())

    def _no_place(self) -> bool:
        if self.world.chance(self.config.rates["no_place"]):
            self.world.counts["no_place"] += 1
            return True
        return False


def _rooms(config: Config, fails: Callable[[], bool]) -> dict[Tier, Room]:
    extent_bytes = config.slots_per_extent * SLOT_BYTES
    rooms: dict[Tier, Room] = {}
    if config.hbm_extents:
        rooms[HBM] = FlakyPool(config.hbm_extents, extent_bytes)
    rooms[DRAM] = FlakyPool(config.dram_extents, extent_bytes)
    if config.cxl_extents:
        rooms[CXL] = FlakyPool(config.cxl_extents, extent_bytes)
    if config.num_segments:
        segment_bytes = config.segment_records * (SLOT_BYTES + 2 * 4096) + FOOTER_BYTES
        rooms[NVME] = FlakyLog(config.num_segments, segment_bytes, FOOTER_BYTES)
    if config.rates["no_place"]:
        for room in rooms.values():
            room.fails = fails  # type: ignore[attr-defined]
    return rooms


def _detail(event: ev.Event) -> tuple[object, ...]:
    """What the trace says about an event, in numbers that are the same in every run."""
    if isinstance(event, ev.CopyFinished):
        return event.copy, *(outcome.cause.value if outcome.cause else "" for outcome in event.outcomes)
    if isinstance(event, ev.AcquireRequested | ev.ReserveRequested | ev.PinRequested):
        return event.call, event.client, event.request_id, len(event.prefix_hashes)
    if isinstance(event, ev.CommitRequested):
        return event.call, event.client, event.request_id, event.reservation_id, len(event.spans)
    if isinstance(event, ev.ReleaseRequested | ev.KeptAlive):
        return event.client, *event.lease_ids
    if isinstance(event, ev.ClientGone | ev.ClientOpened):
        return (event.client,)
    if isinstance(event, ev.SessionUpdated):
        return event.session_id, event.urgency.name
    if isinstance(event, ev.PolicyChanged):
        return tuple((tier.label, count) for tier, count in event.num_units.items())
    if isinstance(event, ev.SourceChanged | ev.SourceSearched | ev.BlocksTold | ev.ExportFinished):
        return (repr(event),)
    if isinstance(event, ev.SegmentFreed):
        return (event.segment,)
    return ()


def _result_detail(result: Result) -> tuple[object, ...]:
    if isinstance(result, AcquireResult):
        places = [(r.block, r.group, r.tier.label, r.place) for r in result.ready]
        return result.lease_id, result.num_blocks, result.last, places
    if isinstance(result, PutResult | ReserveResult):
        return (result.outcomes.hex(),)
    if isinstance(result, Refusal):
        return (result.reason,)
    return ()
