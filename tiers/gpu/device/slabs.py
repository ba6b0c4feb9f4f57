"""Slabs: scratch of work under way, half of it pinned and seen by host and device alike.

A call of a kernel writes columns into the host's half, copies them to the device's, launches, and has results
copied back; nothing of that may change before the device is done with it. So each call has a slab of its own,
their number is fixed, and a caller that finds none free does its work another way: the thread that feeds the
device must not wait. Slabs are made at start, because registering memory takes milliseconds.
"""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....v1.shm import PAGE_BYTES
from ...base import Buffer
from .contract import Device, DeviceError, DeviceMemory, Stream, pieces_of
from .launching import Launch

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Slab:
    """One slab: `view` is the host's half, at address `host` for the device; `device` is the device's half.
    The first slab begins at a page in both halves."""

    view: Buffer
    host: int
    device: int


class KernelStep(NamedTuple):
    """One launch of a kernel. Its arguments are `numbers`, and then the addresses of `parts`."""

    name: str
    num_threads: int
    numbers: Sequence[Any]  # numpy integers
    parts: Sequence[str]


class Ticket:
    """One call under way. Ask `results` once, when the device is known to be done with it."""

    def __init__(self, slabs: "Slabs", slab: Slab, results: "NDArray[Any]") -> None:
        self._slabs = slabs
        self._slab = slab
        self._results = results

    def results(self) -> "NDArray[Any]":
        """Return a copy of what the kernels wrote into the part that the call asked for. Frees the slab."""
        found = self._results.copy()
        self._slabs.give(self._slab)
        return found


class Slabs:
    """`num_slabs` slabs of parts (name -> bytes).

    `shared` parts lie on host and device, `private` ones on the device only. Any thread. Raises DeviceError
    when there is no memory for them. `close` when no stream works for any.
    """

    def __init__(
        self, device: Device, shared: Mapping[str, int], private: Mapping[str, int], num_slabs: int
    ) -> None:
        self._device = device
        self._offsets: dict[str, int] = {}
        end = host_bytes = 0
        for part, num_bytes in {**shared, **private}.items():
            self._offsets[part] = end
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            host_bytes = end if part in shared else host_bytes
        self.shared_bytes = host_bytes  # of one slab
        self._memory: DeviceMemory | None = device.allocate(num_slabs * end + PAGE_BYTES)
        views = memoryview(mmap.mmap(-1, num_slabs * host_bytes))
        try:
            self._host = device.register_host(views, is_read_only=False)
        except DeviceError:
            device.free(self._memory)
            raise
        first = -(-self._memory.address // PAGE_BYTES) * PAGE_BYTES
        self._free = [
            Slab(views[at : at + host_bytes], self._host + at, first + number * end)
            for number, at in enumerate(range(0, num_slabs * host_bytes, host_bytes))
        ]

    def take(self) -> Slab | None:
        """Return a free slab; None: there is none now."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give(self, slab: Slab) -> None:
        """Put a slab back: the device is done with it."""
        self._free.append(slab)

    def call(
        self,
        stream: Stream,
        launch: Launch,
        columns: "Mapping[str, NDArray[Any]]",
        steps: Sequence[KernelStep],
        result: tuple[str, Any, int],
    ) -> Ticket | None:
        """Enqueue a call: `columns` to the device, the kernels, the result back to the host.

        `columns`: shared parts and what they begin with, of any shape. `result`: the shared part, dtype and
        number of elements that the ticket returns, (n,). None while all slabs are in use. Raises DeviceError;
        the slab is then not used again, because the device may still be at it.
        """
        slab = self.take()
        if slab is None:
            return None
        for part, values in columns.items():
            self._column(slab, part, values.dtype, values.size)[:] = values.ravel()
        sent = ((self._offsets[part], values.nbytes) for part, values in columns.items())
        stream.copy(pieces_of((slab.host + at, slab.device + at, num_bytes) for at, num_bytes in sent))
        for step in steps:
            places = (np.uint64(slab.device + self._offsets[part]) for part in step.parts)
            if step.num_threads:
                launch(stream, step.name, step.num_threads, [*step.numbers, *places])
        results, at = self._column(slab, *result), self._offsets[result[0]]
        stream.copy(pieces_of([(slab.device + at, slab.host + at, results.nbytes)]))
        return Ticket(self, slab, results)

    def _column(self, slab: Slab, part: str, dtype: Any, count: int) -> "NDArray[Any]":
        return np.frombuffer(slab.view, dtype, count, self._offsets[part])

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._memory is not None:
            self._device.unregister_host(self._host)
            self._device.free(self._memory)
            self._memory = None
            self._free.clear()
