"""Geometry of opaque blocks: one run of bytes each, in an order that only the runtime knows.

A tier under vLLM's offloading, or a page of SGLang, hands over bytes that only the same runtime, version,
backend and parallelism can read again. Pretending to know layers and heads was rejected: a codec would
believe it. So the geometry says int8, one plane, and what is known: how many tokens it is worth. Everything
else that must agree goes into `layout`.

A large block is cut into fragments of equal size so that several can be read from nvme at the same time.
"""

import hashlib
import json
from collections.abc import Mapping
from math import gcd
from typing import Any

from ...v1.types import Geometry, NamespaceIdentity
from ..errors import InvalidRequest

MAX_FRAGMENT_BYTES = 4 << 20
MAX_FRAGMENTS = 256
_MAX_FIELD = 1 << 20  # of a Geometry
_PAGE_BYTES = 4096


def opaque_geometry(
    block_bytes: int, block_tokens: int, layout: str, max_fragment_bytes: int = MAX_FRAGMENT_BYTES
) -> Geometry:
    """Return a geometry of exactly `block_bytes` bytes a block.

    `block_tokens` is kept where it divides the fragments, otherwise their greatest common divisor. Raises
    InvalidRequest when the numbers are not positive or cannot be expressed.
    """
    if block_bytes <= 0 or block_tokens <= 0:
        raise InvalidRequest(
            f"a block needs bytes and tokens, this one has {block_bytes} and {block_tokens}",
            reason="BAD_NAMESPACE",
        )
    num_fragments = _num_fragments(block_bytes, max_fragment_bytes)
    fragment_bytes = block_bytes // num_fragments
    tokens = gcd(fragment_bytes, block_tokens)
    rest = fragment_bytes // tokens
    heads = next((n for n in range(-(-rest // _MAX_FIELD), _MAX_FIELD + 1) if n and rest % n == 0), 0)
    if not heads:
        raise InvalidRequest(
            f"a block of {block_bytes} bytes cannot be described; pad it to a multiple of {_PAGE_BYTES}",
            reason="BAD_NAMESPACE",
        )
    return Geometry(
        num_layers=num_fragments,
        num_kv_heads=heads,
        head_dim=rest // heads,
        block_tokens=tokens,
        dtype="int8",
        layout=layout,
        layers_per_group=1,
        num_planes=1,
    )


def token_frame(block_tokens: int) -> Geometry:
    """Return a geometry for `prefix_hashes` only: that of opaque blocks may say a part of their tokens."""
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "block_tokens": block_tokens}
    return Geometry(**sizes, dtype="int8", layout="tokens", layers_per_group=1, num_planes=1)


def opaque_identity(
    weights: bytes,
    block_bytes: int,
    block_tokens: int,
    kind: str,
    facts: Mapping[str, Any],
    shard: str,
    max_fragment_bytes: int = MAX_FRAGMENT_BYTES,
) -> NamespaceIdentity:
    """Return the identity of opaque blocks of `kind` that agree in `facts` (as JSON has them)."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    geometry = opaque_geometry(block_bytes, block_tokens, f"{kind},{digest[:32]}", max_fragment_bytes)
    return NamespaceIdentity(weights, geometry, shard=shard)


def _num_fragments(block_bytes: int, max_fragment_bytes: int) -> int:
    """Return the least number of equal fragments that are small enough; of whole pages if possible."""
    least = -(-block_bytes // max_fragment_bytes)
    for page_bytes in (_PAGE_BYTES, 1):
        for number in range(least, MAX_FRAGMENTS + 1):
            if block_bytes % (number * page_bytes) == 0:
                return number
    return 1
