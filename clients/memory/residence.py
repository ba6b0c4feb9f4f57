"""Lookups without a call: which blocks of a chain are stored, and in which tier, read from shared memory.

A hint like the answer of a call, which is old when it arrives: blocks may leave the moment after. What is
read is checked only for being a table; a daemon that writes nonsense into it can tell nothing worse than by
an answer.
"""

import struct
from typing import Any, NamedTuple

from ...native import native
from ...v1.advice import LoadSpeed, Speed
from ...v1.residence import (
    ASK,
    EDGE,
    EDGE_OFFSET,
    HEAD,
    HEADER_BYTES,
    MAGIC,
    MAX_PROBES,
    NUM_SPEEDS,
    RETIRED,
    SOURCES,
    SPEED,
    SPEEDS_OFFSET,
    STATE_OFFSET,
    VERSION,
    file_bytes,
    keys_of,
)
from ...v1.shm import EMPTY_TAG, HASH_BYTES
from ...v1.types import Tier
from ..values.namespace import Namespace
from .extents import U8

_MAX_LOG2_ENTRIES = 40  # more would take a terabyte


class Residence(NamedTuple):
    """What the table says of a chain."""

    codes: bytes  # of the longest prefix that is there: the tier of each block, by its number on the wire
    is_certain: bool  # the next block is nowhere


class ResidenceReader:
    """Reads one table. Raises ValueError when it is of another version or another life of the daemon."""

    def __init__(self, memory: U8, epoch: int) -> None:
        if len(memory) < HEADER_BYTES:
            raise ValueError("a residence table without a header")
        magic, version, log2_entries, of_epoch, self.slowest, _ = HEAD.unpack_from(memory.data)
        if magic != MAGIC or version != VERSION or of_epoch != epoch:
            raise ValueError("a residence table of another format, or of another life of the daemon")
        if log2_entries > _MAX_LOG2_ENTRIES or 1 << log2_entries < MAX_PROBES:
            raise ValueError(f"a residence table of 2**{log2_entries} entries")
        if len(memory) < file_bytes(log2_entries):
            raise ValueError(f"a residence table of {len(memory)} bytes, too few for 2**{log2_entries}")
        self.is_slow = bytes(code == self.slowest for code in range(256))  # by number on the wire
        self._bytes = memory.data
        self._head = memory.data[:HEADER_BYTES].cast("Q")
        self._table = memory.data[HEADER_BYTES : file_bytes(log2_entries)].cast("Q")
        self._mask = (1 << log2_entries) - 1
        self._speed_at: dict[int, int] = {}  # namespace -> where its speed was found last

    @property
    def is_retired(self) -> bool:
        """Whether the daemon enters nothing here any more."""
        return self._head[STATE_OFFSET // 8] == RETIRED

    def find(self, packed: bytes, namespace_id: int) -> Residence:
        """Return where the longest stored prefix of a chain is."""
        if native is not None:
            codes: bytes = native.find_residence(self._table, packed, namespace_id)
        else:
            codes = self._find(packed, namespace_id)
        return Residence(codes, self._head[STATE_OFFSET // 8] not in (ASK, RETIRED))

    def _find(self, packed: bytes, namespace_id: int) -> bytes:
        table, mask, codes = self._table, self._mask, bytearray()
        for start in range(0, len(packed), HASH_BYTES):
            tag, check = keys_of(packed[start : start + HASH_BYTES], namespace_id)
            for position in range(tag, tag + MAX_PROBES):
                word = (position & mask) << 1
                there = table[word]
                if there == EMPTY_TAG:
                    return bytes(codes)
                value = table[word + 1] if there == tag else 0
                if value & 0xFF and value & ~0xFF == check:
                    codes.append(value & 0xFF)
                    break
            else:
                break
        return bytes(codes)

    def speed(self, namespace: Namespace, namespace_id: int) -> Speed | None:
        """Return how fast prompts of a namespace are computed; None when that is not told here."""
        known = self._speed_at.get(namespace_id)
        for number in range(NUM_SPEEDS) if known is None else (known,):
            told = self._priced(SPEED, SPEEDS_OFFSET + number * SPEED.size)
            if told is None or not told[1]:
                break
            if told[1] == namespace_id:
                self._speed_at[namespace_id] = number
                _, _, source, tokens_per_s, doubling_tokens = told
                if source >= len(SOURCES) or not (tokens_per_s > 0 and doubling_tokens > 0):
                    return None
                geometry = namespace.geometry
                size = geometry.block_tokens, namespace.block_bytes
                return Speed(*size, tokens_per_s, doubling_tokens, SOURCES[source])
        self._speed_at.pop(namespace_id, None)
        return None

    def edge(self, tier: Tier) -> LoadSpeed | None:
        """Return how fast blocks come up from the slowest tier; None when that is not told."""
        told = self._priced(EDGE, EDGE_OFFSET)
        return LoadSpeed(tier, told[1], told[2]) if told is not None and told[1] > 0 else None

    def _priced(self, layout: struct.Struct, offset: int) -> tuple[Any, ...] | None:
        """Return what stands at `offset`, its version first; None while the daemon changes it."""
        told = layout.unpack_from(self._bytes, offset)
        version = self._head[offset // 8]
        return told if told[0] == version and not version & 1 else None
