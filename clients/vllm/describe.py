"""Reads off the engine's configuration what goes into the namespaces of one rank. Needs vLLM."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.platforms import current_platform

from ...v1.types import NamespaceIdentity
from .groups import specs_in
from .identity import identity_of, length_choices, model_digest
from .options import Options
from .worker.pages import PagedGroup
from .worker.transfers import DevicePages


def describe_groups(
    vllm_config: Any, kv_cache_config: Any, paged: Sequence[PagedGroup], options: Options
) -> list[NamespaceIdentity]:
    """Return the identity of each KV cache group of this rank. Raises InvalidRequest, OSError."""
    model = model_of(vllm_config, options)
    tensor, pipeline = get_tp_group(), get_pp_group()
    replicas = max(1, getattr(kv_cache_config, "kv_tp_replicas", 1))  # ranks with the same KV share it
    shard = (
        f"tp={tensor.rank_in_group // replicas}/{tensor.world_size // replicas},"
        f"pp={pipeline.rank_in_group}/{pipeline.world_size}"
    )
    identities = []
    for index, (group, pages) in enumerate(zip(kv_cache_config.kv_cache_groups, paged, strict=True)):
        spec = specs_in(group.kv_cache_spec)[0]
        heads, content = states_in(spec) if hasattr(spec, "mamba_type") else heads_in(spec)
        layout = {
            "runtime": "vllm",
            "kind": type(spec).__name__,
            "cache_dtype": vllm_config.cache_config.cache_dtype,
            "order": pages.order,
            "hash": vllm_config.cache_config.prefix_caching_hash_algo,
            **content,
            **backend_of(vllm_config, group.layer_names[0], spec),
        }
        identities.append(
            identity_of(
                model,
                pages.num_layers,
                pages.layer_bytes,
                group.kv_cache_spec.block_size,
                heads,
                json.dumps(layout, sort_keys=True),
                f"{shard},group={index}/{len(paged)}",
                options.domain,
                options.layers_per_group,
                len(pages.runs),
            )
        )
    return identities


def heads_in(spec: Any) -> tuple[tuple[int, int, str], dict[str, Any]]:
    """Return (KV heads, head dim, dtype) of an attention layer, and what else is in its blocks."""
    dtype = str(spec.dtype).removeprefix("torch.")
    content = {
        "window": getattr(spec, "sliding_window", None),
        "heads": [spec.num_kv_heads, spec.head_size, spec.head_size_v],
        "dtype": dtype,
        "quantization": getattr(spec.kv_quant_mode, "name", ""),
    }
    return (spec.num_kv_heads, spec.head_size, dtype), content


def states_in(spec: Any) -> tuple[tuple[int, int, str], dict[str, Any]]:
    """Return the same of a recurrent layer. Its states are opaque."""
    content = {
        "state": str(getattr(spec.mamba_type, "name", spec.mamba_type)),
        "shapes": [list(shape) for shape in spec.shapes],
        "dtypes": [str(dtype) for dtype in spec.dtypes],
        "mode": spec.mamba_cache_mode,
    }
    return (1, 1, "opaque"), content


def model_of(vllm_config: Any, options: Options) -> bytes:
    """Return the digest of the weights and of what the engine does with them."""
    model = vllm_config.model_config
    is_dummy = str(vllm_config.load_config.load_format) == "dummy"
    config = {
        "config": model.hf_text_config.to_dict(),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "dummy_seed": model.seed if is_dummy else None,
        "speculative": str(getattr(vllm_config.speculative_config, "model", None)),
    }
    images = getattr(model, "multimodal_config", None)  # a request's hash covers what the request says only
    settings = {name: getattr(images, name, None) for name in ("mm_processor_kwargs", "video_pruning_rate")}
    is_fitted = getattr(model, "original_max_model_len", None) == -1  # after the model was made
    rest = {
        "images": {name: given for name, given in settings.items() if given},
        "length": length_choices(config["config"], 0 if is_fitted else model.max_model_len),
        "tuning": getattr(model, "override_generation_config", {}).get("attn_temperature_tuning"),
        "variant": options.variant,
    }
    config |= {name: given for name, given in rest.items() if given not in (None, "", [], {})}
    given = options.model_digest
    if is_dummy and not given:  # weights drawn from the seed, for this configuration
        given = "00" * 32
    return model_digest(model.model, model.revision, config, given)


def backend_of(vllm_config: Any, layer_name: str, spec: Any) -> dict[str, str]:
    """Return the attention backend of a layer, and on CPU the instruction set its kernel is made for."""
    layer = vllm_config.compilation_config.static_forward_context[layer_name]
    found = {"backend": layer.get_attn_backend().get_name(), "platform": current_platform.device_type}
    if current_platform.device_type == "cpu" and hasattr(spec, "head_size"):
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        cache_dtype = vllm_config.cache_config.cache_dtype
        kind = None if cache_dtype == "auto" else cache_dtype
        found["isa"] = _get_attn_isa(vllm_config.model_config.dtype, spec.block_size, spec.head_size, kind)
    elif isinstance(torch.cuda.device_count(), int) and torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found


def cuda_pages(groups: Sequence[PagedGroup], device: torch.device) -> DevicePages:
    """Return the blocks on a GPU for the direct path. Raises PreconditionFailed. Never ran on a GPU."""
    from ..direct_cuda import CudaExporter

    index = torch.cuda.current_device() if device.index is None else device.index
    return DevicePages(
        groups, CudaExporter(index), lambda event: event.record(torch.cuda.current_stream(index))
    )
