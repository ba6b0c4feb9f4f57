"""TieredCache: transformers' own DynamicCache, which also knows the tokens of its past.

It computes nothing differently: every layer is transformers' layer, filled as a forward pass would have
filled it. It adds a ledger of the tokens it has read, and for sliding-window layers the keys and values that
the window has moved past and that are not stored yet: the layer drops them, and a prompt that begins the
same way and then goes elsewhere needs them.
"""

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from ...v1.types import Tier, Urgency
from .ledger import Ledger
from .plan import LayerKind, Saved

MAX_TAIL_TOKENS = 1 << 16  # of a sliding-window layer, kept until `save`


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a load brought: tokens of the prompt that need no prefill, and where their blocks were."""

    num_tokens: int = 0
    tokens_by_tier: Counter[Tier] = field(default_factory=Counter)
    load_s: float = 0.0


class Tail:
    """Keys and values of one sliding-window layer from token `first_token` on, none dropped."""

    def __init__(self, first_token: int) -> None:
        self.first_token = first_token
        self._parts: list[tuple[Any, Any]] = []  # [row, head, token, dim]
        self._num_tokens = 0

    @property
    def end_token(self) -> int:
        """Token after the last one."""
        return self.first_token + self._num_tokens

    def append(self, keys: Any, values: Any) -> None:
        """Take what a forward pass computed."""
        self._parts.append((keys, values))
        self._num_tokens += keys.shape[-2]
        while self._num_tokens > MAX_TAIL_TOKENS and len(self._parts) > 1:
            self._drop_first_part()

    def states(self) -> tuple[Any, Any]:
        """Return (keys, values), [row, head, token, dim]."""
        if len(self._parts) > 1:
            keys, values = zip(*self._parts, strict=True)
            self._parts = [(torch.cat(keys, dim=-2), torch.cat(values, dim=-2))]
        return self._parts[0]

    def forget_before(self, token: int) -> None:
        """Drop what comes before `token`: it is stored."""
        num_dropped = min(token - self.first_token, self._num_tokens)
        if num_dropped > 0:
            keys, values = self.states()
            self._parts = [(keys[..., num_dropped:, :].clone(), values[..., num_dropped:, :].clone())]
            self.first_token += num_dropped
            self._num_tokens -= num_dropped

    def drop_last(self, num_tokens: int) -> None:
        """Drop the last tokens: the cache was cropped."""
        num_left = max(0, self._num_tokens - num_tokens)
        if self._parts:
            keys, values = self.states()
            self._parts = [(keys[..., :num_left, :], values[..., :num_left, :])]
        self.first_token -= num_tokens - (self._num_tokens - num_left)
        self._num_tokens = num_left

    def _drop_first_part(self) -> None:
        keys, _ = self._parts.pop(0)
        self.first_token += keys.shape[-2]
        self._num_tokens -= keys.shape[-2]


class Home(Protocol):
    """What a cache needs of its store (store.PrefixStore)."""

    model: Any
    block_tokens: int
    counts: Counter[str]

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of layers in the model's cache."""
        ...

    @property
    def digest(self) -> bytes:
        """Digest of the model."""
        ...

    def save(self, cache: "TieredCache", num_tokens: int | None = None) -> Saved:
        """Store the whole blocks that `cache` has and the daemon has not."""
        ...

    def fork(self, cache: "TieredCache", session: str = "") -> "TieredCache":
        """Return a copy of `cache` for another continuation."""
        ...

    def end(self, cache: "TieredCache", archive: bool = True) -> None:
        """End the cache's session."""
        ...

    def tell(self, cache: "TieredCache", urgency: Urgency) -> None:
        """Say how soon the cache's session needs its blocks."""
        ...


class TieredCache(DynamicCache):
    """Pass it to `model.generate(..., past_key_values=...)` as any other cache, over one turn or many.

    Made by `PrefixStore.load`. Calls raise nothing that a DynamicCache would not.
    """

    def __init__(self, store: Home, session: str = "") -> None:
        super().__init__(config=store.model.config)
        self.store = store
        self.digest = store.digest  # of the model that computed it; the store's changes with the weights
        self.session = session
        self.reuse = Reuse()
        self.urgency = Urgency.QUEUED  # as the daemon was told last
        self.ledger = Ledger()
        self.num_stored_blocks = 0  # from the start of the prompt, by what this cache was told
        self.tails: dict[int, Tail] = {}  # by layer
        self.track(0)

    def save(self, num_tokens: int | None = None) -> Saved:
        """Store the blocks that are not stored yet; at most the first `num_tokens` tokens' if given."""
        return self.store.save(self, num_tokens)

    def fork(self, session: str = "") -> "TieredCache":
        """Return a copy that goes another way, in a session of its own when one is named."""
        return self.store.fork(self, session)

    def end(self, archive: bool = True) -> None:
        """The conversation is over: its blocks may leave memory. Does not store; `save` first."""
        self.store.end(self, archive)

    # -------------------------------------------------------------------- what the store asks and does

    def track(self, first_token: int) -> None:
        """Keep what sliding-window layers compute from `first_token` on."""
        windowed = [kind for kind in self.store.kinds if kind.window_tokens]
        self.tails = {layer: Tail(first_token) for kind in windowed for layer in kind.layers}

    def is_whole(self) -> bool:
        """Whether every layer holds what the ledger says was read."""
        expected = self.ledger.num_tokens
        layers = [layer for kind in self.store.kinds for layer in kind.layers]
        return all(self.layers[layer].get_seq_length() == expected for layer in layers)

    def note_forward(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A forward pass over this cache begins: write down what it reads, and how urgent that makes us.

        Assisted generation, and prefill in chunks of transformers 4.57 and 5.19, read the whole prompt though
        the cache holds a part of it, and would answer wrongly: it is emptied, which is right and a miss.
        """
        if self.ledger.is_read_anew(named):
            self.reset()
            self.store.counts["dropped: the prompt was read anew"] += 1
        self._widen(named.get("input_ids"))
        num_new = self.ledger.read(self.get_seq_length(), module, args, named)
        self.store.tell(self, Urgency.PREFILL if num_new > 1 else Urgency.DECODING)

    def _widen(self, ids: Any) -> None:
        """Repeat the rows of a loaded past where generate has repeated those of the prompt: beams, and
        several answers to one prompt."""
        held = self.layers[self.store.kinds[0].layers[0]].keys
        num_held = 0 if held is None else len(held)
        if ids is not None and num_held and len(ids) > num_held and len(ids) % num_held == 0:
            self.batch_repeat_interleave(len(ids) // num_held)

    # ------------------------------------------------------------------------------ DynamicCache

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """As in DynamicCache; [row, head, token, dim]."""
        if layer_idx in self.tails:
            self.tails[layer_idx].append(key_states, value_states)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """As in DynamicCache: forget the last `-tokens_to_remove` tokens; positive, it is how many stay."""
        num_before = self.get_seq_length()
        super().crop(tokens_to_remove)
        num_dropped = num_before - self.get_seq_length()
        self.ledger.drop(num_dropped)
        for tail in self.tails.values():
            tail.drop_last(num_dropped)
        self.num_stored_blocks = min(
            self.num_stored_blocks, self.ledger.num_tokens // self.store.block_tokens
        )

    def reset(self) -> None:
        """As in DynamicCache; the past is empty again, also where transformers only writes zeros into it."""
        for layer in self.layers:
            layer.keys, layer.values, layer.is_initialized = None, None, False
        super().reset()
        self.ledger = Ledger()
        self.num_stored_blocks = 0
        self.track(0)

    def reorder_cache(self, beam_idx: Any) -> None:
        """As in DynamicCache; rows change places, so nothing is stored from here on."""
        self.ledger.spoiled = "rows were moved"
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As in DynamicCache; rows change places, so nothing is stored from here on."""
        self.ledger.spoiled = "rows were moved"
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Any) -> None:
        """As in DynamicCache; rows change places, so nothing is stored from here on."""
        self.ledger.spoiled = "rows were moved"
        super().batch_select_indices(indices)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TieredCache":
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        apart = {"store": self.store, "ledger": self.ledger.copy()}
        for name, value in self.__dict__.items():
            setattr(other, name, apart[name] if name in apart else copy.deepcopy(value, memo))
        return other
