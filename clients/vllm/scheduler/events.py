"""KV events: what is stored in the appliance, for the engine's listeners (a router, an indexer).

Only stores are reported. The appliance may evict later without telling this engine; a listener that acts on a
block that is gone costs a miss, and so does every other hint. Needs vLLM.
"""

from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from ..groups import Group
from .saving import StoredBlocks


def event_of(stored: StoredBlocks, group: Group) -> BlockStored:
    """Return the event for blocks that every rank has stored; `stored.origin` is the engine's request."""
    request: Any = stored.origin
    size = group.block_tokens
    first = stored.first_block * size
    extra_keys, next_item = [], 0
    for start in range(first, first + len(stored.names) * size, size):
        keys, next_item = generate_block_hash_extra_keys(request, start, start + size, next_item)
        extra_keys.append(keys)
    lora = request.lora_request
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(name) for name in stored.names],
        parent_block_hash=maybe_convert_block_hash(stored.parent) if stored.parent else None,
        token_ids=list(request.all_token_ids[first : first + len(stored.names) * size]),
        block_size=size,
        lora_id=lora.lora_int_id if lora else None,
        medium=MEDIUM_CPU,
        lora_name=lora.lora_name if lora else None,
        extra_keys=to_event_extra_keys(extra_keys),
        group_idx=group.index,
        locality="LOCAL",
        session_id=request.session_id,
    )
