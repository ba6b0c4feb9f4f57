"""The names that vLLM gives blocks, for those that have a prompt's tokens and no engine: routers, harnesses.

    client = Client.from_env()
    client.prefetch(None, block_names(tokens, block_tokens=16))

vLLM hashes (name of the block before, tokens, what else the KV depends on) block by block, in Python's pickle
or in CBOR, and the first one after the hash of a seed. Named here is what depends on tokens alone: with an
adapter, images, embeddings or a `cache_salt` vLLM's names have more in them, in each version in its own way.
Rejected: calling vLLM's functions, which needs its installation where only tokens are at hand; the contract
tests compare with them.
"""

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

from ...v1.arguments import whole
from ..errors import InvalidRequest
from .groups import STABLE_HASHES

SEED = "vllm-none-hash"  # vLLM's own since 0.29


def block_names(
    tokens: Sequence[int], block_tokens: int, *, algorithm: str = "sha256", seed: str = SEED
) -> list[bytes]:
    """Return the name, 32 bytes, of each whole block of a prompt of plain tokens.

    `block_tokens` and `algorithm` are the engine's `--block-size` and `--prefix-caching-hash-algo`; `seed` is
    its PYTHONHASHSEED where it is set (vLLM 0.28 needs it). `sha256_cbor` needs the package `cbor2`.

    Raises InvalidRequest."""
    if algorithm not in STABLE_HASHES:
        raise InvalidRequest(f"algorithm is one of {STABLE_HASHES}, is {algorithm!r}", reason="BAD_OPTION")
    whole("block_tokens", block_tokens, least=1)
    numbers = [whole("each of tokens", token) for token in tokens]
    name, names = _digest(seed, algorithm), []
    for end in range(block_tokens, len(numbers) + 1, block_tokens):
        name = _digest((name, tuple(numbers[end - block_tokens : end]), None), algorithm)
        names.append(name)
    return names


def _digest(value: Any, algorithm: str) -> bytes:
    if algorithm == "sha256":
        return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()
    import cbor2

    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()
