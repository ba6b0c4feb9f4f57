"""KV events of the appliance's blocks, for the engine's listeners (a router, an indexer). Needs vLLM.

They carry the tokens, because listeners compute their own hashes of them; the appliance never gets any. A
listener that acts on a block that is gone costs a miss, and so does every other hint.
"""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from ..engine import event_extra_keys
from ..groups import Group
from .announcer import Announced, Announcer, Block, Key, by_place, runs
from .saving import StoredBlocks

LOCAL = "LOCAL"


class EventFields(NamedTuple):
    """What an event says of a block beside its name and place."""

    tokens: "array[int]"
    extra_keys: tuple[Any, ...] | None
    lora_id: int | None
    lora_name: str | None


def block_kind(spec: Any) -> tuple[str, int | None]:
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


def events_of(
    changes: Announced, groups: Sequence[Group], kinds: Sequence[tuple[str, int | None]]
) -> list[KVCacheEvent]:
    """Return the events that say what has changed. `kinds`: `block_kind` of each group."""
    events: list[KVCacheEvent] = _removed(changes.dropped)
    for medium, run in runs(changes.stored):
        group, first = run[0].key.group, run[0].fields
        kind, window = kinds[group]
        events.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(block.key.name) for block in run],
                parent_block_hash=maybe_convert_block_hash(run[0].parent) if run[0].parent else None,
                token_ids=[token for block in run for token in block.fields.tokens],
                block_size=groups[group].block_tokens,
                lora_id=first.lora_id,
                medium=medium,
                lora_name=first.lora_name,
                extra_keys=[block.fields.extra_keys for block in run],
                group_idx=group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
                locality=LOCAL,
            )
        )
    return events + _removed(changes.removed)


def _removed(told: Sequence[tuple[Block, str]]) -> list[KVCacheEvent]:
    return [
        BlockRemoved(
            block_hashes=[maybe_convert_block_hash(name) for name in names],
            medium=medium,
            group_idx=group,
            locality=LOCAL,
        )
        for (group, medium), names in by_place(told).items()
    ]
