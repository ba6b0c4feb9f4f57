"""Which way to the daemon: the local channel where target and settings allow it, gRPC otherwise.

The local channel's socket stands beside the gRPC one (`<path>.local`); connecting to it directly saves
asking for its name. Only when it is not there is the daemon asked, over gRPC. grpc is imported only when it
is used: it costs a runtime 0.2 s at start.
"""

from ...v1.addresses import unix_path
from ...v1.diagnosis import diagnose_address, diagnose_socket
from ..errors import NOT_RUNNING, Unavailable, from_diagnosis
from ..operations.base import ClientSettings
from .link import Link, LocalLink

UNIX = "unix:"
LOCAL_SUFFIX = ".local"


def open_link(settings: ClientSettings) -> Link:
    """Connect. Raises Unavailable when no daemon listens, PermissionDenied when its socket is closed."""
    path = local_path(settings)
    if path is None:
        from .remote import GrpcLink

        return GrpcLink(settings)
    return LocalLink(path, settings.name, settings.domain, settings.limits, settings.timeout)


def local_path(settings: ClientSettings) -> str | None:
    """Return the path of the local channel's socket, None when gRPC is to be used.

    Raises Unavailable when no daemon listens at the target, PermissionDenied when this user may not open its
    socket.
    """
    if (mistake := diagnose_address(settings.target)) is not None:
        raise from_diagnosis(mistake)
    if not settings.target.startswith(UNIX) or settings.shared_memory is False:
        if settings.shared_memory:
            raise Unavailable(
                f"shared memory needs a unix: target, {settings.target!r} is none", reason=NOT_RUNNING
            )
        return None
    path = unix_path(settings.target)
    assert path is not None
    timeout_s = settings.timeout.connect_s
    wrong = diagnose_socket(path + LOCAL_SUFFIX, timeout_s)
    if wrong is None:
        return path + LOCAL_SUFFIX
    if (problem := diagnose_socket(path, timeout_s)) is not None:
        raise from_diagnosis(problem)
    if wrong.reason != NOT_RUNNING:
        raise from_diagnosis(wrong)
    from .remote import local_socket_path

    named = local_socket_path(settings)
    if not named and settings.shared_memory:
        raise Unavailable(f"the daemon at {path} has no local channel", reason=NOT_RUNNING)
    return named or None
