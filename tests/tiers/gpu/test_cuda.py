"""CudaDevice beyond the contract: what CUDA's status codes mean, and what becomes of a device that is lost.

Over a stub of the runtime (stub_cuda.py); the contract suite runs over the same stub, and over a GPU where
there is one."""

import importlib
from typing import Any

import pytest

from kvtier.tiers.gpu.cuda import fault_of, load_runtime
from kvtier.tiers.gpu.device import DeviceError, DeviceFault
from kvtier.tiers.gpu.fake import FakeDevice
from tests.contracts.devices import pieces
from tests.tiers.gpu.stub_cuda import stubbed_cuda

SIZE = 4096


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (2, DeviceFault.OUT_OF_MEMORY),
        (35, DeviceFault.UNAVAILABLE),
        (101, DeviceFault.UNAVAILABLE),
        (304, DeviceFault.REFUSED),
        (712, DeviceFault.REFUSED),
        (700, DeviceFault.LOST),
        (719, DeviceFault.LOST),
        (123_456, DeviceFault.LOST),  # not known to be harmless
    ],
)
def test_what_a_status_means(status: int, fault: DeviceFault) -> None:
    assert fault_of(status) is fault


def test_without_cupy_the_error_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(DeviceError, match=r"pip install kvtier\[gpu\]") as caught:
        load_runtime()
    assert caught.value.fault is DeviceFault.UNAVAILABLE


def test_a_broken_context_is_a_lost_device() -> None:
    device = stubbed_cuda()
    stub: Any = device._runtime
    memory = device.allocate(2 * SIZE)
    stream = device.take_stream()
    assert stream is not None
    stub.fake.lose("an illegal address")  # every later call says 719
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
    stub: Any = device._runtime
    stream = device.take_stream()
    assert stream is not None
    blocker, _ = device.export_event()  # recorded by nobody who is alive: what waits for it is never done
    stub.things[blocker.pointer].cells[0] = 1  # type: ignore[attr-defined]
    stream.wait(blocker)
    event = stream.record()
    told: list[DeviceError | None] = []
    device.when_done(event, told.append)
    stub.fake.lose("fell off the bus")
    device.shut_down()
    assert [error.fault for error in told if error] == [DeviceFault.LOST]


def test_a_client_that_claims_more_than_it_shared() -> None:
    ours = stubbed_cuda()
    memory = ours.allocate(SIZE)
    with pytest.raises(DeviceError, match="are shared") as caught:
        ours.open(ours.export(memory), SIZE + 1)
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
    stub: Any = ours._runtime
    assert stub.num_opened[first.address] == 1, "the other one still uses it"
    ours.close(second)
    with pytest.raises(AssertionError, match="given back twice"):
        ours.close(second)
    third = ours.open(handle, SIZE)
    ours.open(handle, SIZE)
    ours.shut_down()  # closes what is left, as often as it was opened
    assert stub.num_opened[third.address] == 0
    theirs.shut_down()
