"""Payloads that look like keys and values to a codec, without a transformer."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.codecs.base import Shape
from kvtier.tiers.codecs.trial import e4m3_of


def values_like_kv(shape: Shape, seed: int) -> NDArray[np.uint8]:
    """Return the bytes of values as a transformer makes them: per layer and plane a scale, a few channels
    larger."""
    rng = np.random.default_rng(seed)
    parts = shape.num_layers * shape.num_planes
    loud = np.where(rng.random((1, 1, shape.head_dim)) < 0.03, 8, 1)
    scales = np.exp2(rng.integers(-2, 3, (parts, 1, 1))) * loud
    floats = rng.standard_normal((parts, shape.num_tokens * shape.num_heads, shape.head_dim)) * scales
    single = floats.astype(np.float32)
    stored: NDArray[Any]
    match shape.dtype:
        case "bfloat16":
            stored = (single.view(np.uint32) >> 16).astype(np.uint16)
        case "float16":
            stored = single.astype(np.float16)
        case "float32":
            stored = single
        case "int8":
            stored = np.clip(np.rint(single * 8), -127, 127).astype(np.int8)
        case "float8_e4m3fn":
            stored = e4m3_of(single)
        case _:  # the upper half of float16 is e5m2
            stored = (single.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)
    return np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
