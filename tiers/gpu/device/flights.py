"""Flights: copies of a device that are under way, by the places they touch.

Invariant I-6, order, is kept here and not assumed: a copy that touches a place which another stream is still
reading or writing is put behind that stream's event. The planner holds every place from the moment a copy is
queued until it ended, so this should never have to wait; it costs one look per place, and what it prevents is
the mistake that no checksum finds, bytes of one fragment saved under the name of another.

A batch may have a thousand places, so each look is one pass in C over the keys of a dict; the loops in Python
run only for places that two flights touch."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

from ...block import STANDARD_TIERS, Tier
from .contract import Device, DeviceError, DeviceFault, Event, Stream


class TouchedPlaces(NamedTuple):
    """Places of one tier."""

    tier: Tier
    places: Sequence[int]


NOTHING = TouchedPlaces(Tier.HBM, ())


@dataclass(eq=False, slots=True)
class Flight:
    """One batch on its way: `event` is done when it has landed."""

    stream: Stream
    event: Event
    reads: TouchedPlaces
    writes: TouchedPlaces
    is_over: bool = False
    is_overwritten: bool = False  # perhaps: a later flight waits for it


@dataclass(slots=True)
class _Open:
    """The open flights of one tier by the places they touch."""

    reading: dict[int, Flight] = field(default_factory=dict)  # one of the readers of a place
    also_reading: dict[int, list[Flight]] = field(default_factory=dict)  # the others, if there are any
    writing: dict[int, Flight] = field(default_factory=dict)  # the last one to write a place


class Flights:
    """The flights of `device` that have not ended. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open = {tier: _Open() for tier in STANDARD_TIERS}
        self._num_open = 0
        self._changed = threading.Condition()

    def launch(
        self,
        stream: Stream,
        reads: TouchedPlaces,
        writes: TouchedPlaces,
        enqueue: Callable[[], Any],
        landed: Callable[[DeviceError | None], None],
    ) -> None:
        """Call `enqueue`, which gives `stream` copies, after every flight that touches the same places.

        `landed` is called once, on a thread of the device's, when none of them is under way any more: with
        None, or with an error when they failed or their end is not known. Raises DeviceError when nothing is
        under way, nor will be.
        """
        event = self._device.take_event()  # before anything is enqueued: the end of every copy is reported
        flight = Flight(stream, event, reads, writes)
        try:
            self.begin(flight)
        except DeviceError:
            self._device.recycle(event)
            raise
        refused: DeviceError | None = None
        try:
            try:
                enqueue()
            except DeviceError as error:
                if error.fault is DeviceFault.LOST:
                    raise
                refused = error  # some of it may be under way: wait for that all the same
            stream.record(event)
            self._device.when_done(event, partial(self._landed, flight, landed, refused))
        except BaseException:  # lost: nothing of it moves any more
            self.end(flight)
            self._device.recycle(event)
            raise

    def _landed(
        self,
        flight: Flight,
        landed: Callable[[DeviceError | None], None],
        refused: DeviceError | None,
        error: DeviceError | None,
    ) -> None:
        self.end(flight)
        self._device.recycle(flight.event)
        landed(error or refused)

    def begin(self, flight: Flight) -> None:
        """Enter a flight, before anything of it is enqueued: its stream waits for all that it conflicts with.

        Of several writers of a place it waits for the last one, which waited for the others. Raises
        DeviceError (LOST); nothing is entered then.
        """
        reads, writes = flight.reads.places, flight.writes.places
        with self._changed:
            read, written = self._open[flight.reads.tier], self._open[flight.writes.tier]
            before: dict[int, Flight] = {}
            for known, places in (
                (read.writing, reads),
                (written.writing, writes),
                (written.reading, writes),
            ):
                if not known.keys().isdisjoint(places):
                    before.update((id(known[place]), known[place]) for place in known.keys() & {*places})
            for place in written.also_reading.keys() & {*writes} if written.also_reading else ():
                before.update((id(other), other) for other in written.also_reading[place])
            for other in before.values():
                if other.stream is not flight.stream:
                    flight.stream.wait(other.event)
                other.is_overwritten = True
            if not read.reading.keys().isdisjoint(reads):
                shared = read.reading.keys() & {*reads}
                for place in shared:
                    read.also_reading.setdefault(place, []).append(flight)
                reads = [place for place in reads if place not in shared]
            read.reading.update(zip(reads, repeat(flight)))
            written.writing.update(zip(writes, repeat(flight)))
            self._num_open += 1

    def end(self, flight: Flight) -> None:
        """The flight has landed, or never will. Its event may be recycled after this."""
        with self._changed:
            assert not flight.is_over
            flight.is_over = True
            _end_reads(flight, self._open[flight.reads.tier])
            writing, written = self._open[flight.writes.tier].writing, flight.writes.places
            if flight.is_overwritten:
                written = [place for place in written if writing.get(place) is flight]
            _pop_all(writing, written)
            self._num_open -= 1
            self._changed.notify_all()

    @property
    def num_open(self) -> int:
        """Flights that have not ended."""
        return self._num_open

    def wait_until_quiet(self, wait_s: float) -> bool:
        """Block until nothing is under way, `wait_s` at most; whether nothing is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_open == 0, wait_s)

    def check_integrity(self) -> list[str]:
        """Audit: every flight that is entered is open and touches the place; no more are than are open."""
        with self._changed:
            problems: list[str] = []
            flights: set[int] = set()
            for tier, known in self._open.items():
                readers = [*known.reading.items()]
                readers += [(place, one) for place, others in known.also_reading.items() for one in others]
                for kind, entries in (("read", readers), ("written", [*known.writing.items()])):
                    for place, flight in entries:
                        flights.add(id(flight))
                        touched = flight.reads if kind == "read" else flight.writes
                        if flight.is_over:
                            problems.append(f"{tier.label} {place:#x} is {kind} by a flight that is over")
                        elif touched.tier is not tier or place not in touched.places:
                            problems.append(
                                f"{tier.label} {place:#x} is not {kind} by the flight entered there"
                            )
            if len(flights) > self._num_open:
                problems.append(f"{len(flights)} flights touch places, {self._num_open} are open")
            return problems


def _end_reads(flight: Flight, known: _Open) -> None:
    """Take a flight out of the readers of its places."""
    places = flight.reads.places
    if known.also_reading:
        shared = known.also_reading.keys() & {*places}
        places = [place for place in places if place not in shared]
        for place in shared:
            others = known.also_reading[place]
            if known.reading[place] is flight:
                known.reading[place] = others.pop()
            else:
                others.remove(flight)
            if not others:
                del known.also_reading[place]
    _pop_all(known.reading, places)


def _pop_all(known: dict[int, Flight], places: Sequence[int]) -> None:
    """Forget places, which may stand twice in a batch."""
    deque(map(known.pop, places, repeat(None)), 0)
