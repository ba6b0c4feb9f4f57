"""The `tiers:` section of the settings: capacity and properties of each memory tier and of the cold store.

tiers:
  hbm: {backend: cuda, capacity: 40GiB}
  dram: {capacity: 64GiB}
  nvme: {path: /var/lib/kvtier, capacity: 1TiB}
"""

from typing import Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from ...v1.shm import HUGE_PAGE_BYTES, PAGE_BYTES
from ..core.options import WriteMode
from . import units
from .fields import (
    Bytes,
    Capacity,
    DailyWrites,
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


DEFAULT_EXTENT_BYTES = 64 << 20


def _check_extents(tier: str, capacity_bytes: int, extent_bytes: int) -> None:
    """Refuse a capacity that is no extent, or too many of them; names keys below `tiers`."""
    capacity, extent = units.format_bytes(capacity_bytes), units.format_bytes(extent_bytes)
    num_extents = capacity_bytes // extent_bytes
    if not num_extents:
        words = f"{capacity} is less than one extent of {extent}; raise capacity or lower dram.extent"
        refuse(f"{tier}.capacity", words)
    if num_extents > MAX_EXTENTS:
        enough = HUGE_PAGE_BYTES
        while capacity_bytes // enough > MAX_EXTENTS:
            enough *= 2
        refuse(
            "dram.extent",
            f"{capacity} in extents of {extent} are {num_extents} extents, limit {MAX_EXTENTS}; "
            f"write {units.format_bytes(enough)}",
        )


class HbmTier(Section):
    """The hot tier: memory of a GPU, or host memory in its place."""

    capacity_bytes: Bytes = Field(default=1 << 30, alias="capacity")
    """Memory taken at start, in whole extents of the size of dram's; the rest is not taken. Set it to what
    the models and other programs on the device leave free."""
    backend: Literal["host", "cuda"] = "host"
    """`cuda`: memory of an NVIDIA GPU, read on that GPU or through dram; needs `pip install
    kvtier[gpu-cuda12]`, or `kvtier[gpu-cuda13]` with a driver for CUDA 13. `host`: memory of this process,
    which clients read in place. Set `cuda` on hosts with a GPU that has memory to spare."""
    device: int = Field(default=0, ge=0, le=255)
    """Number of the GPU among those in CUDA_VISIBLE_DEVICES. Set it to place hbm beside the runtime that uses
    it most. Only for `cuda`."""
    from_nvme: Switch = "auto"
    """Whether blocks go from nvme to the GPU without a copy in dram; encoded ones are decoded on the GPU.
    `auto` tries both at start and uses the faster one; set `on` or `off` where other load disturbs that
    trial. Encrypted blocks always go through dram. Only for `cuda`."""
    _extent_bytes: int = PrivateAttr(DEFAULT_EXTENT_BYTES)  # dram's, as clients learn one size (Tiers)

    @property
    def extent_bytes(self) -> int:
        """Bytes of an extent."""
        return self._extent_bytes

    @property
    def num_extents(self) -> int:
        """Number of extents this tier has."""
        return self.capacity_bytes // self.extent_bytes


class DramTier(Section):
    """The warm tier: sealed shared memory that clients read in place."""

    capacity_bytes: Capacity = Field(default="auto", alias="capacity", validate_default=True)
    """Memory taken at start, in whole extents: a size, or a share such as `40%` of the memory of the host or
    its container. `auto`: a quarter, at most 32GiB and half of the available memory, at least 256MiB. Set it
    on every host that serves a model."""
    extent_bytes: Bytes = Field(default=DEFAULT_EXTENT_BYTES, alias="extent")
    """Unit in which the memory tiers are allocated and mapped by clients, a multiple of 2MiB, and the largest
    fragment. Raise it for larger fragments, or for more than 1TiB."""
    hugepages: Switch = "auto"
    """Pages of 2MiB: `auto` uses free ones, `on` fails without them, `off` uses none. Set `on` where the host
    reserves them for kvtier."""
    lock: bool = False
    """Locks the memory, so that it is never swapped out. Set it on hosts with swap; needs a sufficient
    memlock limit or CAP_IPC_LOCK."""
    numa_nodes: Nodes = []
    """NUMA nodes to allocate from, CXL nodes included. Set it on hosts with several nodes, to those near the
    GPU. Empty: the kernel chooses."""

    @property
    def num_extents(self) -> int:
        """Number of extents this tier has."""
        return self.capacity_bytes // self.extent_bytes

    @model_validator(mode="after")
    def _check_extent(self) -> Self:
        require_multiple("extent", self.extent_bytes, HUGE_PAGE_BYTES)
        return self


class NvmeTier(Section):
    """The cold tier: append-only segment files."""

    path: Directory
    """Directory of the segment files, which one daemon at a time uses. Set it to the file system of the NVMe
    device."""
    capacity_bytes: Bytes = Field(alias="capacity")
    """Disk space to use, in whole segments; the rest is not used. Set it to what the file system has to
    spare."""
    segment_bytes: Bytes = Field(default=64 << 20, alias="segment")
    """Size of a segment file, a multiple of 4KiB; space is reclaimed by whole segments. Lower it for a small
    capacity, raise it for a large one on a device with large erase blocks."""
    durability: Literal["none", "segment", "record"] = "segment"
    """Data that is flushed to the device before it is reported as stored: `none`, each full `segment`, or
    each `record`. Set `record` where a power failure must lose nothing, `none` where the store may start
    empty."""
    write: WriteMode = "idle"
    """When blocks are copied to nvme, and so survive the process. `spill`: when memory needs their space;
    `idle`: also while the device is idle; `through`: each put, once it is acknowledged. Set `through` where a
    crash must lose little, `spill` to save writes."""
    daily_writes_bytes: DailyWrites = Field(default="auto", alias="daily_writes")
    """Bytes per day after which idle copies wait for the next day: a size, `auto` for `capacity`, or
    `unlimited`. Set it to the endurance of the device. Spills and `through` count and do not wait."""

    @property
    def num_segments(self) -> int:
        """Number of segments this tier has."""
        return self.capacity_bytes // self.segment_bytes

    @property
    def daily_limit_bytes(self) -> int | None:
        """Bytes a day, None without a limit.

        One write of the capacity a day is what drives made for reading are warranted for.
        """
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
    """The `tiers:` section: memory and disk of the daemon."""

    hbm: HbmTier | None = None
    """The hot tier; null: none."""
    dram: DramTier = Field(default_factory=DramTier)
    """The warm tier, which clients read; always present."""
    nvme: NvmeTier | None = None
    """The cold tier; null: none, blocks evicted from dram are dropped."""

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        _check_extents("dram", self.dram.capacity_bytes, self.dram.extent_bytes)
        if self.hbm is not None:
            self.hbm._extent_bytes = self.dram.extent_bytes
            _check_extents("hbm", self.hbm.capacity_bytes, self.dram.extent_bytes)
        return self
