"""Which pages may meet: SGLang's page hash covers tokens and salt; everything else is in the namespace.

The file backend in SGLang's tree puts model name, ranks and sizes into its file names and leaves dtype,
layout and the weights themselves to luck. Here a namespace is: digest of the weights, one pool (KV, Mamba
state, indexer ...), its class, layout, dtype and page size, the layers of this pipeline stage, and the rank
where a page is a shard. Ranks with pages that are replicas (MLA) share one; replicas of data parallelism
always do.

Nothing of SGLang is imported; its config and pools are recognised by their fields.
"""

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ...v1.types import NamespaceIdentity
from ..connector.opaque import MAX_FRAGMENT_BYTES, opaque_identity
from ..connector.plugin_options import ChainOptions, bad_option, options_from

FORMAT = 1  # of a page as a block; raise it when the same bytes would mean something else
KV_POOL = "kv"
SHARDED_POOLS = ("mamba",)  # a shard per rank even where the KV is replicated


@dataclass(frozen=True, slots=True)
class StorageOptions(ChainOptions):
    """What `"kvtier": {...}` in the backend's extra config may say."""

    name: str = "sglang"

    @classmethod
    def from_config(cls, extra_config: Mapping[str, Any] | None) -> "StorageOptions":
        """Read the extra config. Raises InvalidRequest (a ValueError) naming the setting."""
        settings = (extra_config or {}).get("kvtier", {})
        if not isinstance(settings, Mapping):
            raise bad_option(f'"kvtier" in the extra config must be an object of settings, is {settings!r}')
        return options_from(cls, settings, "the kvtier backend")


def namespace_of(
    config: Any,
    pool_name: str,
    pool: Any,
    page_bytes: int,
    weights: bytes,
    variant: str,
    max_fragment_bytes: int = MAX_FRAGMENT_BYTES,
) -> NamespaceIdentity:
    """Return the identity of one pool's pages under a HiCacheStorageConfig."""
    is_replicated = config.is_mla_model and pool_name not in SHARDED_POOLS
    facts = {
        "format": FORMAT,
        "pool": pool_name,
        "class": type(pool).__name__,
        "layout": getattr(pool, "layout", None),
        "dtype": str(getattr(pool, "dtype", None)),
        "page_tokens": getattr(pool, "page_size", None),
        "page_bytes": page_bytes,
        "start_layer": getattr(pool, "start_layer", None),
        "end_layer": getattr(pool, "end_layer", None),
        "format_tag": getattr(pool, "storage_format_tag", None),
        "tp": None if is_replicated else [config.tp_rank, config.tp_size],
        "pp": [config.pp_rank, config.pp_size],
        "cp": [config.attn_cp_rank, config.attn_cp_size],
        "dcp": [config.dcp_rank, config.dcp_size, config.logical_page_size],
        "split_heads": [config.should_split_heads, config.tp_lcm_size],
        "variant": variant,
    }
    tokens = max(1, int(getattr(pool, "page_size", 1) or 1))
    rank = "all" if is_replicated else f"{config.tp_rank}/{config.tp_size}"
    shard = f"pool={pool_name},tp={rank},pp={config.pp_rank}/{config.pp_size}"
    kind = f"sglang.{FORMAT}"
    return opaque_identity(weights, page_bytes, tokens, kind, facts, shard, max_fragment_bytes)


def since_clear(identity: NamespaceIdentity, run: str, num_clears: int) -> NamespaceIdentity:
    """Return the namespace of what the server `run` stores after its last clear."""
    if not num_clears:
        return identity
    shard = f"{identity.shard.partition(',cleared=')[0]},cleared={run}.{num_clears}"
    return replace(identity, shard=shard)


@cache
def run_of_server() -> str:
    """Return a name that the ranks of one server share, and no other server ever has.

    The first rank draws it; the others read it from the store by which torch.distributed made them meet.
    Their parent process does not tell: a program may start one engine after another."""
    from torch import distributed

    drawn = uuid.uuid4().hex[:16]
    if not (distributed.is_available() and distributed.is_initialized()):
        return drawn
    store = distributed.distributed_c10d._get_default_store()
    return str(store.compare_set("kvtier.run", "", drawn).decode())


def hash_of(key: str) -> bytes:
    """Return a page's key as a prefix hash: SGLang's are SHA-256 in hexadecimal; others are hashed."""
    try:
        packed = bytes.fromhex(key)
    except ValueError:
        packed = b""
    return packed if len(packed) == 32 else hashlib.sha256(b"kvtier.sglang.key" + key.encode()).digest()


def name_of(pool_name: Any) -> str:
    """Return a pool's name as text; SGLang uses both an enum and text."""
    return str(getattr(pool_name, "value", pool_name))
