"""What of CUDA is installed, and what to do about what is not."""

import importlib
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.tiers.gpu.device import libraries
from kvtier.tiers.gpu.device.libraries import CudaLibraries, look, missing
from kvtier.v1 import cuda
from tests.tiers.gpu.stub_cuda import StubDriver, stubbed

WHOLE = CudaLibraries("13.0", "", "cupy-cuda13x 14.2.0", "/lib/libnvrtc.so.13", "/include")


@pytest.mark.parametrize(
    ("found", "what", "fix"),
    [
        (CudaLibraries(problem="no NVIDIA driver here"), "driver", "no NVIDIA driver here"),
        (CudaLibraries("13.0"), "cupy", "pip install 'kvtier[gpu-cuda13]'"),
        (CudaLibraries("12.8"), "cupy", "pip install 'kvtier[gpu-cuda12]'"),
        (CudaLibraries("12.8", "", "cupy-cuda12x 13.6.0"), "cupy 14 (cupy-cuda12x 13.6.0", "gpu-cuda12"),
        (
            CudaLibraries("12.8", "", "cupy-cuda13x 14.2.0"),
            "a driver for CUDA 13 (this one runs 12.8)",
            "cuda12",
        ),
        (CudaLibraries("13.0", "", "cupy-cuda12x 14.2.0", "", "/include"), "NVRTC", "kvtier[gpu-cuda12]"),
        (CudaLibraries("13.0", "", "cupy-cuda13x 14.2.0", "/nvrtc", ""), "headers", "kvtier[gpu-cuda13]"),
    ],
)
def test_what_is_missing_is_named_with_its_fix(found: CudaLibraries, what: str, fix: str) -> None:
    (named,) = missing(found)
    assert what in named[0]
    assert fix in named[1]


def test_nothing_is_missing() -> None:
    assert missing(WHOLE) == []


def test_what_is_found_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    monkeypatch.setattr(importlib.metadata, "version", {"cupy-cuda13x": "14.2.0"}.__getitem__)
    monkeypatch.setattr(importlib.metadata, "PackageNotFoundError", KeyError)
    cuda.library.cache_clear()
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-that-is-not-there.so.1")
    found = look()
    assert "libcuda-that-is-not-there" in found.problem
    assert (found.driver, found.cupy, found.nvrtc, found.headers) == ("", "cupy-cuda13x 14.2.0", "", "")
    finder = SimpleNamespace(
        load_nvidia_dynamic_lib=lambda name: SimpleNamespace(abs_path=f"/lib/{name}"),
        find_nvidia_header_directory=lambda name: f"/include/{name}",
    )
    monkeypatch.setattr(importlib, "import_module", {"cuda.pathfinder": finder}.__getitem__)
    with stubbed(StubDriver()):
        assert look() == CudaLibraries("13.0", "", "cupy-cuda13x 14.2.0", "/lib/nvrtc", "/include/cudart")
    assert set(libraries.EXTRAS) == {"12", "13"}
