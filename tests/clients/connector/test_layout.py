"""The block layout: caches to blocks and back, in numpy; the transformers client runs the same on tensors."""

import hashlib

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.clients import Geometry, NamespaceIdentity, prefix_hashes
from kvtier.clients.connector.layout import gather, scatter, shape_of
from kvtier.testing import FakeAppliance

Floats = npt.NDArray[np.float32]
NUM_TOKENS = 23  # five blocks of four, and a rest
UNEVEN = Geometry(
    num_layers=5, num_kv_heads=3, head_dim=2, block_tokens=4, dtype="float32", layers_per_group=2
)


def make_cache(geometry: Geometry, num_tokens: int = NUM_TOKENS) -> list[tuple[Floats, Floats]]:
    """Return (keys, values) per layer, [head, token, dim], in which every element is another number."""
    shape = (geometry.num_layers, 2, geometry.num_kv_heads, num_tokens, geometry.head_dim)
    numbers = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return [(keys, values) for keys, values in numbers]


def test_an_element_stands_where_the_layout_says() -> None:
    layers = make_cache(UNEVEN)
    blocks = np.zeros(shape_of(UNEVEN, 3), np.float32)
    gather(layers, UNEVEN.block_tokens, blocks)
    for index in np.ndindex(blocks.shape):
        block, layer, plane, token, head, dim = index
        assert blocks[index] == layers[layer][plane][head, (1 + block) * UNEVEN.block_tokens + token, dim]


@pytest.mark.parametrize(("first_token", "num_blocks"), [(0, 5), (0, 1), (8, 3), (16, 1), (3, 5)])
def test_scatter_undoes_gather_and_touches_nothing_else(first_token: int, num_blocks: int) -> None:
    layers = make_cache(UNEVEN)
    blocks = np.empty(shape_of(UNEVEN, num_blocks), np.float32)
    gather(layers, first_token, blocks)
    back = [(np.full_like(keys, -1), np.full_like(values, -1)) for keys, values in layers]
    scatter(blocks, back, first_token)
    last_token = first_token + num_blocks * UNEVEN.block_tokens
    inside = (np.arange(NUM_TOKENS) >= first_token) & (np.arange(NUM_TOKENS) < last_token)
    for planes, expected in zip(back, layers, strict=True):
        for states, wanted in zip(planes, expected, strict=True):
            np.testing.assert_array_equal(states, np.where(inside[:, None], wanted, -1))


def test_blocks_do_not_depend_on_the_prompt_they_were_cut_from() -> None:
    long = make_cache(UNEVEN)
    short = [(keys[:, :9].copy(), values[:, :9].copy()) for keys, values in long]
    from_long = np.empty(shape_of(UNEVEN, 2), np.float32)
    from_short = np.empty_like(from_long)
    gather(long, 0, from_long)
    gather(short, 0, from_short)
    assert from_long.tobytes() == from_short.tobytes()


def test_asking_for_tokens_that_are_not_there_is_refused() -> None:
    with pytest.raises(AssertionError, match="has 23 tokens, asked for 24"):
        gather(make_cache(UNEVEN), 20, np.empty(shape_of(UNEVEN, 1), np.float32))


def test_another_layout_is_refused() -> None:
    other = Geometry(1, 1, 1, 1, "float32", layout="kv,head,token,dim")
    with pytest.raises(AssertionError, match="not 'kv,head,token,dim'"):
        shape_of(other, 1)


def test_fragments_are_the_bytes_the_daemon_calls_fragments() -> None:
    """Through a client: what a lease shows of (block, group) are those layers of what was put."""
    blocks = np.empty(shape_of(UNEVEN, 5), np.float32)
    gather(make_cache(UNEVEN), 0, blocks)
    identity = NamespaceIdentity(hashlib.sha256(b"layout").digest(), UNEVEN)
    with FakeAppliance(1 << 20).client() as client:
        namespace = client.register(identity)
        hashes = prefix_hashes(namespace, list(range(NUM_TOKENS)))
        assert client.put(namespace, hashes, blocks).num_stored == 5
        with client.acquire(namespace, hashes) as lease:
            assert lease.wait() == 5
            for block in range(5):
                for group in range(UNEVEN.num_groups):
                    layers = UNEVEN.layers_of(group)
                    part = blocks[block, layers.start : layers.stop]
                    assert part.flags.c_contiguous
                    assert bytes(lease.view(block, group)) == part.tobytes()
        back = np.empty_like(blocks)
        assert client.get(namespace, hashes, into=back).num_blocks == 5
    np.testing.assert_array_equal(back, blocks)


def test_tensors_and_arrays_give_the_same_bytes() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; `make demo` installs it")
    layers = make_cache(UNEVEN)
    blocks = np.empty(shape_of(UNEVEN, 5), np.float32)
    gather(layers, 0, blocks)
    tensors = [(torch.from_numpy(keys), torch.from_numpy(values)) for keys, values in layers]
    tensor_blocks = torch.empty(shape_of(UNEVEN, 5))
    gather(tensors, 0, tensor_blocks)
    assert tensor_blocks.numpy().tobytes() == blocks.tobytes()
    back = [(torch.zeros_like(keys), torch.zeros_like(values)) for keys, values in tensors]
    scatter(tensor_blocks, back, 0)
    num_tokens = 5 * UNEVEN.block_tokens
    for planes, expected in zip(back, layers, strict=True):
        for states, wanted in zip(planes, expected, strict=True):
            np.testing.assert_array_equal(states[:, :num_tokens].numpy(), wanted[:, :num_tokens])
