"""Places of a memory tier in columns: extents, slots and addresses of many places at once.

What is done once per fragment in Python costs more than copying it does where a copy engine moves 50 GB/s; so
batches are looked at extent by extent, and usually have one or two.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

I64: TypeAlias = NDArray[np.int64]

_SLOT_BITS = 32  # see v1.shm.place_of
_SLOT_MASK = np.int64((1 << _SLOT_BITS) - 1)


def column_of(places: "Sequence[int] | I64") -> I64:
    """Return places as a column (n,) int64. By way of an array, which costs a third of numpy's own way."""
    if isinstance(places, np.ndarray):
        return places
    return np.frombuffer(array("q", places), np.int64)


def slots_of(places: I64) -> I64:
    """Return the slots (n,) int64 of `places` (n,) int64 in their extents."""
    return places & _SLOT_MASK


def extents_of(places: I64) -> I64:
    """Return the extents (n,) int64 of `places` (n,) int64."""
    return places >> _SLOT_BITS


def by_extent(places: I64) -> Iterator[tuple[int, "slice | I64"]]:
    """Yield (extent, index): `index`, a slice or (m,) int64, selects its places from `places` (n,) int64."""
    if not len(places):
        return
    numbers = extents_of(places)
    first = int(numbers[0])
    if bool((numbers == first).all()):
        yield first, slice(None)
        return
    order = np.argsort(numbers, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        yield int(numbers[rows[0]]), rows


def addresses(
    places: I64, start_of: Callable[[int], int], slot_bytes_of: Callable[[int], int]
) -> NDArray[np.uint64]:
    """Return the addresses (n,) uint64 of the slots at `places` (n,) int64.

    `start_of` returns the address of an extent, `slot_bytes_of` the size of the slot at a place in bytes: all
    slots of an extent have one."""
    if not len(places):
        return np.empty(0, np.uint64)
    numbers = extents_of(places)
    first = int(numbers[0])
    if bool((numbers == first).all()):
        return (slots_of(places) * slot_bytes_of(first << _SLOT_BITS) + start_of(first)).view(np.uint64)
    known, which = np.unique(numbers, return_inverse=True)
    starts = np.array([start_of(number) for number in known.tolist()], np.int64)
    slot_bytes = np.array([slot_bytes_of(number << _SLOT_BITS) for number in known.tolist()], np.int64)
    return (slots_of(places) * slot_bytes[which] + starts[which]).view(np.uint64)
