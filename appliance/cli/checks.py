"""What `kvtier doctor` thinks of what it found: pure functions from facts to verdicts.

Each check says what is, and when something is wrong, what to do: `fix` is a command or a setting to change.
They read facts only (facts.py gathers them), so that every verdict can be tested on any machine.
`warn` means slower or riskier than it could be; `fail` means the daemon will not start, or not work.
"""

from ...v1.shm import HUGE_PAGE_BYTES, extent_file_bytes
from ..settings import Settings
from ..units import about_bytes, format_bytes
from .checks_gpu import check_gds, check_topology
from .checks_places import check_daemon, check_directory, check_listen, check_master_keys
from .facts import Facts, Gpu, Host, Versions
from .verdicts import Check, fail, ok, warn

MIN_PYTHON = (3, 11)
MIN_GRPC = (1, 70)
SPARE_DESCRIPTORS = 128  # sockets, the log, threads' pipes
DESCRIPTORS_PER_CLIENT = 4
SLOW_CLOCKS = {"hpet", "acpi_pm", "jiffies", "pit"}


def examine(facts: Facts, settings: Settings) -> list[Check]:
    """Return all checks, in the order in which they matter to somebody setting up a host."""
    host, running = facts.host, facts.daemon.reachable
    checks = [
        check_python(facts.versions),
        check_grpc(facts.versions),
        check_kernel(host),
        check_shared_memory(host),
        check_memory(host, settings, running),
        check_huge_pages(host, settings, running),
        check_memlock(host, settings),
        check_descriptors(host, settings),
        check_numa(host, settings),
        check_dev_shm(host),
        check_clock(host),
        check_gpu(facts.gpu, settings),
        check_pinning(facts.gpu, settings),
        check_topology(facts.gpu, settings),
        check_gds(facts.gpu, facts.directory, settings),
    ]
    checks += [check_listen(listen, facts.daemon) for listen in facts.listens]
    if facts.directory is not None:
        checks += check_directory(facts.directory, settings, running)
    if facts.master_keys is not None:
        checks.append(check_master_keys(facts.master_keys))
    return checks + check_daemon(facts.daemon, facts.versions)


# ------------------------------------------------------------------------------------------ software


def check_python(versions: Versions) -> Check:
    """Python is new enough."""
    text = ".".join(map(str, versions.python))
    if versions.python[:2] < MIN_PYTHON:
        return fail("python", text, "use Python 3.11 or newer")
    return ok("python", text)


def check_grpc(versions: Versions) -> Check:
    """grpcio is new enough."""
    numbers = tuple(int(part) for part in versions.grpc.split(".")[:2])
    detail = f"grpcio {versions.grpc}, protobuf {versions.protobuf}"
    if numbers < MIN_GRPC:
        return fail("grpc", detail, "pip install 'grpcio>=1.70'")
    return ok("grpc", detail)


# -------------------------------------------------------------------------------------------- kernel


def check_kernel(host: Host) -> Check:
    """The kernel has pidfds, by which the death of a client is noticed."""
    if not host.has_pidfd:
        return fail("kernel", f"Linux {host.kernel} has no pidfd", "use Linux 5.4 or newer")
    return ok("kernel", f"Linux {host.kernel}, {host.machine}, pidfd")


def check_shared_memory(host: Host) -> Check:
    """Memory can be sealed so that clients can only read it."""
    if host.seal_error:
        return fail(
            "shared memory",
            host.seal_error,
            "use Linux 5.1 or newer, and a seccomp profile that allows memfd_create",
        )
    return ok("shared memory", "memfds can be sealed read-only")


def check_memory(host: Host, settings: Settings, running: bool) -> Check:
    """There is as much memory as the tiers want to take."""
    wanted = wanted_memory_bytes(settings)
    detail = f"{about_bytes(wanted)} wanted, {about_bytes(host.available_bytes)} available"
    if running:
        return ok("memory", f"{detail} beside the running daemon")
    if wanted > host.available_bytes:
        return fail("memory", detail, "lower tiers.dram.capacity, or raise the container's memory limit")
    if wanted > 0.9 * host.available_bytes:
        return warn("memory", detail, "lower tiers.dram.capacity to leave room for everything else")
    return ok("memory", detail)


def check_huge_pages(host: Host, settings: Settings, running: bool) -> Check:
    """2 MiB pages are there if they are wanted."""
    mode = settings.tiers.dram.hugepages
    needed = wanted_memory_bytes(settings) // HUGE_PAGE_BYTES
    detail = f"{host.num_free_huge_pages} of {host.num_huge_pages} free, {needed} wanted ({mode})"
    if mode == "off" or running or host.num_free_huge_pages >= needed:
        return ok("huge pages", detail)
    total = host.num_huge_pages - host.num_free_huge_pages + needed
    fix = f"sysctl -w vm.nr_hugepages={total}, best at boot"
    if mode == "on":
        return fail("huge pages", detail, f"{fix}, or set tiers.dram.hugepages to auto")
    return warn("huge pages", detail, f"{fix}; without them copies cost more TLB misses")


def check_memlock(host: Host, settings: Settings) -> Check:
    """The memory may be locked if it is to be."""
    limit = host.memlock_bytes
    text = "unlimited" if limit is None else format_bytes(limit)
    if not settings.tiers.dram.lock:
        return ok("memlock", f"limit {text}, not needed (tiers.dram.lock is false)")
    if host.can_lock_anything or limit is None or limit >= wanted_memory_bytes(settings):
        return ok("memlock", f"limit {text}")
    return fail(
        "memlock",
        f"limit {text}, {about_bytes(wanted_memory_bytes(settings))} to lock",
        "LimitMEMLOCK=infinity in the systemd unit, `ulimit -l unlimited`, or CAP_IPC_LOCK in a container",
    )


def check_descriptors(host: Host, settings: Settings) -> Check:
    """As many files may be open as there are extents, segments and clients."""
    tiers = settings.tiers
    needed = tiers.dram.num_extents + SPARE_DESCRIPTORS
    needed += tiers.hbm.num_extents if tiers.hbm else 0
    needed += tiers.nvme.num_segments if tiers.nvme else 0
    needed += DESCRIPTORS_PER_CLIENT * settings.limits.max_clients
    detail = f"limit {host.max_descriptors}, up to {needed} needed"
    if host.max_descriptors < needed:
        return fail(
            "open files",
            detail,
            f"LimitNOFILE={needed} in the systemd unit, `ulimit -n {needed}`, or larger extents and segments",
        )
    return ok("open files", detail)


def check_numa(host: Host, settings: Settings) -> Check:
    """The nodes in the settings exist; CXL nodes (memory without processors) are named."""
    parts = [
        f"node {node.number} {about_bytes(node.num_bytes)}{'' if node.has_cpus else ' (no CPU: CXL or HBM)'}"
        for node in host.nodes
    ]
    detail = ", ".join(parts) or "not shown by the kernel"
    wanted = settings.tiers.dram.numa_nodes
    missing = [n for n in wanted if n not in {node.number for node in host.nodes}]
    if missing:
        nodes = ", ".join(map(str, missing))
        return fail("numa", f"{detail}; no node {nodes}", "set tiers.dram.numa_nodes to nodes that exist")
    if wanted:
        return ok("numa", f"{detail}; dram is taken from {wanted}")
    if len(host.nodes) > 1:
        return warn("numa", detail, "set tiers.dram.numa_nodes to the nodes near the GPUs, else it is chance")
    return ok("numa", detail)


def check_dev_shm(host: Host) -> Check:
    """/dev/shm does not matter: said aloud, because it is the first suspect everywhere else."""
    return ok("/dev/shm", f"{about_bytes(host.shm_bytes)}, not used: kvtier shares memfds")


def check_clock(host: Host) -> Check:
    """Reading the clock is cheap."""
    if host.clock_source in SLOW_CLOCKS:
        return warn(
            "clock",
            f"{host.clock_source}: every reading is a slow system call",
            "boot with clocksource=tsc, if the processor's is stable",
        )
    return ok("clock", host.clock_source or "not shown by the kernel")


def check_gpu(gpu: Gpu, settings: Settings) -> Check:
    """There is a GPU where hbm is to be one's memory; else says what there is."""
    driver = f"driver {gpu.driver}, {', '.join(gpu.names)}" if gpu.driver else "no NVIDIA driver"
    libraries = [
        f"{name} {version}" if version else f"no {name}"
        for name, version in (("torch", gpu.torch), ("cupy", gpu.cupy))
    ]
    detail = f"{driver}; {', '.join(libraries)}"
    hbm = settings.tiers.hbm
    if hbm is None or hbm.backend == "host":
        return ok("gpu", f"{detail}; not used (tiers.hbm{'.backend is host' if hbm else ' is not set'})")
    if not gpu.driver:
        return fail("gpu", detail, "install the NVIDIA driver, or run the container with the NVIDIA runtime")
    if not gpu.cupy:
        return fail("gpu", detail, "pip install 'kvtier[gpu-cuda12]', or gpu-cuda13 with a driver for it")
    if hbm.device >= len(gpu.names):
        return fail("gpu", f"{detail}; no device {hbm.device}", "set tiers.hbm.device to one that exists")
    return ok("gpu", f"{detail}; hbm is memory of device {hbm.device}")


def check_pinning(gpu: Gpu, settings: Settings) -> Check:
    """What limits the memory that a GPU's copies reach."""
    limits = "; ".join(gpu.pin_limits) or "nothing found that limits it"
    if settings.tiers.hbm is None or settings.tiers.hbm.backend == "host":
        return ok("pinned memory", f"{limits}; not needed")
    if gpu.pin_limits:
        fix = "see that the limit is above tiers.dram.capacity; the daemon logs what it could not pin"
        return warn("pinned memory", limits, fix)
    return ok("pinned memory", limits)


def wanted_memory_bytes(settings: Settings) -> int:
    """Return the host memory the tiers take at start, slot headers included."""
    hbm, dram = settings.tiers.hbm, settings.tiers.dram
    tiers = [dram] if hbm is None or hbm.backend != "host" else [hbm, dram]
    return sum(tier.num_extents * extent_file_bytes(tier.extent_bytes) for tier in tiers)
