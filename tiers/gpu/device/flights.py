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
from dataclasses import dataclass
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
    is_followed: bool = False  # a later flight waits for it, and touches some of its places


class Flights:
    """The flights of `device` that have not ended. Thread-safe.

    Flights that touch the same place follow one another, two that read it as well: so a new one waits for the
    last, which waited for those before it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: dict[Tier, dict[int, Flight]] = {tier: {} for tier in STANDARD_TIERS}  # by place
        self._num_open = 0
        self._num_landing = 0  # ended, and their `landed` is being called
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
        with self._changed:
            self._num_landing += 1
        try:
            self.end(flight)
            self._device.recycle(flight.event)
            landed(error or refused)
        finally:
            with self._changed:
                self._num_landing -= 1
                self._changed.notify_all()

    def begin(self, flight: Flight) -> None:
        """Enter a flight, before anything of it is enqueued: its stream waits for all that it conflicts with.

        Raises DeviceError (LOST); nothing is entered then.
        """
        with self._changed:
            before: dict[int, Flight] = {}
            for tier, places in (flight.reads, flight.writes):
                last = self._last[tier]
                if not last.keys().isdisjoint(places):
                    before.update((id(last[place]), last[place]) for place in last.keys() & {*places})
            for other in before.values():
                if other.stream is not flight.stream:
                    flight.stream.wait(other.event)
                other.is_followed = True
            for tier, places in (flight.reads, flight.writes):
                self._last[tier].update(zip(places, repeat(flight)))
            self._num_open += 1

    def end(self, flight: Flight) -> None:
        """The flight has landed, or never will. Its event may be recycled after this."""
        with self._changed:
            assert not flight.is_over
            flight.is_over = True
            for tier, places in (flight.reads, flight.writes):
                last = self._last[tier]
                if flight.is_followed:
                    places = [place for place in places if last.get(place) is flight]
                deque(map(last.pop, places, repeat(None)), 0)  # a place may stand twice in a batch
            self._num_open -= 1
            self._changed.notify_all()

    @property
    def num_open(self) -> int:
        """Flights that have not ended."""
        return self._num_open

    def wait_until_quiet(self, wait_s: float) -> bool:
        """Block until nothing is under way and every end was told, `wait_s` at most; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_open and not self._num_landing, wait_s)

    def check_integrity(self) -> list[str]:
        """Audit: every flight that is entered is open and touches the place; no more are than are open."""
        with self._changed:
            problems: list[str] = []
            flights: set[int] = set()
            for tier, last in self._last.items():
                for place, flight in last.items():
                    flights.add(id(flight))
                    touched = [one.places for one in (flight.reads, flight.writes) if one.tier is tier]
                    if flight.is_over:
                        problems.append(f"{tier.label} {place:#x} is touched by a flight that is over")
                    elif not any(place in places for places in touched):
                        problems.append(f"{tier.label} {place:#x} is not touched by the flight entered there")
            if len(flights) > self._num_open:
                problems.append(f"{len(flights)} flights touch places, {self._num_open} are open")
            return problems
