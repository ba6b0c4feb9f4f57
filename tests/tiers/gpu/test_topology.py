"""Where GPUs hang, from a sysfs that the test writes; what the link makes; and whether GDS can be had."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.tiers.gpu.decode.gds import GdsFacts, Reader, compare, look, why_not
from kvtier.tiers.gpu.device import links
from kvtier.tiers.gpu.device.contract import DeviceError, DeviceFault
from kvtier.tiers.gpu.device.topology import GpuPlace, describe, gpus, place_of, with_nvlinks
from tests.fakes.gpu.device import FakeDevice
from tests.fakes.gpu.streams import FakeStream

NEAR = GpuPlace("0000:17:00.0", 0, 32.0, 16, 16)
FAR = GpuPlace("0000:ca:00.0", 1, 2.5, 8, 16)


def write_pci(root: Path, bus_id: str, **files: str) -> None:
    folder = root / "bus/pci/devices" / bus_id
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    speeds = {"current_link_speed": "32.0 GT/s PCIe", "current_link_width": "16", "max_link_width": "16"}
    gpu = {"vendor": "0x10de", "class": "0x030200", "numa_node": "0", **speeds}
    idle = {**gpu, "numa_node": "1", "current_link_speed": "2.5 GT/s PCIe", "current_link_width": "8"}
    write_pci(tmp_path, "0000:CA:00.0", **idle)
    write_pci(tmp_path, "0000:17:00.0", **gpu)
    write_pci(tmp_path, "0000:01:00.0", vendor="0x144d", **{"class": "0x010802"}, numa_node="0")  # a disk
    write_pci(tmp_path, "0000:05:00.0", vendor="0x10de", **{"class": "0x068000"})  # an NVSwitch
    return tmp_path


def test_gpus_in_the_order_of_their_addresses(sysfs: Path) -> None:
    assert gpus(sysfs) == (NEAR, FAR)
    assert describe(NEAR) == "0000:17:00.0 on node 0, PCIe x16 at 32 GT/s"
    assert "x8 of x16" in describe(FAR)
    assert gpus(sysfs / "nothing") == ()


def test_what_the_kernel_does_not_say_is_not_made_up(tmp_path: Path) -> None:
    write_pci(tmp_path, "0000:17:00.0", vendor="0x10de", **{"class": "0x030200"}, numa_node="-1")
    assert gpus(tmp_path) == (GpuPlace("0000:17:00.0", None),)
    assert describe(gpus(tmp_path)[0]) == "0000:17:00.0 on an unknown node"


class Nvml(SimpleNamespace):
    """As much of pynvml as is asked, for one GPU with three links: two to FAR, one into a switch."""

    NVML_FEATURE_ENABLED, NVML_NVLINK_DEVICE_TYPE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:  # noqa: N802
        if bus_id != NEAR.bus_id:
            raise self.NVMLError
        return bus_id

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:  # noqa: N802
        if link > 3:
            raise self.NVMLError  # there are no more
        return int(link != 1)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: str, link: int) -> int:  # noqa: N802
        return 2 if link == 3 else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: str, link: int) -> Any:  # noqa: N802
        return SimpleNamespace(domain=0, bus=0xCA, device=0)


def test_nvlink_is_asked_of_nvml_and_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert with_nvlinks([NEAR]) == (NEAR,)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    near, far = with_nvlinks([NEAR, FAR])
    assert near.nvlinks == ((FAR.bus_id, 2), ("switch", 1))
    assert far == FAR
    assert describe(near).endswith("NVLink: 2 to 0000:ca:00.0, 1 to a switch")


def test_a_device_that_is_not_cuda_is_nowhere() -> None:
    assert place_of(FakeDevice(), [NEAR]) is None


class Clock:
    """Each look takes as long as it is told."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def test_the_link_is_measured_both_ways_and_nothing_is_left() -> None:
    device = FakeDevice(is_live=True)
    up, down = links.measure(device, 1 << 20, Clock(1e-3))
    for speed in (up, down):
        assert speed.bandwidth_bytes_per_s == pytest.approx((1 << 20) / 1e-3)
        assert speed.latency_s == pytest.approx(1e-3)
    assert not device.memory.regions
    device.shut_down()
    assert device.check_integrity() == []


def test_a_slow_link_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds: one copy of each kind instead of four."""
    device = FakeDevice(is_live=True)
    lengths = []
    original = FakeStream.copy

    def copy(self: Any, pieces: Any) -> None:
        lengths.append(int(pieces.lengths.sum()))
        original(self, pieces)

    monkeypatch.setattr(FakeStream, "copy", copy)
    links.measure(device, 1 << 20, Clock(links.LIMIT_S))
    assert lengths == [4096, 4096, 1 << 20] * 2
    device.shut_down()


def test_a_device_that_is_lost_or_full_is_not_measured() -> None:
    full = FakeDevice(max_registered_bytes=4096)
    with pytest.raises(DeviceError):
        links.measure(full, 1 << 20)
    assert not full.memory.regions
    lost = FakeDevice(is_live=True)
    lost.lose()
    with pytest.raises(DeviceError) as caught:
        links.measure(lost, 1 << 20)
    assert caught.value.fault is DeviceFault.LOST
    lost.shut_down()


# ------------------------------------------------------------------------------------ GPUDirect Storage


def test_what_stands_in_the_way_of_gds_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules").write_text("nvidia_fs 262144 0 - Live 0x0\nnvidia 1 1 - Live 0x0\n")
    found = look(tmp_path / "modules", tmp_path / "none", tmp_path / "none")
    assert (found.module, found.is_iommu_on) == ("nvidia-fs", False)
    ready = GdsFacts("26.10", "nvidia-fs", False)
    assert why_not(ready, "xfs") == []
    assert len(why_not(GdsFacts(is_iommu_on=True), "overlay")) == 4
    assert ["nvidia-fs" in reason for reason in why_not(GdsFacts("26.10"), "ext4")] == [True]
    assert "overlay" in why_not(ready, "overlay")[0]


def test_without_kvikio_there_is_no_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(DeviceError, match="kvikio cannot be loaded"):
        Reader(tmp_path / "segment")


@pytest.mark.parametrize(("direct_s", "bounce_s", "is_quicker"), [(1.0, 2.0, True), (1.0, 1.04, False)])
def test_the_direct_way_is_taken_only_when_it_is_clearly_quicker(
    direct_s: float, bounce_s: float, is_quicker: bool
) -> None:
    clock = Clock(0.0)

    def takes(seconds: float) -> Any:
        def way() -> None:
            clock.now += seconds

        return way

    trial = compare(takes(direct_s), takes(bounce_s), lambda: True, clock=clock)
    assert tuple(trial) == pytest.approx((direct_s, bounce_s))
    assert trial.is_quicker is is_quicker
    with pytest.raises(DeviceError, match="other bytes"):
        compare(takes(1), takes(2), lambda: False, clock=clock)
