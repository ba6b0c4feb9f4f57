"""What a daemon with `backend: cuda` finds on this host: the driver, and what kernels need.

Copies need the driver only. Kernels (small pieces, decoding on the device) are compiled at start by cupy,
which needs NVRTC and CUDA's headers; `cuda-pathfinder`, which cupy 14 depends on, looks for them where cupy
does. Nothing here makes a CUDA context.
"""

import importlib
import importlib.metadata
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_int
from dataclasses import dataclass
from typing import Any

from ....v1 import cuda

EXTRAS = {"12": "kvtier[gpu-cuda12]", "13": "kvtier[gpu-cuda13]"}
_DISTRIBUTIONS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_MIN_CUPY = 14


@dataclass(frozen=True, slots=True)
class CudaLibraries:
    """What was found; an empty string: nothing. `problem` says why there is no driver."""

    driver: str = ""  # the newest CUDA that the driver runs: "13.0"
    problem: str = ""
    cupy: str = ""  # distribution and version: "cupy-cuda13x 14.2.0"
    nvrtc: str = ""  # the library's path
    headers: str = ""  # their folder


def look() -> CudaLibraries:
    """Look at this host. Loads NVRTC where it is found."""
    driver, problem = _driver()
    nvrtc = headers = ""
    try:
        pathfinder: Any = importlib.import_module("cuda.pathfinder")
    except ImportError:
        return CudaLibraries(driver, problem, installed(_DISTRIBUTIONS))
    with suppress(RuntimeError, OSError):
        nvrtc = str(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path or "")
    with suppress(RuntimeError, OSError):
        headers = str(pathfinder.find_nvidia_header_directory("cudart") or "")
    return CudaLibraries(driver, problem, installed(_DISTRIBUTIONS), nvrtc, headers)


def missing(found: CudaLibraries) -> list[tuple[str, str]]:
    """Return what is missing as (what, fix) in words; empty when nothing is."""
    if found.problem:
        return [("the NVIDIA driver", found.problem)]
    major = found.driver.partition(".")[0]
    extra = EXTRAS["12" if major == "12" else max(EXTRAS)]
    name, _, version = found.cupy.partition(" ")
    if not found.cupy:
        return [("cupy, so no kernels", f"pip install '{extra}'")]
    if int(version.partition(".")[0]) < _MIN_CUPY:
        return [(f"cupy {_MIN_CUPY} ({found.cupy} is here)", f"pip install '{extra}'")]
    if name == "cupy-cuda13x" and major == "12":
        text = f"a driver for CUDA 13 (this one runs {found.driver}), which {name} needs"
        return [(text, f"pip uninstall {name}, then pip install '{extra}', or a newer driver")]
    extra = EXTRAS["12"] if name == "cupy-cuda12x" else extra
    parts = {"NVRTC, so no kernels": found.nvrtc, "CUDA's headers, so no kernels": found.headers}
    return [(what, f"pip install '{extra}'") for what, where in parts.items() if not where]


def _driver() -> tuple[str, str]:
    """Return the newest CUDA that the driver runs, or why there is none."""
    version = c_int()
    try:
        cuda.check("cuDriverGetVersion", byref(version))
    except OSError as problem:
        return "", str(problem)
    except cuda.DriverStatus as problem:
        return "", f"the NVIDIA driver does not say its version (status {problem.status})"
    return f"{version.value // 1000}.{version.value % 1000 // 10}", ""


def installed(distributions: Sequence[str]) -> str:
    """Return the first of `distributions` that is installed, and its version: "cupy 14.2.0"; empty: none."""
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return ""
