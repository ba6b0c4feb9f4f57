"""Driver: performs the operations of Client on the calling thread.

Thread safety: one Client may be shared by threads. Calls are serialised by a lock (one connection, one
staging extent), except a get of one block that shared memory answers alone. A thread that waited for
PATIENCE_S is the next: else one that puts in a loop takes the lock again before another has woken up. In
order from the start was rejected: four threads made 0.75 as many small puts.
Threads that want to overlap calls each make a Client of their own; it costs a socket and a staging extent.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeVar

from ..errors import BROKEN_ANSWER, CONNECTION_LOST, KvtierError, Unavailable
from ..links.connect import open_link
from ..links.forks import reset_after_fork
from ..links.link import Link
from ..operations.base import ClientSettings, Operations
from ..operations.effects import Attach, Effect, Forget, Operation, Post, Receive, Send, Work

T = TypeVar("T")
PATIENCE_S = 0.005
THREAD_BYTES = sys.maxsize  # every copy runs on the calling thread


class Driver:
    """One connection, opened when it is needed, its lock, and the retry of calls on a new one."""

    @classmethod
    def over(cls, open_link: Callable[[], Link], settings: ClientSettings) -> Self:
        """Make a client over another kind of link, e.g. FakeAppliance's."""
        client = cls.__new__(cls)
        client._set_up(settings, open_link)
        return client

    def _set_up(self, settings: ClientSettings, open_with: Callable[[], Link] | None = None) -> None:
        self.operations = Operations(settings)
        self._open_link = open_with or partial(open_link, settings)
        self._link: Link | None = None
        self._make_locks()
        reset_after_fork(self)

    def _make_locks(self) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None  # the thread with a call under way
        self._next = threading.Lock()  # of the thread that waited for long, and has the lock next

    def forget_connection(self) -> None:
        """Forget the connection, in a child that was forked: it is the parent's (forks.py)."""
        link, self._link = self._link, None
        self._make_locks()
        self.operations = Operations(self.operations.settings)
        if link is not None:
            link.abandon()

    def run(self, make: Callable[[], Operation[T]], *, repeat: bool = True) -> T:
        """Perform an operation; once more on a new connection when the old one turned out dead."""
        attempt = 0
        while True:
            attempt += 1
            is_nested = self._holder == threading.get_ident()  # in a signal handler
            if not is_nested:
                self._take_turn()
            try:
                return self._drive(make())
            except KvtierError as problem:
                is_repeated = repeat and self.operations.should_repeat(problem, attempt)
                if is_repeated or problem.reason == BROKEN_ANSWER:
                    self._disconnect()  # before another thread has connected anew
                if not is_repeated:
                    raise
            finally:
                if not is_nested:
                    self._holder = None
                    self._lock.release()

    def _take_turn(self) -> None:
        if self._next.locked():
            with self._next:
                pass
        if not self._lock.acquire(timeout=PATIENCE_S):
            with self._next:
                self._lock.acquire()
        self._holder = threading.get_ident()

    def _disconnect(self) -> None:
        """Report what was read one-sidedly, then close the connection, if there is one."""
        with self._lock:
            with contextlib.suppress(KvtierError):
                self._drive(self.operations.leave())
            link, self._link = self._link, None
            if link is not None:
                link.close()

    def _drive(self, operation: Operation[T]) -> T:
        link: Link | None = None  # the one this operation started on; never changed under it
        try:
            effect = next(operation)
            while True:
                try:
                    if type(effect) is Attach:
                        link = self._attached(effect.connect)
                        result: Any = link.attachment if link else None
                    else:
                        result = _perform(effect, link)
                except BaseException as problem:
                    effect = operation.throw(problem)
                else:
                    effect = operation.send(result)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def _attached(self, connect: bool) -> Link | None:
        if self._link is not None and self._link.closed:
            self._link = None
        if self._link is None and connect:
            self._link = self._open_link()
        return self._link


def _perform(effect: Effect, link: Link | None) -> Any:
    if type(effect) is Work:
        return effect.function()
    if link is None or link.closed:
        raise Unavailable("the connection was lost during the call", reason=CONNECTION_LOST)
    if type(effect) is Send:
        return link.send(effect.call, effect.request, effect.timeout_s)
    if type(effect) is Receive:
        return link.receive(effect.ticket)
    if type(effect) is Post:
        return link.post(effect.call, effect.request, effect.is_hint)
    assert type(effect) is Forget
    return link.forget(effect.ticket)
