"""NVIDIA's runtime compiler through ctypes: the one part of CUDA that works without a GPU and without a
driver.

`pip install nvidia-cuda-nvrtc-cu12` brings it; where it is missing the test is skipped. KVTIER_NVRTC names a
library elsewhere."""

import ctypes
import importlib.util
import os
from pathlib import Path

import pytest


def _library() -> ctypes.CDLL:
    candidates = [os.environ.get("KVTIER_NVRTC", "")]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        candidates += map(str, sorted(Path(folder).glob("*/lib/libnvrtc.so.*")))
    for candidate in [*candidates, "libnvrtc.so.12", "libnvrtc.so.13"]:
        try:
            return ctypes.CDLL(candidate) if candidate else ctypes.CDLL("libnvrtc.so")
        except OSError:
            continue
    pytest.skip("no libnvrtc here; pip install nvidia-cuda-nvrtc-cu12")


def compiled(source: str, architecture: str) -> str:
    """Return the PTX of `source`. Raises AssertionError with the compiler's log; warnings count."""
    library, program = _library(), ctypes.c_void_p()
    create = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    assert create == 0
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"-ftz=true"]  # as cupy
    status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    log = _text(library, "ProgramLog", program)
    assert status == 0, log
    assert "warning" not in log, log
    ptx = _text(library, "PTX", program)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx


def _text(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    assert getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(library, f"nvrtcGet{what}")(program, text) == 0
    return text.value.decode()
