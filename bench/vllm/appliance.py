"""A real daemon beside the engines: killed, started again in the same place, asked what it holds."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from kvtier.appliance.compression.codec_choice import CANDIDATES
from kvtier.v1 import admin_pb2, admin_pb2_grpc, types_pb2

START_S = 180.0  # on an idle machine it takes a second, beside two engines that start much longer
STOP_S = 120.0
CODECS_S = 180.0  # their loops are compiled once per machine, with low priority
NO_SYNC = "tiers.nvme.durability=none"  # the machine does not lose power; only processes die here


class ApplianceProcess:
    """`kvtier serve` with a DRAM tier and, unless `nvme` is empty, an NVMe tier, in a folder of its own."""

    def __init__(
        self,
        dram: str = "256MiB",
        nvme: str = "4GiB",
        settings: tuple[str, ...] = (),
        address: str = "",
        prefix: tuple[str, ...] = (),
    ) -> None:
        """`address`: where it listens beside its socket, host:port; `prefix`: of the command, such as into a
        namespace."""
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-vllm-"))
        self.target = f"unix://{self.folder}/kvtier.sock"
        self.log = self.folder / "daemon.log"
        chosen = [f"tiers.dram.capacity={dram}", "tiers.dram.extent=16MiB", *settings]
        if nvme:
            chosen += [f"tiers.nvme.path={self.folder}/nvme", f"tiers.nvme.capacity={nvme}", NO_SYNC]
            (self.folder / "nvme").mkdir()
        self._command = [*prefix, sys.executable, "-m", "kvtier.appliance.cli", "serve"]
        self._command += ["--listen", self.target]
        if address:
            self._command += ["--listen", address]
        for setting in chosen:
            self._command += ["--set", setting]
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0

    def start(self) -> Self:
        """Start it, again if need be; return when it serves. Raises RuntimeError with the end of its log."""
        self.start_unseen()
        return self.wait_until_it_serves()

    def start_unseen(self) -> None:
        """Start it, and do not wait."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        self._num_starts += 1

    def wait_until_it_serves(self) -> Self:
        """Raises RuntimeError with the end of its log when it does not."""
        assert self._process is not None
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                self.status(timeout_s=5.0)
                return self
            except grpc.RpcError as problem:
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(
                        f"the appliance does not serve:\n{self.log.read_text()[-3000:]}"
                    ) from problem
                time.sleep(0.05)  # not listening yet: the call fails at once

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def wait_for_memory(self) -> None:
        """Wait until all pages of the DRAM tier have been touched: fresh ones come slowly.

        Raises TimeoutError when that does not end.
        """
        self._wait_for("memory in place", self._num_starts)

    def wait_for_codecs(self) -> None:
        """Wait until the daemon knows how quick its codecs are here: before that, blocks are stored raw, and
        the first load after a start waits 0.3 s for compiled loops. It finds out once there is a namespace,
        where `compression.codec` is auto. Raises TimeoutError when that does not end."""
        deadline_s = time.monotonic() + CODECS_S
        while not set(CANDIDATES) <= {one.codec for one in self.status().codec_speeds}:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the appliance does not know its codecs after {CODECS_S:.0f} s")
            time.sleep(0.1)

    def _wait_for(self, line: str, num_times: int) -> None:
        deadline_s = time.monotonic() + START_S
        while self.log.read_text().count(line) < num_times:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the appliance's log has no {line!r} after {START_S:.0f} s")
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop the appliance by a drain: everything reaches the NVMe tier."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the appliance with SIGKILL."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop the appliance with SIGSTOP: it is alive and does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def status(self, timeout_s: float = 10.0) -> admin_pb2.GetStatusResponse:
        with grpc.insecure_channel(self._channel) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            return stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=timeout_s)

    def num_blocks(self) -> int:
        return self.status().num_blocks

    def used_bytes(self, tier: types_pb2.Tier.ValueType) -> int:
        return sum(one.used_bytes for one in self.status().tiers if one.tier == tier)

    def leave_dram(self) -> None:
        """Restart in order: every block is then on the NVMe tier only. Raises AssertionError when not."""
        num_blocks = self.num_blocks()
        self.stop()
        self.start()
        self.wait_for_memory()
        assert self.used_bytes(types_pb2.TIER_DRAM) == 0
        assert self.num_blocks() == num_blocks, f"{self.num_blocks()} of {num_blocks} blocks came back"

    def check_integrity(self) -> None:
        """Raises AssertionError with what the daemon's own audit found."""
        with grpc.insecure_channel(self._channel) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            answer = stub.CheckIntegrity(admin_pb2.CheckIntegrityRequest(), timeout=60.0)
        assert not answer.problems, list(answer.problems)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:  # `with` does not call __exit__ then: gigabytes would stay
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _channel(self) -> str:
        return self.target.replace("unix://", "unix:")

    def _end(self, how: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(STOP_S)
