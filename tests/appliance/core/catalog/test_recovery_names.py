"""Names that clients chose badly, or with care, keep the books right after a restart."""

import numpy as np
import pytest

from kvtier.appliance.core.catalog import recovery


@pytest.mark.parametrize("shared_bytes", [0, 8, 16, 24, 31])
def test_names_that_begin_alike_are_still_different_blocks(shared_bytes: int) -> None:
    """Four blocks, their two groups interleaved as two writers leave them."""
    names = [b"x" * shared_bytes + bytes([n]) * (32 - shared_bytes) for n in (3, 1, 2, 0)]
    hashes = np.array([name for _ in range(2) for name in names], dtype="V32")
    numbers, first = recovery._rows(hashes, 2)
    found = [hashes[record].tobytes() for record in first]
    assert found == names, "every block once, in the order of the records"
    assert [found[number] for number in numbers] == [record.tobytes() for record in hashes]
    assert first.tolist() == [0, 1, 2, 3], "what a block says of itself is its first record's"
