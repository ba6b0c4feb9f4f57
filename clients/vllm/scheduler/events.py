"""KV events of the appliance's blocks, for the engine's listeners (a router, an indexer). Needs vLLM.

They carry the tokens, because listeners compute their own hashes of them; the appliance never gets any. A
listener that acts on a block that is gone costs a miss, and so does every other hint.
"""

from array import array
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from ..engine import event_extra_keys
from ..groups import Group
from .announcer import Announced, Announcer, Block, EventFields, GroupKind, Key, event_fields
from .saving import StoredBlocks

EVENTS: dict[str, Any] = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved}


def block_kind(spec: Any) -> GroupKind:
    """Return the kind of a KV cache group and its window in tokens, as the engine's own events have them."""
    return get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)


def blocks_of(stored: StoredBlocks, group: Group, salt: str, announcer: Announcer) -> list[Block]:
    """Return the blocks that the announcer does not know; `stored.origin` is the engine's request."""
    request: Any = stored.origin
    namespace = salt, stored.adapter
    keys = [Key(namespace, stored.group, name) for name in stored.names]
    lora, size, next_item = request.lora_request, group.block_tokens, 0
    blocks = []
    for i in announcer.unknown(keys):
        start = (stored.first_block + i) * size
        extra_keys, next_item = generate_block_hash_extra_keys(request, start, start + size, next_item)
        fields = EventFields(
            array("I", request.all_token_ids[start : start + size]),
            event_extra_keys([extra_keys])[0],
            lora.lora_int_id if lora else None,
            lora.lora_name if lora else None,
        )
        blocks.append(Block(keys[i], stored.names[i - 1] if i else stored.parent, fields))
    return blocks


def events_of(changes: Announced, groups: Sequence[Group], kinds: Sequence[GroupKind]) -> list[KVCacheEvent]:
    """Return the events that say what has changed. `kinds`: `block_kind` of each group."""
    fields = event_fields(changes, groups, kinds, maybe_convert_block_hash)
    return [EVENTS[name](**values) for name, values in fields]
