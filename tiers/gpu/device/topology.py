"""Topology of a host's GPUs: NUMA nodes, PCIe links, and which reach each other over NVLink.

A copy between dram and hbm that crosses the link between two processors loses a third and more of its speed,
so the node on which the warm pool lies is worth knowing before anything is measured. All of it but NVLink
stands in sysfs, which needs neither CUDA nor a driver's library, and which a test can write itself. NVLink is
asked through nvidia-ml-py where it is installed; without it nothing is claimed.

Rejected: NVML for everything (it knows no NUMA node on many drivers, and CUDA_VISIBLE_DEVICES does not
renumber it); hwloc (a library more for four files).

Sources: Linux, Documentation/ABI/testing/sysfs-bus-pci; NVML API reference, NVLink methods.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .contract import Device

_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # class of VGA and 3D controllers
_MAX_NVLINKS = 18  # of one GPU (Hopper, Blackwell)


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """One GPU in its host. A width of 0 is not known.

    `nvlinks`: how many links lead to another GPU, by its bus id; "switch": into an NVSwitch."""

    bus_id: str  # 0000:17:00.0
    numa_node: int | None  # None: the kernel does not say, or there is only one
    pcie_gt_per_s: float = 0.0  # per lane, now; less while the GPU idles
    pcie_width: int = 0
    max_pcie_width: int = 0
    nvlinks: tuple[tuple[str, int], ...] = ()


def gpus(sysfs: Path = Path("/sys")) -> tuple[GpuPlace, ...]:
    """Return the NVIDIA GPUs that the kernel sees, in the order of their addresses, without NVLink."""
    found = []
    for folder in sorted((sysfs / "bus/pci/devices").glob("*")):
        if _read(folder / "vendor") != _NVIDIA or not _read(folder / "class").startswith(_DISPLAY):
            continue
        node = _read(folder / "numa_node")
        found.append(
            GpuPlace(
                folder.name.lower(),
                int(node) if node.isdigit() else None,  # -1: not known
                _number(_read(folder / "current_link_speed")),
                int(_number(_read(folder / "current_link_width"))),
                int(_number(_read(folder / "max_link_width"))),
            )
        )
    return tuple(found)


def with_nvlinks(places: Sequence[GpuPlace]) -> tuple[GpuPlace, ...]:
    """Return the same with what NVML says of NVLink, where nvidia-ml-py is installed and a driver answers."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return tuple(places)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return tuple(places)
    try:
        return tuple(replace(place, nvlinks=_nvlinks(nvml, place.bus_id)) for place in places)
    finally:
        nvml.nvmlShutdown()


def _nvlinks(nvml: Any, bus_id: str) -> tuple[tuple[str, int], ...]:
    """Count the active links of one GPU by where they lead."""
    counts: dict[str, int] = {}
    try:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
        for link in range(_MAX_NVLINKS):
            if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                continue
            kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            if kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
                remote = nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)
                peer = f"{remote.domain:04x}:{remote.bus:02x}:{remote.device:02x}.0"
            else:
                peer = "switch"
            counts[peer] = counts.get(peer, 0) + 1
    except nvml.NVMLError:  # no such link, or none at all: what was counted stands
        pass
    return tuple(sorted(counts.items()))


def place_of(device: Device, places: Sequence[GpuPlace]) -> GpuPlace | None:
    """Return where `device` is, by the bus id that CUDA gives it; None where it has none."""
    bus_id = getattr(device, "bus_id", "")
    return next((place for place in places if place.bus_id == bus_id), None)


def describe(place: GpuPlace) -> str:
    """Return a place in words: "0000:17:00.0 on node 0, PCIe x16 at 32 GT/s, NVLink: 18 to a switch"."""
    node = "an unknown node" if place.numa_node is None else f"node {place.numa_node}"
    words = [f"{place.bus_id} on {node}"]
    if place.pcie_width:
        narrow = f" of x{place.max_pcie_width}" if place.pcie_width < place.max_pcie_width else ""
        words.append(f"PCIe x{place.pcie_width}{narrow} at {place.pcie_gt_per_s:g} GT/s")
    if place.nvlinks:
        links = ", ".join(f"{n} to {'a switch' if p == 'switch' else p}" for p, n in place.nvlinks)
        words.append(f"NVLink: {links}")
    return ", ".join(words)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> float:
    """Return the number that a text begins with ("32.0 GT/s PCIe"), 0 where there is none."""
    try:
        return float(text.split()[0])
    except (IndexError, ValueError):
        return 0.0
