"""How columns become longer, without a pause.

Columns of one length would be full in one step, and move to larger memory in it: 60 MB and 12 ms at a million
rows. They take turns instead, evenly over the sixteenth by which an `array` grows, so each moves as often as
it would alone. Columns in chunks were rejected: every read would be two.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

#: Turns of a column while it grows by the factor e; the next one comes before its sixteenth is used up.
RENEWALS: Final = 1 / math.log(18 / 17)
RENEWED_FROM: Final = 1 << 16  # entries; below that all columns together move in a millisecond
_SPARE: Final = 16  # entries; an `array` that is cut by as many fits its memory to its length


def append(columns: "Sequence[array[Any]]", value: int, count: int) -> None:
    """Append `count` times `value` to each column."""
    for column in columns:
        column.extend(array(column.typecode, [value]) * count)


def extend(column: "array[Any]", values: "npt.NDArray[Any]") -> None:
    """Append values to a column. values: (n,)."""
    column.frombytes(np.ascontiguousarray(values, column.typecode).view(np.uint8).data)


def renew(columns: "Sequence[array[Any]]", length: int) -> None:
    """Give more memory to those columns that had a turn while all of them grew from `length`."""
    if length < RENEWED_FROM:
        return
    num_columns = len(columns)
    done, due = (int(math.log(num) * RENEWALS * num_columns) for num in (length, len(columns[0])))
    fit([columns[turn % num_columns] for turn in range(max(done, due - num_columns), due)])


def fit(columns: "Iterable[array[Any]]") -> None:
    """Fit the memory of each column to its length and a sixteenth."""
    for column in columns:
        column.frombytes(bytes(_SPARE * column.itemsize))
        del column[-_SPARE:]
