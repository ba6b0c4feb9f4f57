"""Kernels through cupy: what it is called with, and what becomes of its errors. Over a stub of cupy whose
functions have the parameters of cupy 14.2 (signatures.json), and which warns where cupy warns."""

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.tiers.gpu.device import launching
from kvtier.tiers.gpu.device.contract import CopyPieces, DeviceError, DeviceFault
from kvtier.tiers.gpu.device.cuda import CudaDevice
from kvtier.tiers.gpu.pages import kernels
from tests.tiers.gpu.stub_cuda import stubbed_cuda

SOURCE, NAMES = "extern ...", ("one", "two")


class CompileException(Exception):
    """Not a RuntimeError, as cupy's."""


class CUDADriverError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class CUDARuntimeError(CUDADriverError):
    pass


class StubCupy:
    """The part of cupy that is used. `launched` are (kernel, grid, block, arguments, stream)."""

    def __init__(self, *, compiling: Exception | None = None, launching: Exception | None = None) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.cuda = SimpleNamespace(
            compiler=SimpleNamespace(CompileException=CompileException),
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError),
            ExternalStream=self._external_stream,
        )
        self._compiling, self._launching = compiling, launching

    def _external_stream(self, ptr: int, device_id: int = -1) -> Any:
        warnings.warn("ExternalStream is deprecated. Use Stream.from_external()", DeprecationWarning, 2)

    def RawModule(self, *, code: str | None = None, options: tuple[str, ...] = ()) -> Any:  # noqa: N802
        def compile_it(log_stream: Any = None) -> None:
            if self._compiling is not None:
                raise self._compiling

        return SimpleNamespace(compile=compile_it, get_function=self._kernel)

    def _kernel(self, name: str) -> Callable[..., None]:
        def run(
            grid: tuple[int, ...],
            block: tuple[int, ...],
            args: tuple[Any, ...],
            shared_mem: int = 0,
            stream: Any = None,
        ) -> None:
            if self._launching is not None:
                raise self._launching
            self.launched.append((name, grid, block, args, stream.ptr))

        return run


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    made = stubbed_cuda()
    yield made
    made.shut_down()


def with_cupy(monkeypatch: pytest.MonkeyPatch, cupy: Any) -> None:
    monkeypatch.setattr(importlib, "import_module", {"cupy": cupy}.__getitem__)


def test_a_launch_is_one_call_on_the_given_stream(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without cupy's own streams: making one of ours warns, and tests count warnings as errors."""
    cupy = StubCupy()
    with_cupy(monkeypatch, cupy)
    launch = launching.load(device, SOURCE, NAMES)
    stream: Any = device.take_stream()
    assert launch is not None
    launch(stream, "two", 1000, [np.int32(7)])
    assert cupy.launched == [("two", (4,), (256,), (np.int32(7),), stream.pointer)]
    copy = kernels.load(device)
    assert copy is not None
    copier = kernels.PieceKernel(device, copy)
    copier.copy(stream, CopyPieces(*np.zeros((3, 1 << 16), np.uint64)))
    assert cupy.launched[1][:3] == (kernels.NAME, (kernels.MAX_BLOCKS,), (256,))
    assert [argument.itemsize for argument in cupy.launched[1][3]] == [8, 8, 8, 4]
    copier.close()
    device.give_stream(stream)


@pytest.mark.parametrize(
    "problem", [CompileException("line 3"), RuntimeError("Failed to find CUDA headers"), OSError("no NVRTC")]
)
def test_what_cannot_be_compiled_is_done_without_kernels(
    device: CudaDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    problem: Exception,
) -> None:
    with_cupy(monkeypatch, StubCupy(compiling=problem))
    with caplog.at_level(logging.WARNING):
        assert launching.load(device, SOURCE, NAMES) is None
        assert kernels.load(device) is None
    assert str(problem) in caplog.text


def test_without_cupy_there_are_no_kernels(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    assert launching.load(device, SOURCE, NAMES) is None
    assert kernels.load(device) is None


@pytest.mark.parametrize("kind", [CUDADriverError, CUDARuntimeError])
def test_a_launch_that_fails_is_a_device_error(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, kind: type[CUDADriverError]
) -> None:
    with_cupy(monkeypatch, StubCupy(launching=kind(1)))
    launch, copy = launching.load(device, SOURCE, NAMES), kernels.load(device)
    stream: Any = device.take_stream()
    assert launch is not None
    assert copy is not None
    with pytest.raises(DeviceError, match="status 1") as caught:
        launch(stream, "one", 1, [])
    assert caught.value.fault is DeviceFault.REFUSED
    with pytest.raises(DeviceError, match="status 1") as caught:
        copy(stream, kernels.NAME, 32, [])
    assert caught.value.fault is DeviceFault.REFUSED
    device.give_stream(stream)
