"""KvtierCache: what `Llama.set_cache` takes.

Blocks are opaque: `block_tokens` tokens of llama.cpp's own state, under the hash of all tokens before. A
state that is saved is cut, and what is stored already does not travel; a prompt gets the blocks that it
shares with any prompt before it, joined to a state.

llama-cpp-python copies the whole state of the context before each save, and its scores: rows of logits that
nothing reads after a load, because the last token is evaluated in any case. They are not kept. Keeping whole
states under their prompts, as its own caches do, was rejected: the next prompt of a conversation is never
the same, and a state of 8k tokens would be stored once a turn.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_cache import BaseLlamaCache

from ...v1.types import NamespaceIdentity
from ..connector.chain_store import ChainStore
from ..connector.guard import Guard, harmless
from ..connector.opaque import opaque_identity, token_frame
from ..connector.plugin_options import ChainOptions
from ..values.keys import prefix_hashes
from ..weights import checkpoint_digest
from .state import Bytes, StateLayout, UnsupportedState, layout_of, num_cells

FORMAT = 1  # of a block; raise it when the same bytes would mean something else
UNKNOWN_STATE = "UNKNOWN_STATE"  # cause of a miss: a state that is not cut
#: Of the context's parameters: what changes the keys and values of a token, beside the weights.
SETTINGS = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "flash_attn_type",
    "pooling_type",
    "attention_type",
)


class KvtierCache(BaseLlamaCache):
    """States of one model in one daemon; `llm.set_cache(KvtierCache(llm))`.

    `llm` must be fresh: a token is evaluated to see how it writes its state. `block_tokens`: prompts are
    resumed at multiples of it. `target`, `domain`: as for Client. `weights_digest`: hexadecimal, instead of
    reading samples of the model's file. Raises UnsupportedState (a ValueError) for a model or context that it
    cannot serve, naming why.
    """

    def __init__(
        self,
        llm: Any,
        target: str = "",
        *,
        block_tokens: int = 32,
        domain: str = "",
        weights_digest: str = "",
        variant: str = "",
        guard: Guard | None = None,
    ) -> None:
        super().__init__(0)
        self.block_tokens = block_tokens
        self.guard = guard or Guard("kvtier.llamacpp")
        self.num_hits = self.num_hit_tokens = self.num_stored_bytes = 0
        self._llm = llm
        self._options = ChainOptions(
            target=target, name="llamacpp", domain=domain, weights_digest=weights_digest, variant=variant
        )
        self.layout = self._learn_layout()
        self.identity = self._identity()
        self._frame = token_frame(block_tokens)
        self._store = ChainStore.at(
            self._options, self.guard, self._options.load_timeout_s, self._options.staging_bytes
        )

    @property
    def cache_size(self) -> int:
        """Return the bytes that this process has stored so far; what the daemon keeps is its own decision."""
        return self.num_stored_bytes

    @harmless(lambda *_: False)
    def __contains__(self, key: Sequence[int]) -> bool:
        return self._num_found(self._names(key[:-1])) > 0

    def __getitem__(self, key: Sequence[int]) -> Any:
        """Return the state of the longest stored beginning of `key`. Raises KeyError when there is none, or
        the context has as much itself."""
        state = self._load(list(key))
        if state is None:
            raise KeyError("nothing in kvtier begins like this prompt")
        return state

    @harmless(lambda *_: None)
    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        state = np.frombuffer(value.llama_state, np.uint8)
        num_tokens = int(value.n_tokens)
        try:
            if layout_of(state) != self.layout or num_cells(state) != num_tokens:
                raise UnsupportedState("not the layout of this context")
        except UnsupportedState:
            self.guard.count(UNKNOWN_STATE)
            return
        names = self._names(value.input_ids[:num_tokens])
        num_known = self._store.num_stored(self.identity, names)
        if num_known is None or num_known == len(names):
            return
        blocks = self.layout.cut(
            state, num_known * self.block_tokens, len(names) - num_known, self.block_tokens
        )
        parent = names[num_known - 1] if num_known else b""
        stored = self._store.store(self.identity, names[num_known:], list(blocks), parent=parent)
        self.num_stored_bytes += stored.num_sent * self.block_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_tokens * self.layout.token_bytes

    def close(self) -> None:
        """Close the connection; it opens again when it is used."""
        self._store.close()

    # ---------------------------------------------------------------------------------- internals

    @harmless(lambda *_: None)
    def _load(self, tokens: list[int]) -> Any:
        """Return a state; None when there is none that helps."""
        names = self._names(tokens[:-1])  # the last token is evaluated for its logits
        own = self._llm.input_ids[: self._llm.n_tokens]
        num_own = int(np.argmin(np.append(own[: len(tokens)] == tokens[: len(own)], False)))
        if len(names) * self.block_tokens <= num_own:
            return None
        names = names[: self._num_found(names)]
        if len(names) * self.block_tokens <= num_own:
            return None
        blocks = np.empty((len(names), self.block_bytes), np.uint8)
        num_loaded = self._store.load(self.identity, names, list(blocks))
        num_tokens = num_loaded * self.block_tokens
        if num_tokens <= num_own:
            return None
        self.num_hits += 1
        self.num_hit_tokens += num_tokens
        state = self.layout.join(blocks[:num_loaded], self.block_tokens)
        input_ids = np.zeros(len(self._llm.input_ids), np.intc)
        input_ids[:num_tokens] = tokens[:num_tokens]
        no_scores = np.zeros((1, 1), np.single)  # of any shape, where they are copied to
        return llama_cpp.LlamaState(input_ids, no_scores, num_tokens, state, len(state), self._llm._seed)

    def _num_found(self, names: Sequence[bytes]) -> int:
        return self._store.num_available(self.identity, names) if names else 0

    def _names(self, tokens: Any) -> list[bytes]:
        return prefix_hashes(self._frame, np.asarray(tokens, np.int64))

    def _learn_layout(self) -> StateLayout:
        """Return how this context writes its state. Raises UnsupportedState."""
        llm = self._llm
        if llm.n_tokens:
            raise UnsupportedState(
                f"the context has {llm.n_tokens} tokens already; make the cache before its first prompt"
            )
        if getattr(llm, "_logits_all", False):
            raise UnsupportedState(
                "logits_all asks for the logits of every token, which are not kept; leave it out"
            )
        llm.eval([llm.token_bos() if llm.token_bos() >= 0 else 0, 0, 0])
        state: Bytes = np.frombuffer(llm.save_state().llama_state, np.uint8)
        llm.reset()
        llm._ctx.kv_cache_clear()
        layout = layout_of(state)
        if not np.array_equal(layout.join(layout.cut(state, 0, 3, 1), 1), state):
            raise UnsupportedState("a state that does not come out of its blocks as it was")
        return layout

    def _identity(self) -> NamespaceIdentity:
        llm, options = self._llm, self._options
        given = options.weights_digest
        weights = bytes.fromhex(given) if given else checkpoint_digest(Path(llm.model_path))
        adapter = getattr(llm, "lora_path", None)
        facts = {
            "format": FORMAT,
            "session": llama_cpp.LLAMA_STATE_SEQ_VERSION,
            "layout": {**asdict(self.layout), "architecture": self.layout.architecture.decode()},
            "block_tokens": self.block_tokens,
            "settings": {name: getattr(llm.context_params, name, None) for name in SETTINGS},
            # A model may have two rope factors, and the context's size decides which one all tokens get.
            **({"n_ctx": llm.n_ctx()} if any(".rope.scaling." in key for key in llm.metadata) else {}),
            "overrides": repr(getattr(llm, "kv_overrides", None)),
            "adapter": hashlib.sha256(Path(adapter).read_bytes()).hexdigest() if adapter else "",
            "adapter_scale": getattr(llm, "lora_scale", None) if adapter else None,
            "variant": options.variant,
        }
        return opaque_identity(
            weights, self.block_bytes, self.block_tokens, f"llama.cpp.{FORMAT}", facts, "all"
        )
