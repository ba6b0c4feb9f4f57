"""Fresh runs: new blocks of one chain, from the decision to take them to the moment they are readable.

Because they continue one another, everything that is ever asked about them (each fragment's label, where its
bytes come from and go to) follows from a handful of values. So nothing is written out per fragment when a
put is decided: `Lazy` sequences are filled in when they are read. A daemon reads it once; replay,
which has no bytes, never does, and that was a tenth of its time.

What a run says is a copy of its own: it stays true after its blocks have left and their rows name others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, overload

from ....tiers.base import CopyItem
from ....tiers.block import FragmentLabel
from .catalog import NamespaceEntry

T = TypeVar("T")
_ITEM = partial(tuple.__new__, CopyItem)  # of a triple; in C, because a put has many


class Lazy(Sequence[T]):
    """A sequence of known length that is made when it is read."""

    __slots__ = ("_length", "_made", "_make")

    def __init__(self, length: int, make: Callable[[], list[T]]) -> None:
        self._length = length
        self._make = make
        self._made: list[T] | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._all()[index]

    def _all(self) -> list[T]:
        if self._made is None:
            self._made = self._make()
        return self._made


@dataclass(slots=True)
class FreshRun:
    """Blocks that a put brings. Fragments and places are block by block, in group order."""

    namespace: NamespaceEntry
    first_block: int  # number of the first one in its put
    names: Sequence[bytes]  # prefix hashes
    parent_hash: bytes  # of the first one; empty at the start of a chain
    position: int  # of the first one
    rows: list[int]
    fragments: list[int]
    places: list[int]  # in the put tier
    _labels: list[FragmentLabel] = field(default_factory=list)

    def items(self, spans: Sequence[tuple[int, int]]) -> Lazy[CopyItem]:
        """Return what is to be copied; `spans` says where each block is in the staging extent."""
        return Lazy(len(self.fragments), partial(self._make_items, spans))

    def labels(self, checksums: Sequence[bytes]) -> Lazy[FragmentLabel]:
        """Return the labels of the fragments, with the checksums that were taken."""
        return Lazy(len(self.fragments), partial(self._make_labels, checksums))

    def _make_items(self, spans: Sequence[tuple[int, int]]) -> list[CopyItem]:
        offsets = self.namespace.group_offsets
        sources = [start + offset for start, _ in spans for offset in offsets]
        return list(map(_ITEM, zip(sources, self.places, self._unchecked(), strict=True)))

    def _make_labels(self, checksums: Sequence[bytes]) -> list[FragmentLabel]:
        labels = self._unchecked()
        for label, checksum in zip(labels, checksums, strict=True):
            label.checksum = checksum  # the copy has ended: no other holds this label
        return labels

    def _unchecked(self) -> list[FragmentLabel]:
        """Return the labels without checksums, the same ones every time."""
        if not self._labels:
            namespace, parent_hash = self.namespace, self.parent_hash
            digest, sizes = namespace.identity.digest, list(enumerate(namespace.fragment_bytes))
            for position, name in enumerate(self.names, self.position):
                for group, length in sizes:
                    label = FragmentLabel(digest, namespace.id, name, parent_hash, position, group, length)
                    self._labels.append(label)
                parent_hash = name
        return self._labels
