"""A pool as processes: Mooncake's master, and hosts that lend it memory."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from ..ports import free_port

WAIT_S = 120.0
ROOT = Path(__file__).resolve().parents[2]


class Pool:
    """A master and `num_lenders` processes that lend it memory, all of them on the loopback."""

    def __init__(
        self, folder: Path, num_lenders: int = 1, lent_bytes: int = 256 << 20, lease_s: int = 10
    ) -> None:
        self.port, self._admin_port = free_port(), free_port()
        self._log = (folder / "mooncake.log").open("ab")
        self._lent_bytes = lent_bytes
        self.master = self._start_master()
        self.lenders: list[subprocess.Popen[bytes]] = []
        for _ in range(num_lenders):
            self.lend()

    @property
    def address(self) -> str:
        """Return the master's host and port."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (*self.lenders, self.master):
            process.kill()
            process.wait(60)
            if process.stdin is not None:
                process.stdin.close()
            if process.stdout is not None:
                process.stdout.close()
        self._log.close()

    def lend(self) -> subprocess.Popen[bytes]:
        """Start a process that lends memory, and wait until it does."""
        command = [sys.executable, "-m", "tests.mooncake.lender", self.address, str(self._lent_bytes)]
        lender = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, cwd=ROOT
        )
        self.lenders.append(lender)
        assert lender.stdout is not None
        while line := lender.stdout.readline():
            if line.startswith(b"setup "):
                assert line == b"setup 0\n", line
                return lender
        raise AssertionError("no memory was lent")

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
        ends_at, pause = time.monotonic() + WAIT_S, threading.Event()
        while not self._is_ready():
            assert master.poll() is None, "the master ended"
            assert time.monotonic() < ends_at, "the master does not start"
            pause.wait(0.05)
        return master

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._admin_port}/health", timeout=5) as answer:
                return bool(json.load(answer)["service_ready"])
        except (OSError, ValueError, urllib.error.URLError):
            return False
