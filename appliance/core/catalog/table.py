"""BlockTable: prefix hash -> row, without pauses.

One dict of a million entries stops the world for tens of milliseconds whenever it is rebuilt, and with
entries coming and going it is rebuilt again and again. 256 dicts by the first byte of the hash (which is
uniform) are rebuilt one at a time, in a fraction of a millisecond each.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

NUM_SHARDS = 256


class BlockTable:
    """A dict from 32-byte hashes to rows. `shards[h[0]]` is public: loops over many hashes use it."""

    __slots__ = ("shards",)

    def __init__(self) -> None:
        self.shards: list[dict[bytes, int]] = [{} for _ in range(NUM_SHARDS)]

    def get(self, prefix_hash: bytes, default: int) -> int:
        """Return the row of a hash, `default` when it is not there."""
        return self.shards[prefix_hash[0]].get(prefix_hash, default)

    def __setitem__(self, prefix_hash: bytes, row: int) -> None:
        self.shards[prefix_hash[0]][prefix_hash] = row

    def __delitem__(self, prefix_hash: bytes) -> None:
        del self.shards[prefix_hash[0]][prefix_hash]

    def __contains__(self, prefix_hash: bytes) -> bool:
        return prefix_hash in self.shards[prefix_hash[0]]

    def __bool__(self) -> bool:
        return any(self.shards)

    def __len__(self) -> int:
        return sum(len(shard) for shard in self.shards)

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Iterate over (hash, row)."""
        for shard in filter(None, self.shards):  # most namespaces are small
            yield from shard.items()

    def values(self) -> Iterator[int]:
        """Iterate over the rows."""
        for shard in filter(None, self.shards):
            yield from shard.values()

    def add_many(self, prefix_hashes: Sequence[bytes], first_row: int) -> None:
        """Add many hashes at once, in ascending order, with consecutive rows from `first_row`."""
        bounds = [bisect_left(prefix_hashes, bytes([first])) for first in range(NUM_SHARDS)]
        bounds.append(len(prefix_hashes))
        for shard, start, end in zip(self.shards, bounds, bounds[1:], strict=False):
            shard.update(
                zip(prefix_hashes[start:end], range(first_row + start, first_row + end), strict=True)
            )
