"""SourceChain: a chain of blocks as the source keeps it, in bundles, and what is known of them there."""

from collections.abc import Sequence

from ..catalog.catalog import NamespaceEntry
from .source_index import SourceIndex


class SourceChain:
    """Blocks of a namespace by their names, in bundles of `size`.

    Where the source `has_hosts`, they may hold less than a bundle behind those that are whole."""

    def __init__(
        self, index: SourceIndex, namespace: NamespaceEntry, names: Sequence[bytes], has_hosts: bool
    ) -> None:
        self.namespace = namespace
        self.names = names
        self.size = index.num_blocks(namespace)
        self._index = index
        self._has_hosts = has_hosts

    def bundle_start(self, block: int) -> int:
        """Return the first block of the bundle that a block is in."""
        return block // self.size * self.size

    def asked(self, first: int) -> tuple[list[bytes], int]:
        """Return the names of the bundles from block `first` on, and the end of what can be asked for."""
        ends = range(first + self.size, len(self.names) + 1, self.size)
        bundles = [self.names[end - 1] for end in ends]
        return bundles, len(self.names) if self._has_hosts else first + len(bundles) * self.size

    def is_known(self, first: int) -> bool:
        """Return whether it is known if there is something from block `first` on."""
        if first + self.size <= len(self.names):
            return self._is_present(first + self.size) is not None
        return bool(self._tail_end(first))

    def bundles_end(self, start: int) -> int:
        """Return the end of the bundles from block `start` on that the source is known to hold."""
        end = start
        while end + self.size <= len(self.names) and self._is_present(end + self.size):
            end += self.size
        return end

    def present_end(self, first: int) -> int:
        """Return the end of the blocks from `first` on that the source is known to hold."""
        end = self.bundles_end(first)
        return self._tail_end(end) or end

    def is_stored(self, first: int) -> bool:
        """Return whether a store is known to have the bundle that begins with block `first`."""
        end = min(first + self.size, len(self.names))
        return end > 0 and self._index.is_stored(self.namespace.id, self.names[end - 1])

    def _tail_end(self, start: int) -> int:
        """Return the end of the blocks from `start` on that a host has, less than a bundle; 0: of none."""
        last = min(start + self.size - 1, len(self.names)) if self._has_hosts else start
        return next((end for end in range(last, start, -1) if self._is_present(end)), 0)

    def _is_present(self, end: int) -> bool | None:
        """Return whether what ends with block `end` - 1 is there, as far as known."""
        return self._index.is_present(self.namespace.id, self.names[end - 1])
