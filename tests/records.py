"""What recovery finds, as rows for tests and benchmarks to write and to read."""

import numpy as np
import numpy.typing as npt

from kvtier.tiers.cold.recovery import RECORD, Records, RecoveredStore


def columns(rows: npt.NDArray[np.void]) -> Records:
    """Return the columns of rows (num_records,) of dtype RECORD."""
    return {name: rows[name].copy() for name in RECORD.names or ()}


def rows_of(recovered: RecoveredStore) -> npt.NDArray[np.void]:
    """Return the records (num_records,), of dtype RECORD."""
    rows = np.empty(recovered.num_records, RECORD)
    for name, column in recovered.records.items():
        rows[name] = column
    return rows
