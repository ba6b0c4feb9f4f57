"""Blocks in pieces: put from and get into the scattered memory of a paged cache, in every world."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.clients import Geometry, InvalidRequest, NamespaceIdentity, NotFound, Pieces, prefix_hashes

from .client_worlds import World

LAYERS, PAGES = 6, 10
GEOMETRY = Geometry(
    num_layers=LAYERS, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16", layers_per_group=2
)
LAYER_BYTES = GEOMETRY.layer_bytes
CHAIN = prefix_hashes(GEOMETRY, range(5 * 16))
PAGED: list[int] = [7, 2, 9, 0, 4]  # where the five blocks of the chain live in the paged cache


def cache(seed: int) -> npt.NDArray[np.uint8]:
    """A paged cache, layers outermost: shape (layers, pages, bytes)."""
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, PAGES, LAYER_BYTES), np.uint8)


def pieces(paged: npt.NDArray[np.uint8], pages: list[int]) -> Pieces:
    start: int = paged.__array_interface__["data"][0]
    rows = np.array(pages, np.int64)[:, None] * LAYER_BYTES
    return Pieces(start + rows + np.arange(LAYERS) * PAGES * LAYER_BYTES, LAYER_BYTES, paged)


def register(client: Any, request: pytest.FixtureRequest, geometry: Geometry = GEOMETRY) -> Any:
    return client.register(NamespaceIdentity(request.node.name.encode()[-64:].rjust(16), geometry))


def test_pieces_come_back_to_other_pages(world: World, request: pytest.FixtureRequest) -> None:
    client = world.client(name="paged")
    namespace = register(client, request)
    source, target = cache(1), cache(2)
    assert client.put(namespace, CHAIN, pieces(source, PAGED)).num_stored == 5
    others = [1, 3, 5]
    untouched = [page for page in range(PAGES) if page not in others]
    before = target[:, untouched].copy()
    report = client.get(namespace, CHAIN, into=pieces(target, others), first_block=2)
    assert (report.num_blocks, report.num_loaded) == (5, 3)
    np.testing.assert_array_equal(target[:, others], source[:, PAGED[2:]])
    np.testing.assert_array_equal(target[:, untouched], before)


def test_pieces_and_whole_blocks_are_the_same_bytes(world: World, request: pytest.FixtureRequest) -> None:
    client = world.client(name="paged")
    namespace = register(client, request)
    source = cache(3)
    client.put(namespace, CHAIN, pieces(source, PAGED))
    whole = client.get(namespace, CHAIN).data
    expected = source[:, PAGED].transpose(1, 0, 2)
    np.testing.assert_array_equal(whole.reshape(5, LAYERS, LAYER_BYTES), expected)


def test_one_block_alone(world: World, request: pytest.FixtureRequest) -> None:
    """A get of one block has a way of its own through the client; pieces must not fall into it."""
    client = world.client(name="paged")
    namespace = register(client, request)
    source, target = cache(4), cache(5)
    client.put(namespace, CHAIN[:1], pieces(source, [6]))
    for _ in range(2):
        assert client.get(namespace, CHAIN[:1], into=pieces(target, [8])).num_loaded == 1
    np.testing.assert_array_equal(target[:, 8], source[:, 6])


@pytest.mark.parametrize(
    ("addresses", "piece_bytes", "message"),
    [
        (np.zeros((4, LAYERS), np.int64), LAYER_BYTES, "one row per block"),
        (np.zeros((5, LAYERS), np.int64), LAYER_BYTES // 2, "a block has"),
        (np.zeros(5, np.int64), LAYER_BYTES * LAYERS, "one row per block"),
    ],
)
def test_wrong_pieces_are_refused(
    world: World, request: pytest.FixtureRequest, addresses: Any, piece_bytes: int, message: str
) -> None:
    client = world.client(name="paged")
    namespace = register(client, request)
    with pytest.raises(InvalidRequest, match=message):
        client.get(namespace, CHAIN, into=Pieces(addresses, piece_bytes))


def test_fragments_that_are_no_whole_pieces_are_refused(world: World, request: pytest.FixtureRequest) -> None:
    client = world.client(name="paged")
    uneven = Geometry(
        num_layers=5, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16", layers_per_group=2
    )
    namespace = register(client, request, uneven)
    into = Pieces(np.arange(5, dtype=np.int64)[None, :] * (1 << 20), LAYER_BYTES)
    with pytest.raises(InvalidRequest, match="layers_per_group"):
        client.get(namespace, CHAIN[:1], into=into)


def test_lease_without_views_pins_for_another_client(world: World, request: pytest.FixtureRequest) -> None:
    """The scheduler of an engine holds the lease, its worker reads."""
    scheduler, worker = world.client(name="scheduler"), world.client(name="worker")
    namespace, same = register(scheduler, request), register(worker, request)
    source, target = cache(6), cache(7)
    worker.put(same, CHAIN, pieces(source, PAGED))
    with scheduler.acquire(namespace, CHAIN, first_block=1, views=False) as lease:
        assert lease.wait() == 5
        assert len(lease.tiers) == 5
        with pytest.raises(NotFound):
            lease.view(1, 0)
        assert worker.get(same, CHAIN, into=pieces(target, PAGED)).num_loaded == 5
        lease.extend(5.0)
    np.testing.assert_array_equal(target[:, PAGED], source[:, PAGED])
