"""NixlProcess: NIXL in a process of its own, and the memories that it shares with this one.

Over TCP any host that was told of NIXL's memory can read and write all memory of the process that has it,
and end it (docs/decisions/0024-peers.md). So that process has nothing but these memories, of which no byte is
believed: it is copied out, and the copy is hashed. Each memory has NUM_SLOTS slots; where a write did not
certainly end it may still come: that slot is in quarantine as long as this process lives.
"""

import asyncio
import importlib.metadata
import itertools
import json
import mmap
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...tiers.base import Buffer
from ...tiers.payload import copy
from .connection import ConnectionLost, settled
from .nixl_child import MAX_MESSAGE_BYTES, NIXL_VERSION, PACKAGE

SLOT_BYTES: Final = 64 << 20  # as large as a bundle
NUM_SLOTS: Final = 4
MAX_QUARANTINED: Final = 2  # slots of one memory, after which the process is ended
MAX_METADATA_BYTES: Final = 64 << 10
START_S: Final = 60.0
_PASSED_ON = ("UCX_", "NIXL_", "LD_", "PATH", "PYTHON", "HOME", "TMPDIR", "LANG", "VIRTUAL_ENV")


class NotBegun(Exception):
    """Nothing was written: no slot is free, or NIXL does not take what it was told; the message says."""


class Destination(NamedTuple):
    """Landing memory of another host."""

    metadata: bytes
    address: int
    length: int


def absence() -> str:
    """Return why NIXL cannot be used here, and the fix after "; "; empty: it can. Loads nothing of it."""
    fix = f"pip install --no-deps {PACKAGE}=={NIXL_VERSION}"
    try:
        found = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"the package {PACKAGE} is missing; {fix}"
    return "" if found == NIXL_VERSION else f"{PACKAGE} {found} is not supported; {fix}"


class SlotMemory:
    """Memory in NUM_SLOTS slots, shared with the process. Owned by the event loop."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(f"kvtier-{name}", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, NUM_SLOTS * SLOT_BYTES)
        self._view = memoryview(mmap.mmap(self.descriptor, 0))
        self._free = list(range(NUM_SLOTS))
        self.num_quarantined = 0

    def take(self) -> int | None:
        """Return where a free slot begins; None when there is none."""
        return self._free.pop() * SLOT_BYTES if self._free else None

    def view(self, start: int, length: int) -> memoryview:
        """Return the first bytes of a slot."""
        return self._view[start : start + length]

    def give_back(self, start: int, *, in_doubt: bool) -> None:
        """Let a slot be used again, unless something may still be written there."""
        if in_doubt:
            self.num_quarantined += 1
        else:
            self._free.append(start // SLOT_BYTES)

    def close(self) -> None:
        """Close what `start` gave on; views stay readable. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class NixlProcess:
    """One life of the process, from `start` to `ended`. Owned by the event loop."""

    def __init__(self, copiers: ThreadPoolExecutor) -> None:
        self._loop = asyncio.get_running_loop()
        self._copiers = copiers
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self.landing, self.outgoing = SlotMemory("landing"), SlotMemory("outgoing")
        self._process: subprocess.Popen[bytes] | None = None
        self._hello: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._numbers = itertools.count()
        self.ended = asyncio.Event()
        self.version, self.metadata, self.address = "", b"", 0

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Start the process, and return when it can be used. Raises ConnectionLost."""
        self._loop.add_reader(self._control, self._read)
        try:
            with self._theirs:
                await settled(self._loop.run_in_executor(self._copiers, self._spawn))
            async with asyncio.timeout(START_S):
                hello = await self._hello
            self.metadata, self.address = bytes.fromhex(hello["metadata"]), int(hello["address"])
            self.version = str(hello["version"])
            if not 0 < self.address < 1 << 63 or len(self.metadata) > MAX_METADATA_BYTES:
                raise ValueError("it says nonsense")
        except (OSError, TimeoutError, KeyError, TypeError, ValueError) as failure:
            raise ConnectionLost(f"NIXL's process does not start: {failure or 'no answer'}") from failure

    def expect(self) -> int:
        """Let the process look for what other hosts write, until `end` with the number that is returned."""
        number = next(self._numbers)
        self._say(do="expect", number=number)
        return number

    def end(self, number: int) -> None:
        """Let the process forget a write, or that one is expected."""
        self._say(do="end", number=number)

    async def write(self, payloads: Sequence[Buffer], to: Destination, within_s: float) -> None:
        """Write payloads, one behind another, into another host's memory. Nothing reads them afterwards.

        Raises NotBegun, and ConnectionLost when some of it may have arrived, or may arrive later."""
        if self.ended.is_set() or (slot := self.outgoing.take()) is None:
            raise NotBegun("no memory is free")
        is_certain = True
        try:
            into = self.outgoing.view(slot, to.length)
            copying = self._loop.run_in_executor(self._copiers, _copy_all, into, payloads)
            await settled(copying)
            number = next(self._numbers)
            answer = self._answers[number] = self._loop.create_future()
            where = {"metadata": to.metadata.hex(), "start": slot, "address": to.address, "length": to.length}
            is_certain = False
            self._say(do="write", number=number, write=where)
            try:
                async with asyncio.timeout(within_s):
                    problem = await answer
            finally:
                del self._answers[number]
                if not answer.done() or answer.cancelled():
                    self.end(number)
            is_certain = True
            if problem:
                is_over, _, words = problem.partition(" ")
                raise NotBegun(words) if is_over == "refused" else ConnectionLost(words)
        except TimeoutError:
            raise ConnectionLost("the other host did not take it in time") from None
        finally:
            self.give_back(self.outgoing, slot, in_doubt=not is_certain)

    def give_back(self, memory: SlotMemory, slot: int, *, in_doubt: bool) -> None:
        """Let a slot be used again. With too many in quarantine the process ends; another has new memory."""
        memory.give_back(slot, in_doubt=in_doubt)
        if memory.num_quarantined >= MAX_QUARANTINED:
            self.kill()

    def kill(self) -> None:
        """End the process, and every write that is under way with an error. Idempotent."""
        if self.ended.is_set():
            return
        self.ended.set()
        self._loop.remove_reader(self._control)
        self._control.close()
        if self._process is not None:
            self._process.kill()
        failure = ConnectionLost("NIXL's process has ended")
        unanswered: list[asyncio.Future[Any]] = [self._hello, *self._answers.values()]
        for waiting in unanswered:
            if not waiting.done():
                waiting.set_exception(failure)
                waiting.exception()  # there may be nothing that waits

    async def close(self) -> None:
        """End the process and wait for that. Idempotent."""
        self.kill()
        self._theirs.close()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.wait)
        self.landing.close()
        self.outgoing.close()

    def _spawn(self) -> None:
        """Start the process, with an environment that has nothing secret of this one's."""
        script = str(Path(__file__).with_name("nixl_child.py"))
        descriptors = self._theirs.fileno(), self.landing.descriptor, self.outgoing.descriptor
        name = secrets.token_hex(8)  # to other hosts' NIXL
        self._process = subprocess.Popen(
            [sys.executable, "-P", script, name, *map(str, descriptors)],
            env={key: value for key, value in os.environ.items() if key.startswith(_PASSED_ON)},
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if "NIXL_LOG_LEVEL" in os.environ else subprocess.DEVNULL,
            start_new_session=True,
        )

    def _say(self, **message: Any) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:  # it is gone, or takes nothing any more
            self.kill()

    def _read(self) -> None:
        """Take in a message. What makes no sense ends the process: it may be anyone's by now."""
        try:
            raw = self._control.recv(MAX_MESSAGE_BYTES)
            message = json.loads(raw) if raw else None
            if not self._hello.done() and message is not None:
                self._hello.set_result(dict(message))
            elif message is not None:
                answer = self._answers.get(message["number"])
                if answer is not None and not answer.done():
                    answer.set_result(str(message["problem"]))
            else:
                self.kill()
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError):
            self.kill()


def _copy_all(into: memoryview, payloads: Sequence[Buffer]) -> None:
    at = 0
    for payload in payloads:
        copy(into[at : at + len(payload)], payload)
        at += len(payload)
