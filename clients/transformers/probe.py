"""What a model keeps, measured instead of guessed: one token is read, and the cache is looked at.

Head counts and sizes have a dozen spellings in configurations, and per-layer exceptions in some; the cache
that one forward pass leaves has none. What is refused here, with the reason, is what a store of blocks of
tokens would serve wrongly or not at all:

    states that are not one entry per token      linear attention, SSM, convolution, compressed attention
    a past that depends on what comes after it   dynamic and long RoPE scaling, which change with the length
    two pasts                                    encoder-decoder models
    caches that generate makes itself            static, quantised, offloaded
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, __version__, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...v1.types import DTYPE_BYTES
from ..errors import InvalidRequest
from .plan import LayerKind

MAJOR_VERSIONS = ("4", "5")
NO_LAYER = getattr(cache_utils, "DummyLayer", None)  # has no cache of its own; not in 5.19
CHANGING_ROPE = ("dynamic", "longrope")  # frequencies depend on the length of the whole prompt


class Unsupported(InvalidRequest):
    """kvtier cannot keep what this model keeps; the message says why."""

    def __init__(self, why: str) -> None:
        super().__init__(f"no store for this model: {why}", reason="BAD_NAMESPACE")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model keeps of a token, and where."""

    kinds: tuple[LayerKind, ...]
    devices: dict[int, Any]  # by layer


def shape_of_past(model: Any) -> CacheShape:
    """Return what the model keeps of every token. Runs it over one token. Raises Unsupported."""
    _refuse_by_configuration(model)
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            model(input_ids=token, past_key_values=cache, use_cache=True)
    except AttributeError as problem:  # asked of a cache of the model's own kind, before transformers 5
        raise Unsupported(f"it does not run over a DynamicCache: {problem}") from problem
    members: dict[LayerKind, list[int]] = {}
    devices = {}
    for number, layer in enumerate(cache.layers):
        if type(layer) is not NO_LAYER:
            members.setdefault(_kind(number, layer), []).append(number)
            devices[number] = layer.keys.device
    if not members:
        raise Unsupported("it keeps no past in its cache")
    return CacheShape(tuple(replace(kind, layers=tuple(layers)) for kind, layers in members.items()), devices)


def _kind(number: int, layer: Any) -> LayerKind:
    """Return the kind of one layer of a cache of one token, without its members."""
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise Unsupported(
            f"layer {number} keeps a {type(layer).__name__}, which is not keys and values of each token"
        )
    if layer.get_seq_length() != 1 or layer.keys is None:
        raise Unsupported(f"layer {number} did not keep the token that was read")
    _, num_kv_heads, _, key_dim = layer.keys.shape
    _, num_value_heads, _, value_dim = layer.values.shape
    if num_kv_heads != num_value_heads or layer.keys.dtype != layer.values.dtype:
        raise Unsupported(f"layer {number} has keys and values of different heads or dtypes")
    dtype = str(layer.keys.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise Unsupported(f"layer {number} keeps {dtype}; known are {', '.join(DTYPE_BYTES)}")
    window_tokens = layer.sliding_window - 1 if type(layer) is DynamicSlidingWindowLayer else 0
    return LayerKind((), num_kv_heads, key_dim, value_dim, dtype, window_tokens)


def _refuse_by_configuration(model: Any) -> None:
    if __version__.split(".")[0] not in MAJOR_VERSIONS:
        raise Unsupported(f"transformers is {__version__}, this code speaks {' and '.join(MAJOR_VERSIONS)}")
    if model.config.is_encoder_decoder:
        raise Unsupported("it is an encoder-decoder: its past depends on the encoder's input")
    text = model.config.get_text_config(decoder=True)
    spellings = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]  # 5.x; before
    for kind in set().union(*map(_rope_types, spellings)):
        if kind in CHANGING_ROPE:
            raise Unsupported(f"its RoPE scaling is {kind!r}: a prefix's keys depend on the prompt's length")
    wanted = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if wanted not in (None, "dynamic"):
        raise Unsupported(f"its generation_config wants a {wanted!r} cache; set cache_implementation to None")


def _rope_types(parameters: Any) -> set[str]:
    """Return all values of `rope_type`, or `type` in old files, in a possibly nested dict."""
    if not isinstance(parameters, dict):
        return set()
    found = {str(parameters[name]) for name in ("rope_type", "type") if name in parameters}
    return found.union(*(_rope_types(value) for value in parameters.values()))
