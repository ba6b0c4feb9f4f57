"""Where the bytes of pages are: addresses in SGLang's host pool where it tells them, flat copies where it
does not.

`get_page_buffer_meta` returns, for each page, one or several (address, size): K and V for page_first, one
of each per layer for layer_first, several states for Mamba. A page as a block is those pieces one after
another, so bytes travel between the pool and the appliance's memory without a copy in between. Pools that
refuse (split formats) hand out flat pages instead.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import numpy as np

from ..connector.chain_store import Memory
from ..connector.opaque import opaque_geometry
from ..memory.buffers import Pieces

ALL_PAGES, BLOCK_GROUPS = "all_pages", "block_groups"  # of SGLang's PoolHitPolicy


class PageMemory:
    """Memory of the pages of one host pool."""

    def __init__(self, pool: Any) -> None:
        """Raises what the pool raises when it gives neither addresses nor flat pages."""
        self._pool = pool
        self.page_tokens = max(1, int(getattr(pool, "page_size", 1) or 1))
        sizes = _sizes_of_a_page(pool, self.page_tokens)
        self.has_addresses = bool(sizes)
        if sizes:
            self.page_bytes = sum(sizes)
        else:
            page = pool.get_dummy_flat_data_page()
            self.page_bytes = int(page.numel()) * int(page.element_size())

    def of(self, indices: Any) -> Memory:
        """Return the memory of pages to be read: in place, or copied out.

        `indices` is SGLang's tensor of token slots, page_tokens a page."""
        if self.has_addresses:
            return self._pieces(indices)
        return [self._pool.get_data_page(first, flat=True).contiguous() for first in self._firsts(indices)]

    def for_loading(self, indices: Any) -> Memory:
        """Return memory that pages can be loaded into. Call `loaded` afterwards."""
        if self.has_addresses:
            return self._pieces(indices)
        return [self._pool.get_dummy_flat_data_page() for _ in self._firsts(indices)]

    def loaded(self, indices: Any, memory: Memory, num_pages: int) -> None:
        """Put the first `num_pages` pages where they belong, unless they were loaded in place."""
        if not isinstance(memory, Pieces):
            for first, page in zip(self._firsts(indices)[:num_pages], memory, strict=False):
                self._pool.set_from_flat_data_page(first, page)

    def fits(self, keys: Sequence[str], indices: Any) -> bool:
        """Whether there are keys, and one page of slots for each."""
        return bool(keys) and indices is not None and int(indices.numel()) == len(keys) * self.page_tokens

    def _firsts(self, indices: Any) -> list[int]:
        return [int(slot) for slot in indices[:: self.page_tokens].tolist()]

    def _pieces(self, indices: Any) -> Pieces:
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        num_pages = int(indices.numel()) // self.page_tokens
        return pieces_of(addresses, sizes, num_pages, self.page_bytes)


def pieces_of(addresses: Sequence[int], sizes: Sequence[int], num_pages: int, page_bytes: int) -> Pieces:
    """Return pages as pieces of equal size: where K and V differ in size, both are cut into a common part.

    Raises ValueError when the pool's answer is not `num_pages` pages of `page_bytes`, all cut alike.
    """
    if not num_pages or len(addresses) % num_pages or len(addresses) != len(sizes):
        raise ValueError(f"{len(addresses)} addresses and {len(sizes)} sizes for {num_pages} pages")
    starts = np.array(addresses, np.int64).reshape(num_pages, -1)
    lengths = np.array(sizes, np.int64).reshape(num_pages, -1)
    if (lengths != lengths[0]).any() or int(lengths[0].sum()) != page_bytes:
        raise ValueError(f"the pool's pages are not all {page_bytes} bytes in equal pieces")
    of_one_page = lengths[0].tolist()
    fragment_bytes = opaque_geometry(page_bytes, 1, "").fragment_bytes[0]  # must be a whole number of pieces
    piece_bytes = gcd(*of_one_page, fragment_bytes)
    offsets = [
        (piece, offset)
        for piece, length in enumerate(of_one_page)
        for offset in range(0, length, piece_bytes)
    ]
    which = np.array([piece for piece, _ in offsets])
    return Pieces(starts[:, which] + np.array([offset for _, offset in offsets], np.int64), piece_bytes)


def _sizes_of_a_page(pool: Any, page_tokens: int) -> list[int]:
    """Return the sizes of a page's pieces; empty when the pool tells no addresses. Some pools have the method
    and refuse for their layout, each class with another exception."""
    import torch  # where there is a pool of SGLang's there is torch

    try:
        _, sizes = pool.get_page_buffer_meta(torch.arange(page_tokens))
    except Exception:
        return []
    return [int(size) for size in sizes]


def restorable(
    num_pages: int,
    pools: Sequence[tuple[str, str, int]],
    num_available: Callable[[str], int],
    present: Callable[[str], Sequence[bool]],
) -> tuple[dict[str, int], list[int]]:
    """Return how far each pool reaches, and which prefixes of `num_pages` pages all of them can restore.

    `pools`: name, SGLang's hit policy, and length of the window. Every page of the prefix must be there
    (all_pages), or those of the window at its end (trailing_pages). block_groups never limits a prefix.
    """
    hits: dict[str, int] = {}
    lengths = list(range(1, num_pages + 1))
    for name, policy, num_keys in pools:
        if not lengths or policy == BLOCK_GROUPS:
            continue  # without a report of such a pool there is no verdict
        if policy == ALL_PAGES:
            possible = set(range(1, num_available(name) + 1))
        else:
            window, there = max(1, num_keys), present(name)
            possible = {n for n in range(1, num_pages + 1) if all(there[max(0, n - window) : n])}
        if possible:
            hits[name] = max(possible)
        lengths = [length for length in lengths if length in possible]
    return hits, lengths
