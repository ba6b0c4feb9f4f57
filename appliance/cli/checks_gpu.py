"""The doctor's checks of how GPUs hang in this host. Pure, as in checks.py."""

from ...tiers.gpu.gds import why_not
from ...tiers.gpu.topology import describe
from ..settings import Settings
from .facts import Directory, Gpu
from .verdicts import Check, ok, warn


def check_topology(gpu: Gpu, settings: Settings) -> Check:
    """The warm pool is taken from the GPU's NUMA node, and its slot has all its lanes.

    The device of the settings is taken to be that one by PCI address, which it is unless CUDA_VISIBLE_DEVICES
    or CUDA_DEVICE_ORDER say otherwise.
    """
    detail = "; ".join(map(describe, gpu.places)) or "no NVIDIA GPU on the PCI bus"
    hbm = settings.tiers.hbm
    if hbm is None or hbm.backend == "host" or not gpu.places:
        return ok("gpu topology", detail)
    place = gpu.places[min(hbm.device, len(gpu.places) - 1)]
    if place.pcie_width < place.max_pcie_width:
        return warn(
            "gpu topology",
            f"{detail}; {place.bus_id} has {place.pcie_width} of its {place.max_pcie_width} lanes",
            "reseat the card, or look at how the slot is wired or split: copies are that much slower",
        )
    near = place.numa_node
    if near is not None and settings.tiers.dram.numa_nodes != [near]:
        others = settings.tiers.dram.numa_nodes or "wherever the kernel likes"
        return warn(
            "gpu topology",
            f"{detail}; dram is taken from {others}, device {hbm.device} hangs on node {near}",
            f"set tiers.dram.numa_nodes: [{near}]",
        )
    return ok("gpu topology", detail)


def check_gds(gpu: Gpu, directory: Directory | None, settings: Settings) -> Check:
    """Whether GPUDirect Storage could be used at all: said, never required."""
    hbm = settings.tiers.hbm
    if hbm is None or hbm.backend == "host" or directory is None:
        return ok("gpudirect storage", "not needed: it joins a cold store to a GPU's memory")
    reasons = why_not(gpu.gds, directory.filesystem)
    if reasons:
        return ok("gpudirect storage", f"not possible: {'; '.join(reasons)}; the host reads nvme for hbm")
    kvikio = gpu.gds.kvikio
    return ok("gpudirect storage", f"possible (kvikio {kvikio}): tried at start, taken where it is quicker")
