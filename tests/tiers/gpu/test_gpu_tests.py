"""The tests that need a GPU, run on the fake device with kernels on the host: a machine with a GPU is lent
for minutes, and a mistake in a test is not to be found there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.tiers.codecs.base import Shape
from kvtier.tiers.gpu.pages import kernels
from tests.fakes.gpu.device import FakeDevice
from tests.gpu import test_cold_edge as cold_on_gpu
from tests.gpu import test_kernels as on_gpu

from .host_kernels import on_host
from .host_launch import HostLaunch


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    made = FakeDevice(is_live=True, compiler=on_host)
    yield made
    made.shut_down()
    assert made.check_integrity() == made.left_behind == []


@pytest.mark.parametrize("shape", on_gpu.SHAPES)
def test_the_codec(device: FakeDevice, shape: Shape) -> None:
    on_gpu.test_exponents_decode_to_the_hosts_bits(device, shape)


def test_the_digest(device: FakeDevice) -> None:
    on_gpu.test_the_digest_is_the_hosts(device, 1032)


def test_the_quantisers(device: FakeDevice) -> None:
    on_gpu.test_quantised_records_decode_to_the_hosts_bits(device, 4, "bfloat16")


@pytest.mark.parametrize("kind", ["as it is", "int4"])
def test_the_edge_from_nvme(device: FakeDevice, tmp_path: Path, kind: str) -> None:
    cold_on_gpu.test_what_comes_up_is_what_the_store_holds(device, tmp_path, kind)


def test_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(is_live=True)
    monkeypatch.setattr(kernels, "load", HostLaunch)
    on_gpu.test_pieces_by_the_kernel(device, 333)
    device.shut_down()
    assert device.check_integrity() == device.left_behind == []
