"""The `tiers:` section of the settings: capacity and properties of each memory tier and of the cold store.

tiers:
  hbm: {backend: cuda, capacity: 40GiB}
  dram: {capacity: 64GiB}
  cxl: {kind: memory, capacity: 256GiB, numa_nodes: [2]}
  nvme: {path: /var/lib/kvtier, capacity: 1TiB}

Any number of further memories may stand between dram and nvme, under names of their own; their order is the
order of the ladder, whatever stands between them.
"""

import difflib
import re
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from ...tiers.block import Tier
from ...tiers.ladder import ON_DEVICE, STANDARD, Ladder, with_memory
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
MAX_FURTHER = 8  # memories below dram; each costs a column of every block in the catalog
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,15}")
#: Words that stand beside the names of tiers in metrics, counters and answers.
_TAKEN = frozenset({"declined", "gone", "missed", "none", "remote", "staging", "store", "unspecified"})


DEFAULT_EXTENT_BYTES = 64 << 20


class TierSize(NamedTuple):
    """Size of one tier that a daemon has."""

    capacity_bytes: int
    unit_bytes: int  # of an extent or a segment

    @property
    def num_units(self) -> int:
        """Number of whole extents or segments."""
        return self.capacity_bytes // self.unit_bytes


def _check_extents(name: str, size: TierSize) -> None:
    """Refuse a capacity that is no extent, or too many of them; names keys below `tiers`."""
    capacity, extent = units.format_bytes(size.capacity_bytes), units.format_bytes(size.unit_bytes)
    if not size.num_units:
        words = f"{capacity} is less than one extent of {extent}; raise capacity or lower dram.extent"
        refuse(f"{name}.capacity", words)
    if size.num_units > MAX_EXTENTS:
        enough = HUGE_PAGE_BYTES
        while size.capacity_bytes // enough > MAX_EXTENTS:
            enough *= 2
        refuse(
            "dram.extent",
            f"{capacity} in extents of {extent} are {size.num_units} extents, limit {MAX_EXTENTS}; "
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
    """Pages of 2MiB for all host memory: `auto` uses free ones, `on` fails without them, `off` uses none. Set
    `on` where the host reserves them for kvtier, on every node that a tier is taken from."""
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


class MemoryTier(Section):
    """A further memory of the host below dram, which clients read in place, such as a CXL memory node.

    Blocks are evicted from dram into it, and promoted when they are used again.
    """

    kind: Literal["memory"]
    """Says that a further tier is meant, and no key misspelt. Always `memory`."""
    capacity_bytes: Bytes = Field(alias="capacity")
    """Memory taken at start, in whole extents of `tiers.dram.extent`. Set it to what the node has, less what
    other programs take from it."""
    numa_nodes: Nodes = []
    """NUMA nodes to allocate from. Set it to the node of the memory, as in `numactl --hardware`. Empty: the
    kernel chooses, as for tests on a host with one node."""


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
    """The `tiers:` section: memory and disk of the daemon.

    Keys with other names are further memories, in their order between dram and nvme.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, MemoryTier] = Field(init=False)

    hbm: HbmTier | None = None
    """The hot tier; null: none."""
    dram: DramTier = Field(default_factory=DramTier)
    """The warm tier, which takes puts and which clients read; always present."""
    nvme: NvmeTier | None = None
    """The cold tier; null: none, blocks evicted from the slowest memory are dropped."""

    #: Names with a place of their own in the ladder.
    OWN_NAMES: ClassVar = ("hbm", "dram", "nvme")

    @property
    def further(self) -> dict[str, MemoryTier]:
        """The memories between dram and nvme by name, fastest first."""
        return self.__pydantic_extra__ or {}

    @property
    def ladder(self) -> Ladder:
        """The tiers that this daemon can have.

        Clients on the host read hbm in place only where it is host memory.
        """
        return with_memory(list(self.further), ON_DEVICE if self.is_on_device else STANDARD)

    @property
    def is_on_device(self) -> bool:
        """Whether hbm is a GPU's memory."""
        return self.hbm is not None and self.hbm.backend != "host"

    @property
    def host_memory(self) -> dict[Tier, TierSize]:
        """The size of each tier that takes memory of this host, fastest first."""
        ladder = self.ladder
        memory = ladder.host_tiers if self.is_on_device else ladder.memory_tiers
        return {tier: size for tier, size in self.sizes.items() if tier in memory}

    @property
    def sizes(self) -> dict[Tier, TierSize]:
        """The size of each tier that there is, fastest first."""
        dram, nvme, ladder = self.dram, self.nvme, self.ladder
        sizes = {ladder.put_tier: TierSize(dram.capacity_bytes, dram.extent_bytes)}
        if self.hbm is not None:
            hbm = TierSize(self.hbm.capacity_bytes, dram.extent_bytes)
            sizes = {ladder.device_tier: hbm, **sizes}
        for name, tier in self.further.items():
            sizes[ladder.named(name)] = TierSize(tier.capacity_bytes, dram.extent_bytes)
        if nvme is not None:
            sizes[ladder.log_tier] = TierSize(nvme.capacity_bytes, nvme.segment_bytes)
        return sizes

    def memory_of(self, tier: Tier) -> DramTier | MemoryTier | None:
        """Return the settings that say how a tier's pages are allocated; None for hbm, which has none."""
        return self.dram if tier == self.ladder.put_tier else self.further.get(tier.label)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        names = [name for name in given if name not in cls.OWN_NAMES] if isinstance(given, dict) else []
        for name in names:
            if not isinstance(given[name], dict) or "kind" not in given[name]:
                own = ", ".join(cls.OWN_NAMES)
                near = difflib.get_close_matches(str(name), cls.OWN_NAMES, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                refuse(
                    str(name), f"unknown key; allowed here: {own}, or a memory that says kind: memory{hint}"
                )
            if _NAME.fullmatch(str(name)) is None or name in _TAKEN:
                refuse(
                    str(name),
                    f"{name!r} cannot name a tier; write up to 16 lower case letters, digits, '_', '-', and "
                    f"none of {', '.join(sorted(_TAKEN))}",
                )
        if len(names) > MAX_FURTHER:
            refuse(str(names[-1]), f"{len(names)} further memories, limit {MAX_FURTHER}; merge some of them")
        return given

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        for tier, size in self.sizes.items():
            if tier != self.ladder.log_tier:
                _check_extents(tier.label, size)
        if self.further and self.is_on_device:
            name = next(iter(self.further))
            refuse(name, "a GPU's hbm has copies to and from dram and nvme only; leave out hbm, or this tier")
        return self
