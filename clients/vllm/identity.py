"""The namespace of one rank's KV cache group: what must agree before an engine may read another's bytes.

The engine's block hash covers tokens, LoRA name, multi-modal content and cache_salt. What it does not cover
is here: weights (by content, not by name), the adapter's content, dtype of the KV, block size, physical
layout, position among the ranks, group, attention backend, and on CPU the instruction set, because the CPU
kernels pack keys differently for each.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...v1.types import DTYPE_BYTES, Geometry, NamespaceIdentity
from ..connector.opaque import opaque_geometry
from ..errors import InvalidRequest
from ..weights import checkpoint_digest, find_checkpoint

#: Of a checkpoint's configuration: what changes with a version or a path, and changes no KV.
VOLATILE = ("_name_or_path", "transformers_version", "architectures", "use_cache", "torch_dtype")
FRAGMENT_BYTES = 1 << 20  # wanted; large enough to be copied fast, small enough to come up layer by layer


def model_digest(model: str, revision: str | None, config: Mapping[str, Any], given: str = "") -> bytes:
    """Return 32 bytes that name the weights and how the engine runs them.

    `config` is what else changes the KV (quantization, rope scaling, seed of dummy weights ...). `given`
    replaces reading the checkpoint.

    Raises InvalidRequest when the checkpoint is not on this host.
    """
    weights = bytes.fromhex(given) if given else checkpoint_digest(find_checkpoint(model, revision))
    text = json.dumps(lasting(config), sort_keys=True, default=str)
    return hashlib.sha256(
        b"kvtier.vllm.1" + len(weights).to_bytes(4, "big") + weights + text.encode()
    ).digest()


def lasting(config: Any) -> Any:
    """Return a configuration without what is volatile in it, at any depth.

    Another version of the engine, or the same checkpoint in another place, has the same KV."""
    if isinstance(config, Mapping):
        return {name: lasting(value) for name, value in config.items() if name not in VOLATILE}
    return [lasting(one) for one in config] if isinstance(config, list | tuple) else config


def length_choices(config: Mapping[str, Any], max_model_len: int) -> list[bool | None]:
    """Return what the longest request decides about all KV: LongRoPE's factors, Llama 4's tuning.

    Empty where it decides nothing. A length of 0 is one that the engine chose itself. A checkpoint's own file
    may say `su` for `longrope`, and nothing of Llama 4's tuning."""
    text = json.dumps(config, default=str)
    is_long = re.search(r'type": "(longrope|su)"', text)
    bounds = re.findall(r'"original_max_position_embeddings": (\d+)', text) if is_long else []
    bounds += ["32768"] if re.search(r'"attn_temperature_tuning"|type": "llama4', text) else []
    return [max_model_len > int(bound) if max_model_len else None for bound in sorted(set(bounds))]


def identity_of(
    model: bytes,
    num_layers: int,
    layer_bytes: int,
    block_tokens: int,
    heads: tuple[int, int, str],
    layout: str,
    shard: str,
    domain: str,
    layers_per_group: int = 0,
    num_runs: int = 1,
) -> NamespaceIdentity:
    """Return the identity of one group of one rank.

    `heads` is (KV heads, head dim, dtype of the KV). Where heads and bytes do not fit together (padding,
    scales inside the page, K and V of unequal size) or the dtype is one of bytes (the engine's fp8 is uint8),
    the block is opaque bytes, in `num_runs` runs a layer. `layout` says what is in it.
    """
    num_heads, head_dim, dtype = heads
    layers_per_group = layers_per_group or _layers_per_group(num_layers, layer_bytes)
    if num_layers % layers_per_group:
        raise InvalidRequest(
            f"layers_per_group {layers_per_group} does not divide {num_layers} layers; "
            "use a divisor, or 0 for the default",
            reason="BAD_OPTION",
        )
    for num_planes in (2, 1):
        if num_planes * num_heads * head_dim * block_tokens * DTYPE_BYTES.get(dtype, 0) == layer_bytes:
            geometry = Geometry(
                num_layers=num_layers,
                num_kv_heads=num_heads,
                head_dim=head_dim,
                block_tokens=block_tokens,
                dtype=dtype,
                layout=layout,
                layers_per_group=layers_per_group,
                num_planes=num_planes,
            )
            break
    else:
        run_bytes = layer_bytes // num_runs
        opaque = opaque_geometry(run_bytes, block_tokens, layout, max_fragment_bytes=run_bytes)
        geometry = replace(
            opaque,
            num_layers=num_layers,
            num_kv_heads=opaque.num_kv_heads * num_runs,
            layers_per_group=layers_per_group,
        )
    return NamespaceIdentity(model, geometry, shard=shard, domain=domain)


def salted(identity: NamespaceIdentity, salt: str, adapter: bytes) -> NamespaceIdentity:
    """Return the identity for requests with this adapter.

    `salt` parts it from all that was stored before the engine's weights changed under it."""
    digest = identity.model_digest
    if salt:
        digest = hashlib.sha256(digest + salt.encode()).digest()
    return replace(identity, model_digest=digest, adapter_digest=adapter)


def adapter_digest(path: str) -> bytes:
    """Return the digest of the LoRA adapter in folder `path`; empty for no path.

    Reads files when they have changed. Raises InvalidRequest, OSError."""
    if not path:
        return b""
    folder = Path(path)
    stats = sorted((entry.name, entry.stat()) for entry in folder.iterdir())
    stamps = [(name, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for name, one in stats]
    return _adapter_digest(folder, tuple(stamps))


@lru_cache(maxsize=4096)
def _adapter_digest(folder: Path, _stamps: tuple[tuple[str | int, ...], ...]) -> bytes:
    config = folder / "adapter_config.json"
    text = config.read_bytes() if config.is_file() else b""
    # All bytes, not samples: adapters are small, and a checkpoint of the same training may differ in few.
    return hashlib.sha256(checkpoint_digest(folder, whole=True) + text).digest()


def _layers_per_group(num_layers: int, layer_bytes: int) -> int:
    """Return the largest divisor of the number of layers with fragments no larger than wanted."""
    fitting = [
        n for n in range(1, num_layers + 1) if num_layers % n == 0 and n * layer_bytes <= FRAGMENT_BYTES
    ]
    return max(fitting, default=1)
