"""Values to try codecs with where there are no real ones: distributed as keys and values are."""

import numpy as np
from numpy.typing import NDArray

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
        case "float8_e4m3fn":
            return memoryview(e4m3_of(values).tobytes())
        case "float8_e5m2":
            return memoryview((values.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8).tobytes())
        case _:
            return memoryview(np.clip(values * 16, -127, 127).astype(np.int8).tobytes())


def e4m3_of(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return float32 as e4m3, cut towards zero: float16 of 2^-8 of a value has e4m3's exponent."""
    halves = (np.clip(values, -448, 448) * np.float32(2**-8)).astype(np.float16).view(np.uint16)
    return ((halves >> 8 & 0x80) | (halves >> 7 & 0x7F)).astype(np.uint8)
