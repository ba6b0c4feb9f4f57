"""The table of checks, with the scope of each, and the functions that run them."""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from ...v1.addresses import socket_path
from ..config import Settings
from ..errors import StartError
from .checks_files import (
    check_compression_files,
    check_fleet_keys,
    check_tls,
    check_tokens,
    judge_master_keys,
)
from .checks_gpu import check_gds, check_gpu, check_kernels, check_pinning, check_topology
from .checks_host import (
    check_clock,
    check_descriptors,
    check_dev_shm,
    check_huge_pages,
    check_kernel,
    check_libraries,
    check_memlock,
    check_memory,
    check_native,
    check_numa,
    check_shared_memory,
    held_memory_bytes,
    report_versions,
)
from .checks_places import check_daemon, check_directory, check_http, check_listen
from .checks_settings import check_exports, check_policies, check_quotas, check_tcp_address
from .checks_store import check_store, judge_worth
from .facts import Facts, RunningDaemon
from .verdicts import Check, CheckVerdict

Function: TypeAlias = Callable[[Facts, Settings], Iterable[Check]]


class Scope(Enum):
    """What a check looks at, and so where it means something."""

    SETTINGS = "settings"  # nothing else: the same everywhere
    FILES = "files"  # files that the settings name
    HOST = "host"  # what a daemon would take of this host
    DOCTOR = "doctor"  # what a person wants to know; refuses no start


class CheckRow(NamedTuple):
    """One entry of the table."""

    scope: Scope
    check: Function


#: In the order in which the doctor prints them.
CHECKS = (
    CheckRow(Scope.DOCTOR, lambda facts, _: report_versions(facts.versions)),
    CheckRow(Scope.DOCTOR, lambda facts, _: [check_native(facts.native_absence)]),
    CheckRow(Scope.HOST, lambda facts, _: (check_kernel(facts.host), check_shared_memory(facts.host))),
    CheckRow(Scope.HOST, lambda facts, s: [check_memory(facts.host, s, held_memory_bytes(facts, s))]),
    CheckRow(Scope.HOST, lambda facts, s: [check_huge_pages(facts.host, s, held_memory_bytes(facts, s))]),
    CheckRow(Scope.HOST, lambda facts, s: (check_memlock(facts.host, s), check_numa(facts.host, s))),
    CheckRow(Scope.HOST, lambda facts, s: [check_descriptors(facts.host, s)]),
    CheckRow(Scope.HOST, check_libraries),
    CheckRow(Scope.DOCTOR, lambda facts, _: (check_dev_shm(facts.host), check_clock(facts.host))),
    CheckRow(Scope.DOCTOR, lambda facts, s: (check_gpu(facts.gpu, s), check_kernels(facts.gpu, s))),
    CheckRow(Scope.DOCTOR, lambda facts, s: (check_pinning(facts.gpu, s), check_topology(facts.gpu, s))),
    CheckRow(Scope.DOCTOR, lambda facts, s: [check_gds(facts.gpu, facts.directory, s)]),
    CheckRow(Scope.SETTINGS, check_policies),
    CheckRow(Scope.SETTINGS, check_quotas),
    CheckRow(Scope.SETTINGS, check_exports),
    CheckRow(
        Scope.SETTINGS,
        lambda _, s: (check_tcp_address(one, s.access) for one in s.listen if socket_path(one) is None),
    ),
    CheckRow(Scope.FILES, check_tls),
    CheckRow(Scope.FILES, check_tokens),
    CheckRow(Scope.FILES, lambda facts, _: map(judge_master_keys, filter(None, [facts.master_keys]))),
    CheckRow(Scope.FILES, check_compression_files),
    CheckRow(
        Scope.HOST,
        lambda facts, _: (check_listen(one, facts.daemon) for one in facts.listens if one.folder is not None),
    ),
    CheckRow(Scope.HOST, check_http),
    CheckRow(Scope.HOST, check_fleet_keys),
    CheckRow(Scope.HOST, lambda facts, s: check_directory(facts.directory, s, facts.daemon.is_there)),
    CheckRow(Scope.DOCTOR, lambda facts, _: check_daemon(facts.daemon, facts.versions)),
    CheckRow(Scope.DOCTOR, lambda facts, _: check_store(facts.object_store)),
    CheckRow(Scope.DOCTOR, lambda facts, _: judge_worth(facts.daemon.bundles)),
)
START = (Scope.SETTINGS, Scope.FILES, Scope.HOST)
RELOAD = (Scope.SETTINGS, Scope.FILES)


def examine(facts: Facts, settings: Settings, scopes: Iterable[Scope] = Scope) -> list[Check]:
    """Return the findings of every check of some scopes."""
    wanted = {*scopes}
    return [found for row in CHECKS if row.scope in wanted for found in row.check(facts, settings)]


def failed(checks: Iterable[Check]) -> list[Check]:
    """Return those findings that a daemon refuses to start with."""
    return [check for check in checks if check.verdict is CheckVerdict.FAIL]


def sentence(checks: Sequence[Check]) -> str:
    """Return findings as lines of an error: what is wrong, and the fix."""
    return "\n".join(map(str, checks))


def require(settings: Settings, held_bytes: int = 0, huge_bytes: int = 0) -> list[Check]:
    """Return the warnings about settings and host that a daemon starts with. Raises StartError.

    A daemon before it left `held_bytes` of host memory for its tiers, `huge_bytes` of it in huge pages."""
    inherited_bytes = _usable_bytes(settings, held_bytes, huge_bytes)
    checks = examine(Facts(settings, inherited_bytes=inherited_bytes), settings, START)
    if problems := failed(checks):
        raise StartError(sentence(problems))  # to give up memory would help with none: it is counted in
    return [check for check in checks if check.verdict is CheckVerdict.WARN]


def objections(settings: Settings, held_bytes: int, huge_bytes: int) -> list[Check]:
    """Return why no daemon could start with `settings` in place of the one that runs here.

    That one holds `held_bytes` of host memory for its tiers, of which `huge_bytes` in huge pages."""
    running, usable_bytes = RunningDaemon("", reachable=True), _usable_bytes(settings, held_bytes, huge_bytes)
    return failed(examine(Facts(settings, running, inherited_bytes=usable_bytes), settings, START))


def _usable_bytes(settings: Settings, held_bytes: int, huge_bytes: int) -> int:
    """Return how much of the memory that is held has pages of the kind that the settings ask for."""
    usable = {"on": huge_bytes, "off": held_bytes - huge_bytes, "auto": held_bytes}
    return usable[settings.tiers.dram.hugepages]
