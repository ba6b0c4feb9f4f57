"""The local channel, sans-IO: frames out, frames in, answers by call number. Both shells drive it.

Descriptors arrive in the order of the frames that carry them, and every frame says by its content how many
are its own; they are bound to it when it arrives, for answers are taken in any order, or not at all.

A caller that gives up an acquire before its first answer does not know its lease. The answer still comes:
then the lease is given back here (`unwanted`); otherwise it would last until the connection ends.
"""

import os
from collections import deque
from typing import Any

from google.protobuf.message import DecodeError

from ...v1 import direct_pb2, kvcache_pb2, local_pb2
from ...v1.local import (
    MAX_DESCRIPTORS,
    MAX_PAYLOAD_BYTES,
    TRACEPARENT_BYTES,
    Decoder,
    Flag,
    Frame,
    Method,
    encode,
    traced,
)
from ..errors import CONNECTION_LOST, InvalidRequest, Unavailable, broken_answer, from_detail
from ..memory.extents import ExtentTable, map_memory
from ..memory.one_sided import OneSidedReader, UnorderedMemory
from ..memory.staging import StagingArea
from ..memory.view_lock import ViewLock
from ..operations.answers import announced, server_info
from ..operations.effects import Answer, Attachment
from .tracing import traceparent

__all__ = ["CLOSED", "LocalProtocol", "attachment_of"]

CLOSED = "the daemon closed the connection; the next call reconnects"


def _responses() -> dict[str, tuple[Method, Any]]:
    calls = {}
    for method in Method:
        name = "".join(part.capitalize() for part in method.name.split("_"))
        response = f"{name}Response"
        module = next(one for one in (kvcache_pb2, local_pb2, direct_pb2) if hasattr(one, response))
        calls[name] = (method, getattr(module, response))
    return calls


_CALLS = _responses()
_STREAMED = (Method.ACQUIRE, Method.GET_PAGES)  # the calls with several answers


class LocalProtocol:
    """State of one connection: call numbers, answers not taken yet, descriptors."""

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._next_call = 1
        self._unanswered: dict[int, Method] = {}  # calls with a last answer that has not arrived
        self._response_of: dict[int, Any] = {}  # calls that still listen
        self._answers: dict[int, deque[tuple[Frame, list[int]]]] = {}  # with the descriptors of each
        self._descriptors: deque[int] = deque()
        self._unwanted: list[int] = []  # leases of acquires that were given up
        self._is_traced = False  # whether the daemon wants to know the callers' trace contexts

    def request(self, call: str, message: Any, *, no_reply: bool = False) -> tuple[int, bytes]:
        """Return the call's number and the bytes to send. Raises InvalidRequest when it is too long."""
        payload = message.SerializeToString()
        context = traceparent() if self._is_traced else ""
        if len(payload) + (TRACEPARENT_BYTES if context else 0) > MAX_PAYLOAD_BYTES:
            raise InvalidRequest(
                f"{call} of {len(payload)} bytes, limit {MAX_PAYLOAD_BYTES}; split it", reason="TOO_LARGE"
            )
        method, response = _CALLS[call]
        number = self._next_call
        self._next_call += 1
        if not no_reply:
            self._unanswered[number] = method
            self._response_of[number] = response
        flags = Flag.NO_REPLY if no_reply else Flag.NONE
        frame = Frame(method, flags, number, payload)
        return number, encode(traced(frame, context) if context else frame)

    def feed(self, data: bytes, descriptors: list[int]) -> None:
        """Take in what arrived.

        Raises Unavailable for bytes that are no frames, and for frames that answer no call; the connection is
        then to be closed.
        """
        self._descriptors.extend(descriptors)
        try:
            frames = self._decoder.feed(data)
        except ValueError as problem:
            raise Unavailable(f"broken frame: {problem}", reason=CONNECTION_LOST) from None
        for frame in frames:
            self._check(frame)
            arrived = frame, self._memory_of(frame)
            if frame.call in self._response_of:
                self._answers.setdefault(frame.call, deque()).append(arrived)
            else:
                self._drop(*arrived)
        if len(self._descriptors) > MAX_DESCRIPTORS:  # more than the frame that is still to come may have
            raise broken_answer("file descriptors that belong to no answer")

    def take(self, number: int) -> Answer | None:
        """Return the next answer to a call; None when it has not arrived.

        Raises what the daemon raised, and Unavailable for an answer that cannot be read.
        """
        waiting = self._answers.get(number)
        if not waiting:
            return None
        frame, memory = waiting.popleft()
        response = self._response_of[number]
        if frame.flags & (Flag.LAST | Flag.ERROR):
            self.forget(number)
        if frame.flags & Flag.ERROR:
            raise from_detail(frame.payload)
        try:
            message = _parsed(response, frame.payload)
        except Unavailable:
            self._drop(frame, memory)
            raise
        if frame.method in _STREAMED and message.last != bool(frame.flags & Flag.LAST):
            raise broken_answer(
                f"frame and message of a {frame.method.name} differ on whether it is the last"
            )
        if frame.method is Method.ATTACH:
            self._is_traced = message.is_traced
        return Answer(message, memory)

    def has_answer(self, number: int) -> bool:
        """Whether `take` would return or raise something."""
        return bool(self._answers.get(number))

    def listens(self, number: int) -> bool:
        """Whether answers to a call are still wanted."""
        return number in self._response_of

    def forget(self, number: int) -> None:
        """Stop listening to a call; what still arrives for it is dropped."""
        self._response_of.pop(number, None)
        for frame, memory in self._answers.pop(number, ()):
            self._drop(frame, memory)

    def unwanted(self) -> bytes:
        """Return what to send to give back leases that no caller knows; empty when there are none."""
        leases, self._unwanted = self._unwanted, []
        if not leases:
            return b""
        return self.request("Release", kvcache_pb2.ReleaseRequest(lease_ids=leases), no_reply=True)[1]

    def close(self) -> None:
        """Close descriptors that were not taken."""
        for number in [n for n, waiting in self._answers.items() if any(memory for _, memory in waiting)]:
            self.forget(number)
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _check(self, frame: Frame) -> None:
        """Raise Unavailable for a frame that is not the next answer of a call."""
        if self._unanswered.get(frame.call) is not frame.method:
            raise broken_answer(f"a {frame.method.name} for call {frame.call}, which awaits none")
        if frame.flags & (Flag.LAST | Flag.ERROR):
            del self._unanswered[frame.call]
        elif frame.method not in _STREAMED:
            raise broken_answer(f"a {frame.method.name} that is not the last one")

    def _memory_of(self, frame: Frame) -> list[int]:
        """Take the descriptors of a frame that has just arrived. Raises Unavailable when it lacks some."""
        if frame.flags & Flag.ERROR:
            return []
        if frame.method is Method.ATTACH:
            wanted = 2
        elif frame.method is Method.MAP_EXTENTS:
            wanted = len(_parsed(local_pb2.MapExtentsResponse, frame.payload).extents)
        else:
            return []
        if len(self._descriptors) < wanted:
            raise Unavailable(
                f"{frame.method.name} came with too few descriptors; raise `ulimit -n`",
                reason=CONNECTION_LOST,
            )
        return [self._descriptors.popleft() for _ in range(wanted)]

    def _drop(self, frame: Frame, memory: list[int]) -> None:
        for descriptor in memory:
            os.close(descriptor)
        if frame.method is Method.ACQUIRE and not frame.flags & Flag.ERROR:
            message = _parsed(kvcache_pb2.AcquireResponse, frame.payload)
            if message.tiers:  # the first answer: its reader knows the lease, and gives it back itself
                self._unwanted.append(message.lease_id)


def _parsed(kind: Any, payload: bytes) -> Any:
    """Return the message of class `kind`. Raises Unavailable when the bytes are none."""
    try:
        return kind.FromString(payload)
    except DecodeError:
        raise broken_answer(f"no {kind.DESCRIPTOR.name}") from None


def attachment_of(answer: Answer) -> Attachment:
    """Map what Attach brought: the staging extent and the index.

    Raises Unavailable when they do not fit this version of the client.
    """
    message = answer.message
    staging, index = answer.memory
    extents = ExtentTable(message.extent_bytes)
    try:
        area = StagingArea(map_memory(staging, writable=True))
    except BaseException:
        if isinstance(index, int):
            os.close(index)
        raise
    try:
        view_lock = ViewLock(index) if isinstance(index, int) else None
    except OSError as problem:
        assert isinstance(index, int)
        os.close(index)
        words = f"cannot open the shared index through /proc: {problem.strerror}; mount /proc"
        raise Unavailable(words, reason=CONNECTION_LOST) from None
    memory = map_memory(index)
    reader: OneSidedReader | None
    try:
        reader = OneSidedReader(memory, extents, message.epoch)
    except UnorderedMemory:  # gets are leased, lookups asked
        reader = None
    except ValueError as problem:
        raise Unavailable(str(problem), reason="VERSION_MISMATCH") from None
    info, tiers = server_info(message, "local"), announced(message)
    return Attachment(info, message.client_id, True, extents, area, reader, view_lock, tiers=tiers)
