"""OwnEvents: events by which one user of a stream learns that its work is done, made before the work is
given.

A device's pool of events may be empty at any moment. A caller that finds out after its copies were enqueued
cannot learn when they end, and must keep their memory for good; so an event is taken first, and there is
always one to record. They are exported ones (`Device.export_event`), because those may be recorded again and
again.
"""

from collections import deque

from .contract import Device, Event


class OwnEvents:
    """Grows to as many events as are in use at a time. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: deque[Event] = deque()

    def take(self) -> Event:
        """Return a free event. Raises DeviceError."""
        try:
            return self._free.pop()
        except IndexError:
            return self._device.export_event()[0]

    def give(self, event: Event) -> None:
        """Put an event back, which is done."""
        self._free.append(event)

    def close(self) -> None:
        """Give all that are free back to the device."""
        while self._free:
            self._device.recycle(self._free.pop())
