"""Launching: kernels given as CUDA source, compiled where the device is and started on a stream of ours.

The source travels as text and is compiled at start (NVRTC, through cupy): one wheel for every architecture,
and no compiler on the host. A device that stands for a GPU in the tests brings a compiler of its own
(`FakeDevice.compiler`), which is how the same source runs where there is no GPU. Never ran on a GPU.
"""

import importlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol, cast

from .device import Device, DeviceError, Stream

log = logging.getLogger(__name__)

THREADS = 256  # of a block
MAX_BLOCKS = 1024  # kernels stride over what is more


class Launch(Protocol):
    """Starts a kernel of one source."""

    def __call__(self, stream: Stream, name: str, num_threads: int, arguments: Sequence[Any]) -> None:
        """Enqueue one launch; `arguments` are numpy integers as wide as the kernel's. Raises DeviceError."""
        ...


def load(device: Device, source: str, names: Sequence[str]) -> Launch | None:
    """Return what launches the kernels `names` of `source` on `device`; None where that is not possible, with
    the reason in the log. Compiles them, which takes a second or so."""
    compiler = getattr(device, "compiler", None)
    if compiler is not None:
        stand_in: Launch = compiler(source, names)
        return stand_in
    calling = getattr(device, "calling", None)
    if calling is None:  # neither CUDA nor a stand-in with a compiler
        return None
    try:
        cupy: Any = importlib.import_module("cupy")
        with calling():
            module = cupy.RawModule(code=source)
            kernels = {name: module.get_function(name) for name in names}
    except (ImportError, DeviceError, RuntimeError, OSError) as problem:
        log.warning("kernels cannot be compiled, their work is done on the host: %s", problem)
        return None

    failed: Any = cupy.cuda.driver.CUDADriverError  # launches go through the driver, which has its own

    def launch(stream: Any, name: str, num_threads: int, arguments: Sequence[Any]) -> None:
        num_blocks = min(MAX_BLOCKS, -(-num_threads // THREADS))
        try:
            with calling(), cupy.cuda.ExternalStream(stream.pointer):
                kernels[name]((num_blocks,), (THREADS,), tuple(arguments))
        except failed as error:
            raise cast(Any, device).error(int(error.status), str(error)) from error

    return launch
