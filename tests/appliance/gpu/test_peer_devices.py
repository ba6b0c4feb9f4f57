"""Which GPUs a daemon opens beside that of its hbm, and what it says when it cannot."""

from typing import Any

import pytest

from kvtier.appliance.config import Settings
from kvtier.appliance.errors import StartError
from kvtier.appliance.gpu import peer_devices
from kvtier.appliance.gpu.peer_devices import open_peers
from kvtier.tiers.gpu.device import DeviceError, DeviceFault
from tests.fakes.gpu.device import FakeDevice


def hbm(**options: Any) -> Any:
    """The settings of a hot tier on GPU 1."""
    part = {"capacity": "8MiB", "extent": "2MiB", "backend": "cuda", "device": 1, **options}
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


@pytest.mark.parametrize(
    ("wanted", "indices"), [("all", [0, 2]), ([0, 1, 2], [0, 2]), ([2], [2]), ([1], []), ([], [])]
)
def test_those_that_are_wanted_are_opened(
    opened: list[FakeDevice], wanted: object, indices: list[int]
) -> None:
    assert [device.index for device in open_peers(hbm(direct_devices=wanted))] == indices
    assert [device.index for device in opened] == indices


def test_one_that_was_named_must_be_there(opened: list[FakeDevice]) -> None:
    with pytest.raises(StartError, match=r"tiers.hbm.direct_devices: device 3: .* no such device"):
        open_peers(hbm(direct_devices=[0, 3]))
    with pytest.raises(DeviceError):
        opened[0].allocate(1)  # shut down


def test_nobody_can_say_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_devices() -> int:
        raise DeviceError(DeviceFault.UNAVAILABLE, "cupy is not installed")

    monkeypatch.setattr(peer_devices, "num_devices", num_devices)
    assert open_peers(hbm()) == []


@pytest.mark.parametrize("wanted", ["some", [0, 0], [-1], [256], [True], [1.5], {}])
def test_what_is_no_list_of_gpus_is_refused(wanted: object) -> None:
    with pytest.raises(ValueError, match=r"must be all, or a list|names a GPU twice"):
        hbm(direct_devices=wanted)
