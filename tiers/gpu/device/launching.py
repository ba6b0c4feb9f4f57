"""Launching: kernels given as CUDA source, compiled where the device is and started on a stream of ours.

The source travels as text and is compiled at start (NVRTC, through cupy): one wheel for every architecture,
and no compiler on the host. cupy compiles with `-ftz=true` whatever it is told, so kernels must not need
subnormal floats. A device that stands for a GPU in the tests brings a compiler of its own
(`FakeDevice.compiler`), which is how the same source runs where there is no GPU.

Calls of cupy: tests/tiers/gpu/test_signatures.py holds them against cupy 13.6 and 14.2. Never ran on a GPU.
"""

import importlib
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

from ....v1 import cuda
from .contract import Device, DeviceError, Stream

log = logging.getLogger(__name__)

THREADS = 256  # of a block
MAX_BLOCKS = 1024  # kernels stride over what is more
#: What a kernel's source may begin with: names of types, and a loop in which all threads share the work.
PRELUDE = r"""
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define EACH(i, count) \
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < (i64)(count); \
         i += (i64)blockDim.x * gridDim.x)
"""


class Launch(Protocol):
    """Starts a kernel of one source."""

    def __call__(self, stream: Stream, name: str, num_threads: int, arguments: Sequence[Any]) -> None:
        """Enqueue one launch; `arguments` are numpy integers as wide as the kernel's. Raises DeviceError."""
        ...


class _StreamPointer(NamedTuple):
    """A stream as cupy's launches take it: anything with `ptr`."""

    ptr: int


def load(device: Device, source: str, names: Sequence[str], max_blocks: int = MAX_BLOCKS) -> Launch | None:
    """Compile `source`; return what launches its kernels `names` on `device`. Takes a second or so.

    None where that is not possible, with the reason in the log."""
    compiler = getattr(device, "compiler", None)
    if compiler is not None:
        stand_in: Launch = compiler(source, names)
        return stand_in
    enter = getattr(device, "enter", None)
    if enter is None:  # neither CUDA nor a stand-in with a compiler
        return None
    try:
        cupy: Any = importlib.import_module("cupy")
    except (ImportError, OSError, RuntimeError) as problem:
        log.warning("kernels cannot be compiled, their work is done on the host: %s", problem)
        return None
    try:
        enter()
        module = cupy.RawModule(code=source)
        module.compile()
        kernels = {name: module.get_function(name) for name in names}
    except (DeviceError, RuntimeError, OSError, cupy.cuda.compiler.CompileException) as problem:
        log.warning("kernels cannot be compiled, their work is done on the host: %s", problem)
        return None

    # Launches go through the driver, and making cupy's context on a thread through the runtime.
    failed: Any = (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError)

    def launch(stream: Any, name: str, num_threads: int, arguments: Sequence[Any]) -> None:
        num_blocks = min(max_blocks, -(-num_threads // THREADS))
        enter()
        try:
            on = _StreamPointer(stream.pointer)
            kernels[name]((num_blocks,), (THREADS,), tuple(arguments), stream=on)
        except failed as error:
            status = cuda.DriverStatus(f"launching {name}", int(error.status))
            raise cast(Any, device).error(status) from error

    return launch
