"""PrefixStore: the face that a generate loop sees. What it asks of the daemon may fail, and then is a miss.

Daemon away (a breaker then stops asking), out of time, out of room, restarted, or a bug in here: everything
that talks goes through a guard, which counts the cause, and the answer is an empty store's. What talks
is in carrier.py.
"""

import copy
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from ...v1.addresses import default_target
from ...v1.types import Tier, Urgency
from ..connector.guard import PLUGIN_BUG, Guard
from ..options import Timeout
from ..sync import Client
from ..values.keys import prefix_hashes
from .cache import Reuse, TieredCache
from .carrier import Carrier
from .identity import fingerprint, has_adapter, model_digest
from .plan import LayerKind, Saved, whole_blocks
from .probe import Unsupported, shape_of_past

T = TypeVar("T")
log = logging.getLogger("kvtier.transformers")
TIMEOUT = Timeout(call_s=2.0, connect_s=0.5, grace_s=0.5)  # of a client made here: prefill is not that slow


class PrefixStore:
    """Blocks of one model in one daemon. Make one per model and process; `close` it, or use `with`.

    `model` is a causal language model, in eval mode, on any device. `client` is made from KVTIER_TARGET when
    there is none, with short timeouts. Prompts are resumed at multiples of `align_tokens` (a multiple of
    `block_tokens`; by default the same). Reads all weights once unless `weights_digest` (16 to 64 bytes)
    identifies them. One thread at a time; threads make one each.

    Raises Unsupported (a ValueError) for a model it cannot serve, naming why.
    """

    def __init__(
        self,
        model: Any,
        client: Client | None = None,
        *,
        block_tokens: int = 32,
        align_tokens: int = 0,
        layers_per_group: int = 0,
        weights_digest: bytes = b"",
        guard: Guard | None = None,
    ) -> None:
        align_tokens = align_tokens or block_tokens
        if align_tokens % block_tokens:
            raise Unsupported(f"align_tokens {align_tokens} is no multiple of block_tokens {block_tokens}")
        self.model = model
        self.block_tokens = block_tokens
        self.align_tokens = align_tokens
        self.counts: Counter[str] = Counter()  # what happened so far
        self.guard = guard or Guard("kvtier.transformers")  # and what went wrong, by cause
        self._owns_client = client is None
        self._client = client or Client(
            default_target(os.environ),
            name=os.environ.get("KVTIER_NAME", ""),
            domain=os.environ.get("KVTIER_DOMAIN", ""),
            timeout=TIMEOUT,
        )
        self._layers_per_group = layers_per_group
        self._carrier = self._learn(weights_digest)
        self._fingerprint = fingerprint(model)
        self._refusal = ""
        self._lock = threading.RLock()
        self._hook = model.register_forward_pre_hook(self._watch, with_kwargs=True)
        if hasattr(model, "_prefill_chunking"):
            model._prefill_chunking = partial(_prefill_chunking, model)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of layers in the model's cache."""
        return self._carrier.kinds

    @property
    def digest(self) -> bytes:
        """Digest of the model, see identity.py."""
        return self._carrier.digest

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return sum(geometry.block_bytes for geometry in self._carrier.geometries)

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the prefix hashes of the blocks of a prompt that a load may bring."""
        num_blocks = whole_blocks(len(tokens), self.block_tokens, self.align_tokens)
        return prefix_hashes(self._carrier.geometries[0], tokens[: num_blocks * self.block_tokens])

    # ------------------------------------------------------------------------------------- turns

    def load(self, input_ids: Any, attention_mask: Any = None, *, session: str = "") -> TieredCache:
        """Return a cache for `generate` that holds the longest stored prefix of a prompt; maybe none.

        `input_ids` is a tensor [row, token] or [token], or a list of token numbers. Several rows must be of
        one length without padding; they resume where all of them can. `session` names the conversation.
        """
        began_at = time.perf_counter()
        self._notice_change()
        cache = TieredCache(self, session)
        ids = torch.as_tensor(input_ids)
        rows: list[list[int]] = (ids if ids.ndim == 2 else ids[None]).tolist()
        self.counts["loads"] += 1
        if cause := self._why_not(rows, attention_mask):
            self.counts[f"passed by: {cause}"] += 1
            return cache
        self.tell(cache, Urgency.PREFILL)
        reused = self._ask("load", lambda: self._carrier.fill(cache, rows), None)
        if reused is None:  # it may have failed half-way
            cache.reset()
        else:
            cache.reuse = Reuse(*reused, time.perf_counter() - began_at)
        self.counts["hits" if cache.reuse.num_tokens else "misses"] += 1
        self.counts["reused tokens"] += cache.reuse.num_tokens * len(rows)
        return cache

    def save(self, cache: TieredCache, num_tokens: int | None = None) -> Saved:
        """Store the whole blocks that `cache` has and the daemon has not.

        Those of the first `num_tokens` tokens, if given. The session then waits for its user."""
        self._notice_change()
        saved = Saved(why_not=self._refusal or ("adapter" if has_adapter(self.model) else ""))
        if not saved.why_not:
            saved = self._ask("save", lambda: self._carrier.save(cache, num_tokens), Saved(why_not="failed"))
        if saved.why_not:
            self.counts[f"not saved: {saved.why_not}"] += 1
        self.counts["stored blocks"] += saved.num_stored
        self.counts["refused blocks"] += saved.num_refused
        self.tell(cache, Urgency.WAITING)
        return saved

    def fork(self, cache: TieredCache, session: str = "") -> TieredCache:
        """Return a copy of `cache` for another continuation, in a session of its own when one is named."""
        other = copy.deepcopy(cache)
        other.session = session
        if session and cache.session:
            fork = partial(self._client.operations.fork_session, cache.session, session)
            self._ask("fork", lambda: self._client.run(fork), 0)
        return other

    def end(self, cache: TieredCache, archive: bool = True) -> None:
        """End the cache's session: its blocks go to the cold store instead of memory when `archive`."""
        if cache.session:
            cache.urgency = Urgency.ENDED
            end = partial(self._client.operations.end_session, cache.session, archive)
            self._ask("end", lambda: self._client.run(end), 0)

    def tell(self, cache: TieredCache, urgency: Urgency) -> None:
        """Say how soon the cache's session needs its blocks, when that has changed."""
        if cache.session and urgency is not cache.urgency:
            cache.urgency = urgency
            update = partial(self._client.operations.update_session, cache.session, urgency, None)
            self._ask("tell", lambda: self._client.run(update), None)

    def pin(self, tokens: Sequence[int], floor: Tier = Tier.DRAM, ttl_s: float = 3600.0) -> int:
        """Keep the stored prefix of a prompt in `floor` or faster; return how many blocks are pinned."""
        hashes = self.hashes(tokens)
        return self._ask("pin", lambda: self._carrier.pin(hashes, floor, ttl_s), 0)

    def close(self) -> None:
        """Watch the model no longer; leave the daemon when the client is our own. Idempotent."""
        self._hook.remove()
        if self._owns_client:
            self._client.close()

    def __enter__(self) -> "PrefixStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrefixStore":
        return self  # a copied cache belongs to the same store

    # --------------------------------------------------------------------------------- internals

    def _ask(self, what: str, call: Callable[[], T], default: T) -> T:
        """Return what `call` returns; `default` when it fails, or when it is no use to ask."""
        with self._lock:
            answer = self.guard.ask(what, call)
        return default if answer is None else answer

    def _watch(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Called before every forward pass of the model."""
        cache = named.get("past_key_values")
        if isinstance(cache, TieredCache) and cache.store is self:
            try:
                cache.note_forward(module, args, named)
            except Exception:
                log.exception("this pass was not understood; what it computes is not stored")
                cache.ledger.spoiled = PLUGIN_BUG
                self.guard.count(PLUGIN_BUG)

    def _why_not(self, rows: list[list[int]], mask: Any) -> str:
        """Why a prompt is computed as if there were no store; empty when it is not."""
        if self._refusal or self.model.training:
            return self._refusal or "training"
        if has_adapter(self.model):
            return "adapter"
        if not rows or not rows[0]:
            return "no tokens"
        if mask is not None:
            return "" if bool(torch.as_tensor(mask).bool().all()) else "padding"
        return "padding" if any(self._pad_token() in row for row in rows) else ""

    def _pad_token(self) -> int | None:
        """Return the token that `generate` takes for padding when it is given no mask, as it decides it."""
        configured = getattr(self.model, "generation_config", None)
        pad, end = getattr(configured, "pad_token_id", None), getattr(configured, "eos_token_id", None)
        ends = end if isinstance(end, list) else [end]
        return None if pad in ends else pad

    def _learn(self, weights_digest: bytes = b"") -> Carrier:
        """Look at the model; return what carries for it. Raises Unsupported."""
        shape = shape_of_past(self.model)
        digest = model_digest(self.model, weights_digest)
        return Carrier(
            self._client, shape, digest, self.block_tokens, self.align_tokens, self._layers_per_group
        )

    def _notice_change(self) -> None:
        """Look at the model anew when it was moved, cast or written to since the last look. Whatever it was
        before, nothing is loaded or saved for it until it is known again."""
        try:
            now = fingerprint(self.model)
            if now == self._fingerprint:
                return
            self.counts["model changed"] += 1
            self._refusal = "the model has changed"
            self._carrier = self._learn()
            self._fingerprint, self._refusal = now, ""
        except Unsupported as problem:
            self._fingerprint, self._refusal = now, problem.message
            log.warning("%s; computing without kvtier", problem)
        except Exception:  # out of memory, say; tried again next time
            self._refusal = PLUGIN_BUG
            self.guard.defect("looking at the model")


def _prefill_chunking(model: Any, input_ids: Any, *args: Any, **named: Any) -> Any:
    """Tell the cache's store of prefill in chunks, which transformers 4 does past all hooks, and do it.

    Bound by a partial: a deep copy of the model then calls the copy."""
    if isinstance(cache := named.get("past_key_values"), TieredCache):
        ids = input_ids[:, :-1]  # the last one is read as others are
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        home: Any = cache.store
        home._watch(model, (), {"input_ids": ids, "position_ids": positions, "past_key_values": cache})
    return type(model)._prefill_chunking(model, input_ids, *args, **named)
