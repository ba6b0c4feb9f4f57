"""Values to try codecs with where there are no real ones: distributed as keys and values are."""

import numpy as np

from .base import Shape


def trial_payload(shape: Shape, seed: int = 0) -> memoryview:
    """Return bytes distributed as KV's are: normal values, in the type of `shape`."""
    values = np.random.default_rng(seed).standard_normal(shape.num_values).astype(np.float32)
    match shape.dtype:
        case "bfloat16":
            return memoryview((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        case "float16":
            return memoryview(values.astype(np.float16).tobytes())
        case "float32":
            return memoryview(values.tobytes())
        case _:
            return memoryview((values.view(np.uint32) >> 20).astype(np.uint8).tobytes())
