"""Keys of vLLM's offloading in kvtier's types: a namespace per cache group, chains of prefix hashes.

An OffloadKey is the 32 bytes of vLLM's chained block hash and 4 bytes of group number. A chunk (one or
several blocks) is what kvtier calls a block; its hash is that of its last block, hence chained too. Jobs
name keys in any order, from any group, with holes (a sliding window stores only what can be reached again);
a put wants the links of one chain, in order, and what they continue. `runs_of` makes the one of the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...v1.shm import HASH_BYTES
from ..vllm.scheduler.sessions import MAX_NAME

GROUP_BYTES = 4
KEY_BYTES = HASH_BYTES + GROUP_BYTES


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive chunks of one chain. `rows[i]`, in the primary pool, is where chunk `keys[i]` is."""

    group: int
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]
    parent: bytes = b""  # hash of the chunk before the first; empty at the start, or when it is not known

    @property
    def hashes(self) -> list[bytes]:
        """Prefix hashes, as kvtier calls them."""
        return [hash_of(key) for key in self.keys]


def is_usable(key: bytes) -> bool:
    """Whether a key can name a block here: the hash must be a cryptographic one of 32 bytes.

    vLLM's xxhash variants are shorter, seeded anew in every process, and not collision-resistant.
    """
    return len(key) == KEY_BYTES


def hash_of(key: bytes) -> bytes:
    """Return the prefix hash in a key."""
    return key[:HASH_BYTES]


def group_of(key: bytes) -> int:
    """Return the cache group in a key."""
    return int.from_bytes(key[HASH_BYTES:], "big")


class _Chunk(NamedTuple):
    group: int
    position: int  # where it ends in its request, in tokens; 0: not known
    key: bytes
    row: int


def runs_of(
    keys: Iterable[bytes],
    rows: Iterable[int],
    position_of: Callable[[bytes], int | None],
    chunk_tokens: Mapping[int, int],
    before: Callable[[int, int], bytes] = lambda group, position: b"",
) -> list[Run]:
    """Return the runs in a job, each in chain order, groups in ascending order.

    `position_of` a key is where its chunk ends in its request, in tokens, None when vLLM does not say (then
    it is a run of its own). `before(group, position)` is the hash of the chunk that ends at `position`, empty
    when it is not known.
    """
    chunks = [
        _Chunk(group_of(key), position_of(key) or 0, key, int(row))
        for key, row in zip(keys, rows, strict=True)
    ]
    pieces: list[list[_Chunk]] = []
    for chunk in sorted(chunks, key=lambda one: one[:2]):
        last = pieces[-1][-1] if pieces else None
        step = chunk_tokens.get(chunk.group, 0)
        if last and last.position and chunk[:2] == (last.group, last.position + step):
            pieces[-1].append(chunk)
        else:
            pieces.append([chunk])
    return [_run(piece, chunk_tokens, before) for piece in pieces]


def session_of(kv_transfer_params: Mapping[str, Any] | None) -> str:
    """Return the session that a request names in its kv_transfer_params, empty when it names none."""
    named = (kv_transfer_params or {}).get("kvtier_session")  # as for the connector
    return named if isinstance(named, str) and len(named) <= MAX_NAME else ""


def in_order_of_asking(keys: Sequence[bytes]) -> dict[int, list[bytes]]:
    """Return the keys of a lookup by group, in the order in which they were asked."""
    groups: dict[int, list[bytes]] = {}
    for key in keys:
        groups.setdefault(group_of(key), []).append(key)
    return groups


def _run(
    piece: Sequence[_Chunk], chunk_tokens: Mapping[int, int], before: Callable[[int, int], bytes]
) -> Run:
    first = piece[0]
    start = first.position - chunk_tokens.get(first.group, 0)
    parent = before(first.group, start) if start > 0 else b""
    return Run(first.group, tuple(chunk.key for chunk in piece), tuple(chunk.row for chunk in piece), parent)
