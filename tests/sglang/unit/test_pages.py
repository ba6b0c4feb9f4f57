"""Pages as pieces: what a pool says about addresses and sizes becomes equal pieces in the page's order."""

import random

import numpy as np
import pytest

from kvtier.clients.connector.opaque import opaque_geometry
from kvtier.clients.memory.buffers import address_of
from kvtier.clients.sglang.pages import pieces_of


@pytest.mark.parametrize(
    "sizes", [[4096, 4096], [3072, 1024], [8192], [64] * 10, [100, 60], [3 << 20, 5 << 20], [7, 13]]
)
def test_pieces_are_the_page(sizes: list[int]) -> None:
    chance = random.Random(sum(sizes))
    num_pages, page_bytes = 3, sum(sizes)
    memory = np.random.default_rng(1).integers(0, 256, 4 * num_pages * page_bytes, np.uint8)
    starts = [chance.randrange(len(memory) - size) for _ in range(num_pages) for size in sizes]
    base = address_of(memory)
    pieces = pieces_of([base + start for start in starts], sizes * num_pages, num_pages, page_bytes)
    for page, addresses in enumerate(pieces.addresses.tolist()):
        mine = starts[page * len(sizes) : (page + 1) * len(sizes)]
        expected = b"".join(memory[a : a + n].tobytes() for a, n in zip(mine, sizes, strict=True))
        assert b"".join(memory[a - base :][: pieces.piece_bytes].tobytes() for a in addresses) == expected
    fragment_bytes = opaque_geometry(page_bytes, 16, "").fragment_bytes
    assert all(one % pieces.piece_bytes == 0 for one in fragment_bytes)


@pytest.mark.parametrize(
    ("addresses", "sizes", "num_pages"),
    [([1, 2, 3], [8, 8, 8], 2), ([1, 2], [8], 2), ([], [], 0), ([1, 2], [8, 4], 2), ([1, 2], [4, 4], 2)],
)
def test_an_answer_that_is_not_so_many_pages_is_refused(
    addresses: list[int], sizes: list[int], num_pages: int
) -> None:
    with pytest.raises(ValueError, match="pages"):
        pieces_of(addresses, sizes, num_pages, 8)
