"""A kvtier daemon of one's own: a subprocess in a folder that is gone afterwards."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from kvtier.v1 import admin_pb2, admin_pb2_grpc

START_S = 30.0
STOP_S = 30.0


class ExampleDaemon:
    """`kvtier serve` with `settings` (KEY.KEY=VALUE). Use it as a context manager: leaving it stops the
    daemon and removes the folder, whatever happened inside. `addresses`: where it listens beside its socket;
    `prefix`: what its command begins with."""

    def __init__(
        self, settings: list[str], addresses: Sequence[str] = (), prefix: Sequence[str] = ()
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
        self.target = f"unix://{self.folder}/kvtier.sock"
        self.log = self.folder / "daemon.log"
        self._settings = [f"tiers.nvme.path={self.folder}/nvme", *settings]
        self._addresses, self._prefix = addresses, prefix
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start it and wait until it serves; return how many seconds that took. Raises RuntimeError with
        the end of its log when it does not."""
        began_at = time.perf_counter()
        command = [*self._prefix, sys.executable, "-m", "kvtier.appliance.cli", "serve"]
        for address in (self.target, *self._addresses):
            command += ["--listen", address]
        for setting in self._settings:
            command += ["--set", setting]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C goes to the demo alone, which then stops the daemon in order.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        while not self._serves():
            if self._process.poll() is not None or time.perf_counter() - began_at > START_S:
                lines = self.log.read_text(errors="replace").splitlines()[-15:]
                raise RuntimeError("the daemon does not serve; the end of its log:\n" + "\n".join(lines))
        return time.perf_counter() - began_at

    def stop(self, how: signal.Signals = signal.SIGTERM) -> float:
        """Send it a signal and wait for its end; return how many seconds that took."""
        assert self._process is not None
        began_at = time.perf_counter()
        self._process.send_signal(how)
        self._process.wait(STOP_S)
        return time.perf_counter() - began_at

    def status(self) -> admin_pb2.GetStatusResponse:
        """Return what `kvtier status` shows."""
        with grpc.insecure_channel(self.target) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            return stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=5.0)

    def __enter__(self) -> "ExampleDaemon":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            try:
                self.stop()
            finally:
                if self._process.poll() is None:
                    self._process.kill()
                    self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _serves(self) -> bool:
        with grpc.insecure_channel(self.target) as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=0.2)
            except grpc.FutureTimeoutError:
                return False
        return True
