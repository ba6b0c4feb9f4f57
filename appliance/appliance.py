"""Appliance: executes what the planner decides. Start reading the daemon here.

    calls, completions, deaths, the clock ──event──> planner.handle ──instructions──> execute, in order
           ▲                                                                               │
           └───────── Reply · Copy · Publish · Retract · Seal/FreeSegment · Notify ────────┘

Everything that decides is in the planner, which is pure; everything that acts is here and in the mover.
The two meet in `step`, on one event loop, so neither needs a lock. An event that arises while a step is
executing (a copy so short that it ended at once) waits until the step is done.

A planner that raised has state that cannot be trusted any more, and wrong bytes are worse than none:
`failed` completes, and the process ends.
"""

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ..tiers.base import CopyError
from ..tiers.block import Tier
from .backends import TierBackends
from .core.events import (
    AcquireAbandoned,
    AcquireRequested,
    ClientGone,
    CommitRequested,
    CopyFinished,
    Event,
    SegmentFreed,
    Tick,
    TierLost,
)
from .core.instructions import (
    CancelCopy,
    Copy,
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
    StoreNamespace,
)
from .core.planner import Planner
from .core.results import AcquireResult, Refusal, Result
from .event_log import EventLog
from .replies import NowOrLater, Replies
from .store_tasks import StoreTasks
from .transfer.fair_queue import BandwidthShares
from .transfer.mover import Mover

log = logging.getLogger(__name__)

MAX_TICK_DELAY_S = 0.1
TURNS_TO_ANSWER = 3  # of the loop, that a result takes to its connection where it comes as a future

T = TypeVar("T")


class Appliance:
    """Drives one planner over real tiers. Owned by the running event loop."""

    def __init__(
        self,
        planner: Planner,
        backends: TierBackends,
        events: EventLog,
        shares: BandwidthShares | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.clock = self._loop.time
        self.planner = planner
        self.engines = backends.engines
        self.events = events
        self.mover = Mover(
            backends.routes,
            self.step,
            max_in_flight=backends.max_in_flight,
            clock=self.clock,
            shares=shares,
            device=backends.ladder.log_tier,
        )
        self.counters: Counter[str] = Counter()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        #: Called with every event before the planner is; None while no access log is watched.
        self.tap: Callable[[Event, float], None] | None = None
        #: Called with every step before its instructions are carried out: (event, instructions, when it
        #: began); what follows from one that is done in two halves comes with a Tick.
        self.observers: list[Callable[[Event, list[Instruction], float], None]] = []
        self._store, self._log_tier = backends.store, backends.ladder.log_tier
        on_failure = self._lose_store, self._refuse_store, self._admit_store
        self.store_tasks = StoreTasks(self._loop, self.counters, *on_failure)
        self.num_ticks = 0  # deadlines of the planner that were kept
        self._num_namespaces_storing = 0
        self._pending: deque[Event] = deque()
        self._stepping = False
        self._half_done_at: float | None = None  # when a step began that has its second half due
        self._is_finish_due = False
        self._asking = 0  # number of the call with an answer that is returned, not sent
        self._is_fresh = False  # whether an event of a put came since the last turn of the loop
        self._num_turns = 0  # of the loop, until all answers of the last steps are sent
        self._numbers = itertools.count(1)
        self._sinks: dict[int, Callable[[Result], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._execute: dict[type, Callable[[Any], None]] = {
            Reply: self._reply,
            Copy: self.mover.start,
            CancelCopy: self.mover.cancel,
            HastenCopy: self.mover.hasten,
            Publish: self._publish,
            Retract: self._retract,
            SealSegment: self._seal,
            FreeSegment: self._free,
            GiveBack: self._give_back,
            StoreNamespace: self._store_namespace,
            ForgetNamespace: self._forget_namespace,
            Notify: events.append,
        }

    # ------------------------------------------------------------------------------- event in

    def step(self, event: Event) -> None:
        """Give `event` to the planner and execute what it answers."""
        self._pending.append(event)
        self._run()

    def _finish(self, num_turns: int) -> None:
        """On the loop, so many turns from now: do what was left over until answers were sent.

        A timer that is due is called behind what came in the same turn: clients may have sent more puts."""
        if self._is_fresh and self.planner.may_put_off:
            num_turns += 1
        if num_turns:
            self._finish_later(num_turns - 1)
            return
        self._is_finish_due = False
        if not self._stopped:  # `stop` sees to it, while there are engines
            self._run(to_the_end=True)

    def _run(self, to_the_end: bool = False) -> None:
        """Run pending steps, unless that is going on; `to_the_end`: and the second half of the last."""
        if self._stepping:
            return
        if self.failed.done():  # its state is not to be trusted any more
            self._pending.clear()
            return
        self._stepping = True
        try:
            while self._pending or (to_the_end and self._half_done_at is not None):
                if self._pending:
                    self._take_in(self._pending.popleft())
                else:
                    self._finish_half()
        except BaseException as defect:
            if not self.failed.done():
                self.failed.set_exception(defect)
            raise
        finally:
            self._stepping = False
        if self._half_done_at is None:
            self._arm_timer()
        elif not self._is_finish_due:  # which sees to the timer, too
            self._is_finish_due = True
            self._finish_later(self._num_turns)
            self._num_turns = 0

    def _finish_later(self, num_turns: int) -> None:
        self._is_fresh = False
        self._loop.call_later(0, self._finish, num_turns)

    def _take_in(self, event: Event) -> None:
        """Run one step: the answers of what landed first.

        What else follows from it waits until the answers are sent, or another event comes.
        """
        kind = type(event)
        is_of_put = kind is CopyFinished or kind is CommitRequested
        if not (is_of_put and self.planner.may_put_off):
            self._finish_half()
        now = self.clock()
        if self.tap is not None:
            self.tap(event, now)
        if is_of_put:
            self._half_done_at, self._is_fresh = now, True
            instructions = self.planner.answer(event, now)
        else:
            instructions = self.planner.handle(event, now)
        self._carry_out(event, instructions, now)

    def _finish_half(self) -> None:
        if self._half_done_at is not None:
            began_at, self._half_done_at = self._half_done_at, None
            # Observers heard of the event with its answer; of a put they would count it twice.
            self._carry_out(Tick(), self.planner.follow_up(), began_at)

    def _carry_out(self, event: Event, instructions: list[Instruction], began_at: float) -> None:
        for observe in self.observers:
            observe(event, instructions, began_at)
        self.execute(instructions)

    def ask(self, build: Callable[[int], Event]) -> NowOrLater[Result]:
        """Step with the event that `build` makes of a call number.

        The result itself when the planner answered at once, which is the common case and costs neither future
        nor task; else a future of it.
        """
        call = next(self._numbers)
        answers: list[Result] = []
        self._sinks[call] = answers.append
        self._asking = call
        self.step(build(call))
        self._asking = 0
        if answers:
            return answers[0]
        future: asyncio.Future[Result] = self._loop.create_future()
        self._sinks[call] = lambda result: None if future.done() else future.set_result(result)
        return future

    def ask_many(
        self,
        build: Callable[[int], AcquireRequested],
        convert: Callable[[AcquireResult], T],
        after: "asyncio.Future[None] | None" = None,
    ) -> Replies[T]:
        """Step with the event that `build` makes of a call number; return its answers, now and to come.

        If given, `after` is waited for before the step.
        """
        replies = Replies(next(self._numbers), convert)
        self._sinks[replies.call] = replies.push

        def begin(_: object = None) -> None:
            if not replies.ended:
                self.step(build(replies.call))

        if after is None:
            begin()
        else:
            after.add_done_callback(begin)
        return replies

    def abandon(self, replies: Replies[T]) -> None:
        """Drop `replies`: their acquire is abandoned in the planner. Idempotent."""
        if not replies.ended:
            replies.ended = True
            self._sinks.pop(replies.call, None)
            self.step(AcquireAbandoned(replies.call))

    # ------------------------------------------------------------------------ instructions out

    def carry_out_by(self, executors: Mapping[type, Callable[[Any], None]]) -> None:
        """Let another part carry out the instructions of these types."""
        self._execute.update(executors)

    def execute(self, instructions: Iterable[Instruction]) -> None:
        """Carry out instructions in order."""
        for instruction in instructions:
            self._execute[type(instruction)](instruction)

    def _reply(self, reply: Reply) -> None:
        sink = self._sinks.get(reply.call)
        if sink is None:
            self.counters["replies_to_nobody"] += 1
            return
        if not isinstance(reply.result, AcquireResult) or reply.result.last:
            del self._sinks[reply.call]
        if isinstance(reply.result, Refusal):
            self.counters[f"refused_{reply.result.reason.lower()}"] += 1
        if reply.call != self._asking:
            self._num_turns = TURNS_TO_ANSWER
        sink(reply.result)

    def _publish(self, publish: Publish) -> None:
        self.engines[publish.tier].publish_run(publish.places, publish.labels)

    def _retract(self, retract: Retract) -> None:
        engine = self.engines[retract.tier]
        for place in retract.places:
            engine.retract(place)

    def _seal(self, instruction: SealSegment) -> None:
        """A segment that cannot be sealed still serves its records; only a restart has to scan it."""
        assert self._store is not None
        self.store_tasks.run_for_segment("seal", self._store.seal, instruction.segment, self._sealed)

    def _sealed(self, well: bool) -> None:
        self.counters["segments_sealed" if well else "segments_suspect"] += 1

    def _free(self, instruction: FreeSegment) -> None:
        assert self._store is not None
        segment, freed = instruction.segment, SegmentFreed(instruction.segment)
        self.store_tasks.run_for_segment("free", self._store.free, segment, lambda _: self.step(freed))

    def _give_back(self, instruction: GiveBack) -> None:
        engine: Any = self.engines[instruction.tier]  # only tiers that can are ever asked to shrink
        self.store_tasks.run("give_back", engine.give_back, instruction.number, lambda _: None)

    async def resize_store(self, num_segments: int) -> None:
        """Resize the cold store to so many segment files. Raises what the store raises."""
        assert self._store is not None
        store = self._store
        await self.store_tasks.keep(lambda: store.resize(num_segments))

    async def keep_store(self, call: Callable[[], T]) -> T:
        """Run a blocking call of the cold store in its thread, after what it was asked before.

        Raises what the call raises.
        """
        return await self.store_tasks.keep(call)

    def _store_namespace(self, instruction: StoreNamespace) -> None:
        """Store a namespace. Copies into the store wait meanwhile: its records must come later."""
        assert self._store is not None
        self._num_namespaces_storing += 1
        self.mover.hold(self._log_tier)
        store = self._store.store_namespace
        self.store_tasks.run("store_namespace", store, instruction.identity, self._namespace_stored)

    def _forget_namespace(self, instruction: ForgetNamespace) -> None:
        assert self._store is not None
        forget = self._store.forget_namespace
        self.store_tasks.run("forget_namespace", forget, instruction.identity, lambda _: None)

    def _namespace_stored(self, _: None) -> None:
        self._num_namespaces_storing -= 1
        if self._num_namespaces_storing == 0:
            self.mover.resume(self._log_tier)

    def _lose_store(self, reason: str) -> None:
        self.lose_tier(self._log_tier, reason)

    def _refuse_store(self, failure: CopyError) -> None:
        """Write no records while the disk takes none of their metadata. What is stored is read on."""
        log.error("tier %s takes no writes: %s", self._log_tier.label, failure)
        self.step(TierLost(self._log_tier, True, str(failure), is_read_on=True))
        self.mover.refuse(self._log_tier, failure.cause)

    def _admit_store(self) -> None:
        """Write records again: the last of the calls that failed has succeeded."""
        log.info("tier %s takes writes again", self._log_tier.label)
        self.mover.admit(self._log_tier)
        self.step(TierLost(self._log_tier, False, "its metadata can be written", is_read_on=True))

    def lose_tier(self, tier: Tier, reason: str) -> None:
        """Copy nothing into a tier from now on; what it held is a miss."""
        log.error("tier %s is lost: %s", tier.label, reason)
        self.counters[f"{tier.label}_lost"] += 1
        self.step(TierLost(tier, True, reason))
        self.mover.refuse(tier)

    # ------------------------------------------------------------------------------- the clock

    def _arm_timer(self) -> None:
        """Set the timer of the planner's next Tick, MAX_TICK_DELAY_S late at most.

        Asking for the next deadline after every step would cost a tenth of a small put, so a timer that is
        set is left alone, unless the planner has work left over right now and it is not due yet: `settled`
        looks in every turn of the loop, and would put off for ever what it waits for.
        """
        if self._stopped:
            return
        if self._timer is not None:
            if not self.planner.is_busy or self._timer.when() <= self._loop.time():
                return
            self._timer.cancel()
            self._timer = None
        deadline = self.planner.next_deadline()
        if deadline is not None:
            delay_s = min(max(0.0, deadline - self.clock()), MAX_TICK_DELAY_S)
            self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        """A deadline may have moved away since the timer was set: then only set it anew."""
        self._timer = None
        deadline = self.planner.next_deadline()
        if deadline is not None and deadline <= self.clock():
            self.num_ticks += 1
            self.step(Tick())
        else:
            self._arm_timer()

    # ---------------------------------------------------------------------------- life and death

    def client_gone(self, client: int, reason: str) -> None:
        """Release everything that a client holds. Its queued copies end first."""
        self.mover.detach(client)
        self.step(ClientGone(client, reason))

    async def settled(self) -> None:
        """Wait until no copy and no call of the store is under way, and the planner has nothing due."""
        while True:
            self._run(to_the_end=True)
            deadline = self.planner.next_deadline()
            if self.mover.is_busy:
                await self.mover.idle()
            elif self.store_tasks.num_running:
                await self.store_tasks.ended()
            elif deadline is None or deadline > self.clock():
                return
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """Wait for copies in flight, then close every tier. Idempotent."""
        self._stopped = self.store_tasks.is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        await self.mover.stop()
        self._run(to_the_end=True)
        await asyncio.to_thread(self.store_tasks.shut_down)
        for engine in self.engines.values():
            await asyncio.to_thread(engine.close)
        self.events.close()

    def check_integrity(self) -> list[str]:
        """Return what is wrong in the shell's own state and every engine.

        (The planner's are its own.)
        """
        problems = [*self.mover.check_integrity(), *self.events.check_integrity()]
        if self._pending:
            problems.append(f"{len(self._pending)} events wait outside of a step")
        for tier, engine in self.engines.items():
            problems += [f"{tier.label}: {problem}" for problem in engine.check_integrity()]
        return problems
