"""Small programs that ask one thing of a GPU each; they write their figures to FILE as they find them.

    python -m tests.gpu.probes attributes|batches|sweep cuda|fake FILE

`attributes`: what the device says it supports, and versions. `batches`: batches of 1,024 to 65,536 copies
in one call of the driver, 100 of each, every size in a process of its own, because drivers have crashed and
hung there. `sweep`: pieces of 256 bytes to 1 MiB by a batch and by the kernel, each way. Exit code 77: no
GPU here.
"""

import importlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_int
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.tiers.gpu.device import driver
from kvtier.tiers.gpu.device.contract import CopyPieces, Device, DeviceError, DeviceFault, Event, Stream
from kvtier.tiers.gpu.device.cuda import CudaDevice
from kvtier.tiers.gpu.pages import kernels
from kvtier.v1 import cuda
from tests.fakes.gpu.device import FakeDevice
from tests.tiers.gpu.host_launch import HostLaunch

from .first_contact import NEEDS_HARDWARE

#: CUdevice_attribute, cuda.h of CUDA 13.0.
ATTRIBUTES = {
    "MULTIPROCESSOR_COUNT": 16,
    "ASYNC_ENGINE_COUNT": 40,
    "UNIFIED_ADDRESSING": 41,
    "COMPUTE_CAPABILITY_MAJOR": 75,
    "COMPUTE_CAPABILITY_MINOR": 76,
    "PAGEABLE_MEMORY_ACCESS": 88,
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 91,
    "HOST_REGISTER_SUPPORTED": 99,
    "READ_ONLY_HOST_REGISTER_SUPPORTED": 113,
    "GPU_DIRECT_RDMA_SUPPORTED": 116,
    "IPC_EVENT_SUPPORTED": 125,
}
PACKAGES = ("cupy", "torch", "numba", "numpy", "grpc", "pytest", "xxhash")
PIECE_BYTES, REPEATS, CHILD_S, SPENT_S = 256, 100, 12.0, 5.0
COUNTS = tuple(1 << power for power in range(10, 17))
SWEPT_BYTES = tuple(1 << power for power in range(8, 21))


def device_of(kind: str, *, may_wait_abroad: bool = False) -> Device:
    """Return the first GPU, or the fake one. Raises DeviceError."""
    if kind == "cuda":
        return CudaDevice(0)
    return FakeDevice(capacity_bytes=1 << 28, is_live=True, may_wait_abroad=may_wait_abroad)


def is_done_within(event: Event, seconds: float) -> bool:
    """Return whether `event` happens within `seconds`. Raises DeviceError."""
    deadline_at = time.monotonic() + seconds
    while not event.is_done():
        if time.monotonic() > deadline_at:
            return False
        time.sleep(1e-4)
    return True


def attributes(kind: str, write: Callable[[Any], None]) -> bool:
    """Ask the driver for its version and attributes, and every package for its version."""
    found: dict[str, Any] = {"python": platform.python_version(), "kind": kind}
    for name in PACKAGES:
        try:
            importlib.import_module(name)  # a package that is there may still lack its libraries
        except (ImportError, OSError, RuntimeError) as problem:
            found[name] = f"not usable: {problem!r}"
        else:
            distributions = metadata.packages_distributions().get(name, [])
            found[name] = ", ".join(f"{it} {metadata.version(it)}" for it in sorted(set(distributions)))
        write(found)
    if kind == "cuda":
        library, number, value = cuda.library(), cuda.device_of(0), c_int()
        cuda.check("cuDriverGetVersion", byref(value))
        found["driver"] = value.value
        for name, attribute in ATTRIBUTES.items():
            status = library.cuDeviceGetAttribute(byref(value), c_int(attribute), c_int(number))
            found[name] = value.value if status == cuda.SUCCESS else f"status {status}"
    device = device_of(kind)
    found["device"] = f"{device.name} {device.uuid}"
    found["has_batches"] = getattr(device, "has_batches", None)
    write(found)
    device.shut_down()
    print(json.dumps(found, indent=1))
    return True


def batches(kind: str, write: Callable[[Any], None]) -> bool:
    """Run every size in a child. What the product submits, BATCH_PIECES, must work; above it is a finding."""
    if kind == "cuda":
        cuda.device_of(0)  # raises where there is none
    rows = []
    for count in COUNTS if kind == "cuda" else COUNTS[:2]:
        command = [sys.executable, "-m", "tests.gpu.probes", "batch", kind, str(count)]
        row: dict[str, Any] = {"pieces": count}
        try:
            child = subprocess.run(command, capture_output=True, timeout=CHILD_S, check=False)
            row["exit_code"] = child.returncode
            with suppress(ValueError):
                row |= json.loads(child.stdout)
            if child.returncode:
                row["error"] = child.stderr[-1000:].decode(errors="replace")
        except subprocess.TimeoutExpired:
            row["error"] = f"not done in {CHILD_S:.0f} s"
        rows.append(row)
        write({"rows": rows})
        print(json.dumps(row), flush=True)
    return all(row.get("exit_code") == 0 for row in rows if row["pieces"] <= driver.BATCH_PIECES)


def batch(kind: str, count: int) -> None:
    """Copy `count` pieces in one call, REPEATS times or for SPENT_S; compare the bytes; print the times."""
    driver.BATCH_PIECES = count
    device, num_bytes = device_of(kind), count * PIECE_BYTES
    source, back = np.random.default_rng(count).integers(0, 256, (2, num_bytes), np.uint8)
    pinned = [device.register_host(array.data, is_read_only=False) for array in (source, back)]
    memory, stream = device.allocate(num_bytes), device.take_stream()
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(PIECE_BYTES)
    order = np.random.default_rng(1).permutation(offsets)
    lengths = np.full(count, PIECE_BYTES, np.int64)
    up = CopyPieces(np.uint64(pinned[0]) + offsets, np.uint64(memory.address) + order, lengths)
    down = CopyPieces(up.targets, np.uint64(pinned[1]) + offsets, lengths)
    submit_s: list[float] = []
    done_s: list[float] = []
    began_at = time.monotonic()
    repeats = REPEATS if kind == "cuda" else 2
    while len(done_s) < repeats and time.monotonic() < began_at + SPENT_S:
        started_at = time.perf_counter()
        stream.copy(up)
        submit_s.append(time.perf_counter() - started_at)
        _finish(device, stream)
        done_s.append(time.perf_counter() - started_at)
    stream.copy(down)
    _finish(device, stream)
    assert (source == back).all(), "the bytes differ"
    times = {"submit_ms": statistics.median(submit_s) * 1e3, "done_ms": statistics.median(done_s) * 1e3}
    print(json.dumps({"repeats": len(done_s), **times}))
    device.shut_down()


def _finish(device: Device, stream: Stream) -> None:
    event = stream.record()
    assert is_done_within(event, CHILD_S), "never done"
    device.recycle(event)


def sweep(kind: str, write: Callable[[Any], None]) -> bool:
    """Time pieces of every size by a batch and by the kernel, up, down and within the device."""
    device = device_of(kind)
    launch = HostLaunch(device) if isinstance(device, FakeDevice) else kernels.load(device)
    kernel = kernels.PieceKernel(device, launch) if launch is not None else None
    sizes = SWEPT_BYTES if kind == "cuda" else (64 << 10, 1 << 20)
    host = np.zeros(kernels.MEASURED_BYTES, np.uint8)
    pinned = device.register_host(host.data, is_read_only=False)
    both = device.allocate(2 * kernels.MEASURED_BYTES)
    stream = device.take_stream()
    event, _ = device.export_event()
    inside = both.address, both.address + kernels.MEASURED_BYTES
    ends = {"up": (pinned, inside[0]), "down": (inside[0], pinned), "within": inside}
    means: dict[str, Callable[[CopyPieces], None]] = {"batch": stream.copy}
    if kernel is not None:
        means["kernel"] = partial(kernel.copy, stream)
    rows = []
    for way, (source, target) in ends.items():
        for size in sizes:
            num_bytes = size * min(kernels.MEASURED_PIECES, kernels.MEASURED_BYTES // size)
            row: dict[str, Any] = {"way": way, "piece_bytes": size, "num_bytes": num_bytes}
            for name, copy in means.items():
                timed = (kernels.time_s(stream, event, copy, source, target, size) for _ in range(5))
                seconds = statistics.median(timed)
                row[f"{name}_gb_per_s"] = num_bytes / seconds / 1e9
            rows.append(row)
            print(json.dumps(row), flush=True)
        write({"rows": rows, "has_kernel": kernel is not None})
    if kernel is not None:
        kernel.close()
    device.recycle(event)
    device.give_stream(stream)
    device.free(both)
    device.unregister_host(pinned)
    device.shut_down()
    return kernel is not None


def written_to(path: str) -> Callable[[Any], None]:
    """Return what writes figures to `path`, whole or not at all."""

    def write(found: Any) -> None:
        part = Path(f"{path}.part")
        part.write_text(json.dumps(found, indent=1))
        part.replace(path)

    return write


def answer(probe: Callable[[], bool]) -> int:
    """Return the exit code of a probe."""
    try:
        return int(not probe())
    except (DeviceError, OSError, cuda.DriverStatus) as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        is_absent = isinstance(problem, OSError) or getattr(problem, "fault", None) is DeviceFault.UNAVAILABLE
        return NEEDS_HARDWARE if is_absent else 1


def main(name: str, kind: str, last: str) -> int:
    if name == "batch":
        batch(kind, int(last))
        return 0
    probe = {"attributes": attributes, "batches": batches, "sweep": sweep}[name]
    return answer(lambda: probe(kind, written_to(last)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
