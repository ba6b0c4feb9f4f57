"""What the checks look at: the host, the files, the running daemon. Nothing is judged here (table.py).

Everything is read, or tried on something nameless and at once gone: an anonymous memfd, an unlinked
temporary file. The cold store's lock is read from /proc/locks rather than tried, because trying it, even
for a moment, can stop a daemon that is just starting.
"""

import ctypes
import errno
import os
import platform
import resource
import stat
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import grpc
from google import protobuf

from ... import __version__, native
from ...sources.objects.fleet_keys import FleetKeys
from ...sources.objects.opening import open_store
from ...sources.objects.probe import ProbeResult, StoreProbe
from ...sources.objects.problems import StoreError, StoreProblem
from ...sources.objects.store import StoreLimits, travels_plain
from ...tiers.cold.mounts import filesystem_of
from ...tiers.encryption.keyring import FILE_NAME as KEYS_FILE
from ...tiers.encryption.keyring import count_wraps
from ...tiers.encryption.master_keys import (
    KeyringError,
    key_id,
    load_master_keys,
    read_master_keys,
)
from ...tiers.gpu.decode.gds import GdsFacts, look
from ...tiers.gpu.device import libraries
from ...tiers.gpu.device.libraries import CudaLibraries
from ...tiers.gpu.device.pinned import limits
from ...tiers.gpu.device.topology import GpuPlace, gpus, with_nvlinks
from ...v1.addresses import socket_path
from ...v1.threads import lower_thread_priority
from ..config import Settings
from ..config.host_memory import read_number, read_text
from ..transfer.object_edge import EPOCH_DAYS
from . import probes
from .certificates import TlsFiles, gather_tls
from .probes import Node

#: A person waits for the doctor.
TRIAL_LIMITS: Final = StoreLimits(connect_s=3.0, idle_s=5.0, request_s=20.0, num_retries=1, retry_s=5.0)


STORE_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of what runs this program."""

    kvtier: str
    python: str
    grpc: str
    protobuf: str


@dataclass(frozen=True, slots=True)
class Host:
    """The machine, as far as this process may use it."""

    kernel: str
    machine: str
    has_pidfd: bool
    seal_error: str  # empty: memfds can be sealed
    available_bytes: int  # of memory, the cgroup's limit included
    num_huge_pages: int
    num_free_huge_pages: int
    memlock_bytes: int | None  # None: unlimited
    can_lock_anything: bool  # CAP_IPC_LOCK
    max_descriptors: int  # that this process may raise its own limit to
    nodes: tuple[Node, ...]
    shm_bytes: int
    clock_source: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """NVIDIA driver, its GPUs and the libraries that would use them; empty where there is none."""

    driver: str = ""
    names: tuple[str, ...] = ()
    libraries: CudaLibraries = field(default_factory=CudaLibraries)
    pin_limits: tuple[str, ...] = ()  # what limits memory that the GPU reaches
    places: tuple[GpuPlace, ...] = ()  # as the kernel sees them, by address
    gds: GdsFacts = field(default_factory=GdsFacts)


@dataclass(frozen=True, slots=True)
class Listen:
    """One address of the daemon. `path` and `folder` are None for TCP."""

    address: str
    path: Path | None = None
    folder: Path | None = None
    kind: str = ""  # what is at the path, as probes.kind_at says
    is_writable: bool = True  # the folder, or where it would be created
    is_shared_folder: bool = False  # others may replace what is in it


@dataclass(frozen=True, slots=True)
class Directory:
    """The cold store's directory."""

    path: Path
    exists: bool
    is_something_else: bool
    is_writable: bool
    filesystem: str
    free_bytes: int
    own_bytes: int  # of segment files already there
    write_errno: int  # 0: a file can be written past the page cache, or it was not tried
    lock_holder: str  # "pid 17"; empty: not locked


@dataclass(frozen=True, slots=True)
class MasterKeyFile:
    """The file of master keys, and which of them the cold store's key file needs."""

    path: Path
    error: str  # empty: it can be used; with the fix
    is_unreadable: bool  # by this user: nothing is known
    ids: tuple[str, ...]  # the one in force first
    wraps: Mapping[str, int]  # data keys in keys.json by the id of their master key; empty id: not said


class FleetKeysTrial(NamedTuple):
    """How opening an object store's tenant keys went; all is well unless it says otherwise."""

    problem: str = ""  # why none can be used
    num_foreign: int = 0  # of some that were read: those that another master key made


class BundleWorth(NamedTuple):
    """What a bundle of one namespace costs; the message of this name says more."""

    namespace_id: int
    fetch_s: float
    recompute_s: float
    reads_to_earn: float
    namespace: str
    share: str


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """A running daemon, or why there is none."""

    target: str
    was_named: bool = False  # by the user, so that its absence is a failure
    reachable: bool = False
    is_silent: bool = False  # it listens, and does not answer in time
    error: str = ""
    version: str = ""
    draining: bool = False
    policy_problem: str = ""  # why its policy file is not what it runs with
    problems: tuple[str, ...] = ()
    backends: dict[str, str] = field(default_factory=dict)  # by tier
    offline: tuple[str, ...] = ()  # tiers that stopped working
    source_problem: str = ""  # why it does not ask its object store, or stores nothing there
    memory_bytes: int = 0  # of the host, that its tiers have
    bundles: tuple[BundleWorth, ...] = ()  # of an object store, by namespace

    @property
    def is_there(self) -> bool:
        """Return whether sockets, ports and files that are in use may be its own."""
        return self.reachable or self.is_silent


@dataclass(frozen=True, slots=True)
class StoreTrial:
    """How trying the object store of the settings went."""

    url: str
    error: str  # empty: it answers; with the fix
    results: tuple[ProbeResult, ...] = ()
    travels_plain: bool = False  # without TLS


class Facts:
    """Everything the checks look at. Each attribute is looked up when a check first reads it.

    `daemon` is the one that runs, as the caller found it. `known`: attributes that are given instead of
    looked up; for tests.
    """

    inherited_bytes = 0  # of host memory, which a daemon before this one left for the tiers

    def __init__(self, settings: Settings, daemon: RunningDaemon | None = None, **known: object) -> None:
        self.daemon = daemon or RunningDaemon("")
        self._settings = settings
        vars(self).update(known)  # where cached_property looks first

    @cached_property
    def versions(self) -> Versions:
        """Versions of what runs this program."""
        return Versions(__version__, platform.python_version(), grpc.__version__, protobuf.__version__)

    @cached_property
    def native_absence(self) -> str:
        """Why native code is not used; empty where it is."""
        return native.absence

    @cached_property
    def host(self) -> Host:
        """Return kernel, memory and limits: reads /proc and /sys, tries a memfd and a pidfd."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
        return Host(
            kernel=platform.release(),
            machine=platform.machine(),
            has_pidfd=probes.has_pidfd(),
            seal_error=probes.seal_error(),
            available_bytes=probes.available_bytes(),
            num_huge_pages=read_number(probes.HUGE_PAGES / "nr_hugepages"),
            num_free_huge_pages=read_number(probes.HUGE_PAGES / "free_hugepages"),
            memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
            can_lock_anything=probes.has_capability(probes.CAP_IPC_LOCK),
            max_descriptors=sys.maxsize if descriptors == resource.RLIM_INFINITY else descriptors,
            nodes=probes.numa_nodes(Path("/sys/devices/system/node")),
            shm_bytes=probes.filesystem_bytes("/dev/shm"),
            clock_source=read_text(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")),
        )

    @cached_property
    def gpu(self) -> Gpu:
        """Return the NVIDIA driver, GPUs, and the libraries that use them."""
        return gather_gpu()

    @cached_property
    def listens(self) -> tuple[Listen, ...]:
        """Return what is at each address of the settings."""
        return tuple(gather_listen(address) for address in self._settings.listen)

    @cached_property
    def directory(self) -> Directory | None:
        """Return the cold store's directory; None without one."""
        nvme = self._settings.tiers.nvme
        return gather_directory(nvme.path) if nvme else None

    @cached_property
    def master_keys(self) -> MasterKeyFile | None:
        """Return the file of master keys; None without one."""
        return gather_master_keys(self._settings)

    @cached_property
    def fleet_keys(self) -> FleetKeysTrial:
        """Return how opening the object store's tenant keys went."""
        return gather_fleet_keys(self._settings)

    @cached_property
    def tls(self) -> TlsFiles | None:
        """Return the certificates of the settings; None without any."""
        return gather_tls(self._settings.access.tls)

    @cached_property
    def missing_modules(self) -> frozenset[str]:
        """Return the libraries of probes.OPTIONAL_MODULES that are not installed. Imports none of them."""
        return frozenset(name for name in probes.OPTIONAL_MODULES if not probes.is_installed(name))

    @cached_property
    def object_store(self) -> StoreTrial | None:
        """Return how trying the object store went, which stores a small bundle; None without one."""
        url = self._settings.object.url
        return try_store(url) if url else None

    @cached_property
    def is_http_free(self) -> bool:
        """Return whether the address of `observe.http` can be listened at."""
        address = self._settings.observe.http_address
        return address is None or probes.may_listen(address.host, address.port)


def try_store(url: str) -> StoreTrial:
    """Try what `kvtier objects check` tries."""
    try:
        store = open_store(url, limits=TRIAL_LIMITS)
        store.check_bucket()
        return StoreTrial(url, "", tuple(StoreProbe(store, EPOCH_DAYS).results()), travels_plain(url))
    except StoreError as problem:
        return StoreTrial(url, str(problem))


def gather_gpu() -> Gpu:
    """Ask the NVIDIA driver through its own libraries, without making a CUDA context."""
    places = with_nvlinks(gpus())
    without_driver = Gpu("", (), libraries.look(), tuple(limits()), places, look())
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return without_driver
    if nvml.nvmlInit_v2() != 0:
        return without_driver
    try:
        text = ctypes.create_string_buffer(96)
        nvml.nvmlSystemGetDriverVersion(text, len(text))
        driver = text.value.decode()
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        names = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                nvml.nvmlDeviceGetName(handle, text, len(text))
                names.append(text.value.decode())
    finally:
        nvml.nvmlShutdown()
    return replace(without_driver, driver=driver, names=tuple(names))


def gather_listen(address: str) -> Listen:
    """Return what is at a socket's path, or at the folder where it would be created."""
    path = socket_path(address)
    if path is None:
        return Listen(address)
    folder = path.parent
    kind = probes.kind_at(path)
    existing = probes.nearest_existing(folder)
    status = existing.stat()
    shared = existing == folder and bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    writable = os.access(existing, os.W_OK | os.X_OK)
    return Listen(address, path, folder, kind, writable, shared)


def gather_directory(path: Path) -> Directory:
    """Return what is known about the cold store's directory, or about where it would be created."""
    existing = probes.nearest_existing(path)
    is_directory = existing.is_dir()
    writable = is_directory and os.access(existing, os.W_OK | os.X_OK)
    space = os.statvfs(existing)
    write_errno = probes.write_errno(existing) if writable else 0
    if space.f_flag & os.ST_RDONLY:  # where nothing counts as writable
        write_errno = errno.EROFS
    files = path.glob("segment-*") if writable and existing == path else ()
    return Directory(
        path=path,
        exists=existing == path,
        is_something_else=not is_directory,
        is_writable=writable,
        filesystem=filesystem_of(existing, read_text(Path("/proc/self/mountinfo"))),
        free_bytes=space.f_bavail * space.f_frsize,
        own_bytes=sum(map(probes.allocated_bytes, files)),
        write_errno=write_errno,
        lock_holder=probes.lock_holder(path / "lock"),
    )


def gather_master_keys(settings: Settings) -> MasterKeyFile | None:
    """Return what the file of master keys and the wraps beside the segments hold."""
    path, nvme = settings.encryption.master_key, settings.tiers.nvme
    if path is None or (nvme is None and not settings.object.url):
        return None
    folder = nvme.path if nvme is not None else None
    if _is_closed(path) or (folder is not None and _is_closed(folder / KEYS_FILE)):
        return MasterKeyFile(path, "", True, (), {})
    try:
        owner_uid = next((p.stat().st_uid for p in (folder, path) if p is not None and p.exists()), None)
        ids = tuple(map(key_id, read_master_keys(path, owner_uid=owner_uid)))
        return MasterKeyFile(path, "", False, ids, count_wraps(folder) if folder is not None else {})
    except (KeyringError, OSError) as problem:
        return MasterKeyFile(path, str(problem), False, (), {})


def gather_fleet_keys(settings: Settings) -> FleetKeysTrial:
    """Return how opening the object store's tenant keys with the master keys goes.
    Well, too, when the store does not answer within STORE_WAIT_S: no start waits for a store."""
    path, url = settings.encryption.master_key, settings.object.url
    if path is None or not url or _is_closed(path):
        return FleetKeysTrial()
    found: list[FleetKeysTrial] = []
    trial = threading.Thread(target=lambda: found.append(_try_fleet_keys(path, url)), daemon=True)
    trial.start()
    trial.join(STORE_WAIT_S)
    return found[0] if found else FleetKeysTrial()


def _try_fleet_keys(path: Path, url: str) -> FleetKeysTrial:
    """In a thread of its own: when a daemon starts it may be the first that asks the client library."""
    lower_thread_priority("kvtier-object", 0)
    limits = StoreLimits(connect_s=1.0, idle_s=1.0, request_s=STORE_WAIT_S, num_retries=0, retry_s=0.0)
    try:
        keys = FleetKeys(load_master_keys(path))
        keys.open(open_store(url, limits=limits))
    except StoreError as problem:
        return FleetKeysTrial(str(problem) if problem.problem is StoreProblem.WRONG_KEY else "")
    except KeyringError:  # judge_master_keys tells
        return FleetKeysTrial()
    return FleetKeysTrial("", keys.num_foreign)


def _is_closed(path: Path) -> bool:
    """Return whether this user may not know what is there."""
    try:
        path.stat()
    except OSError as problem:
        return isinstance(problem, PermissionError)
    return not os.access(path, os.R_OK)
