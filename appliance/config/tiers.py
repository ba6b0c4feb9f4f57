"""The `tiers:` section of the settings: capacity and properties of each memory tier and of the cold store.

tiers:
  hbm: {backend: cuda, capacity: 40GiB}
  dram: {capacity: 64GiB}
  nvme: {path: /var/lib/kvtier, capacity: 1TiB}
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from ...v1.shm import HUGE_PAGE_BYTES, PAGE_BYTES
from ..core.options import WriteMode
from . import units
from .fields import (
    Bytes,
    Capacity,
    DailyWrites,
    Devices,
    Directory,
    Nodes,
    Section,
    Switch,
    refuse,
    require_multiple,
)

MAX_EXTENTS = 16_384  # each is a descriptor and a mapping, here and in every client
MAX_SEGMENTS = 1_000_000  # of one cold store (tiers/cold/opening.py)
MIN_SEGMENTS = 3  # one to fill, one to reclaim, one to reclaim into


class _MemoryTier(Section):
    capacity_bytes: Bytes = Field(default=1 << 30, alias="capacity")
    """Memory to take at start. Whole extents are used; what is left over is not taken."""
    extent_bytes: Bytes = Field(default=64 << 20, alias="extent")
    """Unit in which memory is taken and handed to clients, a multiple of 2MiB. No fragment can be larger."""

    @property
    def num_extents(self) -> int:
        """Number of extents this tier has."""
        return self.capacity_bytes // self.extent_bytes

    @model_validator(mode="after")
    def _check_extents(self) -> Self:
        require_multiple("extent", self.extent_bytes, HUGE_PAGE_BYTES)
        capacity, extent = units.format_bytes(self.capacity_bytes), units.format_bytes(self.extent_bytes)
        if self.capacity_bytes < self.extent_bytes:
            refuse(
                "capacity", f"{capacity} is less than one extent of {extent}; raise capacity or lower extent"
            )
        if self.num_extents > MAX_EXTENTS:
            enough = HUGE_PAGE_BYTES
            while self.capacity_bytes // enough > MAX_EXTENTS:
                enough *= 2
            refuse(
                "extent",
                f"{capacity} in extents of {extent} are {self.num_extents} extents, limit {MAX_EXTENTS}; "
                f"write {units.format_bytes(enough)}",
            )
        return self


class HbmTier(_MemoryTier):
    """The hot tier: a GPU's memory, or memory that stands for it."""

    backend: Literal["host", "cuda"] = "host"
    """What holds the bytes. `host` is ordinary memory of this process, which clients read in place; `cuda` is
    the memory of an NVIDIA GPU, read on that GPU or by way of dram. Its kernels need
    `pip install kvtier[gpu-cuda12]`, or `kvtier[gpu-cuda13]` with a driver for CUDA 13."""
    device: int = Field(default=0, ge=0, le=255)
    """Which GPU, as this process numbers them (CUDA_VISIBLE_DEVICES). Only for `cuda`."""
    direct_devices: Devices = "all"
    """GPUs whose runtimes get blocks straight into their pages: `device`, and these, or `all` that are
    visible. Each costs some hundred megabytes of its memory for a CUDA context. Only for `cuda`."""
    from_nvme: Switch = "auto"
    """Whether blocks that are wanted on the GPU come from nvme without a stop in dram: encoded ones are
    decoded there. `auto` does it where a trial at start finds it quicker, `on` for all that the GPU can
    decode, `off` never. Encrypted blocks always stop in dram. Only for `cuda`."""


class DramTier(_MemoryTier):
    """The warm tier: sealed shared memory that clients read in place."""

    capacity_bytes: Capacity = Field(default="auto", alias="capacity", validate_default=True)
    """Memory to take at start: a size, or a share of the memory this process may use (the host's, or its
    container's limit) such as `40%`. `auto`: a quarter, at most 32GiB and half of what is available, at least
    256MiB. Whole extents are used; what is left over is not taken."""
    hugepages: Switch = "auto"
    """2MiB pages: `auto` takes them where the host has them free, `on` insists, `off` never."""
    lock: bool = False
    """Keep the memory from being swapped out. Needs a large enough memlock limit or CAP_IPC_LOCK."""
    numa_nodes: Nodes = []
    """NUMA nodes to take the memory from, CXL nodes included. Empty: wherever the kernel likes."""


class NvmeTier(Section):
    """The cold tier: append-only segment files."""

    path: Directory
    """Directory of the segment files, on the NVMe device. It belongs to one daemon at a time."""
    capacity_bytes: Bytes = Field(alias="capacity")
    """Disk space to use. Whole segments are used; what is left over is not."""
    segment_bytes: Bytes = Field(default=64 << 20, alias="segment")
    """Size of one segment file, a multiple of 4KiB. Space comes back a whole segment at a time."""
    durability: Literal["none", "segment", "record"] = "segment"
    """What is on the device before it counts: nothing, each full segment, or each record."""
    write: WriteMode = "idle"
    """When blocks are copied here, and so survive the process: `spill`, when memory needs their room; `idle`,
    also while the device has nothing else to do; `through`, each put as soon as it was answered."""
    daily_writes_bytes: DailyWrites = Field(default="auto", alias="daily_writes")
    """Bytes a day that may be written here before idle copies wait for the next day: a size, `auto` for as
    much as `capacity`, or `unlimited`. Spills and `through` count, and do not wait."""

    @property
    def num_segments(self) -> int:
        """Number of segments this tier has."""
        return self.capacity_bytes // self.segment_bytes

    @property
    def daily_limit_bytes(self) -> int | None:
        """Bytes a day, None without a limit. One write of the capacity a day is what drives made for reading
        are warranted for."""
        daily = self.daily_writes_bytes
        if isinstance(daily, str):
            return self.capacity_bytes if daily == "auto" else None
        return daily

    @model_validator(mode="after")
    def _check_segments(self) -> Self:
        require_multiple("segment", self.segment_bytes, PAGE_BYTES)
        segment = units.format_bytes(self.segment_bytes)
        if not 1 << 20 <= self.segment_bytes <= 16 << 30:
            refuse("segment", f"{segment} is outside 1MiB to 16GiB; 64MiB suits most devices")
        if self.num_segments > MAX_SEGMENTS:
            most = units.format_bytes(MAX_SEGMENTS * self.segment_bytes)
            refuse("segment", f"{MAX_SEGMENTS} segments of this size hold {most}; write larger ones")
        if self.num_segments < MIN_SEGMENTS:
            least = units.format_bytes(MIN_SEGMENTS * self.segment_bytes)
            refuse(
                "capacity",
                f"{units.format_bytes(self.capacity_bytes)} holds {self.num_segments} segments of {segment}, "
                f"at least {MIN_SEGMENTS} are needed; write {least} or more, or lower segment",
            )
        if self.daily_limit_bytes is not None and self.daily_limit_bytes < self.segment_bytes:
            daily = units.format_bytes(self.daily_limit_bytes)
            refuse(
                "daily_writes",
                f"{daily} is less than one segment of {segment}; write {segment} or more, or `write: spill` "
                "for no idle copies",
            )
        return self


class Tiers(Section):
    """Where bytes live, fastest first."""

    hbm: HbmTier | None = None
    """The hot tier; null for none."""
    dram: DramTier = Field(default_factory=DramTier)
    """The warm tier. There is always one: it is what clients read."""
    nvme: NvmeTier | None = None
    """The cold tier; null for none, then what leaves dram is gone."""
