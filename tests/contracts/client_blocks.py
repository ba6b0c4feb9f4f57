"""Blocks of the contract suites of clients: a small model's, their names and bytes."""

from typing import Any

import numpy as np

from kvtier.clients import Geometry, prefix_hashes

GEOMETRY = Geometry(
    num_layers=5, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16", layers_per_group=2
)
BLOCK = GEOMETRY.block_bytes  # 40 KiB in fragments of 16, 16 and 8 KiB


def chain(num_blocks: int, salt: str = "") -> list[bytes]:
    return prefix_hashes(GEOMETRY, range(num_blocks * 16), extra_keys=[salt])


def payload(num_blocks: int, seed: int = 1) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, num_blocks * BLOCK, np.uint8)
