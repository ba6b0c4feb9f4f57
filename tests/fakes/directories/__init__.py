"""A directory in memory, held to the contract of the real ones (tests/contracts/test_directories.py)."""

import time

from kvtier.sources.directories.addresses import DirectoryError
from kvtier.sources.directories.records import TTL_S, HostRecord, Met


class Shelf:
    """What several clients share."""

    def __init__(self) -> None:
        self.records: dict[int, tuple[HostRecord, float]] = {}
        self.is_down = False


class FakeDirectory:
    """One client of a shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def meet(self, own: HostRecord) -> Met:
        """See HostDirectory."""
        if self._shelf.is_down:
            raise DirectoryError("it is down")
        now, kept = time.monotonic(), self._shelf.records
        for epoch in [epoch for epoch, (_, until) in kept.items() if until <= now]:
            del kept[epoch]
        is_new = own.epoch not in kept or kept[own.epoch][0] != own
        kept[own.epoch] = own, now + TTL_S
        return Met([record for record, _ in kept.values()], is_new=is_new)

    async def leave(self, own: HostRecord) -> None:
        """See HostDirectory."""
        self._shelf.records.pop(own.epoch, None)

    async def close(self) -> None:
        """See HostDirectory."""
