"""A pool of Mooncake Store as processes: its master, and hosts that lend it memory, all on the loopback."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from .network import free_port

WAIT_S = 120.0
ROOT = Path(__file__).resolve().parents[1]


class MooncakeProcesses:
    """A master, and `num_lenders` processes that lend it `lent_bytes` of memory each.

    Logs go to `folder`. Use it as a context manager: entering raises RuntimeError when one does not start,
    leaving kills them all.
    """

    find_port = staticmethod(free_port)

    def __init__(self, folder: Path, num_lenders: int = 1, lent_bytes: int = 256 << 20) -> None:
        self.port, self._admin_port = self.find_port(), self.find_port()
        self._log = (folder / "mooncake.log").open("ab")
        self._num_lenders, self._lent_bytes = num_lenders, lent_bytes
        self._processes: list[subprocess.Popen[bytes]] = []  # all that were started
        self.lenders: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        """Return the master's host and port."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self._close)
            self.master = self._start_master()
            for _ in range(self._num_lenders):
                self.lend()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(60)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._log.close()

    def lend(self) -> subprocess.Popen[bytes]:
        """Start a process that lends memory, and wait until it does."""
        command = [sys.executable, "-m", "examples.mooncake_lender", self.address, str(self._lent_bytes)]
        lender = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, cwd=ROOT
        )
        self.lenders.append(lender)
        self._processes.append(lender)
        assert lender.stdout is not None
        while line := lender.stdout.readline():
            if line == b"setup 0\n":
                return lender
        raise RuntimeError("no memory was lent to the pool")

    def names(self) -> set[str]:
        """Return the keys of all objects, also of those that were lost with a host a moment ago."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self._admin_port}/get_all_keys", timeout=60
        ) as answer:
            return set(answer.read().decode().split())

    def restart_master(self) -> None:
        """Start another master at the same port, which knows nothing, after the first one was killed."""
        self.master.wait(60)
        self.master = self._start_master()

    def _start_master(self) -> subprocess.Popen[bytes]:
        import mooncake

        program = Path(mooncake.__path__[0]) / "mooncake_master"
        flags = {
            "rpc_port": self.port,
            "metrics_port": self._admin_port,
            "rpc_address": "127.0.0.1",
            "metrics_host": "127.0.0.1",
            "enable_metric_reporting": "false",
        }
        words = [f"--{name}={value}" for name, value in flags.items()]
        master = subprocess.Popen([os.fspath(program), *words], stdout=self._log, stderr=self._log)
        self._processes.append(master)
        ends_at, pause = time.monotonic() + WAIT_S, threading.Event()
        while not self._is_ready():
            if master.poll() is not None or time.monotonic() > ends_at:
                raise RuntimeError("the pool's master does not start")
            pause.wait(0.05)
        return master

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._admin_port}/health", timeout=5) as answer:
                return bool(json.load(answer)["service_ready"])
        except (OSError, ValueError, urllib.error.URLError):
            return False
