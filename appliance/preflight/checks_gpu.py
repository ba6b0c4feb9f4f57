"""Checks of GPUs: that one is there where one is needed, and how it hangs in this host."""

from ...tiers.gpu.decode.gds import why_not
from ...tiers.gpu.device.libraries import missing
from ...tiers.gpu.device.topology import describe
from ..config import Settings
from .facts import Directory, Gpu
from .verdicts import Check, fail, ok, warn


def check_gpu(gpu: Gpu, settings: Settings) -> Check:
    """Check that there is a GPU where the settings need one; else report what there is."""
    driver = f"driver {gpu.driver}, {', '.join(gpu.names)}" if gpu.driver else "no NVIDIA driver"
    detail = f"{driver}, runs CUDA {gpu.libraries.driver}" if gpu.libraries.driver else driver
    hbm = settings.tiers.hbm
    if hbm is None or hbm.backend == "host":
        return ok("gpu", f"{detail}; not used (tiers.hbm{'.backend is host' if hbm else ' is not set'})")
    if not gpu.driver:
        return fail("gpu", detail, "install the NVIDIA driver, or run the container with the NVIDIA runtime")
    if gpu.libraries.problem:
        return fail("gpu", f"{detail}; {gpu.libraries.problem}", "repair the installation of the driver")
    if hbm.device >= len(gpu.names):
        return fail("gpu", f"{detail}; no device {hbm.device}", "set tiers.hbm.device to one that exists")
    return ok("gpu", f"{detail}; hbm is memory of device {hbm.device}")


def check_kernels(gpu: Gpu, settings: Settings) -> Check:
    """Check for cupy, NVRTC and CUDA's headers: without them the host encodes, decodes and hashes."""
    found, hbm = gpu.libraries, settings.tiers.hbm
    here = {"cupy": found.cupy, "NVRTC": found.nvrtc, "headers": found.headers}
    detail = ", ".join(f"{name}: {where or 'none'}" for name, where in here.items())
    if hbm is None or hbm.backend == "host":
        return ok("gpu kernels", f"{detail}; not needed")
    findings = missing(found)
    if not findings:
        return ok("gpu kernels", detail)
    lacking, fixes = zip(*findings, strict=True)
    words = f"{detail}; missing: {'; '.join(lacking)}: the host copies small pieces in batches and decodes"
    return warn("gpu kernels", words, ", ".join(dict.fromkeys(fixes)))


def check_pinning(gpu: Gpu, settings: Settings) -> Check:
    """Check the limits of memory that a GPU can copy from."""
    limits = "; ".join(gpu.pin_limits) or "nothing found that limits it"
    if settings.tiers.hbm is None or settings.tiers.hbm.backend == "host":
        return ok("pinned memory", f"{limits}; not needed")
    if gpu.pin_limits:
        fix = "see that the limit is above tiers.dram.capacity; the daemon logs what it could not pin"
        return warn("pinned memory", limits, fix)
    return ok("pinned memory", limits)


def check_topology(gpu: Gpu, settings: Settings) -> Check:
    """Check that dram is on the GPU's NUMA node, and that the GPU's slot has all its lanes.

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
    """Return whether GPUDirect Storage could be used at all: said, never required."""
    hbm = settings.tiers.hbm
    if hbm is None or hbm.backend == "host" or directory is None:
        return ok("gpudirect storage", "not needed: it joins a cold store to a GPU's memory")
    reasons = why_not(gpu.gds, directory.filesystem)
    if reasons:
        return ok("gpudirect storage", f"not possible: {'; '.join(reasons)}; the host reads nvme for hbm")
    kvikio = gpu.gds.kvikio
    return ok("gpudirect storage", f"possible (kvikio {kvikio}): tried at start, taken where it is quicker")
