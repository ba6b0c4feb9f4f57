"""Flights: copies of a device that are under way, by the places they touch.

Invariant I-6, order, is kept here and not assumed: a copy that touches a place which another stream is still
reading or writing is put behind that stream's event. The planner holds every place from the moment a copy is
queued until it ended, so this should never have to wait; it costs one look per place, and what it prevents is
the mistake that no checksum finds, bytes of one fragment saved under the name of another."""

import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from .device import Event, Stream


@dataclass(eq=False, slots=True)
class Flight:
    """One batch on its way: `event` is done when it has landed."""

    stream: Stream
    event: Event
    reads: tuple[Hashable, ...]
    writes: tuple[Hashable, ...]
    is_over: bool = False


class Flights:
    """Who touches what. Thread-safe. Places are keys of the caller's making, unique over all tiers."""

    def __init__(self) -> None:
        self._touching: dict[Hashable, list[Flight]] = {}
        self._writing: dict[Hashable, Flight] = {}  # the last one to write a place
        self._num_open = 0
        self._changed = threading.Condition()

    def begin(self, flight: Flight) -> None:
        """Enter a flight, before anything of it is enqueued: its stream waits for all that it conflicts with.

        Raises DeviceError (LOST); nothing is entered then.
        """
        with self._changed:
            before: dict[int, Flight] = {}
            for key in flight.writes:
                before.update((id(other), other) for other in self._touching.get(key, ()))
            for key in flight.reads:
                writer = self._writing.get(key)
                if writer is not None:
                    before[id(writer)] = writer
            for other in before.values():
                if other.stream is not flight.stream:
                    flight.stream.wait(other.event)
            for key in (*flight.reads, *flight.writes):
                self._touching.setdefault(key, []).append(flight)
            self._writing.update(dict.fromkeys(flight.writes, flight))
            self._num_open += 1

    def end(self, flight: Flight) -> None:
        """The flight has landed, or never will. Its event may be recycled after this."""
        with self._changed:
            assert not flight.is_over
            flight.is_over = True
            for key in (*flight.reads, *flight.writes):
                there = self._touching[key]
                there.remove(flight)
                if not there:
                    del self._touching[key]
            for key in flight.writes:
                if self._writing.get(key) is flight:
                    del self._writing[key]
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
        """Audit: every flight entered is open, and writers are among the touching."""
        with self._changed:
            flights = {id(flight): flight for there in self._touching.values() for flight in there}
            problems = [
                f"a flight that is over still touches {f.reads + f.writes}"
                for f in flights.values()
                if f.is_over
            ]
            if len(flights) > self._num_open:
                problems.append(f"{len(flights)} flights touch places, {self._num_open} are open")
            problems += [
                f"{key} is written by a flight that does not touch it"
                for key, flight in self._writing.items()
                if flight not in self._touching.get(key, ())
            ]
            return problems


def keys(tier: Hashable, places: Iterable[int]) -> tuple[Hashable, ...]:
    """Return the keys of places of one tier."""
    return tuple((tier, place) for place in places)
