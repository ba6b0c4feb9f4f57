"""A real daemon beside the engines: killed, started again in the same place, asked what it holds."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

from kvtier.tiers.codecs.streaming import CANDIDATES
from kvtier.v1 import types_pb2
from tests.daemon import Daemon
from tests.waiting import until

NO_SYNC = "tiers.nvme.durability=none"  # the machine does not lose power; only processes die here


class ApplianceProcess(Daemon):
    """A daemon with a DRAM tier and, unless `nvme` is empty, an NVMe tier. Its folder is gone with it; its
    session is its own: benchmarks find its threads by that."""

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
        chosen = [f"tiers.dram.capacity={dram}", "tiers.dram.extent=16MiB", *settings]
        if nvme:
            chosen += [f"tiers.nvme.path={self.folder}/nvme", f"tiers.nvme.capacity={nvme}", NO_SYNC]
            (self.folder / "nvme").mkdir()
        listen = ("--listen", address) if address else ()
        super().__init__(self.folder, settings=chosen, arguments=listen, prefix=prefix, has_own_session=True)

    def wait_for_memory(self) -> None:
        """Wait until all pages of the DRAM tier have been touched: fresh ones come slowly."""
        self.wait_for_log("memory in place")

    def wait_for_codecs(self) -> None:
        """Wait until the daemon knows how quick its codecs are here: before that, blocks are stored raw, and
        the first load after a start waits 0.3 s for compiled loops. It finds out once there is a namespace,
        where `compression.codec` is auto."""
        until(
            lambda: set(CANDIDATES) <= {one.codec for one in self.status().codec_speeds},
            "the appliance does not know its codecs",
            pause_s=0.1,
        )

    def kill(self) -> None:
        """Kill the appliance with SIGKILL, and its supervisor: nothing starts another one."""
        self.stop(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop the appliance with SIGSTOP: it is alive and does not answer."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

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
        problems = self.audit()
        assert not problems, problems

    def close(self) -> None:
        """Make sure that neither processes nor files are left."""
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)
