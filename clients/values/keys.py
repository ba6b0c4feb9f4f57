"""Prefix hashes: how tokens become block names, and how chains of names travel.

A prefix hash is 32 bytes, chained: H(parent, tokens, extra keys). A runtime that has its own chained
hash of 32 bytes (vLLM's SHA-256) passes that instead; kvtier never recomputes them. The encoding is
tagged and length-prefixed, hence injective: no two (parent, tokens, extra keys) meet short of a SHA-256
collision. A faster non-cryptographic hash was rejected: a collision would hand out wrong bytes.
"""

import hashlib
import operator
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ...v1.arguments import digest, instance, text
from ...v1.shm import HASH_BYTES
from ...v1.types import Geometry
from ..errors import InvalidRequest
from .namespace import Namespace

_TAG = b"kvtier.prefix.1"


def prefix_hashes(
    where: Namespace | Geometry,
    tokens: Sequence[int] | npt.NDArray[np.integer],
    *,
    parent: bytes = b"",
    extra_keys: Iterable[bytes | str] = (),
) -> list[bytes]:
    """Return one prefix hash per *full* block of `tokens`; a rest shorter than a block has no name.

    `parent` is the prefix hash of the block before, empty at the start of a chain. `extra_keys` go into
    every block: what else the KV depends on (a salt, the digest of an image). docs/prefix-hash.md specifies
    the bytes. Raises InvalidRequest when `tokens` is not one row of integers from 0 to 2**64 - 1.
    """
    geometry = where if isinstance(where, Geometry) else instance("where", where, Namespace).geometry
    block_tokens = geometry.block_tokens
    parent = parent_hash(parent)
    if isinstance(extra_keys, str | bytes) or not isinstance(extra_keys, Iterable):
        raise InvalidRequest(f"extra_keys is a list of keys, is {extra_keys!r}; pass [{extra_keys!r}]")
    numbers = _numbers(tokens)
    keys = [
        text("extra_keys", key).encode() if isinstance(key, str) else digest("each of extra_keys", key)
        for key in extra_keys
    ]
    tail = b"".join([len(keys).to_bytes(4, "big"), *(len(key).to_bytes(4, "big") + key for key in keys)])
    head = _TAG + block_tokens.to_bytes(4, "big")
    hashes = []
    for first in range(0, len(numbers) - block_tokens + 1, block_tokens):
        content = numbers[first : first + block_tokens].tobytes()
        parent = hashlib.sha256(b"".join([head, bytes([len(parent)]), parent, content, tail])).digest()
        hashes.append(parent)
    return hashes


def _numbers(tokens: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Return tokens as little-endian uint64, shape (tokens,). Nothing is rounded, wrapped or flattened: two
    prompts would share names."""
    try:
        found = np.asarray(tokens)
        if found.ndim == 1 and found.size and found.dtype.kind not in "iu":
            found = np.array([operator.index(token) for token in tokens], np.uint64)
        if found.ndim == 1 and (found.dtype.kind != "i" or not found.size or found.min() >= 0):
            return np.ascontiguousarray(found, "<u8")
        problem = f"shape {found.shape}, dtype {found.dtype}"
    except (TypeError, ValueError, OverflowError) as error:
        problem = str(error)
    raise InvalidRequest(
        f"tokens must be one row of integers from 0 to 2**64 - 1 ({problem}); pass the ids of one sequence"
    )


def parent_hash(parent: bytes) -> bytes:
    """Return the prefix hash of the block before, or nothing. Raises InvalidRequest for other lengths."""
    if len(digest("parent", parent)) not in (0, HASH_BYTES):
        raise InvalidRequest(
            f"parent must be empty or {HASH_BYTES} bytes, is {len(parent)}", reason="BAD_KEY"
        )
    return parent


def pack(hashes: Sequence[bytes] | bytes) -> bytes:
    """Return a chain as one bytes of 32-byte strides. Raises InvalidRequest for other lengths and types."""
    if isinstance(hashes, bytes):
        if len(hashes) % HASH_BYTES:
            raise _bad_length(len(hashes))
        return hashes
    try:
        packed = b"".join(hashes)
        lengths, num_bytes = set(map(len, hashes)), HASH_BYTES * len(hashes)
    except TypeError:
        raise _bad_type(hashes) from None
    if not lengths <= {HASH_BYTES}:
        raise _bad_length(next(len(one) for one in hashes if len(one) != HASH_BYTES))
    if len(packed) != num_bytes or isinstance(
        hashes, set
    ):  # elements of more than a byte; or without an order
        raise _bad_type(hashes)
    return packed


def only_hash(hashes: Sequence[bytes] | bytes) -> bytes | None:
    """Return the prefix hash of a chain of exactly one block, None for other chains."""
    if isinstance(hashes, bytes):
        return hashes if len(hashes) == HASH_BYTES else None
    if not isinstance(hashes, list | tuple) or len(hashes) != 1 or not isinstance(hashes[0], bytes):
        return None
    return hashes[0] if len(hashes[0]) == HASH_BYTES else None


def _bad_type(hashes: object) -> InvalidRequest:
    return InvalidRequest(
        f"hashes must be a list of {HASH_BYTES}-byte hashes, or bytes of them one after another, not "
        f"{type(hashes).__name__} or text; use prefix_hashes(), or bytes.fromhex() of hexadecimal digits",
        reason="BAD_KEY",
    )


def _bad_length(length: int) -> InvalidRequest:
    return InvalidRequest(
        f"prefix hashes must be {HASH_BYTES} bytes each, one has {length}; use prefix_hashes() or SHA-256",
        reason="BAD_KEY",
    )
