"""DirectoryAddress: what may be written for a directory, and what else is needed to open one.

One URL for every service, because its parts differ only in number: several nodes stand between commas. No
credentials in it: an address is shown and logged, so they are in files that are read when they are needed.
"""

import re
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from ...v1.files import read_regular_file

DEFAULT_PORTS: Final = {"etcd": 2379, "redis": 6379, "sentinel": 26379, "cluster": 6379}
WAYS: Final = (
    "write etcd://HOST:PORT, redis://HOST:PORT/DATABASE, redis+sentinel://HOST:PORT,HOST:PORT/MASTER or "
    "redis+cluster://HOST:PORT,HOST:PORT; with TLS etcds:, rediss:, rediss+sentinel: or rediss+cluster:; "
    "USER@ before the hosts and #FLEET at the end where there are such"
)
MAX_NODES: Final = 64
FLEET: Final = "kvtier"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,63}")
_SCHEME = re.compile(r"(etcd|redis)(s?)(?:\+(sentinel|cluster))?")
_NODE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_MAX_SECRET_BYTES: Final = 4096


class DirectoryAddress(NamedTuple):
    """Where a directory is. `shape`: sentinel, cluster, or empty for one server (or etcd's members)."""

    engine: str  # etcd or redis
    shape: str
    is_tls: bool
    nodes: tuple[tuple[str, int], ...]
    username: str = ""
    master: str = ""  # by which Sentinel knows the servers
    database: int = 0
    fleet: str = FLEET

    def __str__(self) -> str:
        scheme = f"{self.engine}{'s' * self.is_tls}{'+' * bool(self.shape)}{self.shape}"
        nodes = ",".join(f"{f'[{host}]' if ':' in host else host}:{port}" for host, port in self.nodes)
        path = "/".join(filter(None, (self.master, str(self.database) if self.database else "")))
        user, fleet = (
            f"{self.username}@" if self.username else "",
            f"#{self.fleet}" if self.fleet != FLEET else "",
        )
        return f"{scheme}://{user}{nodes}{'/' * bool(path)}{path}{fleet}"


class DirectoryAccess(NamedTuple):
    """What a client of a directory shows, and believes: files of one folder, each where it is needed.

    Their names are those of a TLS secret of Kubernetes, so that such a secret is mounted as it is. Read when
    a connection is made."""

    folder: Path | None = None

    @property
    def password_file(self) -> Path | None:
        """The password, in one line."""
        return self._file("password")

    @property
    def ca(self) -> Path | None:
        """Authorities that sign the directory's certificate, PEM."""
        return self._file("ca.crt")

    @property
    def certificate(self) -> Path | None:
        """Client certificate, PEM."""
        return self._file("tls.crt")

    @property
    def key(self) -> Path | None:
        """Private key of the client certificate, PEM."""
        return self._file("tls.key")

    def _file(self, name: str) -> Path | None:
        return path if self.folder is not None and (path := self.folder / name).exists() else None

    def password(self) -> str:
        """Return the password; empty without one. Raises OSError, ValueError for what is no text."""
        path = self.password_file
        return "" if path is None else read_regular_file(path, _MAX_SECRET_BYTES).decode().strip()


class DirectoryError(Exception):
    """A directory did not do what was asked. The message names no credentials."""


def parse_address(url: str) -> DirectoryAddress:
    """Return the parts of a URL. Raises ValueError, which says what may be written."""
    scheme, separator, rest = url.partition("://")
    match = _SCHEME.fullmatch(scheme)
    if match is None or not separator or (match[1] == "etcd" and match[3]):
        raise ValueError(f"this is no address of a directory; {WAYS}")  # not repeated: it may hold a password
    parts = urlsplit(f"//{rest}")
    username, _, netloc = parts.netloc.rpartition("@")
    if ":" in username:
        raise ValueError(
            "a password in an address is shown and logged; write it into the file `password` of `credentials`"
        )
    if parts.query or not _NAME.fullmatch(username or "-") or not _NAME.fullmatch(parts.fragment or "-"):
        raise ValueError(f"an address has no '?', and names without signs; {WAYS}")
    engine, shape = match[1], match[3] or ""
    nodes = tuple(_node(one, DEFAULT_PORTS[shape or engine]) for one in netloc.split(","))
    if len(nodes) > MAX_NODES:
        raise ValueError(f"{len(nodes)} nodes, at most {MAX_NODES}; name some of them")
    if engine == "redis" and not shape and len(nodes) > 1:
        raise ValueError(f"several servers need redis+sentinel or redis+cluster; {WAYS}")
    path = [part for part in parts.path.split("/") if part]
    master = path.pop(0) if shape == "sentinel" and path else ""
    if shape == "sentinel" and not master:
        raise ValueError("name the master as Sentinel does: redis+sentinel://HOST:PORT/MASTER")
    database = path.pop(0) if engine == "redis" and shape != "cluster" and path else "0"
    if path or not (database.isascii() and database.isdigit()):
        raise ValueError(f"{parts.path!r} means nothing here; {WAYS}")
    fleet = parts.fragment or FLEET
    return DirectoryAddress(engine, shape, bool(match[2]), nodes, username, master, int(database), fleet)


def _node(text: str, default_port: int) -> tuple[str, int]:
    match = _NODE.fullmatch(text)
    port = int(match[2] or default_port) if match is not None else 0
    if match is None or not 0 < port < 1 << 16:
        raise ValueError(f"a node of the address is no host and port; {WAYS}")  # as above
    return match[1].strip("[]"), port
