"""FakeDevice: the contract of a GPU on host memory, with streams that run late, for tests and benches.

It is built to be worse than a GPU. Work is done only when `step` is called (or, with `is_live`, by a thread),
one piece at a time, by a seeded choice among all streams that could go on, pieces of one call in any order; a
copy reads whatever is current at its own time, and callbacks come late. So a missing wait gives wrong bytes
under some seed, and `OrderAudit` names it under every seed. Memory freed while somebody may still touch it,
freed twice, or touched though it is not registered, is a violation: it raises where it is noticed, is kept
for `check_integrity`, and the device is lost, as a GPU is after an illegal address.

Rejected: a mock that records calls (it would know nothing of time), and doing work at once (it would hide
every race that matters).
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import numpy as np

from kvtier.tiers.base import Buffer
from kvtier.tiers.gpu.device.contract import (
    CopyPieces,
    Device,
    DeviceError,
    DeviceFault,
    DeviceMemory,
    Event,
    Stream,
)
from kvtier.tiers.gpu.device.launching import Launch

from .memory import FakeMemory, move
from .order import OrderAudit
from .streams import DONE, RECORDED, Calling, Copying, FakeEvent, FakeStream, Recording, Waiting

POLL_S = 0.001  # how often a live device looks at events of other processes
SHUT_DOWN_S = 5.0  # how long it waits for them when it ends
UNLIMITED = 1 << 62
MAX_STREAMS = 1 << 16


@dataclass(slots=True)
class _Call:
    """Somebody who wants to know when an event is done."""

    event: FakeEvent
    call: Callable[[DeviceError | None], Any]
    is_given_up: bool = False

    @property
    def is_done(self) -> bool:
        """Whether the event is, as it was recorded last: that is what a device can be asked."""
        return self.event.has_reached(self.event.last_recording)


class FakeDevice:
    """Implements `Device`. Drive it with `step` or `run`, unless it `is_live`.

    `capacity_bytes` bounds allocations, `max_registered_bytes` host memory, `num_streams` the
    pool of streams. The same `seed` and the same calls give the same schedule (not when live: threads have
    their own mind). `compiler` makes launches of kernels' source; without it there are no kernels.

    As CUDA reportedly does, `close` of a live device waits until its streams are idle. What a killed process
    had recorded is never done, so a stream that waits for another process's event is a violation, unless
    the device `may_wait_abroad`, as a runtime's. So is a call of the driver on the thread `no_calls_on`.

    `beside` names another device of the same process: host memory registered with either is both's, the
    order of both's copies is audited together, and `reach` lets one read the other, if the later of the two
    `has_peer_access`.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        capacity_bytes: int = 256 << 20,
        max_registered_bytes: int = UNLIMITED,
        num_streams: int = 16,
        seed: int = 0,
        is_live: bool = False,
        compiler: Callable[[str, Sequence[str]], Launch] | None = None,
        beside: "FakeDevice | None" = None,
        has_peer_access: bool = True,
        may_wait_abroad: bool = False,
    ) -> None:
        self.index = index
        self.may_wait_abroad = may_wait_abroad
        self.no_calls_on: int | None = None  # a thread's number: an event loop's
        self.compiler = compiler
        self.name = "fake"
        self.uuid = str(uuid.uuid5(uuid.NAMESPACE_OID, f"kvtier fake device {index}"))
        their_memory: FakeMemory | None = beside.memory if beside is not None else None
        self.memory: FakeMemory = FakeMemory(capacity_bytes, max_registered_bytes, their_memory)
        self.has_peer_access = has_peer_access
        self.violations: list[str] = []
        self.left_behind: list[str] = []  # what nobody had given back when the device was shut down
        self._order: OrderAudit = beside._order if beside is not None else OrderAudit()
        first = index * MAX_STREAMS  # the audit knows streams of several devices by their numbers
        self._streams = [FakeStream(self, first + number) for number in range(num_streams)]
        self._free_streams = list(self._streams)
        self._num_events = 0  # taken out of the pool
        self._calls: list[_Call] = []
        self._random = Random(seed)
        self._lost = ""
        self._is_shut_down = False
        self._changed: threading.Condition = (
            beside._changed if beside is not None else threading.Condition(threading.RLock())
        )
        self._thread: threading.Thread | None = None
        if is_live:
            self._thread = threading.Thread(target=self._live, name=f"kvtier-fake-gpu-{index}", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------------------------------------ memory

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """See Device.allocate."""
        with self._working("allocate"):
            return self.memory.allocate(num_bytes)

    def free(self, memory: DeviceMemory) -> None:
        """See Device.free. Freeing twice, or what a stream may still touch, is a violation."""
        self._give_back(memory.address, "device", "freed")

    def register_host(self, buffer: Buffer, *, is_read_only: bool) -> int:
        """See Device.register_host."""
        with self._working("register_host"):
            return self.memory.register(buffer, is_read_only)

    def unregister_host(self, address: int) -> None:
        """See Device.unregister_host. Doing it while a stream may still touch the memory is a violation."""
        with self._changed:
            if address in self.memory.regions:
                self._give_back(address, "host", "unregistered")

    def reach(self, peer: Device) -> bool:
        """See Device.reach."""
        with self._working("reach"):
            assert isinstance(peer, FakeDevice)
            if self.has_peer_access and peer.has_peer_access:
                self.memory.reach(peer.memory)
            return peer.memory in self.memory.reached

    def export(self, memory: DeviceMemory) -> bytes:
        """Return the handle by which another process opens `memory`."""
        with self._working("export"):
            return self.memory.export(memory)

    def open(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        """See Device.open."""
        with self._working("open"):
            return self.memory.open(handle, num_bytes)

    def close(self, memory: DeviceMemory) -> None:
        """See Device.close."""
        with self._changed:
            self._check_thread("close")
            if self._thread is not None:
                self._changed.wait_for(lambda: self._lost or not any(one.work for one in self._streams))
        self._give_back(memory.address, "opened", "closed")

    def _give_back(self, address: int, kind: str, verb: str) -> None:
        with self._changed:
            self._check_thread(verb)
            region = self.memory.regions.get(address)
            if region is None or region.kind != kind:
                if self._is_shut_down:
                    return
                raise self._violation(f"{verb} {address:#x}, which is no {kind} memory (any more)")
            if self._order.touching(address, address + region.num_bytes):
                raise self._violation(f"{verb} {address:#x} while a stream may still touch it")
            self.memory.drop(address)

    # ------------------------------------------------------------------------------ streams and events

    def take_stream(self) -> Stream:
        """See Device.take_stream."""
        with self._working():
            if not self._free_streams:
                raise DeviceError(DeviceFault.OCCUPIED, f"all {len(self._streams)} streams are taken")
            return self._free_streams.pop(0)

    def give_stream(self, stream: Stream) -> None:
        """See Device.give_stream."""
        with self._changed:
            assert stream not in self._free_streams, "given back twice"
            self._free_streams.append(cast(FakeStream, stream))

    def take_event(self) -> FakeEvent:
        """See Device.take_event."""
        with self._working("take_event"):
            self._num_events += 1
            return FakeEvent(self)

    def export_event(self) -> tuple[Event, bytes]:
        """See Device.export_event."""
        with self._working("export_event"):
            event = FakeEvent.shared(self)
            return event, event.handle

    def open_event(self, handle: bytes) -> Event:
        """See Device.open_event."""
        with self._working("open_event"):
            return FakeEvent.opened(self, handle)

    def recycle(self, event: Event) -> None:
        """See Device.recycle. Doing it twice is a violation."""
        with self._changed:
            self._check_thread("recycle")
            mine = cast(FakeEvent, event)
            if mine.is_recycled:
                raise self._violation("an event was recycled twice")
            mine.close()
            self._num_events -= mine.is_pooled

    def enqueue_copy(self, stream: FakeStream, pieces: CopyPieces) -> None:
        """Take over a copy, whose arrays may change afterwards. Refuses what a GPU would trip over."""
        with self._working("enqueue_copy"):
            own = CopyPieces(pieces.sources.copy(), pieces.targets.copy(), pieces.lengths.copy())
            if self.memory.names_lost(own):
                raise DeviceError(DeviceFault.REFUSED, "a peer is lost, and its memory with it")
            problem = self.memory.why_not(own) or self._order.copy(stream.number, own)
            if problem:
                raise self._violation(problem)
            order = list(range(len(own.lengths)))
            self._random.shuffle(order)
            stream.work.append(Copying(own, order))

    def enqueue_call(self, stream: FakeStream, run: Callable[[], None]) -> None:
        """Take over a kernel's stand-in."""
        with self._working("enqueue_call"):
            stream.work.append(Calling(run))

    def enqueue_wait(self, stream: FakeStream, event: FakeEvent) -> None:
        """Take over a wait for an event as it stands recorded now."""
        with self._working("wait"):
            self._check_event(event)
            if event.is_foreign and not self.may_wait_abroad:
                raise self._violation("a stream waits for an event of another process, which may be killed")
            self._order.wait(stream.number, event.clock)
            stream.work.append(Waiting(event, event.last_recording))

    def enqueue_record(self, stream: FakeStream, event: FakeEvent | None) -> FakeEvent:
        """Take over a mark in a stream's work."""
        with self._working("enqueue_record"):
            event = event or self.take_event()
            self._check_event(event)
            event.clock = self._order.record(stream.number)
            event.cells[RECORDED] += 1
            stream.work.append(Recording(event, event.last_recording))
            return event

    def has_seen_done(self, event: FakeEvent) -> bool:
        """Whether an event is done; the host has then learned of it."""
        with self._working("has_seen_done"):
            self._check_event(event)
            is_done = event.has_reached(event.last_recording)
            if is_done:
                self._order.learn(event.clock)
            return is_done

    def when_done(self, event: Event, call: Callable[[DeviceError | None], Any]) -> Callable[[], None]:
        """See Device.when_done. Called by `step`, or by the device's thread."""
        with self._working():
            mine = cast(FakeEvent, event)
            self._check_event(mine)
            entry = _Call(mine, call)
            self._calls.append(entry)

        def give_up() -> None:
            with self._changed:
                entry.is_given_up = True
                self._changed.notify_all()

        return give_up

    # ---------------------------------------------------------------------------------------- its time

    def step(self) -> bool:
        """Do one thing that can be done now: move one piece, pass one mark, or make one call. False:
        nothing."""
        with self._changed:
            streams = [stream for stream in self._streams if stream.can_go_on]
            calls = [one for one in self._calls if self._lost or one.is_given_up or one.is_done]
            number_of_choices = len(streams) + len(calls)
            if not number_of_choices:
                return False
            choice = self._random.randrange(number_of_choices)
            if choice < len(streams):
                self._advance(streams[choice])
                return True
            entry = calls[choice - len(streams)]
            self._calls.remove(entry)
            error = None
            if self._lost:
                error = DeviceError(DeviceFault.LOST, self._lost)
            elif not entry.is_done:
                error = DeviceError(DeviceFault.REFUSED, "the event was given up")
            else:
                self._order.learn(entry.event.clock)
        entry.call(error)
        return True

    def run(self) -> int:
        """Do all that can be done; return how many steps it took."""
        num_steps = 0
        while self.step():
            num_steps += 1
        return num_steps

    def _advance(self, stream: FakeStream) -> None:
        head = stream.work[0]
        if isinstance(head, Copying) and head.left:
            piece = head.left.pop()
            self._move(head.pieces, piece)
        elif isinstance(head, Calling):
            head.run()
        is_over = not isinstance(head, Copying) or not head.left
        if is_over and stream.work:  # there is none when that piece was the device's end
            stream.work.popleft()
        if isinstance(head, Recording) and not head.event.has_reached(head.recording):
            head.event.cells[DONE] = head.recording
        if is_over:
            self._changed.notify_all()

    def _move(self, pieces: CopyPieces, piece: int) -> None:
        here = slice(piece, piece + 1)
        one = CopyPieces(pieces.sources[here], pieces.targets[here], pieces.lengths[here])
        if self.memory.names_lost(one):
            self._lose("a peer was lost while it was read")
            return
        problem = self.memory.why_not(one)
        if problem:  # it was there when the copy was enqueued
            self.violations.append(problem)
            self._lose(problem)
        else:
            move(int(one.targets[0]), int(one.sources[0]), int(one.lengths[0]))

    def _live(self) -> None:
        """The thread of a live device."""
        while True:
            try:
                if self.step():
                    continue
            except Exception as defect:
                with self._changed:
                    self._violation(f"a callback raised {defect!r}")
            with self._changed:
                if self._is_shut_down:
                    return
                waits_abroad = any(stream.work for stream in self._streams) or self._calls
                if not any(stream.can_go_on for stream in self._streams):
                    self._changed.wait(POLL_S if waits_abroad else None)

    # ------------------------------------------------------------------------------------ what goes wrong

    def lose(self, detail: str = "fell off the bus") -> None:
        """From now on nothing works, and what was under way is never known to be done."""
        with self._changed:
            self._lose(detail)

    def _lose(self, detail: str) -> None:
        self._lost = self._lost or detail
        self.memory.is_lost = True
        for stream in self._streams:
            stream.work.clear()
        self._order.forget({stream.number for stream in self._streams})
        self._changed.notify_all()

    def _violation(self, problem: str) -> AssertionError:
        """Note a defect of the program; return it as the error to raise. The device is lost."""
        self.violations.append(problem)
        self._lose(problem)
        return AssertionError(problem)

    def _check_event(self, event: FakeEvent) -> None:
        if event.is_recycled:
            raise self._violation("an event was used after it was recycled")

    def _check_thread(self, call: str) -> None:
        if threading.get_ident() == self.no_calls_on:
            raise self._violation(f"{call} on an event loop's thread, which a driver's lock may block")

    @contextmanager
    def _working(self, call: str = "") -> Iterator[None]:
        """Hold the lock; wake the thread at the end. `call` is one of the driver's. Raises DeviceError
        (LOST)."""
        with self._changed:
            if call:
                self._check_thread(call)
            if self._lost:
                raise DeviceError(DeviceFault.LOST, self._lost)
            yield
            self._changed.notify_all()

    # ----------------------------------------------------------------------------------------- inspection

    def peek(self, address: int, num_bytes: int) -> bytes:
        """Return what lies in memory now, as a debugger would: without any order."""
        return self._bytes(address, num_bytes).tobytes()

    def poke(self, address: int, payload: bytes | Buffer) -> None:
        """Change memory now, as a kernel of somebody else's would."""
        self._bytes(address, len(payload))[:] = np.frombuffer(payload, np.uint8)

    def _bytes(self, address: int, num_bytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        with self._changed:
            region = self.memory.first_touching(address, address + 1)
            assert region is not None, f"nothing is at {address:#x}"
            whole = np.frombuffer(region.keeper, np.uint8)
            start = address - region.address
            assert start + num_bytes <= region.num_bytes
            return whole[start : start + num_bytes]

    def check_integrity(self) -> list[str]:
        """Return every violation so far, in words."""
        with self._changed:
            return list(self.violations)

    def shut_down(self) -> None:
        """See Device.shut_down. What waits for another process that does not come is given up."""
        if self._thread is None:
            self.run()
        else:
            with self._changed:
                self._changed.wait_for(self._is_quiet, SHUT_DOWN_S)
        with self._changed:
            if self._is_shut_down:
                return
            if self._num_events and not self._lost:
                self.left_behind.append(f"{self._num_events} events")
            self._lose(self._lost or "the device was shut down")
            self._is_shut_down = True
            self._changed.notify_all()
        self.run()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._changed:
            for region in list(self.memory.regions.values()):
                self.left_behind.append(f"{region.num_bytes} bytes of {region.kind} memory")
                self.memory.drop(region.address)

    def _is_quiet(self) -> bool:
        return not self._calls and not any(stream.work for stream in self._streams)
