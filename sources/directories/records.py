"""HostRecord: what a host leaves in a directory, and the port that every directory is.

The key is the host's life (`epoch`, 63 random bits drawn at every start), not its name or address: two hosts
can never overwrite each other's record, and a host that was started anew leaves its former self to expire.
Others write into a directory, too, so a record is read as something hostile.
"""

import json
from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol

from ...v1.addresses import check_address, socket_path

TTL_S: Final = 10.0  # of a record that is not renewed
BEAT_S: Final = TTL_S / 3
CALL_S: Final = 2.0  # that one answer of a directory is waited for
MAX_RECORDS: Final = 4096
MAX_RECORD_BYTES: Final = 1024
#: What hosts say to each other (peer.proto) with these numbers, this version can: `OLDEST` to `PROTOCOL`.
PROTOCOL: Final = 1
OLDEST: Final = 1


class HostRecord(NamedTuple):
    """One life of a host."""

    epoch: int
    address: str  # host:port where other hosts call it
    name: str = ""  # for people
    version: str = ""  # for people
    protocol: int = PROTOCOL
    oldest: int = OLDEST

    def text(self) -> bytes:
        """Return it as a directory keeps it."""
        return json.dumps(self._asdict(), separators=(",", ":")).encode()


class Met(NamedTuple):
    """What a directory said."""

    records: list[HostRecord]  # of all hosts, this one among them
    num_unreadable: int = 0  # entries that are no record
    is_new: bool = False  # this host was not in it, not any more, or another one had its life
    problem: str = ""  # why this host is not in it; others may be


class HostDirectory(Protocol):
    """Where hosts of one fleet find each other."""

    async def meet(self, own: HostRecord) -> Met:
        """Say that this host is there for TTL_S from now; return all that are. Raises DirectoryError."""
        ...

    async def leave(self, own: HostRecord) -> None:
        """Remove this host's record. Raises DirectoryError."""
        ...

    async def close(self) -> None:
        """End all connections. Idempotent."""
        ...


def refusal_of(protocol: int, oldest: int) -> str:
    """Return why a host that says these numbers is not asked; empty when it is."""
    if oldest > PROTOCOL:
        return f"it is newer: it says protocol {oldest} at the least, this host {PROTOCOL}; upgrade this host"
    if protocol < OLDEST:
        return f"it is older: it says protocol {protocol}, this host {OLDEST} at the least; upgrade it"
    return ""


def read_records(values: Iterable[bytes]) -> tuple[list[HostRecord], int]:
    """Return the records among values, at most MAX_RECORDS, and how many values are none."""
    records, num_unreadable = dict[int, HostRecord](), 0
    for value in values:
        try:
            record = _read(value)
        except (ValueError, TypeError, KeyError, RecursionError):
            num_unreadable += 1
        else:
            if len(records) < MAX_RECORDS:
                records[record.epoch] = record
    return list(records.values()), num_unreadable


def _read(value: bytes) -> HostRecord:
    if len(value) > MAX_RECORD_BYTES:
        raise ValueError("it is too long")
    found = json.loads(value)
    epoch, protocol, oldest = (_number(found[key]) for key in ("epoch", "protocol", "oldest"))
    address = check_address(found["address"])
    if socket_path(address) is not None:
        raise ValueError("it is no address of another host")
    name, version = (_words(found[key]) for key in ("name", "version"))
    return HostRecord(epoch, address, name, version, protocol, oldest)


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 63:
        raise ValueError("it is no number of a host")
    return value


def _words(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("it is no text")
    return "".join(filter(str.isprintable, value))[:64]
