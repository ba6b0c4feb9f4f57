"""Which of the appliance's blocks the engine's listeners are told of, and in which medium each is.

A block is announced where all ranks can read it: CPU when it is in a memory tier of every rank's namespace,
STORAGE when it is further down for some rank, not at all when one rank lacks it. The daemon says where the
blocks are (announcing.py). The fields of their events, tokens among them, come from the engine's requests:
no token leaves the engine but in the engine's own events.

Bounded: beyond MAX_BLOCKS the removal of the oldest block is announced. `take` returns the difference to what
was announced before, so that nothing grows while the engine does not step.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..groups import Group

MAX_BLOCKS = 1 << 16
NOWHERE, CPU, STORAGE = "", "CPU", "STORAGE"
LOCAL = "LOCAL"
GroupKind = tuple[str, int | None]  # name of a KV cache group's kind, window in tokens


class Key(NamedTuple):
    """A block: salt and digest of the adapter, which tell its namespaces apart, KV cache group, name."""

    namespace: tuple[str, bytes]
    group: int
    name: bytes


class EventFields(NamedTuple):
    """What an event says of a block beside its name and place."""

    tokens: "array[int]"
    extra_keys: tuple[Any, ...] | None = None  # salt, images, adapter: what its name covers beside tokens
    lora_id: int | None = None
    lora_name: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """A block that may be announced."""

    key: Key
    parent: bytes
    fields: EventFields


@dataclass(slots=True)
class Announced:
    """What to announce, in this order."""

    dropped: list[tuple[Block, str]] = field(
        default_factory=list
    )  # removed from a medium; not known any more
    stored: list[tuple[Block, str]] = field(default_factory=list)
    removed: list[tuple[Block, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Announcement:
    block: Block
    mediums: list[str]  # by rank
    announced: str = NOWHERE

    @property
    def medium(self) -> str:
        if NOWHERE in self.mediums:
            return NOWHERE
        return STORAGE if STORAGE in self.mediums else CPU


class Announcer:
    """Filled by the agent's thread and the scheduler's, emptied by the scheduler's."""

    def __init__(self, num_ranks: int, max_blocks: int = MAX_BLOCKS) -> None:
        self._num_ranks = num_ranks
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, _Announcement] = OrderedDict()
        self._changed: dict[Key, None] = {}
        self._dropped: list[tuple[Block, str]] = []

    def unknown(self, keys: Sequence[Key]) -> list[int]:
        """Return the indices of blocks that `add` was never told of, or that were dropped."""
        with self._lock:
            return [i for i, key in enumerate(keys) if key not in self._entries]

    def add(self, blocks: Iterable[Block]) -> None:
        """Remember blocks; nothing is announced of them before `place`."""
        with self._lock:
            for block in blocks:
                if block.key not in self._entries:
                    self._entries[block.key] = _Announcement(block, [NOWHERE] * self._num_ranks)
                self._entries.move_to_end(block.key)
            while len(self._entries) > self._max_blocks:
                self._drop(next(iter(self._entries)))

    def place(self, key: Key, rank: int, medium: str) -> None:
        """Note where a rank's part of a block is. Blocks that were not added are ignored."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.mediums[rank] != medium:
                entry.mediums[rank] = medium
                self._changed[key] = None

    def forget_places(self) -> list[Key]:
        """Note that nothing is known of where blocks are; return them, the oldest first."""
        with self._lock:
            for entry in self._entries.values():
                entry.mediums = [NOWHERE] * self._num_ranks
            self._changed = dict.fromkeys(self._entries)
            return list(self._entries)

    def clear(self) -> None:
        """Drop every block."""
        with self._lock:
            for key in list(self._entries):
                self._drop(key)

    def take(self) -> Announced:
        """Return what has changed since the last call."""
        with self._lock:
            changes = Announced(dropped=self._dropped)
            self._dropped = []
            changed, self._changed = self._changed, {}
            for key in changed:
                entry = self._entries[key]
                before, medium = entry.announced, entry.medium
                if medium == before:
                    continue
                entry.announced = medium
                if medium:
                    changes.stored.append((entry.block, medium))
                if before:
                    changes.removed.append((entry.block, before))
            return changes

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self._changed.pop(key, None)
        if entry.announced:
            self._dropped.append((entry.block, entry.announced))


def event_fields(
    changes: Announced,
    groups: Sequence[Group],
    kinds: Sequence[GroupKind],
    short: Callable[[bytes], int | bytes],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name of vLLM's event, its fields) for what has changed, in the order in which to publish it.

    `kinds`: of each KV cache group; `short`: a block's name as the engine's own events have it. No owner is
    named: listeners drop events of an owner that they do not know.
    """
    yield from _removed(changes.dropped, short)
    for medium, run in runs(changes.stored):
        group, parent, first = run[0].key.group, run[0].parent, run[0].fields
        kind, window = kinds[group]
        yield (
            "BlockStored",
            {
                "block_hashes": [short(block.key.name) for block in run],
                "parent_block_hash": short(parent) if parent else None,
                "token_ids": [token for block in run for token in block.fields.tokens],
                "block_size": groups[group].block_tokens,
                "lora_id": first.lora_id,
                "medium": medium,
                "lora_name": first.lora_name,
                "extra_keys": [block.fields.extra_keys for block in run],
                "group_idx": group,
                "kv_cache_spec_kind": kind,
                "kv_cache_spec_sliding_window": window,
                "locality": LOCAL,
            },
        )
    yield from _removed(changes.removed, short)


def _removed(
    told: Iterable[tuple[Block, str]], short: Callable[[bytes], int | bytes]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for (group, medium), names in by_place(told).items():
        hashes = [short(name) for name in names]
        yield (
            "BlockRemoved",
            {"block_hashes": hashes, "medium": medium, "group_idx": group, "locality": LOCAL},
        )


def runs(told: Iterable[tuple[Block, str]]) -> Iterable[tuple[str, list[Block]]]:
    """Yield (medium, blocks) for blocks of one group and medium that continue one another."""
    run: list[Block] = []
    run_medium = NOWHERE
    for block, medium in told:
        last = run[-1] if run else None
        if last is None or (last.key.name, last.key[:2], run_medium) != (block.parent, block.key[:2], medium):
            if run:
                yield run_medium, run
            run, run_medium = [], medium
        run.append(block)
    if run:
        yield run_medium, run


def by_place(told: Iterable[tuple[Block, str]]) -> dict[tuple[int, str], list[bytes]]:
    """Return the names of blocks by KV cache group and medium."""
    found: dict[tuple[int, str], list[bytes]] = {}
    for block, medium in told:
        found.setdefault((block.key.group, medium), []).append(block.key.name)
    return found
