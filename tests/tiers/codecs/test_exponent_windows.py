"""Where the window of exponents is found: near the largest of a sample, or by counting all of them. On any
processor."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("numba")

from kvtier.tiers.codecs.kernels import exponents as loops
from kvtier.tiers.codecs.kernels.window_vectors import NUM_WINDOWS


def _sample(num_values: int) -> NDArray[np.int64]:
    """Return which of so many values are looked at."""
    num_blocks = num_values // loops.BLOCK
    step = num_blocks if num_blocks % 2 else num_blocks - 1
    return np.concatenate([np.arange(64) + 64 * step * row for row in range(8)])


@pytest.mark.parametrize("num_values", [512, 1024, 2560, 65536])
def test_the_window_is_where_most_of_the_sample_is(num_values: int) -> None:
    """Against counting as one would; the device's kernels count alike."""
    rng = np.random.default_rng(num_values)
    for spread in (1, 5, 12, 100, 255):
        exponents = np.clip(rng.normal(rng.integers(0, 256), spread, num_values), 0, 255).astype(np.uint16)
        values = (exponents << 7) | (rng.integers(0, 2, num_values) << 15).astype(np.uint16)
        places = _sample(num_values)
        counts = np.bincount(exponents[places], minlength=256)
        inside = [counts[max(0, top - loops.WINDOW + 1) : top + 1].sum() for top in range(256)]
        found = loops._find_top_anywhere(values, int(places[64]), np.empty((4, 264), np.uint16))
        assert found == int(np.argmax(inside))


def _share_inside(exponents: NDArray[Any], top: int) -> float:
    return float((((top - exponents.astype(int)) % 256) < loops.WINDOW).mean())


@pytest.mark.parametrize("num_values", [0, 512, 1024, 2048, 5120, 65536])
@pytest.mark.parametrize("num_outliers", [0, 1, 40], ids=["none", "one outlier", "many outliers"])
def test_the_window_near_the_largest_exponent_is_nearly_the_best(num_values: int, num_outliers: int) -> None:
    """Also where a few values are far larger than all the rest, so that it is to be found elsewhere."""
    rng = np.random.default_rng(num_values)
    for scale in (1e-30, 1.0, 1e30):
        floats = (rng.standard_normal(num_values) * scale).astype(np.float32)
        floats[rng.integers(0, max(num_values, 1), num_outliers if num_values else 0)] = 3e38
        values = (floats.view(np.uint32) >> 16).astype(np.uint16)
        scratch = np.empty(NUM_WINDOWS, np.int64), np.empty((4, 264), np.uint16)
        top = int(loops._find_top(values, *scratch))
        exponents = (values >> 7) & 0xFF
        if num_values:
            best = max(_share_inside(exponents, other) for other in range(256))
            assert _share_inside(exponents, top) > best - 0.06
