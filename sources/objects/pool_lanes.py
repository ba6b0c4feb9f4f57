"""PoolProcess: Mooncake's client in a process of its own, and lanes to it.

Its code is native: what crashes it ends that process, and the next look at the pool starts another. A call
that does not end in time loses its lane: that memory is not touched here again, whatever is written there
later. So no byte arrives in memory of the daemon that was not copied there after the call had ended.
"""

import importlib.util
import json
import math
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from .pool_child import ANSWER, REQUEST
from .problems import StoreError, StoreProblem

MAX_LOST: Final = 16  # lanes that were given up, after which the process is ended
_PROMPT_S: Final = 0.5  # a call that fails sooner has not begun to move bytes that arrive later
_CLIENT_MEMORY_BYTES: Final = 16 << 20  # of Mooncake's own: what travels lies in lanes
_PASSED_ON = ("MC_", "MOONCAKE_", "GLOG_", "LD_", "PATH", "PYTHON", "HOME", "TMPDIR", "LANG", "VIRTUAL_ENV")


class Lane:
    """A socket to the process, and memory that it shares. For one thread at a time."""

    def __init__(self, connection: socket.socket, descriptor: int) -> None:
        self._connection = connection
        self._descriptor = descriptor
        self.memory = memoryview(b"")
        self.is_spent = False  # a call failed so late that Mooncake may still write into the memory

    def grow(self, length: int) -> None:
        """Have at least `length` bytes of memory."""
        if length > len(self.memory):
            os.ftruncate(self._descriptor, length)
            self.memory = memoryview(mmap.mmap(self._descriptor, length))

    def call(self, operation: bytes, key: str, offset: int, length: int, seconds: float) -> int:
        """Return the answer to a request. Raises TimeoutError and OSError; the lane is lost then."""
        request = REQUEST.pack(operation, offset, length, len(self.memory)) + key.encode()
        began_at = time.monotonic()
        self._connection.settimeout(seconds)
        self._connection.send(request)
        answer = self._connection.recv(ANSWER.size)
        if not answer:
            raise ConnectionResetError("Mooncake's client has ended")
        code = int(ANSWER.unpack(answer)[0])
        self.is_spent = code < 0 and time.monotonic() - began_at > _PROMPT_S
        return code

    def close(self) -> None:
        """Let the process forget this lane as soon as its call has ended."""
        self._connection.close()
        os.close(self._descriptor)


class PoolProcess:
    """The process, running. Thread-safe; `close` ends it.

    `master`: host and port. Raises StoreError when it does not open the pool within `start_s`.
    """

    def __init__(self, master: str, *, rpc_s: float, connect_s: float, start_s: float) -> None:
        if importlib.util.find_spec("mooncake") is None:
            fix = "the package mooncake is missing; `pip install kvtier[mooncake]`"
            raise StoreError(StoreProblem.NOT_INSTALLED, fix)
        self._lock = threading.Lock()
        self._free: list[Lane] = []
        self._num_lost = 0
        setup = _setup(master, connect_s)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(Path(__file__).with_name("pool_child.py"))
        arguments = [str(theirs.fileno()), json.dumps(setup)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", script, *arguments],
                env=_environment(rpc_s, connect_s),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if "MC_LOG_LEVEL" in os.environ else subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            self._control.settimeout(start_s)
            answer = self._control.recv(ANSWER.size)
        except OSError:
            answer = b""
        if not answer or (code := ANSWER.unpack(answer)[0]) != 0:
            self.close()
            why = f"code {code}" if answer else "no answer"
            raise StoreError(
                StoreProblem.UNREACHABLE,
                f"Mooncake's client does not open {master}: {why}; is a master of the same version there?",
            )

    @property
    def is_running(self) -> bool:
        """Whether calls can succeed."""
        return self._process.poll() is None

    @contextmanager
    def lane(self, num_bytes: int, *, is_look: bool = False) -> Iterator[Lane]:
        """Lend a lane with at least so much memory; OSErrors inside become StoreErrors.
        A process that does not answer a look is ended."""
        try:
            lane = self._take()
        except OSError as error:
            raise self._unreachable(error) from error
        try:
            lane.grow(num_bytes)
            yield lane
        except OSError as error:
            self._lose(lane, is_look)
            raise self._unreachable(error) from error
        except BaseException:
            self._give_back(lane)
            raise
        self._give_back(lane)

    def kill(self) -> None:
        """Let every call fail, at once."""
        self._process.kill()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._control.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        with self._lock:
            free, self._free = self._free, []
        for lane in free:
            lane.close()

    def _take(self) -> Lane:
        with self._lock:
            if self._free:
                return self._free.pop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor = os.memfd_create("kvtier-pool", os.MFD_CLOEXEC)
        lane = Lane(ours, descriptor)
        with theirs:
            try:
                socket.send_fds(self._control, [b"l"], [theirs.fileno(), descriptor])
            except OSError:
                lane.close()
                raise
        return lane

    def _give_back(self, lane: Lane) -> None:
        if lane.is_spent:
            return self._lose(lane, is_useless=False)
        with self._lock:
            self._free.append(lane)  # the last one is used next: few become large

    def _lose(self, lane: Lane, is_useless: bool) -> None:
        lane.close()
        with self._lock:
            self._num_lost += 1
            is_useless = is_useless or self._num_lost >= MAX_LOST
        if is_useless:
            self._process.kill()

    def _unreachable(self, error: OSError) -> StoreError:
        words = "no answer in time" if isinstance(error, TimeoutError) else "its client has ended"
        return StoreError(StoreProblem.UNREACHABLE, f"Mooncake: {words}")


def _setup(master: str, connect_s: float) -> dict[str, str | int]:
    """Return the arguments of Mooncake's `setup`, in order; its own first connection waits much longer.
    This host lends the pool no memory. Raises StoreError when nothing answers at the master's address."""
    environment = os.environ
    name, _, port = master.rpartition(":")
    try:
        with socket.create_connection((name.strip("[]"), int(port)), connect_s) as connection:
            own_address = str(connection.getsockname()[0])
    except (OSError, OverflowError) as error:
        raise StoreError(StoreProblem.UNREACHABLE, f"{master}: {error}") from error
    return {
        "local_hostname": environment.get("MOONCAKE_LOCAL_HOSTNAME") or own_address,
        "metadata_server": environment.get("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
        "global_segment_size": 0,
        "local_buffer_size": _CLIENT_MEMORY_BYTES,
        "protocol": environment.get("MOONCAKE_PROTOCOL", "tcp"),
        "rdma_devices": environment.get("MOONCAKE_DEVICE", ""),
        "master_server_addr": master,
    }


def _environment(rpc_s: float, connect_s: float) -> dict[str, str]:
    """Return the environment of the process: its time limits, and nothing secret of this one's."""
    limits = {
        "MC_RPC_TIMEOUT_MS": f"{rpc_s * 1000:.0f}",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": f"{math.ceil(rpc_s)}",
        "MC_TCP_STATUS_TIMEOUT_SEC": f"{math.ceil(rpc_s)}",
        "MC_RPC_CONNECT_TIMEOUT_MS": f"{connect_s * 1000:.0f}",
    }
    passed_on = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    return {**limits, **passed_on}
