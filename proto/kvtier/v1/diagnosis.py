"""Diagnosis of a daemon that cannot be reached: a stable reason, and a sentence that names the fix.

Clients, command line and `kvtier doctor` ask here after a connection has failed, so that they say the same.
On a Unix socket the kernel's error is explained by the modes and owners on the way to it. On TCP the
connection is tried once more, without gRPC, which reports every TLS mistake as an outage: an ordinary
handshake with the same files, then the first bytes of HTTP/2. Nothing is sent that could be a secret but the
certificate, to a peer that has proved its name. grpc is not imported: a client on this host never loads it.
"""

import errno
import grp
import os
import pwd
import socket
import stat
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from .addresses import check_address, may, unix_path
from .unreachable import (
    BAD_TARGET,
    CONNECTION_LOST,
    NO_ANSWER,
    NOT_KVTIER,
    NOT_RUNNING,
    SOCKET_DENIED,
    Diagnosis,
)

_UNAVAILABLE, _DEADLINE_EXCEEDED, _UNIMPLEMENTED = 14, 4, 12  # gRPC status codes
_OTHER_SCHEMES = ("dns", "ipv4", "ipv6", "vsock", "xds")  # what gRPC resolves itself


def diagnose_call(
    code: int, text: str, target: str, environment: Mapping[str, str] = os.environ, timeout_s: float = 1.0
) -> Diagnosis | None:
    """Return why a gRPC call at `target` failed; None for a status that is no matter of reaching it.

    It ended with status `code` and the words `text`, without the daemon's own explanation. May take
    `timeout_s`, and twice that on TCP.
    """
    if code == _DEADLINE_EXCEEDED:
        return Diagnosis(NO_ANSWER, f"the daemon at {target} does not answer; look at its log ({text})")
    if code == _UNIMPLEMENTED:
        return Diagnosis(
            NOT_KVTIER, f"what listens at {target} is no kvtier daemon of this version ({text}); name another"
        )
    if code != _UNAVAILABLE:
        return None
    return diagnose(target, environment, timeout_s) or Diagnosis(
        CONNECTION_LOST, f"the connection to {target} broke ({text}); try again, or look at the daemon's log"
    )


def diagnose(
    target: str, environment: Mapping[str, str] = os.environ, timeout_s: float = 1.0
) -> Diagnosis | None:
    """Connect to `target` as a client with `environment` would; return what is wrong, None when that works.

    `timeout_s` bounds each of at most two connections.
    """
    if (path := unix_path(target)) is not None:
        return diagnose_socket(path, timeout_s)
    if target.partition(":")[0] in _OTHER_SCHEMES:
        return None
    if (wrong := diagnose_address(target)) is not None:
        return wrong
    from .port_diagnosis import Port  # it imports ssl, which a client on this host never needs

    host, _, port = target.rpartition(":")
    return Port(target, host.strip("[]"), int(port), timeout_s).diagnose(environment)


def diagnose_address(target: str) -> Diagnosis | None:
    """Return what is wrong with a target as it is written, None when nothing is."""
    if target.partition(":")[0] in ("unix", *_OTHER_SCHEMES):
        return None
    try:
        check_address(target)
    except ValueError as error:
        return Diagnosis(BAD_TARGET, f"the target {error}")
    return None


# --------------------------------------------------------------------------------------- Unix sockets


def diagnose_socket(path: str, timeout_s: float = 1.0) -> Diagnosis | None:
    """Connect to the Unix socket at `path`; return what is wrong, None when a server listens."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(timeout_s)
        try:
            probe.connect(path)
        except OSError as problem:
            return explain_socket(path, problem)
    return None


def explain_socket(path: str, problem: OSError) -> Diagnosis:
    """Return why connecting to the Unix socket at `path` ended in `problem`."""
    if problem.errno in (errno.EACCES, errno.EPERM):
        try:
            return Diagnosis(SOCKET_DENIED, _denied(Path(path)))
        except OSError as changed:
            return Diagnosis(
                SOCKET_DENIED, f"permission denied at unix://{path} ({changed.strerror}); try again"
            )
    if problem.errno == errno.EAGAIN or isinstance(problem, TimeoutError):
        return Diagnosis(NO_ANSWER, f"the daemon at unix://{path} takes no connections; look at its log")
    return Diagnosis(
        NOT_RUNNING,
        f"no daemon at unix://{path}; start one with `kvtier serve` (one that was started may need a moment: "
        "`kvtier status --wait 30s`), or name another with --target or KVTIER_TARGET",
    )


def _denied(path: Path) -> str:
    """Return which part of the way to `path` is closed to this process, and what opens it.

    Raises OSError when that changes meanwhile.
    """
    uid = os.geteuid()
    closed = next((folder for folder in reversed(path.parents) if not may(folder, os.X_OK)), None)
    found, wanted = (closed, os.X_OK) if closed else (path, os.W_OK)
    status = found.stat()
    kind, mode = "folder" if closed else "socket", stat.S_IMODE(status.st_mode)
    start = (
        f"permission denied at unix://{path}: {kind} {found} has owner {_user(status.st_uid)}, group "
        f"{_group(status.st_gid)}, mode {mode:04o}; this process is uid {_user(uid)}, groups "
        f"{' '.join(map(_group, _own_groups()))}"
    )
    if may(found, wanted):
        return f"{start}, which may; so a security module forbids it: see its audit log"
    fix = ", and ".join(_steps(found, status, 0o010 if closed else 0o060))
    if not closed:
        fix += (
            f"; or name uid {uid} under `tenants` in the daemon's policy, which gives the socket mode 0666 "
            "and admits only those that are named"
        )
    return f"{start}. A daemon may well be there. Fix: {fix}"


def _steps(found: Path, status: os.stat_result, needed: int) -> list[str]:
    """Return what lets this process use a file by its group; `needed` are the bits of the group's mode."""
    mode = stat.S_IMODE(status.st_mode)
    steps = []
    if mode & needed != needed:
        how = "RuntimeDirectoryMode= with systemd" if stat.S_ISDIR(status.st_mode) else "`tenants` open it"
        steps.append(f"chmod {mode | needed:04o} {found} ({how})")
    gid = status.st_gid
    if gid == 0:
        steps.append("run the daemon with a group of its own instead of root's, and let this user join that")
    elif gid not in _own_groups():
        uid = os.geteuid()
        steps.append(
            f"let this user join group {_group(gid)}: usermod --append --groups {_name_of_group(gid) or gid} "
            f"{_name(uid) or uid}, then start the process anew; in Kubernetes supplementalGroups: [{gid}]"
        )
    return steps


def _user(uid: int) -> str:
    name = _name(uid)
    return f"{uid} ({name})" if name else str(uid)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _group(gid: int) -> str:
    name = _name_of_group(gid)
    return f"{gid} ({name})" if name else str(gid)


def _name_of_group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return ""


def _own_groups() -> list[int]:
    return list(dict.fromkeys((os.getegid(), *os.getgroups())))
