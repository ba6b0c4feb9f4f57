"""The table of checks, with the scope of each, and the functions that run them."""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from ..config import Settings
from ..errors import StartError
from .checks_files import check_compression_files, check_master_keys, check_tls, check_tokens
from .checks_gpu import check_gpus
from .checks_host import (
    check_kernel_features,
    check_libraries,
    check_limits,
    check_memory_tiers,
    check_software,
    check_surroundings,
)
from .checks_places import check_cold_store, check_http, check_listens, check_running
from .checks_settings import check_policies, check_quotas, check_tcp
from .facts import Facts
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
    CheckRow(Scope.DOCTOR, check_software),
    CheckRow(Scope.HOST, check_kernel_features),
    CheckRow(Scope.HOST, check_memory_tiers),
    CheckRow(Scope.HOST, check_limits),
    CheckRow(Scope.HOST, check_libraries),
    CheckRow(Scope.DOCTOR, check_surroundings),
    CheckRow(Scope.DOCTOR, check_gpus),
    CheckRow(Scope.SETTINGS, check_policies),
    CheckRow(Scope.SETTINGS, check_quotas),
    CheckRow(Scope.SETTINGS, check_tcp),
    CheckRow(Scope.FILES, check_tls),
    CheckRow(Scope.FILES, check_tokens),
    CheckRow(Scope.FILES, check_master_keys),
    CheckRow(Scope.FILES, check_compression_files),
    CheckRow(Scope.HOST, check_listens),
    CheckRow(Scope.HOST, check_http),
    CheckRow(Scope.HOST, check_cold_store),
    CheckRow(Scope.DOCTOR, check_running),
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


def require(settings: Settings) -> list[Check]:
    """Return the warnings about settings and host that a daemon starts with. Raises StartError."""
    checks = examine(Facts(settings), settings, START)
    if problems := failed(checks):
        raise StartError(sentence(problems))
    return [check for check in checks if check.verdict is CheckVerdict.WARN]
