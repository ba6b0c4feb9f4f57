"""The slot headers of one extent, written so that a reader in another process always sees a valid state.

A header changes only while its generation is odd, and a generation is stored through a view of 8-byte
words, that is by one aligned store: readers see the old one or the new one. struct and memoryview are
used because this is called once per fragment on the event loop; numpy's structured scalars cost ten
times as much.
"""

import struct
import zlib
from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from ...native import native, order_stores
from ...v1.shm import CHECKSUM_BYTES, HASH_BYTES, IS_SPENT, SLOT_HEADER, tag_of
from ..base import Buffer
from ..block import FragmentLabel

EMPTY_GENERATION = 1  # odd: nothing here. Zero, what fresh memory holds, would be readable.
MAX_GENERATION = 1 << 62  # no extent comes so far; a number above it was not written by `fill`

# A header without its generation: namespace_id, group, offset, length, raw_length, check, position,
# prefix_hash, checksum, parent_hash.
BODY = struct.Struct("<IIQQQII32s16s32s")
BODY_OFFSET = 8
_BYTES = SLOT_HEADER.itemsize
_WORDS = _BYTES // 8
_CHECKS, _CHECK = _BYTES // 4, 10  # u4 words of a header; which of them is `check`
_CHECK_IN_BODY, _NO_CHECK = 4 * _CHECK - BODY_OFFSET, bytes(4)
assert BODY_OFFSET + BODY.size == _BYTES

#: Which of a header's words say what is in the slot: namespace and group, raw length, hash, checksum.
_IDENTITY = np.array([1, 4, 6, 7, 8, 9, 10, 11])
assert SLOT_HEADER.fields is not None
assert [SLOT_HEADER.fields[name][1] for name in ("raw_length", "check", "prefix_hash", "checksum")] == [
    32,
    40,
    48,
    80,
]

_columns_of = attrgetter("namespace_id", "group", "raw_length", "prefix_hash", "checksum")


def _one_or_column(values: tuple[int, ...]) -> "np.uint64 | npt.NDArray[np.uint64]":
    """Return one uint64 if all values are equal, as in most batches; else a column (n,) uint64."""
    first = values[0]
    return np.uint64(first) if values.count(first) == len(values) else np.array(values, np.uint64)


class LabelColumns:
    """The labels of a batch in columns, for comparing all of them at once with what is in their slots."""

    def __init__(self, labels: Sequence[FragmentLabel]) -> None:
        self.labels = labels
        columns: tuple[tuple[Any, ...], ...] = tuple(zip(*map(_columns_of, labels), strict=True))
        self._namespace_ids, self._groups, lengths, self._hashes, self.checksums = columns
        self.lengths = np.empty(len(labels), np.int64)
        self.lengths[:] = _one_or_column(lengths)

    @cached_property
    def words(self) -> npt.NDArray[np.uint64] | None:
        """The headers' identity words of these labels, (n, 8) uint64.
        None where a label has no checksum yet, and cannot be compared as a whole."""
        hashes, checksums, count = b"".join(self._hashes), b"".join(self.checksums), len(self.labels)
        if len(hashes) != count * HASH_BYTES or len(checksums) != count * CHECKSUM_BYTES:
            return None
        words = np.empty((count, len(_IDENTITY)), np.uint64)
        words[:, 0] = _one_or_column(self._groups) << np.uint64(32) | _one_or_column(self._namespace_ids)
        words[:, 1] = self.lengths
        words[:, 2:6] = np.frombuffer(hashes, "<u8").reshape(count, 4)
        words[:, 6:8] = np.frombuffer(checksums, "<u8").reshape(count, 2)
        return words


class SlotHeaders:
    """A view of the header table `buffer`. If it `is_fresh`, all slots are made empty."""

    def __init__(self, buffer: Buffer, *, is_fresh: bool = True) -> None:
        self._bytes = buffer
        self._words = buffer.cast("Q")
        self._checks = buffer.cast("I")
        if is_fresh:
            np.frombuffer(buffer, SLOT_HEADER)["generation"] = EMPTY_GENERATION
        #: The largest even generation so far. Counted by extent: an extent is of one isolation domain, and
        #: what other domains do is none of its readers' business.
        self.last_generation = 0

    def resume(self) -> None:
        """Continue the generations that another daemon wrote. Reads all headers; call it before `fill`."""
        generations = self.table()["generation"]
        generations[generations > MAX_GENERATION] = EMPTY_GENERATION
        self.last_generation = int(generations.max()) & ~1

    def empty_all(self, but: Sequence[int]) -> None:
        """Make all slots empty but for these."""
        is_filled = self.table()["generation"] % 2 == 0
        is_filled[but] = False
        self.table()["generation"][is_filled] += 1

    def fill(self, slot: int, label: FragmentLabel, offset: int) -> None:
        """Write the header of a slot and, last, its generation, which is even and larger than any before.

        A slot that is filled becomes empty first: it holds what another daemon left.
        """
        word, start = slot * _WORDS, slot * _BYTES + BODY_OFFSET
        if not self._words[word] & 1:
            self._words[word] += 1
        if order_stores is not None:
            order_stores()
        BODY.pack_into(
            self._bytes,
            start,
            label.namespace_id,
            label.group,
            offset,
            label.raw_length,
            label.raw_length,
            0,  # `check`, until it is known
            label.position | IS_SPENT if label.is_spent else label.position,
            label.prefix_hash,
            label.checksum,
            label.parent_hash,
        )
        self._checks[slot * _CHECKS + _CHECK] = zlib.crc32(self._bytes[start : start + BODY.size])
        self.last_generation = generation = self.last_generation + 2
        if order_stores is not None:
            order_stores()
        self._words[word] = generation

    def fill_run(self, slots: list[int], labels: list[FragmentLabel], slot_bytes: int) -> list[int]:
        """Write the headers of `slots`, all of `slot_bytes`, as `fill` does one; return the labels' tags."""
        if native is not None:
            last = self.last_generation
            tags: list[int] = native.fill_headers(self._bytes, slots, labels, slot_bytes, last)
            self.last_generation += 2 * len(slots)
            return tags
        for slot, label in zip(slots, labels, strict=True):
            self.fill(slot, label, slot * slot_bytes)
        return [tag_of(label.prefix_hash, label.namespace_id, label.group) for label in labels]

    def empty(self, slot: int) -> None:
        """Make the generation of a filled slot odd."""
        self._words[slot * _WORDS] += 1
        if order_stores is not None:  # before anything is written there
            order_stores()

    def empty_if_filled(self, slot: int) -> None:
        """Make the generation of a slot odd, if it is even."""
        if not self._words[slot * _WORDS] & 1:
            self.empty(slot)

    def generation(self, slot: int) -> int:
        """Return the generation of `slot`."""
        return self._words[slot * _WORDS]

    def checksum(self, slot: int) -> bytes:
        """Return the xxh3-128 of what is in a filled slot, as it was taken at put."""
        return bytes(BODY.unpack_from(self._bytes, slot * _BYTES + BODY_OFFSET)[-2])

    def is_of(self, slot: int, label: FragmentLabel) -> bool:
        """Whether the slot is filled and with this fragment: namespace, hash, group, length, checksum."""
        body = BODY.unpack_from(self._bytes, slot * _BYTES + BODY_OFFSET)
        namespace_id, group, _, _, raw_length, _, _, prefix_hash, digest, _ = body
        return (
            self._words[slot * _WORDS] % 2 == 0
            and prefix_hash == label.prefix_hash
            and namespace_id == label.namespace_id
            and group == label.group
            and raw_length == label.raw_length
            and (not label.checksum or digest == label.checksum)
        )

    def generations_of(
        self, slots: npt.NDArray[np.int64], words: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64] | None:
        """Return the generations (n,) uint64 of `slots` (n,) int64.
        None unless each is filled with the fragment of its row of `words`, (n, 8) uint64
        (`LabelColumns.words`) names."""
        rows = np.frombuffer(self._words, np.uint64).reshape(-1, _WORDS)[slots]
        generations: npt.NDArray[np.uint64] = rows[:, 0]
        is_right = not (generations & np.uint64(1)).any() and np.array_equal(rows[:, _IDENTITY], words)
        return generations if is_right else None

    def payload_of(self, slot: int) -> tuple[int, int, bytes] | None:
        """Return offset, raw length and checksum of what is in a slot.
        None if the slot is empty, or if its header is not as `fill` wrote it, by its check."""
        start = slot * _BYTES + BODY_OFFSET
        body = bytearray(self._bytes[start : start + BODY.size])
        _, _, offset, _, raw_length, check, _, _, digest, _ = BODY.unpack(body)
        body[_CHECK_IN_BODY : _CHECK_IN_BODY + 4] = _NO_CHECK
        is_right = not self._words[slot * _WORDS] & 1 and zlib.crc32(body) == check
        return (offset, raw_length, digest) if is_right else None

    def table(self) -> npt.NDArray[np.void]:
        """Return all headers, (num_slots,) of dtype SLOT_HEADER, without copying; for audits."""
        return np.frombuffer(self._bytes, SLOT_HEADER)

    def close(self) -> None:
        """Release the views of the memory."""
        self._words.release()
        self._checks.release()
        self._bytes.release()
