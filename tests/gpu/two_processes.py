"""What a GPU does between two processes, as daemon and runtime use it; figures go to FILE.

    python -m tests.gpu.two_processes shared|killed cuda|fake FILE

`shared`: a runtime exports a torch tensor and an event from a fresh thread, where no context is current;
the daemon's device waits for the event and reads the tensor, opened twice, closed one after the other.
`killed`: a runtime is killed by SIGKILL while a kernel spins before its event. The daemon asks for such an
event and lets no stream wait for it; here one does all the same, to see what that costs. Do other streams
go on, does its memory close, does this process's interpreter keep running? On the fake device no kernel
spins: time stands still there.
"""

import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np

from kvtier.tiers.gpu.device import launching
from kvtier.tiers.gpu.device.contract import Device, DeviceError, Stream
from tests.contracts.devices import exported, pieces
from tests.e2e.direct_device import FakeExporter
from tests.fakes.gpu.device import FakeDevice

from .probes import answer, device_of, is_done_within, written_to

SIZE = 1 << 20
WAIT_S = 5.0
SPIN_TICKS = 40_000_000_000  # twenty seconds or so: a device that is left behind comes free by itself
SPIN = 'extern "C" __global__ void spin(long long n) { long long b = clock64(); while (clock64() - b < n); }'


class Child:
    """The runtime: another process of this module, which answers with one line of JSON and waits."""

    def __init__(self, role: str, kind: str) -> None:
        command = [sys.executable, "-m", "tests.gpu.two_processes", role, kind, "-"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the {role} ended; see its error above"
        self.said: dict[str, Any] = json.loads(line)

    def leave(self) -> int:
        """Let it end; return its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(WAIT_S)


class Host:
    """Pinned memory of SIZE bytes."""

    def __init__(self, device: Device) -> None:
        self.mapping = mmap.mmap(-1, SIZE)
        self.bytes = np.frombuffer(self.mapping, np.uint8)
        self.address = device.register_host(memoryview(self.mapping), is_read_only=False)


def shared(kind: str, write: Callable[[Any], None]) -> bool:
    """Read another process's tensor, opened twice, after its event."""
    device, child = device_of(kind), Child("exporter", kind)
    said, host, stream = child.said, Host(device), device.take_stream()
    handle, offset = bytes.fromhex(said["handle"]), said["offset"]
    opened = [device.open(handle, offset + SIZE) for _ in range(2)]
    event = device.open_event(bytes.fromhex(said["event"]))
    assert is_done_within(event, WAIT_S), (
        "the tensor's event never happened"
    )  # the daemon asks, no stream waits
    found: dict[str, Any] = {"offset": offset, "same_address": opened[0].address == opened[1].address}
    for number, memory in enumerate(opened):
        host.bytes[:] = 0
        stream.copy(pieces((memory.address + offset, host.address, SIZE)))
        mark = stream.record()
        assert is_done_within(mark, WAIT_S), "the copy is never done"
        device.recycle(mark)
        found[f"is_same_{number}"] = hashlib.sha256(host.bytes.data).hexdigest() == said["digest"]
        device.close(memory)  # the other opening must live on
        write(found)
    device.recycle(event)
    device.give_stream(stream)
    found["exporter_exit_code"] = child.leave()
    write(found)
    print(json.dumps(found, indent=1))
    device.shut_down()
    return bool(found["is_same_0"] and found["is_same_1"] and found["exporter_exit_code"] == 0)


def exporter(kind: str) -> None:
    """Export a tensor and an event from a fresh thread; fill the tensor, record the event."""
    fresh = ThreadPoolExecutor(1)  # its thread has no context
    data = np.random.default_rng(7).integers(0, 256, SIZE, np.uint8)
    if kind == "cuda":
        import torch

        from kvtier.clients.direct_cuda import CudaExporter

        tensor = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
        ours: Any = CudaExporter(0)
        address: int = tensor.data_ptr()
    else:
        ours = FakeExporter(FakeDevice(is_live=True, seed=2))
        tensor = ours.tensor(SIZE)
        address = tensor.__array_interface__["data"][0]
    exported = fresh.submit(ours.export, address).result(WAIT_S)
    event, handle = fresh.submit(ours.new_event).result(WAIT_S)
    if kind == "cuda":
        tensor.copy_(torch.from_numpy(data))
        event.record()
    else:
        tensor[:] = data
        ours.device.take_stream().record(event)
    digest = hashlib.sha256(data.data).hexdigest()
    places = {"handle": exported.handle.hex(), "offset": address - exported.address, "event": handle.hex()}
    print(json.dumps({**places, "digest": digest}), flush=True)
    sys.stdin.read()


def spinner(kind: str) -> None:
    """Export two allocations and an event that a spinning kernel stands before; wait to be killed."""
    device = device_of(kind) if kind == "cuda" else FakeDevice()
    memories = [device.allocate(SIZE) for _ in range(2)]
    stream = device.take_stream()
    event, handle = device.export_event()
    if kind == "cuda":
        launch = launching.load(device, SPIN, ("spin",))
        assert launch is not None, "the spinning kernel does not compile"
        launch(stream, "spin", 1, [np.int64(SPIN_TICKS)])
        stream.record(event)
    else:
        stream.record(event)  # its device's time does not pass
    handles = [exported(device, memory).hex() for memory in memories]
    print(json.dumps({"handles": handles, "event": handle.hex()}), flush=True)
    sys.stdin.read()
    os._exit(0)


class Heartbeat:
    """Ticks a thousand times a second; `longest_s` is the longest time without a tick."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last_at = time.monotonic()
        while not self._is_over.wait(1e-3):
            now = time.monotonic()
            self.longest_s, last_at = max(self.longest_s, now - last_at), now

    def stop(self) -> float:
        self._is_over.set()
        self._thread.join()
        return self.longest_s


def killed(kind: str, write: Callable[[Any], None]) -> bool:
    """Kill the runtime before its event; say what lives."""
    device, child = device_of(kind, may_wait_abroad=True), Child("spinner", kind)
    own, host = device.allocate(SIZE), Host(device)
    stuck, other = device.take_stream(), device.take_stream()
    assert stuck is not None
    heartbeat, threads = Heartbeat(), ThreadPoolExecutor(4)
    found: dict[str, Any] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        """Return what `call` does on a thread of its own, within WAIT_S; note how long it took or why not."""
        began_at = time.monotonic()
        try:
            result = threads.submit(call).result(WAIT_S)
            found[name] = round(time.monotonic() - began_at, 4) if result is not False else "not done"
            return result
        except FutureTimeout:
            found[name] = f"not back in {WAIT_S:.0f} s"
        except DeviceError as problem:
            found[name] = f"{problem.fault.name}: {problem}"
        finally:
            write(found)
        return None

    def moves(stream: Stream) -> bool:
        stream.copy(pieces((host.address, own.address, SIZE)))
        return is_done_within(stream.record(), WAIT_S / 2)

    handles = [bytes.fromhex(handle) for handle in child.said["handles"]]
    opened = timed("open_s", lambda: [device.open(handle, SIZE) for handle in handles])
    event = timed("open_event_s", lambda: device.open_event(bytes.fromhex(child.said["event"])))
    if event is not None and opened is not None:
        stuck.wait(event)
        stuck.copy(pieces((host.address, opened[0].address, SIZE)))
        mark = stuck.record()
    timed("others_while_it_spins_s", lambda: moves(other))
    found["event_was_pending"] = event is not None and not event.is_done()
    child.process.send_signal(signal.SIGKILL)
    timed("killed_process_gone_s", lambda: child.process.wait(WAIT_S))
    timed("others_after_s", lambda: moves(other))
    if event is not None and opened is not None:
        timed("stuck_stream_ends_s", lambda: is_done_within(mark, WAIT_S / 2))
        timed("close_s", lambda: device.close(opened[1]))  # no stream touches this one
    timed("others_at_the_end_s", lambda: moves(other))
    found["heartbeat_longest_s"] = round(heartbeat.stop(), 4)
    found["kernel"] = "a spinning one" if kind == "cuda" else "none: needs hardware"
    write(found)
    print(json.dumps(found, indent=1), flush=True)
    lives = [found[name] for name in ("others_while_it_spins_s", "others_after_s", "others_at_the_end_s")]
    return all(isinstance(value, float) for value in lives) and found["heartbeat_longest_s"] < WAIT_S / 4


def main(name: str, kind: str, path: str) -> int:
    if name in ("exporter", "spinner"):
        {"exporter": exporter, "spinner": spinner}[name](kind)
        return 0
    probe = {"shared": shared, "killed": killed}[name]
    code = answer(lambda: probe(kind, written_to(path)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what hangs in the driver is not waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
