"""CudaDevice and CudaExporter beyond the contract: what CUDA's status codes mean, on which threads they work,
what becomes of a device that is lost.

Over a stub of the driver (stub_cuda.py); the contract suite runs over the same stub, and over a GPU where
there is one."""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import pytest

from kvtier.clients.direct_cuda import CudaExporter
from kvtier.clients.errors import PreconditionFailed
from kvtier.tiers.gpu.device.contract import DeviceError, DeviceFault
from kvtier.tiers.gpu.device.cuda import CudaDevice, fault_of, num_devices
from kvtier.tiers.gpu.device.driver import BATCH_PIECES
from kvtier.v1 import cuda
from tests.contracts.devices import exported, pieces
from tests.fakes.gpu.device import FakeDevice
from tests.tiers.gpu.stub_cuda import StubDriver, stubbed, stubbed_cuda

SIZE = 4096
T = TypeVar("T")


def on_fresh_thread(call: Callable[[], T]) -> T:
    """Return what `call` returns on a thread that has made no call of CUDA before."""
    results: list[T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    return results[0]


@pytest.mark.parametrize(
    ("status", "fault", "foreign"),
    [
        (2, DeviceFault.OUT_OF_MEMORY, DeviceFault.OUT_OF_MEMORY),
        (101, DeviceFault.UNAVAILABLE, DeviceFault.UNAVAILABLE),
        (802, DeviceFault.UNAVAILABLE, DeviceFault.UNAVAILABLE),
        (304, DeviceFault.REFUSED, DeviceFault.REFUSED),
        (712, DeviceFault.REFUSED, DeviceFault.REFUSED),
        (700, DeviceFault.LOST, DeviceFault.LOST),
        (719, DeviceFault.LOST, DeviceFault.LOST),
        (999, DeviceFault.LOST, DeviceFault.LOST),
        (209, DeviceFault.LOST, DeviceFault.REFUSED),
        (123_456, DeviceFault.LOST, DeviceFault.REFUSED),  # not known to be harmless
    ],
)
def test_what_a_status_means(status: int, fault: DeviceFault, foreign: DeviceFault) -> None:
    assert fault_of(status) is fault
    assert fault_of(status, is_foreign=True) is foreign


def test_a_handle_that_is_answered_with_an_unknown_status_takes_the_device_from_nobody() -> None:
    device = stubbed_cuda()
    stub: StubDriver = device.stub  # type: ignore[attr-defined]
    stub.answers = {"cuIpcOpenMemHandle_v2": 209, "cuIpcOpenEventHandle": 209}
    for open_it in (lambda: device.open(b"x" * 64, SIZE), lambda: device.open_event(b"x" * 64)):
        with pytest.raises(DeviceError, match="status 209") as caught:
            open_it()
        assert caught.value.fault is DeviceFault.REFUSED
    device.free(device.allocate(SIZE))
    stub.answers = {"cuMemAlloc_v2": 209}
    with pytest.raises(DeviceError) as caught:
        device.allocate(SIZE)
    assert caught.value.fault is DeviceFault.LOST
    stub.answers = {}
    device.shut_down()


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"cuInit": 100}, "nvidia-smi"),
        ({"cuInit": 802}, "nvidia-fabricmanager"),
        ({"cuInit": 803}, "reboot"),
        ({"cuDeviceGet": 46}, "^unavailable: cuDeviceGet .status 46.: the device is busy"),
        ({}, "tiers.hbm.device"),
    ],
)
def test_a_device_that_cannot_be_opened_says_what_to_do(answers: dict[str, int], words: str) -> None:
    stub = StubDriver()
    stub.answers = answers
    with stubbed(stub), pytest.raises(DeviceError, match=words) as caught:
        CudaDevice(0)
    assert caught.value.fault is DeviceFault.UNAVAILABLE


def test_without_a_driver_the_error_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.library.cache_clear()
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-that-is-not-there.so.1")
    for call in (CudaDevice, num_devices):
        with pytest.raises(DeviceError, match="NVIDIA runtime") as caught:
            call()
        assert caught.value.fault is DeviceFault.UNAVAILABLE


def test_a_driver_that_is_too_old_is_named() -> None:
    with pytest.raises(OSError, match="has no cuDeviceGetUuid_v2; install one for CUDA 12"):
        cuda.prototyped(StubDriver().library(without=("cuDeviceGetUuid_v2",)))
    cuda.prototyped(StubDriver().library(without=cuda.OPTIONAL))


def test_streams_have_more_hardware_queues_than_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work behind a stream that waits for a runtime would wait, too."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    stubbed_cuda().shut_down()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "12")
    stubbed_cuda().shut_down()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "12", "an administrator's word"


def test_any_thread_may_call() -> None:
    """A context is current per thread."""
    device = stubbed_cuda()
    memory = on_fresh_thread(lambda: device.allocate(SIZE))
    event, _ = on_fresh_thread(device.export_event)
    assert on_fresh_thread(event.is_done)
    stream = device.take_stream()
    on_fresh_thread(lambda: stream.copy(pieces((memory.address, memory.address + 64, 64))))
    on_fresh_thread(lambda: stream.record(event))
    device.give_stream(stream)
    device.recycle(event)
    device.shut_down()


def test_a_batch_goes_in_parts_that_a_driver_is_known_to_take() -> None:
    device = stubbed_cuda()
    stub: StubDriver = device.stub  # type: ignore[attr-defined]
    num_pieces = 2 * BATCH_PIECES + 5
    source, target = device.allocate(8 * num_pieces), device.allocate(8 * num_pieces)
    stub.fakes[0].poke(source.address, np.random.default_rng(1).bytes(8 * num_pieces))
    stream = device.take_stream()
    at = range(0, 8 * num_pieces, 8)
    stream.copy(pieces(*((source.address + offset, target.address + offset, 8) for offset in at)))
    event = stream.record()
    while not event.is_done():
        continue
    assert stub.batches == [BATCH_PIECES, BATCH_PIECES, 5]
    assert BATCH_PIECES == 4096
    peek = stub.fakes[0].peek
    assert peek(target.address, 8 * num_pieces) == peek(source.address, 8 * num_pieces)
    device.recycle(event)
    device.give_stream(stream)
    device.shut_down()


def test_a_broken_context_is_a_lost_device() -> None:
    device = stubbed_cuda()
    stub: Any = device.stub  # type: ignore[attr-defined]
    memory = device.allocate(2 * SIZE)
    stream = device.take_stream()
    stub.fakes[0].lose("an illegal address")  # every later call says 719
    with pytest.raises(DeviceError) as caught:
        stream.copy(pieces((memory.address, memory.address + SIZE, SIZE)))
    assert caught.value.fault is DeviceFault.LOST
    with pytest.raises(DeviceError, match="status 719"):  # remembered: CUDA is not asked again
        device.allocate(1)
    device.give_stream(stream)
    device.free(memory)
    device.shut_down()


def test_whoever_waits_is_told_of_the_loss() -> None:
    device = stubbed_cuda()
    stub: Any = device.stub  # type: ignore[attr-defined]
    stream = device.take_stream()
    blocker, _ = device.export_event()  # recorded by nobody who is alive: what waits for it is never done
    stub.things[blocker.pointer].cells[0] = 1  # type: ignore[attr-defined]
    stream.wait(blocker)
    event = stream.record()
    told: list[DeviceError | None] = []
    device.when_done(event, told.append)
    stub.fakes[0].lose("fell off the bus")
    device.shut_down()
    assert [error.fault for error in told if error] == [DeviceFault.LOST]


def test_a_client_that_claims_more_than_it_shared() -> None:
    ours = stubbed_cuda()
    memory = ours.allocate(SIZE)
    with pytest.raises(DeviceError, match="are shared") as caught:
        ours.open(exported(ours, memory), SIZE + 1)
    assert caught.value.fault is DeviceFault.REFUSED
    ours.shut_down()


def test_an_allocation_that_is_opened_twice_is_closed_twice() -> None:
    """Two registrations of one runtime name the same allocation: CUDA counts, and so must we."""
    ours, theirs = stubbed_cuda(), FakeDevice()
    memory = theirs.allocate(SIZE)
    handle = theirs.export(memory)
    first, second = ours.open(handle, SIZE), ours.open(handle, SIZE)
    assert first == second
    ours.close(first)
    stub: Any = ours.stub  # type: ignore[attr-defined]
    assert stub.num_opened[first.address] == 1, "the other one still uses it"
    ours.close(second)
    with pytest.raises(AssertionError, match="given back twice"):
        ours.close(second)
    third = ours.open(handle, SIZE)
    ours.open(handle, SIZE)
    ours.shut_down()  # closes what is left, as often as it was opened
    assert stub.num_opened[third.address] == 0
    theirs.shut_down()


class StubTorch(ModuleType):
    """What CudaExporter takes from torch. As torch's, a device guard makes no context current where the index
    is the one that a fresh thread starts with."""

    class cuda:  # noqa: N801
        class device:  # noqa: N801
            def __init__(self, index: int) -> None:
                self.index = index

            def __enter__(self) -> None:
                assert self.index == 0

            def __exit__(self, *raised: object) -> None:
                pass


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubDriver]:
    """The driver of a runtime's process with one GPU."""
    stub = StubDriver()
    stub.fakes[0] = FakeDevice(num_streams=64)
    monkeypatch.setitem(sys.modules, "torch", StubTorch("torch"))
    with stubbed(stub):
        yield stub
    stub.fakes[0].shut_down()


def test_pages_are_exported_from_any_thread(runtime: StubDriver) -> None:
    """A worker registers its pages in its load and save threads, on which torch has made no call."""
    exporter = CudaExporter(0)
    assert exporter.device_uuid == runtime.fakes[0].uuid
    memory = runtime.fakes[0].allocate(SIZE)
    here = exporter.export(memory.address + 100)
    there = on_fresh_thread(lambda: exporter.export(memory.address + 100))
    assert here == there
    assert here.address == memory.address
    base = ctypes.c_uint64()
    assert cuda.library().cuMemAlloc_v2(ctypes.byref(base), SIZE) == 201, "this thread is left as it was"


def test_both_sides_name_a_device_by_the_same_call(runtime: StubDriver) -> None:
    """Of a MIG instance the calls with and without `_v2` answer differently."""
    daemon, exporter = CudaDevice(0), CudaExporter(0)
    assert daemon.uuid == exporter.device_uuid
    assert "cuDeviceGetUuid" not in runtime.num_calls
    assert runtime.num_calls["cuDeviceGetUuid_v2"] == 2
    daemon.shut_down()


@pytest.mark.parametrize("status", [1, 801])
def test_memory_that_cannot_be_shared_is_refused_with_what_to_change(
    runtime: StubDriver, status: int
) -> None:
    memory = runtime.fakes[0].allocate(SIZE)
    runtime.answers = {"cuIpcGetMemHandle": status}
    with pytest.raises(PreconditionFailed, match=r"expandable_segments.*--enable-sleep-mode"):
        CudaExporter(0).export(memory.address)
    runtime.answers = {"cuMemGetAddressRange_v2": 1}
    with pytest.raises(PreconditionFailed, match="finding the tensor's allocation failed: CUDA status 1"):
        CudaExporter(0).export(memory.address)
