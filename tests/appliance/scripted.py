"""A planner that says what a test wrote down, and an engine that notes what happens to it."""

import asyncio
import threading
import typing
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvtier.appliance.appliance import Appliance
from kvtier.appliance.backends import TierBackends
from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import (
    Copy,
    Instruction,
)
from kvtier.appliance.event_log import EventLog
from kvtier.appliance.transfer.lanes import Edge, Route
from kvtier.tiers.base import CopyItem, CopyOutcome, EngineStatistics
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity, Tier, Urgency

from .loops import SLOW_CALLBACK_S

SPILL = Edge(Tier.DRAM, Tier.NVME)
STAGING = Edge(None, Tier.DRAM)
LABEL = FragmentLabel(b"n" * 32, 1, b"p" * 32, b"", 0, 0, 4096)
IDENTITY = NamespaceIdentity(b"m" * 16, Geometry(1, 1, 64, 16, "float16"))


class ScriptedPlanner:
    """Answers each event with the next entry of its script; remembers what it was told."""

    def __init__(self, *script: list[Instruction]) -> None:
        self.script = deque(script)
        self.rest: deque[list[Instruction]] = deque()  # of steps in two halves
        self.told: list[ev.Event] = []
        self.times: list[float] = []
        self.deadline: float | None = None

    def handle(self, event: ev.Event, now: float) -> list[Instruction]:
        self.told.append(event)
        self.times.append(now)
        return self.script.popleft() if self.script else []

    answer = handle

    def follow_up(self) -> list[Instruction]:
        return self.rest.popleft() if self.rest else []

    is_busy = False
    may_put_off = False

    def next_deadline(self) -> float | None:
        return self.deadline


class Recorder:
    """An engine, a copier and a cold store that write down what happens to them, in order."""

    tier = Tier.DRAM

    def __init__(self) -> None:
        self.done: list[object] = []
        self.gate = threading.Event()  # what the store's thread waits for
        self.gate.set()
        self.failure: Exception | None = None  # of what the store is asked for
        self.running: list[Future[list[CopyOutcome]]] = []

    def publish_run(self, places: Sequence[int], labels: Sequence[FragmentLabel]) -> None:
        self.done += [("publish", place) for place in places]

    def retract(self, place: int) -> None:
        self.done.append(("retract", place))

    def start(self, items: Sequence[CopyItem]) -> "Future[list[CopyOutcome]]":
        self.done.append(("copy", items[0].target))
        self.running.append(Future())
        return self.running[-1]

    def inline(self, items: Sequence[CopyItem]) -> list[CopyOutcome]:
        self.done.append(("inline", items[0].target))
        return [CopyOutcome(None, b"c" * 16) for _ in items]

    def _store(self, verb: str, argument: object) -> None:
        self.gate.wait(2 * SLOW_CALLBACK_S)
        self.done.append((verb, argument))
        if self.failure is not None:
            raise self.failure

    def seal(self, segment: int) -> bool:
        self._store("seal", segment)
        return True

    def free(self, segment: int) -> None:
        self._store("free", segment)

    def store_namespace(self, identity: NamespaceIdentity) -> None:
        self._store("store_namespace", identity)

    def forget_namespace(self, identity: NamespaceIdentity) -> None:
        self._store("forget_namespace", identity)

    def on_failed_write(self, call: Callable[[int], None]) -> None:
        self.write_failed = call

    def check_writable(self, segment: int) -> None:
        self._store("check_writable", segment)

    def resize(self, num_segments: int) -> None:
        self._store("resize", num_segments)

    def give_back(self, number: int) -> None:
        self._store("give_back", number)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics("recorder")

    def check_integrity(self) -> list[str]:
        return []

    def close(self) -> None:
        self.done.append("close")


def build(planner: ScriptedPlanner, recorder: Recorder) -> Appliance:
    route = Route(recorder)
    engine = store = typing.cast(typing.Any, recorder)
    backends = TierBackends({Tier.DRAM: engine}, {SPILL: route}, {SPILL: 2, STAGING: 2}, store)
    appliance = Appliance(typing.cast(typing.Any, planner), backends, EventLog(16))
    appliance.mover.attach(1, {Tier.DRAM: Route(recorder, recorder.inline)})
    return appliance


def copy(number: int, edge: Edge) -> Copy:
    return Copy(number, edge.source, edge.target, [CopyItem(0, number, LABEL)], Urgency.QUEUED, client=1)


def released(call: int) -> ev.ReleaseRequested:
    return ev.ReleaseRequested(call, 1, [])


async def until_told(planner: ScriptedPlanner, kind: type) -> ev.Event:
    async with asyncio.timeout(60.0):
        while not any(isinstance(event, kind) for event in planner.told):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return next(event for event in planner.told if isinstance(event, kind))
