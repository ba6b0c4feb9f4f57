"""Which GPUs a daemon opens beside that of its hbm, and what it says when it cannot."""

from typing import Any

import pytest

from kvtier.appliance.config import Settings
from kvtier.appliance.gpu import peer_devices
from kvtier.appliance.gpu.peer_devices import open_peers
from kvtier.tiers.gpu.device.contract import DeviceError, DeviceFault
from tests.fakes.gpu.device import FakeDevice


def hbm(**options: Any) -> Any:
    """The settings of a hot tier on GPU 1."""
    part = {"capacity": "8MiB", "backend": "cuda", "device": 1, **options}
    dram = {"capacity": "8MiB", "extent": "2MiB"}
    return Settings.model_validate({"tiers": {"hbm": part, "dram": dram}}).tiers.hbm


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeDevice]:
    """Four GPUs, of which number 3 is broken; those that were opened."""
    devices: list[FakeDevice] = []

    def make(index: int) -> FakeDevice:
        if index >= 3:
            raise DeviceError(DeviceFault.UNAVAILABLE, "there is no such device")
        devices.append(FakeDevice(index))
        return devices[-1]

    monkeypatch.setattr(peer_devices, "CudaDevice", make)
    monkeypatch.setattr(peer_devices, "num_devices", lambda: 4)
    return devices


def test_all_visible_gpus_are_opened_but_for_a_broken_one(opened: list[FakeDevice]) -> None:
    assert [device.index for device in open_peers(hbm())] == [0, 2]
    assert [device.index for device in opened] == [0, 2]


def test_nobody_can_say_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_devices() -> int:
        raise DeviceError(DeviceFault.UNAVAILABLE, "cupy is not installed")

    monkeypatch.setattr(peer_devices, "num_devices", num_devices)
    assert open_peers(hbm()) == []
