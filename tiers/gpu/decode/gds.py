"""GPUDirect Storage: whether this host has it, whether it is quicker here, and reading with it.

GDS lets an NVMe controller write into a GPU's memory. It is only that where NVIDIA's kernel module is loaded,
the file system and the disk support it and no IOMMU is in the way; otherwise cuFile quietly does what we do
ourselves, through a bounce buffer of its own. So nothing is believed: `why_not` names what is missing, kvikio
is told not to fall back, and `is_quicker` compares both ways on a real file of the cold store.

The host has not seen records that came this way: cold_edge.py has its header sent back, and hashes on the
device what it speaks of. A device without kernels therefore has no use for this.

Sources: kvikio 26.10 (CuFile, defaults); NVIDIA GPUDirect Storage installation guide, supported file systems.
Without a driver kvikio refuses, as it should; never ran with one.
"""

import importlib
import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from ..device.contract import DeviceError, DeviceFault, DeviceMemory
from ..device.libraries import installed

FILE_SYSTEMS = ("ext4", "xfs")  # local ones; ext4 in its default journalling mode, data=ordered
ALIGNMENT = 4096  # of offsets, lengths and addresses: what is not aligned is copied by the host
MIN_GAIN = 1.05  # below this the bounce stays: it works everywhere
MAX_OPEN = 64  # files
_MODULES = Path("/proc/modules")
_NVFS = Path("/proc/driver/nvidia-fs/version")


@dataclass(frozen=True, slots=True)
class GdsFacts:
    """What of GDS is installed. Empty strings: not."""

    kvikio: str = ""
    module: str = ""  # nvidia-fs, or p2pdma by the kernel itself
    is_iommu_on: bool = False


def look(modules: Path = _MODULES, nvfs: Path = _NVFS, iommu: Path = Path("/sys/class/iommu")) -> GdsFacts:
    """Look at this host; loads nothing."""
    version = installed(("kvikio-cu12", "kvikio-cu13", "kvikio")).partition(" ")[2]
    try:
        loaded = any(line.split(" ")[0] == "nvidia_fs" for line in modules.read_text().splitlines())
    except OSError:
        loaded = False
    module = "nvidia-fs" if loaded or nvfs.exists() else ""
    return GdsFacts(version, module, iommu.is_dir() and any(iommu.iterdir()))


def why_not(facts: GdsFacts, filesystem: str) -> list[str]:
    """Return what stands in the way of GDS for a cold store on `filesystem`; nothing: it can be tried."""
    reasons = []
    if not facts.kvikio:
        reasons.append("kvikio is not installed (pip install kvikio-cu12)")
    if not facts.module:
        reasons.append("the kernel module nvidia-fs is not loaded (install nvidia-gds, modprobe nvidia-fs)")
    if filesystem not in FILE_SYSTEMS:
        reasons.append(f"{filesystem} is not supported ({' and '.join(FILE_SYSTEMS)} are)")
    if facts.is_iommu_on:
        reasons.append("an IOMMU is on, which keeps a disk from writing to a GPU (iommu=pt or off)")
    return reasons


class FileReader(Protocol):
    """Reads from one file into device memory."""

    def read(self, offset: int, memory: DeviceMemory) -> None:
        """Fill `memory` from `offset` on. Blocks. Raises DeviceError."""
        ...

    def close(self) -> None:
        """Close the file. Idempotent."""
        ...


OpenFile: TypeAlias = Callable[[Path], FileReader]  # raises DeviceError


class Reader:
    """Reads from a file into device memory with cuFile. One per file; `close` it.

    Raises DeviceError (UNAVAILABLE) when kvikio is missing or would fall back to ordinary reads.
    """

    def __init__(self, path: Path) -> None:
        try:
            kvikio: Any = importlib.import_module("kvikio")
            defaults: Any = importlib.import_module("kvikio.defaults")
        except (ImportError, OSError, RuntimeError) as error:
            raise DeviceError(DeviceFault.UNAVAILABLE, f"kvikio cannot be loaded ({error})") from error
        try:
            defaults.set({"compat_mode": kvikio.CompatMode.OFF})  # else it reads as we do, and says nothing
            self._file = kvikio.CuFile(path, "r")
        except (OSError, RuntimeError) as error:
            raise DeviceError(DeviceFault.UNAVAILABLE, f"cuFile refuses {path.name} ({error})") from error

    def read(self, offset: int, memory: DeviceMemory) -> None:
        """Fill `memory` from `offset` on, both aligned to ALIGNMENT. Blocks. Raises DeviceError (REFUSED)."""
        assert offset % ALIGNMENT == memory.address % ALIGNMENT == memory.num_bytes % ALIGNMENT == 0
        try:
            num_bytes = self._file.raw_read(_Array(memory), memory.num_bytes, offset)
        except (OSError, RuntimeError) as error:
            raise DeviceError(DeviceFault.REFUSED, f"cuFile: {error}") from error
        if num_bytes != memory.num_bytes:
            raise DeviceError(DeviceFault.REFUSED, f"cuFile read {num_bytes} of {memory.num_bytes} bytes")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


class Records:
    """Reads records of a cold store into device memory without the host.

    Keeps one open file per life of a segment, the ones used last. Thread-safe."""

    def __init__(self, whereabouts: Callable[[int], tuple[Path, int, int]], open_file: OpenFile) -> None:
        self._whereabouts = whereabouts
        self._open_file = open_file
        self._files: OrderedDict[tuple[Path, int], FileReader] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, place: int, memory: DeviceMemory) -> None:
        """Fill `memory` from the record at `place` on, header first. Blocks. Raises DeviceError."""
        path, epoch, offset = self._whereabouts(place)
        with self._lock:
            reader = self._files.get((path, epoch)) or self._open_file(path)
            self._files[path, epoch] = reader
            self._files.move_to_end((path, epoch))
            while len(self._files) > MAX_OPEN:  # a read under way holds its file; it closes after that
                self._files.popitem(last=False)
        reader.read(offset, memory)


class _Array:
    """Device memory as kvikio wants it: anything with a CUDA array interface (version 3)."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
            "strides": None,
        }


class Trial(NamedTuple):
    """Seconds for the same bytes either way, medians; and whether the direct one is the one to take."""

    direct_s: float
    bounce_s: float

    @property
    def is_quicker(self) -> bool:
        """Whether the direct way is so much quicker that it is worth taking."""
        return self.direct_s * MIN_GAIN < self.bounce_s


def compare(
    direct: Callable[[], None],
    bounce: Callable[[], None],
    is_same: Callable[[], bool],
    num_rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> Trial:
    """Time both ways of bringing the same bytes to the device, in turns: neither has the quieter disk.

    `is_same` compares what they brought. Raises DeviceError (REFUSED) when that differs."""

    def time_s(way: Callable[[], None]) -> float:
        began_at = clock()
        way()
        return clock() - began_at

    pairs = [(time_s(direct), time_s(bounce)) for _ in range(num_rounds)]
    if not is_same():
        raise DeviceError(DeviceFault.REFUSED, "GPUDirect Storage brought other bytes than an ordinary read")
    return Trial(*(statistics.median(column) for column in zip(*pairs, strict=True)))
