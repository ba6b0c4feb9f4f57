"""Fitting a transform's table to samples: the basis of their covariance, and counted steps.

With a weight matrix W (for keys: the mean of q q^T over queries, for values: of the output projection) the
error e is measured as e W e^T, and the basis is orthogonal in that sense: W = S S, the principal axes are
those of x S. W is scaled to a determinant of one, so that a step means the same with and without it.
"""

import numpy as np
from numpy.typing import NDArray

from .transform_table import LARGEST_VALUE, NUM_SYMBOLS, PRECISION, TransformTable

_MAX_SHIFT = 12
_LIMIT = (1 << 24) - 1
_CLASS_SPREAD = 1.25  # of deviations in one class, largest over smallest
_MAX_CLASSES = 40
_RESERVE = 1.25  # over the bits of the samples: fragments differ, and one that does not fit is stored raw
_ESCAPE_BITS = 32
_HEAD_BITS = 8 * 48


def fit_table(samples: NDArray[np.float32], step: float) -> tuple[bytes, float]:
    """Return a table for values like `samples` in steps of `step`, and the bits a value to reserve.
    `samples`: [token, dim]."""
    mean = samples.mean(axis=0, dtype=np.float64)
    centred = samples.astype(np.float64) - mean
    _, axes = np.linalg.eigh(centred.T @ centred / len(samples))
    inverse = axes[:, ::-1].T  # [coefficient, dim], widest first
    shift = _MAX_SHIFT
    largest_sum, largest = float(np.abs(inverse).sum(axis=0).max()), float(np.abs(inverse).max())
    while (
        LARGEST_VALUE * (largest_sum * (1 << shift) + len(inverse)) > _LIMIT
        or largest * (1 << shift) > 32_000
    ):
        shift -= 1
    whole = np.rint(inverse * (1 << shift)).astype(np.int16)
    steps = np.rint(centred @ np.linalg.inv(whole / (1 << shift)) / step)
    classes, frequencies = _classes(steps)
    table = TransformTable(whole, shift, mean.astype(np.float32), classes, frequencies)
    return table.to_bytes(), _RESERVE * _bits(steps, classes, frequencies) + _HEAD_BITS / (64 * len(mean))


def _classes(steps: NDArray[np.float64]) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """Put columns that spread alike into classes; return [column] -> class and [class, symbol]."""
    deviations = np.sqrt((steps**2).mean(axis=0)) + 0.02
    order = np.argsort(-deviations)
    spread = max(_CLASS_SPREAD, float(deviations.max() / deviations.min()) ** (1 / (_MAX_CLASSES - 1)))
    classes = np.zeros(len(order), np.uint8)
    rows: list[NDArray[np.uint16]] = []
    start = 0
    while start < len(order):
        inside = deviations[order] > deviations[order[start]] / spread
        end = max(start + 1, int(inside.sum()))
        classes[order[start:end]] = len(rows)
        rows.append(_frequencies(steps[:, order[start:end]]))
        start = end
    return classes, np.stack(rows)


def _frequencies(steps: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Return the frequencies of symbols, 2^PRECISION in all, none 0 for an escape."""
    limited = np.where(np.abs(steps) <= LARGEST_VALUE, steps + LARGEST_VALUE + 1, 0).astype(np.int64)
    counts = np.bincount(limited.reshape(-1), minlength=NUM_SYMBOLS).astype(np.float64)
    smooth = np.convolve(counts[1:], [0.02, 0.96, 0.02], mode="same")  # a neighbour is not impossible
    share = np.concatenate([counts[:1], smooth]) / counts.sum()
    frequencies = np.rint(share * (1 << PRECISION)).astype(np.int64)
    frequencies[0] = max(frequencies[0], 1)
    frequencies[int(frequencies.argmax())] += (1 << PRECISION) - int(frequencies.sum())
    return np.asarray(frequencies, np.uint16)


def _bits(steps: NDArray[np.float64], classes: NDArray[np.uint8], frequencies: NDArray[np.uint16]) -> float:
    """Return the bits a value that `steps` take."""
    symbols = np.where(np.abs(steps) <= LARGEST_VALUE, steps + LARGEST_VALUE + 1, 0).astype(np.int64)
    kinds = np.broadcast_to(classes, steps.shape)
    found = frequencies[kinds, symbols]
    coded = np.where(found > 0, found, frequencies[kinds, 0])
    bits = PRECISION - np.log2(coded) + np.where((found == 0) | (symbols == 0), _ESCAPE_BITS, 0)
    return float(bits.mean())
