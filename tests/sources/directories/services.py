"""Directories as a site has them: how each is started, where it is then, and what a client of it shows.

A service is started into a folder, and stopped with a stack; its fleets have names that begin with "test".
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

from kvtier.sources.directories.addresses import DirectoryAccess

from ...ports import free_port
from .servers import (
    PASSWORD,
    Server,
    etcd_cluster,
    etcd_control,
    needs_etcd,
    needs_redis,
    redis_cluster,
    redis_server,
    sentinel_set,
    write_certificates,
)

Service: TypeAlias = tuple[str, DirectoryAccess]
Start: TypeAlias = Callable[[Path, ExitStack], Service]


def _redis(folder: Path, stack: ExitStack) -> Service:
    server = stack.enter_context(redis_server(folder))
    return f"redis://127.0.0.1:{server.port}/3", DirectoryAccess()


def _redis_secured(folder: Path, stack: ExitStack) -> Service:
    server = stack.enter_context(redis_server(folder, files=write_certificates(folder)))
    return f"rediss://kvtier@127.0.0.1:{server.port}/3", DirectoryAccess(folder)


def _sentinel(folder: Path, stack: ExitStack) -> Service:
    return stack.enter_context(sentinel_set(folder)).url, DirectoryAccess()


def _sentinel_secured(folder: Path, stack: ExitStack, *, has_sentinel_users: bool = True) -> Service:
    files = write_certificates(folder)
    if not has_sentinel_users:
        del files["sentinel users"]
    servers = stack.enter_context(sentinel_set(folder, files))
    return servers.url.replace("redis+sentinel://", "rediss+sentinel://kvtier@"), DirectoryAccess(folder)


def _sentinel_half_secured(folder: Path, stack: ExitStack) -> Service:
    return _sentinel_secured(folder, stack, has_sentinel_users=False)


def _cluster(folder: Path, stack: ExitStack) -> Service:
    nodes = stack.enter_context(redis_cluster(folder))
    return f"redis+cluster://127.0.0.1:{nodes[1].port}", DirectoryAccess()


def _cluster_secured(folder: Path, stack: ExitStack) -> Service:
    nodes = stack.enter_context(redis_cluster(folder, files=write_certificates(folder)))
    return f"rediss+cluster://kvtier@127.0.0.1:{nodes[2].port}", DirectoryAccess(folder)


def _etcd(folder: Path, stack: ExitStack) -> Service:
    (server,) = stack.enter_context(etcd_cluster(folder, 1))
    return f"etcd://127.0.0.1:{free_port()},127.0.0.1:{server.port}", DirectoryAccess()


def _etcd_secured(folder: Path, stack: ExitStack) -> Service:
    members = stack.enter_context(etcd_cluster(folder, 3, write_certificates(folder)))
    return etcd_with_a_user(members), DirectoryAccess(folder)


def etcd_with_a_user(members: Sequence[Server]) -> str:
    """Make users with passwords; return the address of the members for one of hosts."""
    for words in (
        f"user add root:{PASSWORD}",
        f"user add kvtier:{PASSWORD}",
        "role add root",
        "role add hosts",
        "role grant-permission hosts --prefix=true readwrite kvtier/test",
        "user grant-role root root",
        "user grant-role kvtier hosts",
        "auth enable",
    ):
        etcd_control(members, *words.split())
    return f"etcds://kvtier@{','.join(f'127.0.0.1:{one.port}' for one in members)}"


#: Those that may hold an index, and others; with the mark that says what they need.
REDIS_SERVICES: dict[str, Start] = {
    "redis": _redis,
    "rediss with a user": _redis_secured,
    "sentinel": _sentinel,
    "sentinel over TLS with users": _sentinel_secured,
    "sentinel over TLS with users of the servers alone": _sentinel_half_secured,
    "cluster": _cluster,
    "cluster over TLS with users": _cluster_secured,
}
ETCD_SERVICES: dict[str, Start] = {"etcd": _etcd, "three etcds over TLS with a user": _etcd_secured}
SERVICES: dict[str, tuple[Start, Any]] = {
    **{name: (start, needs_redis) for name, start in REDIS_SERVICES.items()},
    **{name: (start, needs_etcd) for name, start in ETCD_SERVICES.items()},
}
