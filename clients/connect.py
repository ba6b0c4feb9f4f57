"""Which way to the daemon: the local channel where target and settings allow it, gRPC otherwise.

The local channel's socket stands beside the gRPC one (`<path>.local`); connecting to it directly saves
asking for its name. Only when it is not there is the daemon asked, over gRPC. grpc is imported only when it
is used: it costs a runtime 0.2 s at start.
"""

import socket
from collections.abc import Callable
from contextlib import closing

from .base import Settings
from .errors import NOT_RUNNING, Unavailable
from .link import Link, LocalLink

UNIX = "unix:"
LOCAL_SUFFIX = ".local"


def open_link(settings: Settings) -> Link:
    """Connect. Raises Unavailable when there is nobody."""
    path = local_path(settings, _ask)
    if path is None:
        from .remote import GrpcLink

        return GrpcLink(settings)
    return LocalLink(path, settings.name, settings.domain, settings.limits, settings.timeout)


def local_path(settings: Settings, ask: Callable[[Settings], str]) -> str | None:
    """Return the path of the local channel's socket, None when gRPC is to be used.

    `ask` calls GetServerInfo. Raises Unavailable when nobody listens at the target.
    """
    if not settings.target.startswith(UNIX) or settings.shared_memory is False:
        if settings.shared_memory:
            raise Unavailable(
                f"shared memory needs a unix: target, {settings.target!r} is none", reason=NOT_RUNNING
            )
        return None
    path = socket_path(settings.target)
    if listens(path + LOCAL_SUFFIX, settings.timeout.connect_s):
        return path + LOCAL_SUFFIX
    if not listens(path, settings.timeout.connect_s):
        raise Unavailable(f"no daemon at {path}; start it with `kvtier serve`", reason=NOT_RUNNING)
    named = ask(settings)
    if not named and settings.shared_memory:
        raise Unavailable(f"the daemon at {path} has no local channel", reason=NOT_RUNNING)
    return named or None


def socket_path(target: str) -> str:
    """Return the path in `unix:///path` or `unix:path`."""
    path = target.removeprefix(UNIX)
    return path[2:] if path.startswith("///") else path


def listens(path: str, timeout_s: float) -> bool:
    """Whether a Unix stream socket accepts connections at `path`."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(timeout_s)
        return probe.connect_ex(path) == 0


def _ask(settings: Settings) -> str:
    from .remote import local_socket_path

    return local_socket_path(settings)
