"""Pages in SGLang's device pools, as blocks with their bytes in the order of the layers.

A direct linker is given a pool's tensors, one or more per layer, whatever the model is: K and V, latent KV,
an indexer, recurrent states. Here each is seen as rows of bytes, a row per page. A page as a block is the
rows of its first layer, then those of the second, and so on, so that a *fragment* of the block (a run of
bytes that is moved at once) ends where all layers before it are complete. Nothing is said about what the
bytes mean; only the same class, layout and sizes meet in a namespace.

Tensors are indexed and copied by torch, so the device does not matter. Copying runs of bytes one by one, as
other linkers do, was rejected: one page has two of them per layer.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class ByteRun(NamedTuple):
    """Bytes `first` to `last` of every row of `rows` (pages, bytes), at `offset` of a fragment."""

    rows: Any
    first: int
    last: int
    offset: int


class LayeredPages:
    """The pages of one physical pool: a DevicePoolEntry of SGLang."""

    layout = "direct"
    storage_format_tag = None
    start_layer = end_layer = None

    def __init__(self, entry: Any) -> None:
        """Raises ValueError when a tensor's pages are not rows of bytes."""
        self._entry = entry
        self.page_size = entry.page_size
        self.device = entry.components[0][0].device
        self._rows: list[Any] = []
        self.layer_ends: dict[int, int] = {}  # in bytes of a page, of layers that this pool has
        self.page_bytes = 0
        self.dtype = ""
        for layer in sorted(entry.layer_mapping):
            mapped = entry.layer_mapping[layer]
            for component, meta in zip(entry.components, entry.buffer_meta, strict=True):
                for index in [mapped] if isinstance(mapped, int) else mapped:
                    _, stride, size = meta[index]
                    self._rows.append(_rows_of(component[index], size))
                    self.page_bytes += size
                    # What a row of the pool is belongs to what must agree: its tokens, dtype and shape.
                    self.dtype += f"{layer}:{component[index].dtype}{list(component[index].shape[1:])}"
                    self._span = size // stride
            self.layer_ends[layer] = self.page_bytes

    def numbers(self, indices: Any) -> Any:
        """Return the pages of SGLang's `indices` (slots, page after page) as a tensor on the device.

        Raises ValueError when they are not whole pages of the pool."""
        starts = self._entry.prepare_locations(indices)
        return torch.tensor([start // self._span for start in starts], dtype=torch.int64, device=self.device)

    def runs(self, first: int, last: int) -> Iterator[ByteRun]:
        """Yield what bytes `first` to `last` of a page are."""
        begin = 0
        for rows in self._rows:
            end = begin + rows.shape[1]
            low, high = max(first, begin), min(last, end)
            if low < high:
                yield ByteRun(rows, low - begin, high - begin, low - first)
            begin = end

    def read(self, numbers: Any, into: Any, first: int, last: int) -> None:
        """Copy bytes `first` to `last` of pages into `into` (pages, last - first), uint8 on the device."""
        for rows, low, high, offset in self.runs(first, last):
            into[:, offset : offset + high - low] = rows[numbers, low:high]

    def write(self, numbers: Any, data: Any, first: int, last: int) -> None:
        """Copy `data` (pages, last - first), uint8 on the device, to bytes `first` to `last` of pages."""
        for rows, low, high, offset in self.runs(first, last):
            rows[numbers, low:high] = data[:, offset : offset + high - low]


def _rows_of(buffer: Any, page_bytes: int) -> Any:
    """Return a tensor as (pages, page_bytes) uint8, over the same memory."""
    if not buffer.is_contiguous():
        raise ValueError(f"a pool of shape {tuple(buffer.shape)} and strides {buffer.stride()} has gaps")
    flat = buffer.view(-1).view(torch.uint8)
    num_pages = flat.numel() // page_bytes
    return flat[: num_pages * page_bytes].view(num_pages, page_bytes)
