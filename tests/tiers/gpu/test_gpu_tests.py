"""The tests that need a GPU, run on the fake device with kernels on the host: a machine with a GPU is lent
for minutes, and a mistake in a test is not to be found there."""

import pytest

from kvtier.tiers.codecs.base import Shape
from kvtier.tiers.gpu import device_codec, exponent_kernels, kernels
from kvtier.tiers.gpu.fake import FakeDevice
from tests.gpu import test_kernels as on_gpu

from .host_kernels import HostKernels
from .host_launch import HostLaunch


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(exponent_kernels.SOURCE, exponent_kernels.NAMES, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("shape", on_gpu.SHAPES)
def test_the_codec(shape: Shape, on_host: HostKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_codec, "load", lambda device: on_host)
    device = FakeDevice(is_live=True)
    on_gpu.test_the_codec_is_bit_identical_both_ways(device, shape)
    device.shut_down()
    assert device.check_integrity() == device.left_behind == []


def test_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(is_live=True)
    monkeypatch.setattr(kernels, "load", HostLaunch)
    on_gpu.test_pieces_by_the_kernel(device, 333)
    device.shut_down()
    assert device.check_integrity() == device.left_behind == []
