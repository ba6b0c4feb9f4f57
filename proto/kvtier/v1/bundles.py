"""Limits of a store's bundle, which docs/bundle-format.md promises, and how many blocks it holds."""

from typing import Final

from .types import Geometry

BUNDLE_TOKENS: Final = 256
TARGET_BYTES: Final = 64 << 20  # of a bundle's raw payloads, unless one block has more
MAX_FRAGMENTS: Final = 4096


def blocks_per_bundle(geometry: Geometry) -> int:
    """Return the blocks that one bundle of a namespace holds: BUNDLE_TOKENS, halved until they fit."""
    num_blocks = max(1, BUNDLE_TOKENS // geometry.block_tokens)
    while num_blocks > 1 and (
        num_blocks * geometry.block_bytes > TARGET_BYTES or num_blocks * geometry.num_groups > MAX_FRAGMENTS
    ):
        num_blocks //= 2
    return num_blocks
