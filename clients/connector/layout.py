"""From a transformer's past keys and values to blocks and back: the layout, in one place.

A runtime keeps, per layer, keys and values shaped [head, token, dim]. kvtier keeps blocks: the K and V of
`block_tokens` consecutive tokens, all layers. Many blocks are one array with six axes,

    [block, layer, plane, token, head, dim]        plane 0 is K, plane 1 is V

and that array's memory *is* what `Client.put` sends and `Client.get` fills: a block is contiguous, and in
it the fragments of the layer groups lie back to back, because groups are consecutive layers and layer is
the outermost axis of a block. So no byte is rearranged between client and daemon, and what a runtime reads in
place of one layer group (`Lease.view`) is blocks[b, first layer : end layer] of the same array.

Tokens stand before heads (the other order is what attention kernels like) because then a block cut from a
longer prompt and a block cut from a shorter one are the same bytes under every tensor-parallel split by head.

Nothing here imports torch: ndarrays and tensors share the few methods that are used.
"""

from collections.abc import Sequence
from typing import Any

from ...v1.types import Geometry

Array = Any  # an ndarray or a tensor; all of one call are of the same kind
LAYOUT = "layer,kv,token,head,dim"


def shape_of(geometry: Geometry, num_blocks: int) -> tuple[int, int, int, int, int, int]:
    """Return the shape of an array that holds `num_blocks` blocks."""
    assert geometry.layout == LAYOUT, f"these functions speak {LAYOUT!r}, not {geometry.layout!r}"
    return (
        num_blocks,
        geometry.num_layers,
        geometry.num_planes,
        geometry.block_tokens,
        geometry.num_kv_heads,
        geometry.head_dim,
    )


def gather(layers: Sequence[Sequence[Array]], first_token: int, blocks: Array) -> None:
    """Fill `blocks` from a cache: block 0 begins at token `first_token` of it.

    `layers[l]` is (keys, values), each [head, token, dim]; they are read only. Copies each element once.
    """
    for layer, plane, states in _planes(layers, first_token, blocks):
        blocks[:, layer, plane] = states.swapaxes(0, 1).swapaxes(1, 2)  # block, token, head, dim


def scatter(blocks: Array, layers: Sequence[Sequence[Array]], first_token: int) -> None:
    """Fill a cache from `blocks`, the first of which begins at token `first_token`: undoes `gather`.

    `layers[l]` is (keys, values), each [head, token, dim], written in place from `first_token` on.
    """
    for layer, plane, states in _planes(layers, first_token, blocks):
        states[:] = blocks[:, layer, plane].swapaxes(1, 2).swapaxes(0, 1)  # head, block, token, dim


def _planes(
    layers: Sequence[Sequence[Array]], first_token: int, blocks: Array
) -> list[tuple[int, int, Array]]:
    """Return (layer, plane, states) with the tokens of `blocks` in view as [head, block, token, dim]."""
    num_blocks, num_layers, num_planes, block_tokens, num_heads, head_dim = blocks.shape
    last_token = first_token + num_blocks * block_tokens
    assert len(layers) == num_layers
    found = []
    for layer, planes in enumerate(layers):
        assert len(planes) == num_planes
        for plane, states in enumerate(planes):
            assert states.shape[1] >= last_token, (
                f"layer {layer} has {states.shape[1]} tokens, asked for {last_token}"
            )
            # Splitting an axis never copies, so this is a view, of arrays and of tensors.
            view = states[:, first_token:last_token].reshape(num_heads, num_blocks, block_tokens, head_dim)
            found.append((layer, plane, view))
    return found
