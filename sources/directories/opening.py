"""Opens the directory that an address names."""

from typing import Final

from .addresses import DirectoryAccess, DirectoryAddress
from .records import CALL_S, HostDirectory
from .redis_index import RedisIndex
from .redis_server import RedisDirectory, open_client

LOOK_S: Final = 0.25  # that an answer of an index is waited for


def open_directory(address: DirectoryAddress, access: DirectoryAccess) -> HostDirectory:
    """Return a directory; nothing is connected yet. Raises DirectoryError."""
    if address.engine == "etcd":
        from .etcd import EtcdDirectory  # few hosts need its messages

        return EtcdDirectory(address, access)
    return RedisDirectory(open_client(address, access, CALL_S), address.fleet)


def open_index(address: DirectoryAddress, access: DirectoryAccess) -> RedisIndex:
    """Return the index of a fleet, in Redis; nothing is connected yet. Raises DirectoryError."""
    writer, reader = (open_client(address, access, wait_s) for wait_s in (CALL_S, LOOK_S))
    return RedisIndex(writer, reader, address.fleet)
