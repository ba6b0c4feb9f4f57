"""What a direct linker's threads do: move fragments of leases into pages, group after group, and read pages.

Bytes of the appliance lie in shared memory, those of a pool on a device; between them is *staging*, a piece
of host memory and one on the device of the same size, so that one copy over the bus moves many pages. Where
the pool is in host memory both are one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import NotFound
from ..memory.fragments import Fragment
from ..sync.handles import Lease
from .layered import LayeredPages

LOAD_FAILED = "LOAD_FAILED"  # cause: pages that were pinned did not arrive; SGLang aborts their requests


class Staging:
    """Memory of one thread, and on a device a stream of its own."""

    def __init__(self, device: Any, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        is_host = device.type == "cpu"
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=not is_host)
        self._device = self._host if is_host else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._stream = None if is_host else torch.get_device_module(device).Stream(device)

    def write(
        self, pages: LayeredPages, numbers: Any, fragments: Mapping[int, Fragment], first: int, last: int
    ) -> None:
        """Copy bytes `first` to `last` of pages from their fragments; returns when they are in the pool."""
        size = last - first
        most = self.num_bytes // size
        for begin in range(0, len(fragments), most):
            chosen = range(begin, min(begin + most, len(fragments)))
            host, device = self._shaped(len(chosen), size)
            for row, number in zip(host.numpy(), chosen, strict=True):
                fragments[number].copy(into=row)
            with self._on_stream():
                if device is not host:
                    device.copy_(host, non_blocking=True)
                pages.write(numbers[begin : begin + most], device, first, last)

    def read(self, pages: LayeredPages, numbers: Any) -> list[Any]:
        """Return pages as uint8 arrays, valid until the next call."""
        host, device = self._shaped(len(numbers), pages.page_bytes)
        with self._on_stream():
            pages.read(numbers, device, 0, pages.page_bytes)
            if device is not host:
                host.copy_(device, non_blocking=True)
        return list(host.numpy())

    def _shaped(self, num_rows: int, size: int) -> tuple[Any, Any]:
        host = self._host[: num_rows * size].view(num_rows, size)
        if self._device is self._host:
            return host, host
        return host, self._device[: num_rows * size].view(num_rows, size)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Queue what is done inside. Ends when all of it has run, also after a failure: the pages may be
        another request's then."""
        if self._stream is None:
            yield
            return
        try:
            with torch.get_device_module(self._device.device).stream(self._stream):
                yield
        finally:
            self._stream.synchronize()


class LayerDelivery:
    """Pages of one pool on their way from leases, which cover them one after another."""

    def __init__(
        self, pages: LayeredPages, indices: Any, leases: Sequence[Lease], fragment_bytes: int
    ) -> None:
        """`fragment_bytes`: of each fragment of a page. Raises ValueError for slots that are no pages."""
        self._pages = pages
        self._numbers = pages.numbers(indices)
        self._fragment_bytes = fragment_bytes
        self._arrived: dict[int, dict[int, Fragment]] = {}  # [group][page]
        self._arriving = _fragments_of(leases)
        self._num_written = 0

    def until(self, layer: int, staging: Staging) -> None:
        """Return when a layer is in the pool; at once for one that the pool has not.

        Raises NotFound when something does not come, and what else the client raises."""
        size = self._fragment_bytes
        end = -(-self._pages.layer_ends.get(layer, 0) // size)
        for group in range(self._num_written, end):
            while len(self._arrived.get(group, ())) < len(self._numbers):
                found = next(self._arriving, None)
                if found is None:
                    raise NotFound(f"not all of {len(self._numbers)} pinned pages came", reason=LOAD_FAILED)
                page, fragment = found
                self._arrived.setdefault(fragment.group, {})[page] = fragment
            staging.write(
                self._pages, self._numbers, self._arrived.pop(group), group * size, (group + 1) * size
            )
            self._num_written = group + 1


def _fragments_of(leases: Sequence[Lease]) -> Iterator[tuple[int, Fragment]]:
    """Yield the fragments of leases with the page that each is of, counted over all of them, in turns."""
    starts, first = [], 0
    for lease in leases:
        starts.append((first, iter(lease)))
        first += lease.num_blocks
    while starts:
        for start in list(starts):
            fragment = next(start[1], None)
            if fragment is None:
                starts.remove(start)
            else:
                yield start[0] + fragment.block, fragment
