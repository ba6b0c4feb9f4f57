"""Addresses of the daemon: what may be written, and its default.

Daemon, command line and clients use the same rule, so that `kvtier serve`, `kvtier status` and
`kvtier.Client()` find each other without an argument: /run/kvtier when this user may write there (root,
systemd's RuntimeDirectory), else the user's own runtime directory, else /tmp/kvtier-UID.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

SOCKET_NAME = "kvtier.sock"
MAX_SOCKET_PATH_BYTES = 100  # the kernel takes 107; the local channel's name is longer by a suffix
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def check_address(address: object) -> str:
    """Return `address` as gRPC takes it. Raises ValueError, saying what may be written."""
    if isinstance(address, str) and address.startswith("unix:"):
        path = address.removeprefix("unix://") if address.startswith("unix://") else address[5:]
        if not path.startswith("/"):
            raise ValueError(
                f"{address!r}: a socket's path is absolute; write unix:///run/kvtier/kvtier.sock"
            )
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"{address!r}: a socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes")
        return f"unix://{path}"
    match = _HOST_PORT.fullmatch(address) if isinstance(address, str) else None
    if match is None or int(match[2]) > 65535:
        raise ValueError(f"{address!r} is not an address; write unix:///absolute/path or host:port")
    return match[0]


def join_port(host: str, port: int | str) -> str:
    """Return `host:port`, an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def socket_path(address: str) -> Path | None:
    """Return the path of a unix address, None of any other."""
    return Path(address.removeprefix("unix://")) if address.startswith("unix://") else None


def unix_path(target: str) -> str | None:
    """Return the path in `unix:///path` or `unix:path` as gRPC reads it, None of any other target."""
    if not target.startswith("unix:"):
        return None
    path = target.removeprefix("unix:")
    return path[2:] if path.startswith("///") else path


def candidates(environment: Mapping[str, str], uid: int | None = None) -> list[Path]:
    """Return where a daemon's socket may be, best first."""
    uid = os.getuid() if uid is None else uid
    folders = [Path("/run/kvtier")]
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        folders.append(Path(runtime, "kvtier"))
    folders.append(Path(f"/tmp/kvtier-{uid}"))
    return [folder / SOCKET_NAME for folder in folders if len(os.fsencode(folder)) < 80]


def default_address(environment: Mapping[str, str]) -> str:
    """Return where a daemon of this user listens by default."""
    *wished, last = candidates(environment)
    path = next((path for path in wished if _may_create(path.parent)), last)
    return f"unix://{path}"


def default_target(environment: Mapping[str, str], uid: int | None = None) -> str:
    """Return a client's target: KVTIER_TARGET, else the first usable socket, else this user's.

    A socket is usable that root or this user owns, or that lies where only root could have made room for it;
    one that this user may not open comes after the others. (In /tmp any user may create it first.)
    """
    if target := environment.get("KVTIER_TARGET"):
        return target
    uid = os.getuid() if uid is None else uid
    denied: list[Path] = []
    for path in candidates(environment, uid):
        try:
            status = path.stat()
        except PermissionError:
            denied += [path] if _made_by_root(path.parent) else []
            continue
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode) and (status.st_uid in (0, uid) or _made_by_root(path.parent)):
            if may(path, os.W_OK):
                return f"unix://{path}"
            denied.append(path)
    return f"unix://{denied[0]}" if denied else default_address(environment)


def may(path: Path, mode: int) -> bool:
    """Whether this process, as the user it is now, may do `mode` (os.R_OK, ...) at `path`."""
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _made_by_root(folder: Path) -> bool:
    """Whether only root could have created `folder`; False where this process may not look."""
    try:
        statuses = [parent.stat() for parent in folder.parents]
    except OSError:
        return False
    return all(one.st_uid == 0 and not one.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for one in statuses)


def _may_create(folder: Path) -> bool:
    """Whether this user can put a socket into `folder`, creating its last part if need be."""
    return os.access(folder if folder.exists() else folder.parent, os.W_OK | os.X_OK)
