"""A get into the pages of another process, on a GPU: from the warm pool against torch, and from nvme layer by
layer.

    python -m bench.pages [--device cuda|fake] [--path DIR] [--json FILE] [--small]
                          [--cases NAMES] [--layers-per-group N]

The daemon and the runtime (bench.pages_runtime) are processes of their own; the pages are shared by CUDA IPC.
4,096 tokens of Llama-3-8B are 256 blocks of 2 MiB, 32 layers of 64 KiB each.

`warm`: a get from pinned dram, against one contiguous copy a layer of as many bytes by torch in the runtime's
own process. `by dram` and `straight`: the blocks are in the cold store only; when is the first layer in its
pages, when the last? Straight means encoded over the link and decoded on the device. Bytes are compared after
each. On the fake device it shows that it runs; its figures mean nothing.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from bench.machine import ROOT, print_machine, write_report
from bench.table import render
from kvtier.appliance.config import Settings
from kvtier.v1 import admin_pb2, types_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from tests.daemon import Daemon
from tests.waiting import until

CASES = ("warm", "by dram", "straight")
ROUNDS = 7
HBM, DRAM, NVME = types_pb2.TIER_HBM, types_pb2.TIER_DRAM, types_pb2.TIER_NVME


def settings_of(path: Path, is_small: bool, straight: bool, has_nvme: bool) -> dict[str, str]:
    """Return what a daemon is told. In the warm case hbm is too small for the chain to come to rest in."""
    large, hot = ("64MiB", "64MiB") if is_small else ("2GiB", "2GiB")
    told = {
        "tiers.hbm.capacity": hot if straight else "64MiB",
        "tiers.hbm.from_nvme": "on" if straight else "off",
        "tiers.dram.capacity": large,
        "observe.http": "off",
    }
    if has_nvme:
        told |= {"tiers.nvme.path": str(path), "tiers.nvme.capacity": "512MiB" if is_small else "4GiB"}
        told |= {"tiers.nvme.write": "spill"}  # nothing is written but what is measured
        told |= {"compression.codec": "exponents"} if straight else {}
    return told


@contextmanager
def daemon(kind: str, folder: Path, told: dict[str, str]) -> Iterator[str]:
    """Run a daemon on a GPU, or one on the fake device in this process; give its target."""
    if kind == "cuda":
        process = Daemon(folder, settings=told | {"tiers.hbm.backend": "cuda"})
        process.start()
        try:
            yield process.target
            process.stop()
        finally:
            process.close()
            print(f"--- daemon\n{process.log.read_text()[-2000:]}", file=sys.stderr)
        return
    from tests.appliance.loops import DaemonThread
    from tests.fakes.gpu.device import FakeDevice
    from tests.tiers.gpu.host_kernels import on_host

    overrides = [f"{key}={value}" for key, value in told.items()]
    settings = Settings.load(None, {}, [f"listen=['unix://{folder}/k.sock']", *overrides])
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # slow here says nothing
    device = FakeDevice(capacity_bytes=1 << 30, num_streams=32, is_live=True, compiler=on_host)
    with DaemonThread(settings, device) as served:
        yield served.daemon.settings.listen[0]


class RuntimeProcess:
    """The other process."""

    def __init__(
        self, kind: str, target: str, num_blocks: int, num_layers: int, layers_per_group: int = 1
    ) -> None:
        command = [sys.executable, "-m", "bench.pages_runtime", target, kind]
        command += map(str, (num_blocks, num_layers, layers_per_group))
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        pipe = subprocess.PIPE
        environment = {**os.environ, "PYTHONPATH": paths}
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment
        )
        self.hello = self._read()

    def ask(self, line: str) -> dict[str, Any]:
        """Have something done; return what came of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the runtime ended; see its error above"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let it leave."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.write("quit\n")
            self._process.stdin.close()
        self._process.wait(60)


def to_nvme_only(target: str, runtime: RuntimeProcess, num_fragments: int) -> None:
    """Have the chain archived and gone from memory."""
    runtime.ask("archive")
    with grpc.insecure_channel(target) as channel:
        admin = AdminServiceStub(channel)

        def tier(number: int) -> Any:
            return next(t for t in admin.GetStatus(admin_pb2.GetStatusRequest()).tiers if t.tier == number)

        until(lambda: tier(NVME).num_fragments >= num_fragments, "not all fragments are archived", 0.05)
        for number in (HBM, DRAM):
            admin.Evict(admin_pb2.EvictRequest(tier=number))
        until(lambda: not tier(DRAM).num_fragments, "dram does not empty")


def measure(kind: str, folder: Path, case: str, is_small: bool, layers_per_group: int = 1) -> dict[str, Any]:
    """Run one case with a daemon and a runtime of its own."""
    num_blocks, num_layers = (16, 4) if is_small else (256, 32)
    has_nvme, straight = case != "warm", case == "straight"
    told = settings_of(folder / "nvme", is_small, straight, has_nvme)
    with daemon(kind, folder, told) as target:
        runtime = RuntimeProcess(kind, target, num_blocks, num_layers, layers_per_group)
        try:
            found: dict[str, Any] = {
                "case": case,
                "layers_per_group": layers_per_group,
                "put": runtime.ask("put"),
            }
            assert found["put"]["num_stored"] == num_blocks, found
            if case == "warm":
                found["get"] = runtime.ask(f"get {ROUNDS}")
                found["torch"] = runtime.ask(f"torch {ROUNDS}")
            else:
                to_nvme_only(target, runtime, num_blocks * num_layers // layers_per_group)
                found["layers"] = runtime.ask("layers")
        finally:
            runtime.close()
    return found


def row(found: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    part = found.get("get") or found["layers"]
    same = "yes" if part["is_same"] else "NO"
    if found["case"] == "warm":
        get_s, torch_s = median(part["seconds"]), found["torch"]["median_s"]
        return ["warm", f"{get_s * 1e3:.1f}", f"{torch_s * 1e3:.1f}", f"{torch_s / get_s:.2f}", same]
    first_s, last_s = part["seconds"][0], part["seconds"][-1]
    return [found["case"], f"{first_s * 1e3:.1f}", f"{last_s * 1e3:.1f}", f"{first_s / last_s:.2f}", same]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pages", description="gets into another process's pages"
    )
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument(
        "--path", type=Path, metavar="DIR", help="where the cold store goes; default: a new folder"
    )
    parser.add_argument("--small", action="store_true", help="16 blocks of 4 layers")
    parser.add_argument("--cases", default=",".join(CASES), metavar="NAMES", help="default: all three")
    parser.add_argument(
        "--layers-per-group", type=int, default=1, metavar="N", help="in a fragment; default: 1"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if unknown := set(args.cases.split(",")) - set(CASES):
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    machine = print_machine()
    all_found, failed = [], False
    for case in args.cases.split(","):
        with tempfile.TemporaryDirectory(dir=args.path) as folder:
            (Path(folder) / "nvme").mkdir()
            try:
                all_found.append(measure(args.device, Path(folder), case, args.small, args.layers_per_group))
            except (
                AssertionError,
                OSError,
                RuntimeError,
                subprocess.SubprocessError,
                grpc.RpcError,
            ) as problem:
                print(f"{case}: {problem!r}", file=sys.stderr)  # the others may say something all the same
                failed = True
    print()
    print(
        render(
            ["case", "get / first ms", "torch / last ms", "ratio", "same bytes"], list(map(row, all_found))
        )
    )
    print(
        "\nwarm: torch's time by ours (bar 0.9); the others: first layer's time by the last one's (bar 0.25)"
    )
    write_report(args.json, machine=machine, cases=all_found)
    is_right = all((found.get("get") or found["layers"])["is_same"] for found in all_found)
    return int(failed or not is_right)


if __name__ == "__main__":
    sys.exit(main())
