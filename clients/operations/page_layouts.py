"""Page layouts by name: what a runtime's KV tensors look like, read off the tensors themselves.

A preset is the meaning of a tensor's axes, one letter each; sizes and strides are the tensor's own, so one
preset covers every physical order in which the runtime may have laid that tensor out:

    B page   N token in the page   T slot of one token, page after page (SGLang's flat pools)
    H head   D elements of one head   C the same of all planes, one after another   P plane (K, V)   L layer

vLLM 0.32 gives every layer the logical view [B, H, N, C] whatever the physical KVCacheLayout is (LBNHC,
which it calls NHD; LBHNC, HND; or BLHNC and its kin, where all layers of a block are one run), so its preset
is one line (vllm/v1/kv_cache_interface.py). Earlier ones have planes outermost (FlashAttention) or after the
page (FlashInfer). SGLang keeps one tensor per layer and plane (sglang/srt/mem_cache/memory_pool.py), and in
its host pools may have pages outermost. An explicit table of strides per runtime and backend was rejected: it
would be wrong after the next release, and the tensors know.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...v1.types import DTYPE_BYTES, Geometry
from ..errors import InvalidRequest

#: name -> axes of each tensor. Which tensors there are (one, one per layer, one per layer and plane) is told
#: by the axes that are missing and by how many tensors are given.
PRESETS = {
    "vllm": "BHNC",  # one view per layer, K and V of a head side by side
    "vllm_flash_attention": "PBNHD",  # before 0.32: planes outermost
    "vllm_flashinfer": "BPNHD",  # before 0.32
    "vllm_mla": "BND",  # one latent, one plane
    "vllm_cross_layer": "BLPNHD",  # one tensor of all layers, a block is one run
    "sglang": "THD",  # one tensor per layer and plane: keys of all layers, then values of all layers
    "sglang_mla": "THD",  # one tensor per layer, one plane, one head
    "sglang_page_first": "BLNHD",  # one tensor for K, one for V
    "sglang_page_first_kv": "PBLNHD",  # one tensor
}
_BAD = "BAD_PAGES"


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor as memory: address, sizes, strides in bytes. `keeper` keeps it alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    keeper: Any = None

    @classmethod
    def of(cls, tensor: Any) -> "TensorView":
        """Read it off a torch tensor or an ndarray; a TensorView is what it is."""
        if isinstance(tensor, TensorView):
            return tensor
        if hasattr(tensor, "data_ptr"):
            size = tensor.element_size()
            strides = tuple(stride * size for stride in tensor.stride())
            return cls(tensor.data_ptr(), tuple(tensor.shape), strides, tensor)
        return cls(int(tensor.ctypes.data), tuple(tensor.shape), tuple(tensor.strides), tensor)


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """Where some layers and planes of page 0 begin. Strides in bytes."""

    address: int
    first_layer: int
    num_layers: int
    layer_stride: int
    first_plane: int
    num_planes: int
    plane_stride: int


@dataclass(frozen=True, slots=True)
class PagesDescription:
    """A runtime's pages in numbers, as they travel. Strides in bytes."""

    num_pages: int
    page_tokens: int
    page_stride: int
    token_stride: int
    head_stride: int
    tensors: tuple[PlacedTensor, ...]
    keeper: Any = None


def describe(
    preset: str, tensors: Sequence[Any], geometry: Geometry, page_tokens: int | None = None
) -> PagesDescription:
    """Return the pages that `tensors` are, in the order the preset asks for (see PRESETS).

    `preset` is a name of PRESETS or a string of axes. `page_tokens` is needed for flat pools (axis T) only,
    and is a block's tokens where it is left out. Raises InvalidRequest when tensors and geometry do not
    agree.
    """
    axes = PRESETS.get(preset, preset)
    if not set(axes) <= set("BNTHDCPL") or len(set(axes)) != len(axes):
        raise InvalidRequest(f"unknown layout {preset!r}; known: {', '.join(PRESETS)}", reason=_BAD)
    views = [TensorView.of(tensor) for tensor in tensors]
    num_tokens = page_tokens or geometry.block_tokens
    read = [_read(axes, view, geometry, num_tokens) for view in views]
    if not read or any(one[0] != read[0][0] for one in read):
        raise InvalidRequest("the tensors differ in shape or strides; register them apart", reason=_BAD)
    (num_pages, num_tokens, *strides), (layer_stride, plane_stride) = read[0]
    layers_each = geometry.num_layers if "L" in axes else 1
    planes_each = geometry.num_planes if set("PC") & set(axes) else 1
    parts = geometry.num_layers // layers_each
    if len(views) != parts * (geometry.num_planes // planes_each):
        raise InvalidRequest(
            f"{len(views)} tensors of axes {axes}; {geometry.num_layers} layers and {geometry.num_planes} "
            f"planes need {parts * (geometry.num_planes // planes_each)}: the keys of all layers, then the "
            "values of all layers",
            reason=_BAD,
        )
    placed = tuple(
        PlacedTensor(
            view.address,
            number % parts,
            layers_each,
            layer_stride,
            number // parts,
            planes_each,
            plane_stride,
        )
        for number, view in enumerate(views)
    )
    page_stride, token_stride, head_stride = strides
    return PagesDescription(
        num_pages, num_tokens, page_stride, token_stride, head_stride, placed, tuple(tensors)
    )


def _read(
    axes: str, view: TensorView, geometry: Geometry, page_tokens: int
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return (pages, tokens, page, token and head stride) and (layer stride, plane stride) of one tensor."""
    if len(view.shape) != len(axes):
        raise InvalidRequest(f"a tensor of {len(view.shape)} axes, the layout has {axes}", reason=_BAD)
    sizes = dict(zip(axes, view.shape, strict=True))
    strides = dict(zip(axes, view.strides, strict=True))
    item_bytes = DTYPE_BYTES[geometry.dtype]
    expected = {
        "H": geometry.num_kv_heads,
        "D": geometry.head_dim,
        "C": geometry.head_dim * geometry.num_planes,
        "P": geometry.num_planes,
        "L": geometry.num_layers,
        "N": sizes.get("N", 0),
    }
    for axis, size in sizes.items():
        if axis in expected and size != expected[axis]:
            raise InvalidRequest(f"axis {axis} of {axes} has {size}, not {expected[axis]}", reason=_BAD)
    row = strides.get("D", strides.get("C"))
    if row != item_bytes:
        raise InvalidRequest(
            f"the elements of a head are {row} bytes apart, {geometry.dtype} has {item_bytes}", reason=_BAD
        )
    if min(view.strides) < 0:
        raise InvalidRequest("a tensor with a negative stride cannot be registered", reason=_BAD)
    if "H" not in axes and geometry.num_kv_heads != 1:
        raise InvalidRequest(f"{geometry.num_kv_heads} heads, but axes {axes} have none", reason=_BAD)
    if "T" in axes:
        num_pages, num_tokens = sizes["T"] // page_tokens, page_tokens
        page_stride, token_stride = strides["T"] * page_tokens, strides["T"]
    else:
        num_pages, num_tokens = sizes["B"], sizes["N"]
        page_stride, token_stride = strides["B"], strides["N"]
    plane_stride = strides["P"] if "P" in axes else geometry.head_dim * item_bytes if "C" in axes else 0
    shared = (num_pages, num_tokens, page_stride, token_stride, strides.get("H", 0))
    return shared, (strides.get("L", 0), plane_stride)
