"""Opaque geometries: exactly the bytes asked for, in fragments that a tier can hold."""

import random

import pytest

from kvtier.clients import InvalidRequest
from kvtier.clients.connector.opaque import MAX_FRAGMENT_BYTES, opaque_geometry


@pytest.mark.parametrize(
    ("block_bytes", "block_tokens", "num_groups", "tokens"),
    [
        (65_536, 32, 1, 32),
        (3 << 20, 128, 1, 128),  # 24 KiB a token
        (40 << 20, 128, 10, 128),
        (40 << 20, 48, 10, 16),  # 48 does not divide 4 MiB; what both share does
        (4097, 16, 1, 1),
    ],
)
def test_bytes_tokens_and_fragments(
    block_bytes: int, block_tokens: int, num_groups: int, tokens: int
) -> None:
    geometry = opaque_geometry(block_bytes, block_tokens, "test")
    assert geometry.block_bytes == block_bytes
    assert (geometry.num_groups, geometry.block_tokens) == (num_groups, tokens)
    assert (geometry.dtype, geometry.num_planes, geometry.layout) == ("int8", 1, "test")


def test_whole_pages_of_any_size() -> None:
    chance = random.Random(7)
    for _ in range(300):
        block_bytes = chance.randrange(1, 60_000) * 4096
        geometry = opaque_geometry(block_bytes, chance.choice([16, 32, 128, 256]), "test")
        assert geometry.block_bytes == block_bytes
        if geometry.num_groups > 1:
            assert max(geometry.fragment_bytes) <= MAX_FRAGMENT_BYTES


@pytest.mark.parametrize(("block_bytes", "block_tokens"), [(0, 16), (4096, 0), (-1, 1)])
def test_nothing_is_refused(block_bytes: int, block_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="a block needs bytes and tokens"):
        opaque_geometry(block_bytes, block_tokens, "test")


def test_what_cannot_be_described_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="pad it to a multiple of 4096"):
        opaque_geometry((1 << 31) - 1, 16, "test")  # a prime
