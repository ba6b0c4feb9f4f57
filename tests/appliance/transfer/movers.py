"""Copiers that end when a test says so, and a mover over them."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from kvtier.appliance.core.events import CopyFinished, Event
from kvtier.appliance.core.instructions import Copy
from kvtier.appliance.transfer.lanes import MIN_BATCH_BYTES, Edge, Route
from kvtier.appliance.transfer.mover import Mover
from kvtier.tiers.base import Cause, CopyItem, CopyOutcome
from kvtier.tiers.block import FragmentLabel, Tier, Urgency

STAGING_EDGE = Edge(None, Tier.DRAM)
SPILL = Edge(Tier.DRAM, Tier.NVME)
LOAD = Edge(Tier.NVME, Tier.DRAM)
FORWARD = Edge(Tier.NVME, Tier.NVME)


def label(number: int, num_bytes: int = MIN_BATCH_BYTES, group: int = 0) -> FragmentLabel:
    return FragmentLabel(b"n" * 32, 1, number.to_bytes(32, "big"), b"", 0, group, num_bytes)


def copy(
    number: int,
    edge: Edge = LOAD,
    num_items: int = 1,
    *,
    num_bytes: int = MIN_BATCH_BYTES,
    urgency: Urgency = Urgency.QUEUED,
    deadline_at: float = float("inf"),
    group: int = 0,
    client: int = 0,
) -> Copy:
    items = [CopyItem(n, n, label(number * 1000 + n, num_bytes, group)) for n in range(num_items)]
    return Copy(number, edge.source, edge.target, items, urgency, deadline_at, client)


class HandCopier:
    """Ends batches when the test says so. The checksum of an item is its target, to tell them apart."""

    def __init__(self) -> None:
        self.running: list[tuple[list[CopyItem], Future[list[CopyOutcome]]]] = []
        self.started: list[bytes] = []  # prefix hash of the first item of each batch

    def start(self, items: Sequence[CopyItem]) -> "Future[list[CopyOutcome]]":
        future: Future[list[CopyOutcome]] = Future()
        self.running.append((list(items), future))
        self.started.append(items[0].label.prefix_hash)
        return future

    def inline(self, items: Sequence[CopyItem]) -> list[CopyOutcome]:
        self.started.append(items[0].label.prefix_hash)
        return [CopyOutcome(None, item.target.to_bytes(16, "big")) for item in items]

    def end(self, position: int = 0) -> None:
        """End one running batch, on another thread as real ones do."""
        items, future = self.running.pop(position)
        outcomes = [CopyOutcome(None, item.target.to_bytes(16, "big")) for item in items]
        thread = threading.Thread(target=future.set_result, args=[outcomes])
        thread.start()
        thread.join()

    def numbers(self) -> list[int]:
        """The copies whose batches were started, in that order."""
        return [int.from_bytes(name, "big") // 1000 for name in self.started]


class Bench:
    """A mover with one hand copier per edge and a clock that stands still."""

    def __init__(self, bound: int = 2, *, takes_turns: bool = False) -> None:
        self.now = 0.0
        self.events: list[Event] = []
        self.copiers = {edge: HandCopier() for edge in (SPILL, LOAD, FORWARD, STAGING_EDGE)}
        routes = {edge: Route(self.copiers[edge]) for edge in (SPILL, LOAD, FORWARD)}
        bounds = dict.fromkeys(self.copiers, bound)
        self.mover = Mover(
            routes,
            self.events.append,
            max_in_flight=bounds,
            clock=lambda: self.now,
            takes_turns=takes_turns,
            device=Tier.NVME,
        )

    def ended(self) -> list[CopyFinished]:
        return [event for event in self.events if isinstance(event, CopyFinished)]

    def finished(self) -> dict[int, list[Cause | None]]:
        found = self.ended()
        assert len({event.copy for event in found}) == len(found), "a copy ended twice"
        return {event.copy: [outcome.cause for outcome in event.outcomes] for event in found}

    def check(self) -> None:
        assert self.mover.check_integrity() == []
