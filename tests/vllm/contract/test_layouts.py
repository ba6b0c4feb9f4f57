"""The table of layouts that tests/vllm/unit moves bytes with, held against what vLLM itself makes."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm.v1.kv_cache_layout", reason="before 0.29 each backend has a layout of its own")

from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvtier.clients.vllm.worker.pages import LayerView, PagedGroup

from ..unit.layouts import LAYOUTS, NUM_BLOCKS, NUM_LAYERS, Layout


def spec_of(layout: Layout) -> FullAttentionSpec:
    """The spec that an attention layer, and its backend, would give."""
    dtype = getattr(torch, layout.dtype)
    if layout.cache_dtype in STR_DTYPE_TO_TORCH_DTYPE:
        assert STR_DTYPE_TO_TORCH_DTYPE[layout.cache_dtype] is dtype
    common = {
        "block_size": layout.block_tokens,
        "num_kv_heads": layout.num_heads,
        "head_size": layout.head_size,
        "dtype": dtype,
        "kv_quant_mode": get_kv_quant_mode(layout.cache_dtype),
        "tokens_per_state": layout.tokens_per_state,
    }
    if layout.is_mla:
        spec = MLAAttentionSpec(**common, cache_dtype_str=layout.cache_dtype)
    else:
        spec = FullAttentionSpec(**common, head_size_v=layout.head_size_v)
    if "per_token_head" in layout.cache_dtype:
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

        return TritonAttentionBackend.customize_spec(spec)
    if layout.cache_dtype == "fp8_ds_mla":
        spec = replace(spec, state_content_bytes=layout.content_bytes)
    return replace(spec, page_size_padded=layout.padded_bytes or None)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_cache_lies_as_the_table_says(name: str) -> None:
    layout = LAYOUTS[name]
    spec, order = spec_of(layout), KVCacheLayout[layout.order]
    layer_stride, block_stride, *_ = compute_layout_strides(spec, NUM_BLOCKS, NUM_LAYERS, order)
    raw = torch.zeros(layout.num_bytes, dtype=torch.int8)
    tensor = KVCacheTensor(len(raw), [f"layer {i}" for i in range(NUM_LAYERS)], layer_stride, block_stride)
    kernel_tokens = layout.kernel_tokens or None
    views = create_kv_cache_views(raw, spec, NUM_BLOCKS, order, tensor, kernel_block_size=kernel_tokens)
    theirs = [LayerView.of(view) for view in views]
    for number, view in enumerate(theirs):
        offset = number * layout.strides[0]
        assert view.item_bytes == layout.item_bytes
        assert (view.address - raw.data_ptr(), view.strides) == (
            offset,
            (*layout.strides[1:4], layout.item_bytes),
        )
        assert view.shape == (*layout.shape_bytes[1:4], layout.content_bytes // layout.item_bytes)
    assert PagedGroup(theirs, NUM_BLOCKS).layer_bytes == layout.layer_bytes == spec.unpadded_page_size_bytes
