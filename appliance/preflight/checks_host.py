"""Checks of the host: versions, kernel, memory, limits, GPU. Pure functions from facts to findings."""

from collections.abc import Iterator

from ...sources.peers.nixl_process import absence
from ...v1.addresses import socket_path
from ...v1.shm import HUGE_PAGE_BYTES, extent_file_bytes
from ..config import Settings
from ..config.units import about_bytes, format_bytes
from .facts import Facts, Host, Versions
from .verdicts import Check, fail, ok, warn

SPARE_DESCRIPTORS = 128  # sockets, the log, threads' pipes
DESCRIPTORS_PER_CLIENT = 4
SLOW_CLOCKS = {"hpet", "acpi_pm", "jiffies", "pit"}


def check_libraries(facts: Facts, settings: Settings) -> Iterator[Check]:
    """Check that the optional libraries that the settings need are installed."""
    observe, missing = settings.observe, facts.missing_modules
    needs = {
        ("cryptography", "encryption", "encryption.master_key"): settings.encryption.master_key is not None,
        ("opentelemetry.sdk", "otel", "observe.traces"): observe.traces != "off",
        ("zmq", "events", "observe.kv_events"): observe.kv_events != "off",
        ("msgpack", "events", "observe.kv_events"): observe.kv_events != "off",
    }
    for (module, extra, setting), is_needed in needs.items():
        if is_needed and module in missing:
            yield fail("libraries", f"{module} is not installed", f"pip install 'kvtier[{extra}]'", setting)
    if settings.peers.is_on and settings.peers.transport == "nixl" and (why := absence()):
        what, _, fix = why.partition("; ")
        yield fail("libraries", what, f"{fix}, or write transport: tcp", "peers.transport")
    if uses_fast_codec(settings) and "numba" in missing:
        what = "numba is not installed: blocks on nvme and the network are packed at a fifth of the speed"
        fix = "pip install 'kvtier[codecs]', or write codec: planes"
        yield warn("libraries", what, fix, "compression.codec")


def uses_fast_codec(settings: Settings) -> bool:
    """Return whether blocks may be encoded by the codec that numba compiles."""
    compression = settings.compression
    has_store = settings.tiers.nvme is not None
    edges = {"nvme"} if has_store else set()
    if any(socket_path(address) is None for address in settings.listen):
        edges.add("remote")
    named = [compression.codec] if edges else []
    named += [rule.codec for rule in compression.rules if (edges if not rule.edge else edges & {rule.edge})]
    return bool({"auto", "exponents", "float8"} & {*named}) or (
        has_store and compression.profiles is not None
    )


# ------------------------------------------------------------------------------------------ software


def report_versions(versions: Versions) -> Iterator[Check]:
    """Report what runs this program. With older ones it could not have been imported."""
    yield ok("python", versions.python)
    yield ok("grpc", f"grpcio {versions.grpc}, protobuf {versions.protobuf}")


def check_native(absence: str) -> Check:
    """Check that payloads are copied and hashed by native code; `absence` is why not."""
    if not absence:
        return ok("native", "copies and hashes in one pass")
    fix = "install a C compiler and Python's headers, then kvtier again; unset KVTIER_NATIVE"
    return warn("native", f"not used, Python does the same slower: {absence}", fix)


# -------------------------------------------------------------------------------------------- kernel


def check_kernel(host: Host) -> Check:
    """Check that the kernel has pidfds, which report the end of a client."""
    if not host.has_pidfd:
        return fail("kernel", f"Linux {host.kernel} has no pidfd", "use Linux 5.4 or newer")
    return ok("kernel", f"Linux {host.kernel}, {host.machine}, pidfd")


def check_shared_memory(host: Host) -> Check:
    """Check that memory can be sealed so that clients can only read it."""
    if host.seal_error:
        return fail(
            "shared memory",
            host.seal_error,
            "use Linux 5.1 or newer, and a seccomp profile that allows memfd_create",
        )
    return ok("shared memory", "memfds can be sealed read-only")


def check_memory(host: Host, settings: Settings, held_bytes: int = 0) -> Check:
    """Check that the tiers fit into memory, of which they have `held_bytes` already.

    Huge pages were set aside for them, and are no part of what the kernel calls available.
    """
    wanted = max(0, wanted_memory_bytes(settings) - held_bytes)
    there = host.available_bytes
    if settings.tiers.dram.hugepages != "off":
        there += host.num_free_huge_pages * HUGE_PAGE_BYTES
    more, fix = " more" if held_bytes else "", "or raise the container's memory limit"
    detail = f"the memory tiers take {about_bytes(wanted)}{more}, {about_bytes(there)} are available"
    setting = "tiers.dram.capacity"
    if wanted > there:
        return fail("memory", detail, f"lower tiers.dram.capacity (or tiers.hbm.capacity), {fix}", setting)
    if wanted > 0.9 * there:
        return warn("memory", detail, "lower tiers.dram.capacity to leave room for everything else", setting)
    return ok("memory", detail)


def check_huge_pages(host: Host, settings: Settings, held_bytes: int = 0) -> Check:
    """Check that there are enough 2 MiB pages where the settings ask for them, beside those that are held."""
    mode = settings.tiers.dram.hugepages
    needed = max(0, wanted_memory_bytes(settings) - held_bytes) // HUGE_PAGE_BYTES
    detail = f"{host.num_free_huge_pages} of {host.num_huge_pages} free, {needed} wanted ({mode})"
    if mode == "off" or host.num_free_huge_pages >= needed:
        return ok("huge pages", detail)
    total = host.num_huge_pages - host.num_free_huge_pages + needed
    fix = f"sysctl -w vm.nr_hugepages={total}, best at boot"
    if mode == "on":
        fix += ", or set tiers.dram.hugepages to auto"
        return fail("huge pages", detail, fix, "tiers.dram.hugepages")
    return warn("huge pages", detail, f"{fix}; without them copies cost more TLB misses")


def check_memlock(host: Host, settings: Settings) -> Check:
    """Check that memory may be locked where the settings ask for it."""
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
        "tiers.dram.lock",
    )


def check_descriptors(host: Host, settings: Settings) -> Check:
    """Check that as many files may be open as there are extents, segments and clients."""
    tiers = settings.tiers
    needed = SPARE_DESCRIPTORS + sum(size.num_units for size in tiers.sizes.values())
    most = needed + DESCRIPTORS_PER_CLIENT * settings.limits.max_clients
    detail = f"limit {host.max_descriptors}, {needed} needed, up to {most} with limits.max_clients"
    if host.max_descriptors >= most:
        return ok("open files", detail)
    fix = f"LimitNOFILE={most} in the systemd unit, `ulimit -Hn {most}`, or larger extents and segments"
    verdict = fail if host.max_descriptors < needed else warn
    return verdict("open files", detail, fix)


def check_numa(host: Host, settings: Settings) -> Check:
    """Check that the NUMA nodes of the settings exist; report CXL nodes (memory without processors)."""
    bytes_of = {node.number: node.num_bytes for node in host.nodes}
    parts = [
        f"node {node.number} {about_bytes(node.num_bytes)}{'' if node.has_cpus else ' (no CPU: CXL or HBM)'}"
        for node in host.nodes
    ]
    detail = ", ".join(parts) or "not shown by the kernel"
    sizes = {tier.label: size.capacity_bytes for tier, size in settings.tiers.sizes.items()}
    taken = {"dram": settings.tiers.dram.numa_nodes}
    taken |= {name: tier.numa_nodes for name, tier in settings.tiers.further.items()}
    for name, nodes in taken.items():
        if missing := [node for node in nodes if node not in bytes_of]:
            text = ", ".join(map(str, missing))
            return fail(
                "numa", f"{detail}; no node {text}", "write nodes that exist", f"tiers.{name}.numa_nodes"
            )
        there = sum(bytes_of[node] for node in nodes)
        if nodes and sizes[name] > there:
            what = f"{detail}; {name} of {about_bytes(sizes[name])} is taken from {nodes}, which have less"
            return fail("numa", what, f"write {about_bytes(there)} or less", f"tiers.{name}.capacity")
    for name, nodes in list(taken.items())[1:]:
        if len(host.nodes) > 1 and not set(nodes).difference(taken["dram"]):
            what = f"{detail}; {name} may be taken from the memory that dram is taken from"
            return warn("numa", what, f"set tiers.{name}.numa_nodes to nodes of its own")
    if any(taken.values()):
        said = (f"{name} is taken from {nodes}" for name, nodes in taken.items() if nodes)
        return ok("numa", f"{detail}; {', '.join(said)}")
    if len(host.nodes) > 1:
        return warn("numa", detail, "set tiers.dram.numa_nodes to the nodes near the GPUs, else it is chance")
    return ok("numa", detail)


def check_dev_shm(host: Host) -> Check:
    """Report that /dev/shm is not used: elsewhere it is the first suspect."""
    return ok("/dev/shm", f"{about_bytes(host.shm_bytes)}, not used: kvtier shares memfds")


def check_clock(host: Host) -> Check:
    """Check that reading the clock is cheap."""
    if host.clock_source in SLOW_CLOCKS:
        return warn(
            "clock",
            f"{host.clock_source}: every reading is a slow system call",
            "boot with clocksource=tsc, if the processor's is stable",
        )
    return ok("clock", host.clock_source or "not shown by the kernel")


def held_memory_bytes(facts: Facts, settings: Settings) -> int:
    """Return the host memory, with slot headers, that a running daemon has or that one before left."""
    extent_bytes = settings.tiers.dram.extent_bytes
    running_bytes = facts.daemon.memory_bytes // extent_bytes * extent_file_bytes(extent_bytes)
    return running_bytes + facts.inherited_bytes


def wanted_memory_bytes(settings: Settings) -> int:
    """Return the host memory the tiers take at start, slot headers included."""
    sizes = settings.tiers.host_memory.values()
    return sum(size.num_units * extent_file_bytes(size.unit_bytes) for size in sizes)
