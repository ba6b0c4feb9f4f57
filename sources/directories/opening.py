"""Opens the directory that an address names."""

from typing import Final

from .addresses import DirectoryAccess, DirectoryAddress, DirectoryError
from .records import CALL_S, HostDirectory
from .redis_index import RedisIndex
from .redis_server import RedisDirectory, open_client

LOOK_S: Final = 0.25  # that an answer of an index is waited for


def open_directory(address: DirectoryAddress, access: DirectoryAccess) -> HostDirectory:
    """Return a directory; nothing is connected yet. Raises DirectoryError."""
    _check(address, access)
    if address.engine == "etcd":
        from .etcd import EtcdDirectory  # few hosts need its messages

        return EtcdDirectory(address, access)
    return RedisDirectory(open_client(address, access, CALL_S), address.fleet)


def open_index(address: DirectoryAddress, access: DirectoryAccess) -> RedisIndex:
    """Return the index of a fleet, in Redis; nothing is connected yet. Raises DirectoryError."""
    _check(address, access)
    writer, reader = (open_client(address, access, wait_s) for wait_s in (CALL_S, LOOK_S))
    return RedisIndex(writer, reader, address.fleet)


def _check(address: DirectoryAddress, access: DirectoryAccess) -> None:
    """Refuse credentials that would not be used. Raises DirectoryError."""
    if (access.certificate is None) != (access.key is None):
        raise DirectoryError(f"{access.folder} needs tls.crt and tls.key, both or neither")
    if not address.is_tls and (access.ca is not None or access.certificate is not None):
        secured = address._replace(is_tls=True)
        raise DirectoryError(f"{access.folder} has files for TLS; write {secured}")
    if address.username and access.password_file is None:
        raise DirectoryError(f"{access.folder} has no file `password` for {address.username}")
    if address.engine == "etcd" and access.password_file is not None and not address.username:
        raise DirectoryError("a password of etcd belongs to a user; write USER@ before the hosts")
