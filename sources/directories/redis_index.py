"""RedisIndex: which hosts hold which bundles, in Redis or Valkey, for fleets that are too large for streams.

    kvtier:FLEET:12 BYTES      a set of lives (63-bit numbers, which Redis packs: 8 bytes each)

The key is 4 bytes of the namespace's digest and 8 of the bundle's name: a bundle, not a block, because a
ticket is for bundles, and a sixteenth of the keys. A life that has ended is in no directory, so what it
left here means nothing from then on, and expires. Every command concerns one key: any layout of a Cluster
will do, no script is needed, and two hosts never write the same thing.

Rejected: a set for each host, which ends with it, because a look would ask every host's set; a hash for
each range of names, a fifth of the memory, because removing a host from it needs scripts, and nothing
expires.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from .redis_server import close_client, explained, pipeline_of

if TYPE_CHECKING:
    from .redis_server import Client

KEY_TTL_S: Final = 3600  # of what its hosts do not write again
DIGEST_BYTES: Final = 4


class HolderIndex(Protocol):
    """Which lives hold which bundles. All calls raise DirectoryError."""

    async def add(self, life: int, keys: Sequence[bytes]) -> None:
        """Say that a life holds these bundles, for KEY_TTL_S."""
        ...

    async def remove(self, life: int, keys: Sequence[bytes]) -> None:
        """Say that it does not hold them any more."""
        ...

    async def holders(self, keys: Sequence[bytes]) -> list[frozenset[int]]:
        """Return the lives that hold each bundle; those that have ended may be among them."""
        ...

    async def close(self) -> None:
        """End all connections. Idempotent."""
        ...


def bundle_key(digest: bytes, short_name: bytes) -> bytes:
    """Return what stands for a bundle of a namespace, from the first 8 bytes of its name."""
    return digest[:DIGEST_BYTES] + short_name


class RedisIndex:
    """A fleet's bundles in Redis. `reader`: a client for looks, which wait shortly."""

    def __init__(self, writer: "Client", reader: "Client", fleet: str) -> None:
        self._writer = writer
        self._reader = reader
        self._prefix = f"kvtier:{fleet}:".encode()

    async def add(self, life: int, keys: Sequence[bytes]) -> None:
        """See HolderIndex."""
        with explained():
            async with pipeline_of(self._writer) as batch:
                for key in keys:
                    batch.sadd(self._prefix + key, life)
                    batch.expire(self._prefix + key, KEY_TTL_S)
                await batch.execute()

    async def remove(self, life: int, keys: Sequence[bytes]) -> None:
        """See HolderIndex."""
        with explained():
            async with pipeline_of(self._writer) as batch:
                for key in keys:
                    batch.srem(self._prefix + key, life)
                await batch.execute()

    async def holders(self, keys: Sequence[bytes]) -> list[frozenset[int]]:
        """See HolderIndex."""
        with explained():
            async with pipeline_of(self._reader) as batch:
                for key in keys:
                    batch.smembers(self._prefix + key)
                return [frozenset(map(int, lives)) for lives in await batch.execute()]

    async def close(self) -> None:
        """See HolderIndex."""
        for client in (self._writer, self._reader):
            await close_client(client)
