"""Watcher: one thread per device that says when events are done.

CUDA can call back from a stream (`cudaLaunchHostFunc`), and that was rejected: the call takes the
interpreter's lock on a thread of the driver's, and while it waits for that lock the stream, and with it the
DMA engine, stands still. A thread per stream that sleeps in `cudaEventSynchronize` was rejected, too: it
cannot wait for events of other processes without one more thread each, and one that hangs cannot be ended.
Asking (`cudaEventQuery`) costs a microsecond and works for all of them, so one thread asks about what is
open, every 50 us while something is, and sleeps when nothing is. That adds at most that to a copy, where
handing a completion to the event loop costs as much again."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .contract import DeviceError, DeviceFault, Event

log = logging.getLogger(__name__)

PAUSE_S = 50e-6
MAX_PAUSE_S = 1e-3  # after a while of nothing: a stream that waits for another process
PATIENCE = 100  # looks at the short pause before the pauses grow


@dataclass(eq=False, slots=True)
class _Watch:
    """One event to wait for, and the function to call."""

    event: Event
    call: Callable[[DeviceError | None], Any]
    is_given_up: bool = False

    def give_up(self) -> None:
        """Let the watcher call at its next look, whatever it finds."""
        self.is_given_up = True


class Watcher:
    """Calls every registered function exactly once. Thread-safe. `close` ends it."""

    def __init__(self, name: str) -> None:
        self._open: list[_Watch] = []
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, event: Event, call: Callable[[DeviceError | None], Any]) -> Callable[[], None]:
        """Call `call(None)` when `event` is done, `call(error)` when that will never be known.

        See Device.when_done."""
        watch = _Watch(event, call)
        with self._changed:
            if not self._is_closing:
                self._open.append(watch)
                self._changed.notify()
                return watch.give_up
        call(DeviceError(DeviceFault.LOST, "the device was shut down"))
        return watch.give_up

    def close(self, wait_s: float) -> bool:
        """Let what is open end, `wait_s` at most; tell the rest that it is not known. Idempotent.

        Returns whether everything had ended."""
        with self._changed:
            is_quiet = self._changed.wait_for(lambda: not self._open, wait_s)
            self._is_closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        return is_quiet

    def _run(self) -> None:
        num_idle = 0
        while True:
            with self._changed:
                while not self._open and not self._is_closing:
                    self._changed.wait()
                if self._is_closing:
                    rest, self._open = self._open, []
                    break
                if num_idle:
                    growth = max(1, num_idle - PATIENCE)
                    self._changed.wait(min(PAUSE_S * growth, MAX_PAUSE_S))
                watches = list(self._open)
            ended = [(watch, error) for watch in watches for is_done, error in [_ask(watch)] if is_done]
            num_idle = 0 if ended else num_idle + 1
            for watch, error in ended:
                _tell(watch, error)
            if ended:
                told = {id(watch) for watch, _ in ended}
                with self._changed:
                    self._open = [watch for watch in self._open if id(watch) not in told]
                    self._changed.notify_all()
        for watch in rest:
            _tell(watch, DeviceError(DeviceFault.LOST, "the device was shut down before this was done"))


def _ask(watch: _Watch) -> tuple[bool, DeviceError | None]:
    """Return whether a watch has ended, and how."""
    is_given_up = watch.is_given_up  # before the event is asked: what is done counts
    try:
        is_done = watch.event.is_done()
    except DeviceError as error:
        return True, error
    if is_given_up and not is_done:
        return True, DeviceError(DeviceFault.REFUSED, "the event was given up")
    return is_done, None


def _tell(watch: _Watch, error: DeviceError | None) -> None:
    try:
        watch.call(error)
    except Exception:  # a caller's defect must not leave all others untold
        log.exception("a completion could not be delivered")
