"""PrefixStore: the past of a prompt through kvtier, into and out of a transformers cache.

    reuse = store.load(tokens, session, cache)     the longest stored prefix, in whole prefill steps
    ...prefill the rest, decode...
    store.save(tokens, session, cache)             the prompt's new blocks

Only what prefill computed in whole steps is kept, not the decoded answer: the next turn sends the answer
as part of its prompt, and what a step computes is what a run without kvtier computes, to the last bit
(see model.py). A runtime that does not compare bits keeps decoded blocks too.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from kvtier.clients import Client, Geometry, Namespace, NamespaceIdentity, PutReport, Tier, prefix_hashes

from .kv_blocks import gather, scatter, shape_of
from .model import STEP_TOKENS, Model

BLOCK_TOKENS = 32
LAYERS_PER_GROUP = 4
MAX_TOKENS = 4096
STEP_BLOCKS = STEP_TOKENS // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a load brought: tokens of the prompt that need no prefill, and where their blocks were."""

    num_tokens: int = 0
    tokens_by_tier: Counter[Tier] = field(default_factory=Counter)
    load_s: float = 0.0


class PrefixStore:
    """Blocks of one model in one daemon.

    Holds two arrays of blocks for the longest prompt, one to load into and one to save from; memory that
    was touched before is several times faster than fresh memory.
    """

    def __init__(self, client: Client, model: Model) -> None:
        config = model.config
        self.geometry = Geometry(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            block_tokens=BLOCK_TOKENS,
            dtype="float32",
            layers_per_group=LAYERS_PER_GROUP,
        )
        self._client = client
        self._namespace: Namespace = client.register(NamespaceIdentity(model.digest(), self.geometry))
        self._blocks = torch.zeros(shape_of(self.geometry, MAX_TOKENS // BLOCK_TOKENS))
        self.block_bytes = self._namespace.block_bytes

    def hashes(self, tokens: list[int]) -> list[bytes]:
        """Return the prefix hashes of the whole steps of a prompt, its last token left out: somebody has
        to compute the logits."""
        num_tokens = (len(tokens) - 1) // STEP_TOKENS * STEP_TOKENS
        return prefix_hashes(self.geometry, tokens[:num_tokens])

    def load(self, tokens: list[int], session: str, cache: DynamicCache) -> Reuse:
        """Fill an empty cache with the longest stored prefix of a prompt. A miss fills nothing."""
        began_at = time.perf_counter()
        hashes = self.hashes(tokens)
        found = self._client.lookup(self._namespace, hashes)
        wanted = found.num_blocks // STEP_BLOCKS * STEP_BLOCKS
        if not wanted:
            return Reuse(load_s=time.perf_counter() - began_at)
        report = self._client.get(
            self._namespace, hashes[:wanted], into=self._blocks[:wanted], session=session
        )
        num_blocks = report.num_blocks // STEP_BLOCKS * STEP_BLOCKS  # less, when some came too late
        if num_blocks:
            for layer in range(self.geometry.num_layers):
                keys, values = scatter(self._blocks[:num_blocks], layer)
                cache.update(keys.contiguous()[None], values.contiguous()[None], layer)
        tiers = Counter(found.tiers[:num_blocks])
        by_tier = Counter({tier: count * BLOCK_TOKENS for tier, count in tiers.items()})
        return Reuse(num_blocks * BLOCK_TOKENS, by_tier, time.perf_counter() - began_at)

    def save(self, tokens: list[int], session: str, cache: DynamicCache, first_block: int) -> PutReport:
        """Put the prompt's blocks from `first_block` on, the first one that was not loaded."""
        hashes = self.hashes(tokens)
        new = hashes[first_block:]
        if not new:
            return PutReport([])
        blocks = self._blocks[: len(new)]
        gather([(layer.keys[0], layer.values[0]) for layer in cache.layers], first_block, blocks)
        parent = hashes[first_block - 1] if first_block else b""
        return self._client.put(self._namespace, new, blocks, parent=parent, session=session)

    def pin(self, tokens: list[int], floor: Tier, ttl_s: float) -> int:
        """Keep the whole steps of a prompt in `floor` or faster; return how many blocks are pinned."""
        return self._client.pin(self._namespace, self.hashes(tokens), ttl_s, floor).num_blocks
