"""Processes of load: worker.py, started, stopped, killed, and asked for what they saw."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..waiting import until

END_S = 120.0


@dataclass(frozen=True, slots=True)
class Role:
    """What a worker is: its tenant, its way to the daemon, its token if the daemon wants one."""

    tenant: int = 0
    is_grpc: bool = False
    token: Path | None = None


@dataclass
class WorkerProcess:
    """One running worker. Its counts are those of its last line; a killed one has lost what it did since."""

    role: Role
    process: "subprocess.Popen[bytes]"
    output: Path
    log: Path

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it, stopped or not. Raises AssertionError with its last words when it ended by itself."""
        self.process.send_signal(how)
        self.process.send_signal(signal.SIGCONT)
        status = self.process.wait(END_S)
        assert status in (0, -how), f"a worker ended with {status}:\n{self.log.read_text()[-3000:]}"

    def assert_alive(self) -> None:
        """Raise AssertionError with its last words when it has ended."""
        status = self.process.poll()
        assert status is None, f"a worker ended with {status}:\n{self.log.read_text()[-3000:]}"

    def counts(self) -> Counter[str]:
        """Return what it has done, as far as it has said."""
        lines = [line for line in self.output.read_text().splitlines() if line.endswith("}")]
        return Counter(json.loads(lines[-1])) if lines else Counter()


class Load:
    """All workers there were: those that run, and the counts of those that have ended.

    Loads of several hosts in one folder tell each other what they put; `first` numbers their workers apart.
    """

    def __init__(self, folder: Path, target: str, *, pause_s: float, first: int = 0) -> None:
        self.running: list[WorkerProcess] = []
        self._ended: Counter[str] = Counter()
        self._folder, self._target, self._pause_s, self._num_started = folder, target, pause_s, first

    def start(self, role: Role, *, is_holder: bool = False) -> WorkerProcess:
        """Start a worker; a holder takes leases and waits for its end."""
        self._num_started += 1
        name = f"worker-{self._num_started}"
        output, log = self._folder / f"{name}.json", self._folder / f"{name}.log"
        command = [sys.executable, "-m", "tests.chaos.worker", "--target", self._target]
        command += ["--board", str(self._folder / "board"), "--tenant", str(role.tenant)]
        command += ["--seed", str(self._num_started), "--pause", str(self._pause_s)]
        command += ["--grpc"] * role.is_grpc + ["--hold"] * is_holder
        token = {"KVTIER_TOKEN_FILE": str(role.token)} if role.token else {}
        with output.open("wb") as out, log.open("wb") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err, env=dict(os.environ) | token)
        worker = WorkerProcess(role, process, output, log)
        self.running.append(worker)
        return worker

    def end(self, worker: WorkerProcess, how: signal.Signals = signal.SIGTERM) -> None:
        """End a worker and keep its counts."""
        worker.end(how)
        self.running.remove(worker)
        self._ended.update(worker.counts())

    def drop(self, worker: WorkerProcess) -> None:
        """Kill a worker, however it is."""
        worker.process.kill()
        worker.process.wait()
        self.running.remove(worker)

    def end_all(self) -> None:
        """End every worker."""
        for worker in list(self.running):
            self.end(worker)

    def assert_alive(self) -> None:
        """Raise AssertionError with the last words of a worker that has ended by itself."""
        for worker in self.running:
            worker.assert_alive()

    def wait_until_read(self) -> None:
        """Wait until every worker has read something and found it right."""

        def have_read() -> bool:
            self.assert_alive()
            return all(worker.counts()["blocks verified"] for worker in self.running)

        until(have_read, lambda: f"workers read nothing: {self.counts()}", pause_s=0.1)

    def kill_all(self) -> None:
        """Leave no process behind, whatever went wrong."""
        for worker in self.running:
            worker.process.kill()
            worker.process.wait()

    def counts(self) -> Counter[str]:
        """Return what all workers together have done."""
        total = Counter(self._ended)
        for worker in self.running:
            total.update(worker.counts())
        return total
