"""Batches of copies and allocations' sizes by the CUDA driver, in columns.

`cuMemcpyBatchAsync` (driver 12.8 and newer) takes arrays of sources, targets and sizes, which is what
`CopyPieces` is, so a get of thousands of pieces crosses from Python once and without the interpreter's lock.
A call takes at most BATCH_PIECES of them: with 51,828 descriptors a driver (580.159) has crashed, and
repeated large batches have hung (vllm-project/vllm#49276).

Signatures: v1/cuda.py. Never ran on a GPU.
"""

from ctypes import byref, c_size_t

import numpy as np

from ....v1 import cuda
from .contract import CopyPieces

BATCH_PIECES = 4096


def has_batches() -> bool:
    """Whether the driver copies batches. Raises OSError."""
    return hasattr(cuda.library(), "cuMemcpyBatchAsync")


def copy_batch(pieces: CopyPieces, stream: int) -> None:
    """Enqueue all pieces on `stream` (a CUstream), in as many calls as it takes.

    The arrays are free when it returns. The calling thread has the device's context. Raises DriverStatus;
    some of the pieces may then have been enqueued.
    """
    sources, targets = np.ascontiguousarray(pieces.sources), np.ascontiguousarray(pieces.targets)
    sizes = pieces.lengths.astype(np.uintp)
    addresses = [column.ctypes.data for column in (targets, sources, sizes)]
    attributes = cuda.BatchAttributes(src_access_order=cuda.SOURCE_IN_STREAM_ORDER)
    first, failed = c_size_t(0), c_size_t(0)
    for start in range(0, len(sizes), BATCH_PIECES):
        cuda.check(
            "cuMemcpyBatchAsync",
            *(address + start * sizes.itemsize for address in addresses),
            min(BATCH_PIECES, len(sizes) - start),
            byref(attributes),
            byref(first),
            1,
            byref(failed),
            stream,
        )
