"""The engine's KV cache groups as kvtier sees them, and which of them it can serve.

A group is a set of layers with one block table. Each becomes a namespace of its own (the group is part of
the shard), because its blocks may hold another number of tokens and leave the engine at other times. One
namespace for all groups was rejected: a sliding window's blocks are needed at the end of a prefix only.

Served are full attention, sliding windows, and recurrent state (Mamba, linear attention) where the engine
keeps states at block boundaries ("align"). A state is not a piece of a chain: it stands for its whole prefix,
is found under the name of that prefix alone, and continues exactly there. Nor are windows that are kept
every so many tokens only (`window_checkpoint_tokens`): a prefix can be continued where its last window is
whole. Everything else (states without
boundaries or with drafts, chunked local attention, circular buffers, contexts cut over ranks) makes the whole
model a miss, with the reason logged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

NULL_BLOCK = 0  # the engine's block id for "not there": outside the window
STABLE_HASHES = ("sha256", "sha256_cbor")  # 32 bytes, the same in every process
_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOWED = ("SlidingWindowSpec",)
_RECURRENT = ("MambaSpec",)


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group: `window_tokens` is 0 for full attention.

    A block of a group that `is_recurrent` is the state behind its last token. `checkpoint_tokens`: only
    windows that end at its multiples are kept, and from the last one of a prompt on everything; 0: all."""

    index: int
    block_tokens: int
    hashes_per_block: int  # of the request's own block hashes
    window_tokens: int = 0
    is_recurrent: bool = False
    checkpoint_tokens: int = 0

    @property
    def is_chain(self) -> bool:
        """Whether all blocks of a prefix are kept."""
        return not self.is_recurrent and not self.checkpoint_tokens

    def is_kept(self, block: int, prompt_end: int) -> bool:
        """Return whether a block belongs to a window that is kept.

        `prompt_end`: where its prompt can be continued."""
        if not self.checkpoint_tokens:
            return True
        checkpoint = -(-(block + 1) * self.block_tokens // self.checkpoint_tokens) * self.checkpoint_tokens
        return block >= min(self.first_needed(checkpoint), self.first_needed(prompt_end))

    def name_of(self, hashes: Sequence[bytes], num_tokens: int) -> bytes:
        """Return the name of the block that ends at `num_tokens`, a multiple of the block."""
        return hashes[num_tokens // self.block_tokens * self.hashes_per_block - 1]

    def chain(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the names of the group's blocks: the hash at each block's end names its whole past."""
        return list(hashes[self.hashes_per_block - 1 :: self.hashes_per_block])

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many whole blocks `num_tokens` are."""
        return num_tokens // self.block_tokens

    def first_needed(self, num_tokens: int) -> int:
        """Return the first block that a token at `num_tokens` can see."""
        if not self.window_tokens:
            return 0
        return max(0, num_tokens - self.window_tokens) // self.block_tokens


def alignment_of(groups: Sequence[Group]) -> int:
    """Return the number of tokens of which every hit is a multiple."""
    return lcm(*(group.block_tokens for group in groups))


def groups_of(kv_cache_config: Any, hash_block_tokens: int, window_checkpoint_tokens: int = 0) -> list[Group]:
    """Return the groups of the engine's KVCacheConfig.

    Distances of checkpoints are rounded up to what hits are multiples of."""
    groups: list[Group] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        window = 0
        for one in specs_in(spec):
            if type(one).__name__ in _WINDOWED:
                window = max(window, one.sliding_window + getattr(one, "extra_retained_tokens", 0))
        is_recurrent = type(specs_in(spec)[0]).__name__ in _RECURRENT
        per_block = spec.block_size // hash_block_tokens
        groups.append(Group(index, spec.block_size, per_block, window, is_recurrent))
    size = alignment_of(groups)
    every = -(-window_checkpoint_tokens // size) * size
    return [replace(group, checkpoint_tokens=every if group.window_tokens else 0) for group in groups]


def specs_in(spec: Any) -> list[Any]:
    """Return the specs of single layers in a group's spec."""
    return list(spec.kv_cache_specs.values()) if hasattr(spec, "kv_cache_specs") else [spec]


def why_not_shared(vllm_config: Any, groups: Sequence[Group] = ()) -> str:
    """Return why the daemon cannot be given this engine's GPU memory; empty when it may be.

    vLLM's sleep mode unmaps the KV cache and maps it anew under another process's feet, and such memory has
    no IPC handle."""
    if any(group.is_recurrent for group in groups):
        return "recurrent state is served in host memory only so far"
    model = vllm_config.model_config
    for option in ("enable_sleep_mode", "enable_cumem_allocator"):
        if getattr(model, option, False):
            flag = option.replace("_", "-")
            return (
                f"{option} puts the KV cache into memory that cannot be shared with another process; start "
                f"the engine without --{flag}"
            )
    return ""


def why_not(vllm_config: Any, kv_cache_config: Any, hash_block_tokens: int) -> str:
    """Return why this model's KV cannot be kept by kvtier; empty when it can."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if cache.prefix_caching_hash_algo not in STABLE_HASHES:
        return (
            f"block hashes by {cache.prefix_caching_hash_algo!r} differ between processes; "
            f"use --prefix-caching-hash-algo {STABLE_HASHES[0]}"
        )
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} above 1 spreads a block's tokens over ranks"
    if not kv_cache_config.kv_cache_groups:
        return "the model has no KV cache"
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            return f"KV cache group {index} is not for external transfer"
        kinds = sorted({type(spec).__name__ for spec in specs_in(group.kv_cache_spec)})
        if len(kinds) > 1 or kinds[0] not in (*_FULL, *_WINDOWED, *_RECURRENT):
            return f"KV cache group {index} is of kind {' and '.join(kinds)}"
        if kinds[0] == "MLAAttentionSpec" and not _continues_prompts(vllm_config):
            return (
                "this engine computes a prompt with MLA in one piece (it has turned chunked prefill off), "
                "and passes over a prefix that was loaded: its answers would be wrong"
            )
        if kinds[0] in _RECURRENT and (why := _why_not_states(specs_in(group.kv_cache_spec)[0])):
            return why
        if group.kv_cache_spec.block_size % hash_block_tokens:
            return f"KV cache group {index} has blocks that end between two hashes"
    return ""


def _continues_prompts(vllm_config: Any) -> bool:
    """Whether an engine with latent attention sees the KV before the tokens of a prefill.

    vLLM's MLA backends do only with chunked prefill, which vLLM turns off on CPUs without AMX."""
    return bool(getattr(vllm_config.scheduler_config, "enable_chunked_prefill", True))


def _why_not_states(spec: Any) -> str:
    """Return why the states of a recurrent group cannot be kept; empty when they can."""
    mode = getattr(spec, "mamba_cache_mode", "none")
    if mode != "align":
        return (
            f"MambaSpec in mamba_cache_mode {mode!r} has no states at block boundaries; start the engine "
            "with prefix caching, which sets that mode to align"
        )
    if spec.num_speculative_blocks:
        return "recurrent state of drafted tokens is not kept; run this model without speculative decoding"
    return ""
