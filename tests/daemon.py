"""Starts the real daemon in a subprocess, on sockets in a test's own folder."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import grpc

from kvtier.clients.options import Timeout
from kvtier.v1 import admin_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceStub

from .waiting import until

START_S = 180.0  # a machine that starts engines beside it takes its time to import a daemon
STOP_S = 120.0
#: For clients of tests whose question is not whether a slow daemon is a miss.
PATIENT = Timeout(call_s=60.0, connect_s=60.0)
TWO_MEMORIES = (
    "tiers.dram.capacity=8MiB",
    "tiers.dram.extent=2MiB",
    "tiers.cxl={kind: memory, capacity: 16MiB}",
)


class Daemon:
    """`kvtier serve` on `folder/kvtier.sock`, which runs as long as a `with` block does.

    `policy` is the path of a policy file or None; `settings` are values by key, or `key=value`; `prefix`
    is what the command begins with, such as the network namespace to run it in. With `has_own_session` its
    processes are in a session of their own, which Ctrl-C does not reach."""

    def __init__(
        self,
        folder: Path,
        policy: Path | None = None,
        settings: Mapping[str, str] | Iterable[str] = (),
        arguments: tuple[str, ...] = (),
        python: str = sys.executable,
        prefix: Sequence[str] = (),
        has_own_session: bool = False,
    ) -> None:
        self.path = folder / "kvtier.sock"
        self.target = f"unix://{self.path}"
        self.log = folder / "daemon.log"
        command = [*prefix, python, "-m", "kvtier.appliance.cli", "serve", "--listen", self.target]
        # The built-in capacity is a share of the machine: none of a test's business.
        command += ["--policy", str(policy)] if policy else ["--set", "tiers.dram.capacity=1GiB"]
        self._command = [*command, *set_words(settings), *arguments]
        self._has_own_session = has_own_session
        self._process: subprocess.Popen[bytes] | None = None  # the supervisor
        self._child = 0
        self._log_start = 0  # where the log of this start begins

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start and wait until the local channel accepts connections."""
        self.launch()
        self.wait_until_it_serves()

    def launch(self) -> None:
        """Start, and do not wait."""
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, start_new_session=self._has_own_session
            )

    def wait_until_it_serves(self) -> None:
        """Wait until the local channel accepts connections."""
        assert self._process is not None
        deadline_at = time.monotonic() + START_S
        pause = threading.Event()
        while not _listens(f"{self.path}.local"):
            assert self._process.poll() is None, f"the daemon ended at once:\n{self.log.read_text()}"
            assert time.monotonic() < deadline_at, f"not up after {START_S} s:\n{self.log.read_text()}"
            pause.wait(0.02)
        self._child = self.pid

    @property
    def pid(self) -> int:
        """The process that serves, a child of the supervisor; 0 when there is none just now."""
        assert self._process is not None
        return child_of(self._process.pid)

    @property
    def session(self) -> int:
        """The session of all its processes, if it has one of its own: that of its supervisor."""
        assert self._process is not None
        return self._process.pid

    def wait_for_log(self, words: str) -> None:
        """Wait until it has said something since it was last started."""
        until(
            lambda: words.encode() in self.log.read_bytes()[self._log_start :],
            lambda: f"not said:\n{self.log.read_text()}",
            pause_s=0.05,
        )

    def status(self) -> admin_pb2.GetStatusResponse:
        """Return what `kvtier status` shows."""
        with grpc.insecure_channel(self.target) as channel:
            return AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=STOP_S)

    def audit(self) -> list[str]:
        """Return what the daemon's own audit finds wrong."""
        with grpc.insecure_channel(self.target) as channel:
            request = admin_pb2.CheckIntegrityRequest()
            return list(AdminServiceStub(channel).CheckIntegrity(request, timeout=STOP_S).problems)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Stop it; return its exit status."""
        assert self._process is not None
        self._child = self.pid or self._child  # another one serves since a daemon was killed
        self._process.send_signal(how)
        return self.wait()

    def wait(self) -> int:
        """Wait until it has ended by itself; return its exit status."""
        assert self._process is not None
        try:
            status = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        self._wait_for_child()
        return status

    def _wait_for_child(self) -> None:
        """Wait until the process that served is dead, too: it is killed after its supervisor."""
        until(lambda: not is_alive(self._child), "the daemon outlives its supervisor")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def open_files(self) -> list[str]:
        """Return what its descriptors stand for; empty where only root may know."""
        assert self._process is not None
        names = []
        try:
            for descriptor in Path(f"/proc/{self.pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    names.append(os.readlink(descriptor))
        except PermissionError:
            return []
        return names

    def close(self) -> None:
        """Make sure that nothing is left."""
        if self._process is not None and self._process.poll() is None:
            self._child = self.pid or self._child
            self._process.kill()
            self._process.wait()
            self._wait_for_child()


def set_words(settings: Mapping[str, str] | Iterable[str]) -> list[str]:
    """Return the words of a command line that set these values."""
    if isinstance(settings, Mapping):
        settings = (f"{key}={value}" for key, value in settings.items())
    return [word for one in settings for word in ("--set", one)]


def child_of(supervisor: int) -> int:
    """Return the process that a supervisor runs just now; 0 if there is none."""
    try:
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    except FileNotFoundError:
        return 0
    return int(children[0]) if children else 0


def is_alive(process: int) -> bool:
    """Whether a process or a thread of it runs. One that is dead and not waited for does not."""
    try:
        is_dead = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return not is_dead or len(list(Path(f"/proc/{process}/task").iterdir())) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0
