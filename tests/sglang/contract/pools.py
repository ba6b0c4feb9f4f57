"""Host pools as SGLang's MHATokenToKVPoolHost lays them out, without its device side.

The real class cannot be imported without CUDA packages. Layouts, page indices and the order of addresses
follow sglang/srt/mem_cache/pool_host/mha.py, 0.5.23.
"""

from typing import Any

import torch

LAYERS, HEADS, HEAD_DIM = 3, 2, 16


class HostPool:
    """K and V of pages. `layout`: page_first or layer_first; without `has_addresses` flat pages only."""

    storage_format_tag = None

    def __init__(
        self, num_pages: int, layout: str = "page_first", page_size: int = 8, has_addresses: bool = True
    ) -> None:
        self.page_size = page_size
        self.layout = layout
        self.dtype = torch.bfloat16
        self.start_layer, self.end_layer = 0, LAYERS - 1
        self.size = num_pages * page_size
        self._has_addresses = has_addresses
        shape = (
            (2, self.size, LAYERS, HEADS, HEAD_DIM)
            if layout == "page_first"
            else (2, LAYERS, self.size, HEADS, HEAD_DIM)
        )
        self.kv_buffer = torch.zeros(shape, dtype=self.dtype)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape, generator=generator))

    def indices(self, *pages: int) -> torch.Tensor:
        """Slots of pages, as SGLang's allocator hands them out."""
        slots = [page * self.page_size + n for page in pages for n in range(self.page_size)]
        return torch.tensor(slots, dtype=torch.int64)

    def page(self, number: int) -> torch.Tensor:
        return self.get_data_page(number * self.page_size).clone()

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        if not self._has_addresses:
            raise ValueError(f"Unsupported layout: {self.layout}")
        token_bytes = HEADS * HEAD_DIM * self.dtype.itemsize
        base, v_offset = self.kv_buffer.data_ptr(), LAYERS * self.size * token_bytes
        pointers: list[int] = []
        for slot in indices.tolist()[:: self.page_size]:
            if self.layout == "page_first":
                k = base + slot * LAYERS * token_bytes
                pointers += [k, k + v_offset]
            else:
                for layer in range(LAYERS):
                    k = base + slot * token_bytes + layer * self.size * token_bytes
                    pointers += [k, k + v_offset]
        piece = self.page_size * token_bytes * (LAYERS if self.layout == "page_first" else 1)
        return pointers, [piece] * len(pointers)

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        span = slice(int(index), int(index) + self.page_size)
        page = self.kv_buffer[:, span] if self.layout == "page_first" else self.kv_buffer[:, :, span]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * LAYERS * self.page_size * HEADS * HEAD_DIM, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self.get_data_page(index, flat=False)
        page.copy_(data_page.reshape(page.shape))
